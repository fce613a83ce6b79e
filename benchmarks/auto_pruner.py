"""What `pruner: auto` reaches, beside every pruner that it chooses from, on the same requests: in one engine.

    python -m benchmarks.auto_pruner --family qwen2.5-vl --learn 200 --measure 100 --json auto.json

First so many requests are given whatever auto gives them, while it learns; then the next ones are asked with auto,
which goes on learning, and with each pruner for all of them. A second run of each bundled family has its guidance
turned upside down (emulated: every score is taken from the greatest): there the guided pruners are the worst choice. A
long pair is asked about reels of `--tokens` video tokens.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks import harness
from benchmarks.session import BenchEngine
from vllm_vidspec import assets, metrics
from vllm_vidspec.config import METHOD
from vllm_vidspec.tools import pairs

BATCH = 16


@contextlib.contextmanager
def upside_down() -> Iterator[None]:
    """Invert the guidance scores: the most attended token ranks last."""
    from vllm_vidspec.pruning import prompt

    choose = prompt.choose_kept

    def opposite(unit: Any, knobs: Any, scores: Any, embeddings: Any) -> Any:
        return choose(unit, knobs, None if scores is None else scores.max() - scores, embeddings)

    with mock.patch("vllm_vidspec.engine.draft.prefill.choose_kept", opposite):
        yield


def start(family: str, tokens: int) -> harness.Engine:
    if family not in assets.LONG_PAIRS:
        return harness.pair(family, pruner="auto", overrides={"enable_prefix_caching": False})
    from benchmarks.long import job

    llm = job(tokens, range(1), {"pruner": "auto", "prune_ratio": 0.9}, family=family)["llm"]
    return harness.Engine(llm | {"enable_prefix_caching": False})


def prompts(family: str, numbers: range, tokens: int) -> list[harness.Row]:
    if family not in assets.LONG_PAIRS:
        return harness.videos(family, numbers)
    return BenchEngine.bundled_requests({"family": family, "held_out": numbers, "reel_tokens": tokens})


def ask(engine: harness.Engine, family: str, numbers: range, tokens: int) -> tuple[float, list[list[int]]]:
    """Return the acceptance length over requests about these held-out videos, and their answers."""
    longest = 160 if family in assets.LONG_PAIRS else 64
    batches = [numbers[first : first + BATCH] for first in range(0, len(numbers), BATCH)]
    answers, gained = engine.measure(
        lambda: [
            text for batch in batches for text in engine.answer(prompts(family, batch, tokens), max_tokens=longest)
        ]
    )
    return float(metrics.summarize(gained)["acceptance_length"] or 0.0), answers


def race(family: str, learn: int, measure: int, tokens: int) -> harness.Row:
    with start(family, tokens) as engine:
        config = engine.llm.llm_engine.vllm_config
        pruners = config.additional_config[METHOD]["auto_pruners"]
        while_learning, _ = ask(engine, family, range(learn), tokens)
        numbers = range(learn, learn + measure)
        with_auto, answers = ask(engine, family, numbers, tokens)
        counted = engine.counters()
        fixed, same = {}, True
        for pruner in pruners:
            engine.llm.collective_rpc("vidspec_retune", args=({"pruner": pruner},))
            fixed[pruner], others = ask(engine, family, numbers, tokens)
            same &= others == answers
    best = max(fixed, key=fixed.__getitem__)
    return {
        "family": family,
        "learned_from": learn,
        "measured_on": measure,
        "while_learning": while_learning,
        "auto": with_auto,
        **fixed,
        "best": best,
        "share_of_best": with_auto / fixed[best],
        "requests_by_pruner": {pruner: counted[f"auto_requests_{pruner}"] for pruner in pruners},
        "identical": same,
    }


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    for family in options.family:
        for guidance in ("never trained",) if family in assets.CLONE_ONLY else ("as trained", "upside down"):
            with upside_down() if guidance == "upside down" else contextlib.nullcontext():
                yield {"guidance": guidance, **race(family, options.learn, options.measure, options.tokens)}


if __name__ == "__main__":
    families = [name for name in pairs.PAIRS if name not in assets.LONG_PAIRS]
    rows = harness.command(__doc__, measure, family=families, learn=200, measure=100, tokens=1024)
    sys.exit(int(not all(row["identical"] for row in rows)))
