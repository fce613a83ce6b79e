"""What `pruner: auto` reaches, beside every pruner that it chooses from, on the same requests of one engine.

python benchmarks/bench_auto_pruner.py [--family qwen2.5-vl ...] [--learn 200] [--measure 100] [--json auto.json]

First so many requests are given whatever auto gives them, while it learns. Then the next ones, of other videos, are
asked five times: with auto, which goes on learning, and with each pruner for all of them. A second run of each bundled
family has its guidance turned upside down (emulated: every score is taken from the greatest): there the guided pruners
are the worst choice, and the pair is otherwise the same. The plain pair's target was never trained for guidance.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_vidspec import assets, metrics
from vllm_vidspec.pruning import prompt as pruning
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance

BATCH = 16
ANSWER = {"temperature": 0.0, "max_tokens": 64}


@contextlib.contextmanager
def upside_down() -> Iterator[None]:
    """Let guidance say the opposite: what is looked at most comes last."""
    choose = pruning.choose_kept

    def opposite(unit: Any, knobs: Any, scores: Any, embeddings: Any) -> Any:
        return choose(unit, knobs, None if scores is None else scores.max() - scores, embeddings)

    with mock.patch("vllm_vidspec.engine.draft.prefill.choose_kept", opposite):
        yield


def ask(llm: Any, family: str, numbers: range) -> tuple[float, list[list[int]]]:
    """Return the acceptance length over requests that describe these held-out videos, and their answers."""
    from vllm import SamplingParams

    path = metrics.path_for(llm.llm_engine.vllm_config.instance_id)
    before, answers = metrics.read_metrics(path), []
    for first in range(numbers.start, numbers.stop, BATCH):
        chosen = range(first, min(first + BATCH, numbers.stop))
        prompts = [pairs.video_prompt(family, world.held_out(i).frames) for i in chosen]
        outputs = llm.generate(prompts, SamplingParams(**ANSWER), use_tqdm=False)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
    found = metrics.summarize(metrics.difference(before, metrics.read_metrics(path)))
    return float(found["acceptance_length"] or 0.0), answers


def race(family: str, learn: int, measure: int) -> dict[str, Any]:
    """Return the acceptance lengths of one family's bundled pair."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**pairs.llm_kwargs(family, "draft", pruner="auto", overrides={"enable_prefix_caching": False}))
    pruners = llm.llm_engine.vllm_config.additional_config["vidspec"]["prune"]["auto_pruners"]
    while_learning, _ = ask(llm, family, range(learn))
    numbers = range(learn, learn + measure)
    with_auto, answers = ask(llm, family, numbers)
    counted = metrics.read_metrics(metrics.path_for(llm.llm_engine.vllm_config.instance_id))
    fixed, same = {}, True
    for pruner in pruners:
        llm.collective_rpc("vidspec_retune", args=({"pruner": pruner},))
        fixed[pruner], others = ask(llm, family, numbers)
        same &= others == answers
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=list(pairs.PAIRS), choices=pairs.PAIRS)
    parser.add_argument("--learn", type=int, default=200)
    parser.add_argument("--measure", type=int, default=100)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    rows = []
    for family in args.family:
        for guidance in ("never trained",) if family == assets.PLAIN else ("as trained", "upside down"):
            with upside_down() if guidance == "upside down" else contextlib.nullcontext():
                row = {"guidance": guidance, **race(family, args.learn, args.measure)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return int(not all(row["identical"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
