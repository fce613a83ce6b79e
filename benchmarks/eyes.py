"""What a draft that sees through the target's tower accepts, by kind of map and number of videos it was fitted to.

    python -m benchmarks.eyes --family qwen2.5-vl --fitted 16,64,200 --json eyes.json

One engine whose draft has a tower of its own fits all maps, to videos that are asked nothing; then each answers about
others, in an engine of its own, as the own tower and vanilla do. `random` is a map to another token's embeddings.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from vllm_vidspec.families import tower_of
from vllm_vidspec.tools import fitting, pairs

_FIT_FROM = 2000  # of the held-out videos; those before are asked about
_NUM_JUDGED = 16


def fit(options: argparse.Namespace, folder: Path) -> dict[tuple[str, int], tuple[Path, float]]:
    """Return a map's file and its R2 by kind and number of videos."""
    towers = [tower_of(pairs.checkpoint(options.family, role)) for role in ("target", options.draft)]
    found = {}
    with harness.Engine(pairs.llm_kwargs(options.family, options.draft, draft_vision="own")) as engine:
        tell = engine.llm.collective_rpc
        tell(fitting.begin)
        gathering = engine.runner.gathering

        def show(first: int, end: int, is_held_out: bool) -> None:
            gathering.is_held_out = is_held_out
            engine.answer(harness.videos(options.family, range(_FIT_FROM + first, _FIT_FROM + end)), max_tokens=1)

        def keep(kind: str, number: int, fitted: Any) -> None:
            path = folder / f"{kind} {number}.safetensors"
            fitted.map.save(path, {"towers": towers})
            found[kind, number] = path, fitted.r2

        show(0, _NUM_JUDGED, True)
        before = 0
        for number in sorted(options.fitted):
            show(_NUM_JUDGED + before, _NUM_JUDGED + number, False)
            before = number
            linear = gathering.fit.linear()
            keep("linear", number, linear)
            keep("hidden layer", number, gathering.fit.with_hidden_layer(linear.map, gathering.fit.width_out))
        for sums in gathering.fit._xy:
            sums.copy_(sums[:, torch.randperm(sums.shape[1], generator=torch.Generator().manual_seed(0))])
        keep("random", before, gathering.fit.linear())
    return found


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    prompts = harness.videos(options.family, range(options.requests))
    sampling = {"max_tokens": options.max_tokens}
    with tempfile.TemporaryDirectory() as folder:
        maps = fit(options, Path(folder))
        with harness.Engine(pairs.llm_kwargs(options.family)) as engine:
            vanilla = engine.answer(prompts, **sampling)
        own = 0.0
        for (kind, number), (path, r2) in ({("own tower", 0): ("own", None)} | maps).items():
            with harness.Engine(pairs.llm_kwargs(options.family, options.draft, draft_vision=str(path))) as engine:
                answers, gained = engine.measure(engine.answer, prompts, **sampling)
            steps = gained["drafts"]
            tokens = 1 + gained["accepted_tokens"] / steps
            own = own or tokens
            yield {
                "family": options.family, "draft": options.draft, "vision": kind, "videos": number,
                "r2": None if r2 is None else round(r2, 4), "tokens_per_step": round(tokens, 4), "verify_steps": steps,
                "ci95": harness.ci95(tokens, steps), "of_own": round(tokens / own, 4),
                "identical": sum(map(list.__eq__, answers, vanilla)) / len(answers),
            }  # fmt: skip


if __name__ == "__main__":
    harness.command(
        __doc__, measure, family="qwen2.5-vl", draft="draft", fitted=[16, 64, 200], requests=64, max_tokens=128
    )
