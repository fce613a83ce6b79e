"""Prefilling the draft in a running engine: over many steps, with late scores, beside bad prompts, looked at once."""

from types import SimpleNamespace

import pytest
import torch

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import LLAVA, QWEN, assert_all_stands, in_place_of
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.hooks import attention as attention_guidance
from vllm_vidspec.engine.hooks.prompts import PendingScores
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine


def slow_down(monkeypatch, engine: harness.Engine, budget: int) -> list[dict[str, int]]:
    """Let the draft read `budget` tokens a step; return a list that gains each step's tokens and decoding requests."""
    monkeypatch.setattr(engine.draft, "max_num_tokens", budget)
    steps: list[dict[str, int]] = []

    @in_place_of(monkeypatch, DraftPrefill, "_forward")
    def noting_forward(forward, self, pieces, text):
        steps[-1]["read"] += sum(piece.end - piece.start for piece in pieces)
        return forward(self, pieces, text)

    @in_place_of(monkeypatch, engine.speculator, "propose")
    def noting_propose(propose, batch, *args, **kwargs):
        steps.append({"read": 0, "decoding": int((~batch.is_prefilling_np).sum())})
        return propose(batch, *args, **kwargs)

    return steps


@pytest.fixture(scope="module")
def llava(reference):
    """A draft with the target's weights, a tower of its own and the whole video."""
    for scenario in ("videos", "endless"):  # an engine of its own, and only one lives at a time
        reference(LLAVA, scenario)
    overrides = {"enable_prompt_embeds": True, "enable_mm_embeds": True, "mm_encoder_attn_backend": "TORCH_SDPA"}
    spec = {"pruner": "none", "on_draft_error": "skip", "draft_vision": "own"}
    with harness.engine(LLAVA, pairs.checkpoint(LLAVA, "target"), overrides=overrides, **spec) as engine:
        yield engine


def test_an_equal_draft_still_never_errs(reference, monkeypatch, llava):
    """Prefills of 5 steps and more, in line: every draft stands, no step reads more than its share."""
    requests = harness.videos(LLAVA, 3, ignore_eos=True, max_tokens=60)
    with monkeypatch.context() as patch:
        steps = slow_down(patch, llava, 60)
        outputs, counted = llava.measured(requests)
    harness.assert_begins(outputs, reference(LLAVA, "endless"))
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
    assert counted["prompts"] == 3 and counted["skipped_draft_error"] == 0
    ours, targets = (model.multimodal_config for model in (llava.draft.model, llava.runner.model))
    assert ours.mm_encoder_attn_backend == targets.mm_encoder_attn_backend is not None, "a flag that is the target's"
    reading = [step for step in steps if step["read"]]
    assert len(reading) >= 13 and max(step["read"] for step in reading) <= 60
    assert min(step["decoding"] for step in reading[1:]) >= 2  # who is read for, and another; the first ends early


def test_bad_prompts_take_nobodys_drafts(llava):
    """Embeddings of an image and of a prompt run without drafts, counted; clips of unequal length beside them with."""
    one, other = (world.held_out(i).frames for i in (21, 22))
    # vLLM cannot encode clips of unequal length together: the target knows these already, the draft no longer does.
    for frames in (one, other[:9]):
        llava.generate([(pairs.video_prompt(LLAVA, frames), {"max_tokens": 2})])
    llava.speculator.backend.forget_media()
    unequal = pairs.media_prompt(LLAVA, "describe the video", videos=[one, other[:9]])
    hidden_size = llava.runner.model_config.get_hidden_size()
    image = {"prompt": pairs.chat_prompt(LLAVA, "describe it", ["image"])}
    image["multi_modal_data"] = {"image": torch.zeros(1, 20, hidden_size)}
    embeds = {"prompt_embeds": torch.zeros(12, hidden_size)}
    short = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    outputs, counted = llava.measured([(unequal, short), (image, short), (embeds, short)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 3
    assert counted["skipped_unsupported"] == 2 and counted["skipped_draft_error"] == 0
    assert counted["prompts"] == 1
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 0


class Late(PendingScores):
    """Scores as on a GPU: they are not there yet in the step that sends them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_here, self._copied = False, SimpleNamespace(synchronize=lambda: None)


@pytest.mark.slow
def test_trees_over_late_scores_and_slow_prefills(reference, monkeypatch):
    """Scores a step late, slow prefills, adaptive trees: all vanilla's; an unpruned equal draft loses no depth."""
    expected = harness.token_ids(reference(QWEN, "videos"))
    requests = SCENARIOS["videos"](QWEN)[:4]
    monkeypatch.setattr(attention_guidance, "PendingScores", Late)
    spec = {"drafting": "tree-adaptive", "num_speculative_tokens": 16, "prune_ratio": 0.0}
    with harness.engine(QWEN, pairs.checkpoint(QWEN, "target"), pruner="specvlm", **spec) as engine:
        with monkeypatch.context() as patch:
            steps = slow_down(patch, engine, 100)
            outputs, whole = engine.measured(requests[:3])
        engine.retune(prune_ratio=0.8)
        guided, pruned = engine.measured(requests)
    assert harness.token_ids(outputs) == expected[:3] and harness.token_ids(guided) == expected[:4]
    assert max(step["read"] for step in steps) <= 100
    assert_all_stands(whole)
    assert pruned["guided_prompts"] == pruned["prompts"] == 4 and pruned["accepted_tokens"] > 0
