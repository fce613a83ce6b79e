"""Further measurements of a running engine: long prompts, kernels of a step, memory by owner, sleep."""

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch


def peak_of_a_prompt(session: Any) -> dict[str, int]:
    """Prefill new prompts; return memory's largest increase, and its bound: vLLM's profile, and room for pixels."""
    worker = session.worker
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with session.decoding():
        most = torch.cuda.max_memory_allocated()
    speculator = worker.model_runner.speculator
    pixels = None if speculator is None else speculator.backend._pixels
    set_aside = 0 if pixels is None else pixels.num_bytes
    return {"peak": most - before, "profiled": int(worker.peak_activation_memory) + set_aside}


def sums_of_guidance(session: Any) -> dict[str, list[list[int] | None]]:
    """Prefill a prompt; return by layer the shape of the log-sum-exps that guidance got, None where it got none."""
    from vllm_vidspec.engine.hooks import attention

    told, scores = [], attention.guidance_scores

    def listen(query: torch.Tensor, *args: Any, lse: torch.Tensor | None, **kwargs: Any) -> None:
        told.append(None if lse is None else [*lse.shape, *query.shape[:2]])
        scores(query, *args, lse=lse, **kwargs)

    with mock.patch.object(attention, "guidance_scores", listen), session.decoding():
        pass
    return {"told": told}


def stand_in_for_flashinfer() -> None:
    """Let vLLM's FlashInfer plan and launch nothing, as CUDA's compiler makes its kernels; the rest is its own."""
    from vllm.v1.attention.backends import flashinfer

    class Wrapper:
        def __init__(self, *args: Any, **kwargs: Any):
            pass

        def plan(self, *args: Any, **kwargs: Any) -> None:
            vars(self).update({f"_{name}": value for name, value in kwargs.items()})
            self._logits_soft_cap = kwargs.get("logits_soft_cap") or 0.0

        def run(self, query: torch.Tensor, kv_cache: Any, *, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return out.zero_()

    flashinfer.BatchPrefillWithPagedKVCacheWrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    flashinfer.fast_plan_decode = lambda wrapper, *args, **kwargs: wrapper.plan(**kwargs)


def kernels_of_drafts(session: Any) -> dict[str, list[str]]:
    """Draft one step with graphs and one without; return the kernels of each in order."""
    from null_gpu import device
    from vllm_vidspec.engine.draft.drafter import Drafter

    found: dict[str, list[str]] = {}
    draft, graphs = Drafter.draft, session.worker.model_runner.speculator.graphs
    captured = graphs.graphs

    def noting(self: Drafter, message: Any) -> Any:
        # Two steps, as each drafts from the result of the one before.
        name = "replayed" if "replayed" not in found else "launched"
        graphs.graphs = captured if name == "replayed" else {}
        with device.in_order("launch", "replay") as kernels:
            drafts = draft(self, message)
        found[name] = kernels
        graphs.graphs = captured
        return drafts

    with session.decoding(), mock.patch.object(Drafter, "draft", noting):
        for _ in range(2):
            session.step()
    return found


def pause_the_first(policy: Any, req_ids: list[str], *_: Any) -> Any:
    """Stand in for `Policy.decide`: drafts for all but the first request."""
    from vllm_vidspec.engine.policy import Decision

    option = max(policy.options, key=lambda option: option.num_tokens)
    return Decision(option, frozenset(req_ids[:1] if len(req_ids) > 1 else ()), policy._pads)


def pause_all(policy: Any, *_: Any) -> Any:
    """Stand in for `Policy.decide`: drafts for nobody."""
    from vllm_vidspec.engine.policy import NONE, Decision

    return Decision(NONE, pads=policy._pads)


def decide_by_chance(session: Any) -> dict[str, list[int]]:
    """Let requests come and end while what is drafted, and for whom, changes in every second step; return the tokens
    of each, all of which are to have 24.
    """
    from vllm_vidspec.engine.policy import NONE, Decision, Policy

    random, last = np.random.default_rng(0), [Decision(NONE, pads=True)]
    asked_for: list[list[str]] = [[]]

    def decide(self: Any, req_ids: list[str], *_: Any) -> Any:
        if req_ids != asked_for[0] or random.random() < 0.5:
            option = self.options[random.integers(len(self.options))]
            paused = frozenset(req_id for req_id in req_ids if option.num_tokens and random.random() < 0.4)
            last[0], asked_for[0] = Decision(option, paused, self._pads), list(req_ids)
        return last[0]

    found = []
    with mock.patch.object(Policy, "decide", decide):
        for _ in range(4):
            with session.decoding(max_tokens=24) as names:
                while session.engine.has_unfinished_requests():
                    session.step()
                found += [session.tokens[name] for name in names]
    return {"by_chance": found}


def kernels_of_a_step(session: Any) -> dict[str, Any]:
    """Make a step; return its kernels in order, those of graphs included, and the numbers of layers of both models."""
    from null_gpu import device

    runner = session.worker.model_runner
    models = runner.vllm_config, runner.speculator.backend.draft_model.config
    with session.decoding(), device.in_order("launch", "replay") as kernels:
        session.step()
    layers = [config.model_config.get_total_num_hidden_layers() for config in models]
    return {"kernels": kernels, "layers": layers}


def memory_by_owner(session: Any) -> dict[str, dict[str, int]]:
    """Return bytes of device memory by owner, what is `allocated` but for graphs, and the process's `host` memory."""
    runner, counters = session.worker.model_runner, session.counted()
    draft = getattr(runner.speculator, "model", None)
    found = {
        "target": _bytes_of(runner.model.state_dict().values()),
        "draft": _bytes_of(draft.state_dict().values()) if draft is not None else 0,
        "kv_cache": _bytes_of(runner.kv_caches),
        "draft_pool": counters.get("draft_pool_bytes", 0),
        "vision": counters.get("draft_encoder_bytes", 0),
    }
    segments = torch.cuda.memory_snapshot()
    private = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    in_graphs = sum(segment["allocated_size"] for segment in private)
    allocated = torch.cuda.memory_allocated()
    others = allocated - in_graphs - sum(found.values())
    found |= {
        "graph_pools": sum(segment["total_size"] for segment in private),
        "others": others,
        "allocated": allocated,
    }
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"memory": found | {"host": pages * resource.getpagesize()}}


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def sleep_and_wake(session: Any) -> dict[str, Any]:
    """Sleep at both levels, and decode after each; return the free bytes awake, asleep and awake again, by level."""
    free = {}
    for level in (1, 2):
        awake = torch.cuda.mem_get_info()[0]
        session.llm.sleep(level=level)
        asleep = torch.cuda.mem_get_info()[0]
        session.llm.wake_up(tags=["weights"])
        if level == 2:
            session.llm.collective_rpc("reload_weights")
        session.llm.wake_up(tags=["kv_cache"])
        free[str(level)] = [awake, asleep, torch.cuda.mem_get_info()[0]]
        with session.decoding():
            pass
    return {"free": free}
