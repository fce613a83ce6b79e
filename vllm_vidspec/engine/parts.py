"""RunnerParts: what we add to vLLM's model runner, and the order in which it is built."""

from typing import Any

import torch

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft.local_backend import LocalBackend
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.failures import DraftFailures
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.pixels import SharedPixels
from vllm_vidspec.engine.hooks.prompts import Guidance
from vllm_vidspec.engine.hooks.protocol import TargetHooks
from vllm_vidspec.engine.hooks.target_vision import TargetVision
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.hooks.visual_states import VisualStates
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.engine.parallel.remote_backend import ParallelBackend
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.speculator import Speculator
from vllm_vidspec.engine.tree_attention import make_attention
from vllm_vidspec.engine.verify.loose_tables import LooseRules
from vllm_vidspec.engine.verify.verifier import CoupledVerifier
from vllm_vidspec.pruning import needs_of


class RunnerParts:
    """What we add to a runner, built in order once the target's weights are there: a draft that shares these must not
    share their hooks, so it is loaded before them.
    """

    def __init__(self, runner: Any):
        vllm_config, device, model = runner.vllm_config, runner.device, runner.model
        knobs, counters, agreement, requests = runner.knobs, runner.counters, runner.agreement, runner.requests
        config = knobs.current
        draft_model = None
        if not config.is_parallel:
            draft_model = DraftModel(vllm_config, device, config.is_self_draft, agreement)
            counters.set("draft_load_bytes", draft_model.load(model, config))
        layers, K, in_trees = attention_layers(vllm_config).values(), runner.num_speculative_steps, config.in_trees
        attention = make_attention(layers, vllm_config, device, num_rows=K + 1, in_trees=in_trees, whose="target")
        # Chains need its attention alone: the other parts get it only where trees are drafted.
        self.target_trees: TargetTrees | None = None
        if attention is not None:
            widths = (K, runner.max_num_tokens)
            self.target_trees = TargetTrees(attention, runner.model_state, requests, *widths, device, in_trees)
        self.trees = self.target_trees if in_trees else None
        self.guides = make_guides(knobs, model, vllm_config, counters, agreement)
        self.rules: LooseRules | None = None
        self.visual: VisualStates | None = None
        if config.scorers != {"strict"}:
            sizes = (runner.max_num_reqs, runner.vocab_size)
            self.rules = LooseRules(knobs, vllm_config, *sizes, runner.sampler, counters)
        if self.rules is not None and "loose" in config.scorers:
            self.visual = VisualStates(knobs, vllm_config, runner.max_num_reqs, counters, self.rules, agreement)
        hooks = [hook for hook in (*self.guides, self.visual, self.target_trees) if hook is not None]
        self.hooks = TargetHooks(hooks, knobs, agreement)
        self.verifier = CoupledVerifier(runner, self.trees, config.max_path, self.rules, self.visual)
        failures = DraftFailures(knobs, agreement, requests, counters)
        backend = self._make_backend(runner, draft_model, failures)
        failures.on_failure(backend.forget_media)
        for guide in self.guides:
            failures.on_failure(guide.forget_scores)
        self.speculator = Speculator(knobs, requests, self.guides, counters, failures, backend)
        tables = [table for table in (self.rules, runner.recorder) if table is not None]
        drafting = [table for table in (backend, *self.guides, self.trees) if table is not None]
        requests.register(*tables, self.hooks, backend, drafting=drafting)

    def _make_backend(
        self, runner: Any, draft_model: DraftModel | None, failures: DraftFailures
    ) -> LocalBackend | ParallelBackend:
        """Return where the draft runs: beside the target if it is loaded here, else in a process of its own."""
        if draft_model is None:
            return ParallelBackend(runner, is_guided=bool(self.guides))
        config = runner.knobs.current
        pixels, vision = None, None
        # A target that drafts for itself has seen the video.
        if not config.is_self_draft and runner.encoder_cache is not None:
            if config.has_own_tower:
                pixels = SharedPixels(runner.model_state, runner.device, runner.counters)
            else:
                outputs = runner.encoder_cache.encoder_outputs
                vision = TargetVision(runner.model_state, outputs, draft_model.as_own, runner.agreement)
        sample = CoupledSampler(runner.sampler, config.draft_noise)
        return LocalBackend(runner, draft_model, sample, self.trees, failures, pixels, vision)


def make_guides(
    knobs: Knobs, target: torch.nn.Module, vllm_config: Any, counters: Counters, agreement: Agreement
) -> list[Guidance]:
    """Install what the configured pruner, or each of several, needs on the loaded target."""
    needs, guides = needs_of(knobs.current), list[Guidance]()
    if "attention" in needs:
        guides.append(AttentionGuidance(knobs, vllm_config, counters, agreement))
    if "uv" in needs:
        guides.append(HiddenStateGuidance(knobs, target, vllm_config, counters, agreement))
    return guides
