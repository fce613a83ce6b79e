"""How many requests of a long video fit into one KV budget at once, by how much of the video the draft sees.

    python benchmarks/bench_long_memory.py --tokens 16384 --budget-mib 512 --json docs/results/long-memory.json

Each setting's engine is given requests until one has to wait. `running` counts those that vLLM's KV cache holds,
`drafting` those that the draft's pool holds beside it. `modelled` is the same by the arithmetic of the two pools
(`planning.pool`), which is also all that is said of larger pairs, by their shapes: sizes of 40 GiB, bf16.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import harness
from bench_long import FAMILY, MAX_TOKENS, WHOLE, job

from vidspec_tools import reel
from vidspec_tools.planning.models import from_folder, target_shape
from vllm_vidspec.planning import pool
from vllm_vidspec.tools import pairs

PAIRS = (("72B", "7B"), ("32B", "7B"), ("7B", "7B"))  # of Qwen2.5-VL
PAIRS_BUDGET_MIB = 40 * 1024
PATIENCE = 6  # steps that a request waits before none more is thought to fit
BLOCK, TEXT_TOKENS = 16, 32
PRUNED = {"pruner": "uniform", "prune_ratio": 0.9}


def knobs(setting: str, tokens: int, target: int, draft: int, left: float) -> tuple[float, dict[str, Any]]:
    """Return the share of the video that the draft sees, and the knobs; `target` and `draft` are KV bytes of a token,
    `left` those of both caches.

    "sized" is "pruned" with the draft's pool set to what these requests need, where the default has room for more text.
    """
    if setting == "whole":
        return 1.0, WHOLE
    more = TEXT_TOKENS + MAX_TOKENS
    needed = draft * (0.1 * tokens + more) / (tokens + more)
    return 0.1, PRUNED | ({"draft_kv_bytes": int(left * needed / (target + needed))} if setting == "sized" else {})


def cache_bytes(budget_mib: int) -> float:
    return budget_mib * 2**20 * (1 - pool.VISION_SHARE)


def modelled(budget_mib: int, target: int, draft: int, tokens: int, setting: str) -> harness.Row:
    """Return what a setting takes and how many requests fit, by arithmetic alone."""
    left = cache_bytes(budget_mib)
    kept, spec = knobs(setting, tokens, target, draft, left)
    longest, shown = tokens + TEXT_TOKENS + MAX_TOKENS, kept * tokens + TEXT_TOKENS + MAX_TOKENS
    of_draft = spec.get("draft_kv_bytes") or pool.pool_bytes(int(left), target, draft, kept, longest, BLOCK)
    fits = min((left - of_draft) / target / longest, of_draft / draft / shown)
    row = {"setting": setting, "tokens": tokens, "budget_mib": budget_mib}
    return row | {"pool_mib": round(of_draft / 2**20, 1), "modelled": round(fits, 2)}


def admitted(engine: harness.Engine, prompt: harness.Row) -> tuple[int, int]:
    """Return the most requests that ran, and that drafted, in one step; more are added as long as none waits."""
    from vllm import SamplingParams

    llm, rows = engine.llm.llm_engine, engine.runner.requests
    scheduler = llm.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    added, waited, running, drafting = 0, 0, 0, 0
    while waited < PATIENCE:
        if not scheduler.waiting:
            llm.add_request(str(added), prompt, params)
            added, waited = added + 1, 0
        llm.step()
        waited += 1
        running, drafting = max(running, len(scheduler.running)), max(drafting, int(rows.has_draft_np.sum()))
    llm.abort_request([str(number) for number in range(added)])
    return running, drafting


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would replace the budget
    tokens = options.tokens
    shapes = [from_folder(pairs.checkpoint(FAMILY, role)) for role in ("target", "draft")]
    target, draft = (2 * shape.kv_bytes_per_token for shape in shapes)  # fp32 here
    frames, question, _ = reel.held_out(0, tokens)
    prompt = pairs.video_prompt(FAMILY, frames, question.text)
    for setting in options.setting:
        spec = knobs(setting, tokens, target, draft, cache_bytes(options.budget_mib))[1]
        llm = job(tokens, range(1), spec)["llm"]
        size = {"kv_cache_memory_bytes": options.budget_mib * 2**20, "max_num_seqs": 32}
        with harness.Engine(llm | size | {"enable_prefix_caching": False}) as engine:
            running, drafting = admitted(engine, prompt)
        row = modelled(options.budget_mib, target, draft, tokens, setting)
        yield {"pair": FAMILY, **row, "running": running, "drafting": drafting}
    for names in PAIRS:
        sizes = [target_shape(f"Qwen2.5-VL-{name}").kv_bytes_per_token for name in names]
        for setting in options.setting:
            yield {"pair": f"Qwen2.5-VL {' + '.join(names)}", **modelled(PAIRS_BUDGET_MIB, *sizes, tokens, setting)}


if __name__ == "__main__":
    harness.command(__doc__, measure, tokens=16384, budget_mib=512, setting=["whole", "pruned", "sized"])
