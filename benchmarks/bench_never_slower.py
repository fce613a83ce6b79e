"""Drafting that pays, by default: decode speed over vanilla vLLM and over fixed numbers of drafts, cell by cell.

    python benchmarks/bench_never_slower.py --tokens 256,4096 --drafts bundled,untrained --batches 1,4 --pads 0

A cell is a video's length, a draft, a batch size, and whether the target is padded with no-op layers to so many drafts'
cost. In each cell vanilla, the controller (`adaptive_tokens`, the default) and fixed chains answer the same requests in
interleaved rounds; the first round of a cell is shown apart. The same engines answer all cells of a draft and a
target, one cell after another, as a server's traffic changes. A file of finished cells lets a stopped run go on.

    python benchmarks/bench_never_slower.py --tokens 14848 --batches 4,16 --keep 2

Every round asks about the same two videos, which are in the prefix cache: prompts that take minutes are read once.

    python benchmarks/bench_never_slower.py --one-engine --keep 2

One engine plays all of them in turn: the same cells without the luck of an engine's start.

    python benchmarks/bench_never_slower.py --one-engine --mixed --keep 12 --pads 0 --rounds 11

Mixed traffic: half of the requests are about 256 video tokens, half about 4,096, where the bundled draft is hopeless;
16 of them at once, and 192 of which 16 run at a time.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from safetensors.torch import load_file, save_file

from benchmarks import inflated, scaling
from benchmarks.methods import CONTROLLER
from benchmarks.session import BenchSession, Played
from vllm_vidspec import assets
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.acceptance import identical_frac
from vllm_vidspec.tools.bench.speed import SEQUENTIAL, VANILLA_VARIANT, Variant, Workload
from vllm_vidspec.tools.progress import silent
from vllm_vidspec.tools.provenance import provenance

FAMILY = "qwen2.5-vl"
NAME, ONE_ENGINE = "never-slower", "one-engine"  # results, by an engine for each of a cell or one for all
AGAIN = "vanilla again"  # a second vanilla engine: what two engines that do the same differ by
DRAFTS = {"bundled": (FAMILY, "draft"), "far": (FAMILY, assets.FAR), "plain": (assets.PLAIN, "draft"), "untrained": ()}
WARM = 8  # an engine that takes its turn first answers the same for a part of so many, unmeasured
LEARNING = 1  # rounds that are shown apart
WAVES = 12  # of sixteen requests each, in mixed traffic
HOPELESS = 0.65  # of vanilla's speed: a fixed chain that is slower in these rounds is not asked again


def untrained(folder: Path) -> str:
    """Write the bundled draft with made-up weights; return its directory."""
    import torch

    source = Path(pairs.checkpoint(FAMILY, "draft"))
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors"
    random = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(weight.shape, generator=random).to(weight.dtype) * 0.05 if weight.ndim > 1 else weight
        for name, weight in load_file(weights).items()
    }
    save_file(made, weights, metadata={"format": "pt"})
    return str(folder)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of an option, given with commas."""
    return tuple(int(part) for part in text.split(","))


def variants(fixed: tuple[int, ...]) -> list[Variant]:
    """Return vanilla, the controller, each fixed chain, and vanilla again."""
    most = {"num_speculative_tokens": max(fixed), "pruner": "specvlm", "adaptive_tokens": True}
    return [
        VANILLA_VARIANT,
        Variant(CONTROLLER, SEQUENTIAL, most),
        *(
            Variant(f"chain of {k}", SEQUENTIAL, most | {"num_speculative_tokens": k, "adaptive_tokens": False})
            for k in fixed
        ),
        Variant(AGAIN, VANILLA_VARIANT.mode),
    ]


Asked = BenchSession | Played


def role_of(engine: Variant) -> str | int:
    """Return how one engine plays another."""
    if engine.mode == VANILLA_VARIANT.mode:
        return VANILLA_VARIANT.method
    return CONTROLLER if engine.method == CONTROLLER else int(engine.method.removeprefix("chain of "))


def ask(
    sessions: list[Asked | None], benchmark: scaling.ScalingBenchmark, command: dict[str, Any], first: int = 0
) -> list[dict[str, Any] | None]:
    """Let every engine answer these requests in turn, beginning with the `first`, modulo their number; none: no answer.

    Where prompts are kept, several engines answer the first tokens before, unmeasured: a server's caches have its own
    code and weights, and not those of the engine before.
    """
    command = command | {"sampling": benchmark.sampling, "keeps_prefixes": benchmark.kept_requests > 0}
    warm = command | {"sampling": benchmark.sampling | {"max_tokens": max(2, benchmark.max_tokens // WARM)}}
    warm.pop("lengths", None)
    answers = list[dict[str, Any] | None]([None] * len(sessions))
    for turn in range(len(sessions)):
        place = (first + turn) % len(sessions)
        if session := sessions[place]:
            if isinstance(session, BenchSession) and command["command"] == "batch" and benchmark.kept_requests:
                session.ask(warm)
            answers[place] = session.ask(command)
    return answers


def batch_of(benchmark: scaling.ScalingBenchmark, indices: Iterable[int]) -> dict[str, Any]:
    """Return the command to answer these requests at once."""
    return {"command": "batch", "indices": list(indices), "seed": benchmark.seed}


def without_hopeless(sessions: list[Asked], engines: list[Variant], speedups: list[float]) -> list[Asked | None]:
    """Return who is asked again: None in the place of a fixed chain that is `HOPELESS`."""
    return [
        None if speedup < HOPELESS and engine.method.startswith("chain") else session
        for session, engine, speedup in zip(sessions, engines, speedups, strict=True)
    ]


def verify_steps(rounds: Iterable[dict[str, Any] | None]) -> list[int]:
    """Return how often requests had drafts verified in each round that an engine answered."""
    answered = [one for one in rounds if one is not None]
    return [0 if one["metrics"] is None else one["metrics"]["drafts"] for one in answered]


def rows_of(engines: list[Variant], turns: list[list[dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """Return a row of each engine, given what all of them answered in each round."""
    answers = [[one for one in of_engine if one is not None] for of_engine in zip(*turns, strict=True)]
    vanilla = [scaling.by_round(one) for one in answers[0]]
    rows = []
    for engine, rounds in zip(engines, answers, strict=True):
        found = [scaling.by_round(one) for one in rounds]
        speedups = [its["tpot_s"] / ours["tpot_s"] for ours, its in zip(found, vanilla, strict=False)]
        delays = [1e3 * (ours["ttft_s"] - its["ttft_s"]) for ours, its in zip(found, vanilla, strict=False)]
        last, begin = rounds[-1]["metrics"], LEARNING if len(found) > LEARNING else 0
        rows.append(
            {
                "engine": engine.method,
                "tpot_ms": [round(1e3 * one["tpot_s"], 4) for one in found],
                "speedup": statistics.median(speedups[begin:]),
                "speedup_first": speedups[0],
                "ttft_ms": 1e3 * statistics.median(one["ttft_s"] for one in found[begin:]),
                "ttft_more_ms": statistics.median(delays[begin:]),
                "verify_steps": verify_steps(rounds),
                "verify_steps_last": 0 if last is None else last["drafts"],
                "accepted_last": 0 if last is None else last["accepted_tokens"],
                "identical_frac": identical_frac(
                    scaling.token_ids(rounds), scaling.token_ids(answers[0][: len(rounds)])
                ),
            }
        )
    return rows


def benchmark_of(
    args: argparse.Namespace, family: str, draft: str, pads: float, tokens: int, batch: int
) -> tuple[scaling.ScalingBenchmark, Workload]:
    """Return what is measured with videos of at most so many tokens and at most so many requests at once."""
    sizes = {"video_tokens": tokens, "batch_size": batch, "rounds": args.rounds, "max_tokens": args.max_tokens}
    sizes["kept_requests"] = args.keep
    benchmark = scaling.ScalingBenchmark(families=(family,), inflate=(pads,), draft=draft, **sizes)
    if args.layers:
        return benchmark, inflated.InflatedWorkload(family, 0.0, *args.layers)
    return benchmark, inflated.workload_for(benchmark, family, pads, silent)


@contextlib.contextmanager
def started(
    args: argparse.Namespace,
    benchmark: scaling.ScalingBenchmark,
    workload: Workload,
    engines: list[Variant],
    num_videos: list[int],
) -> Iterator[list[Asked]]:
    """Start every engine, or one that plays all, with a request of so many videos each before it; one with arguments of
    its own may use all cores.

    Of two that do the same the one that starts first may be some per cent slower or faster: the second one, the
    controller, starts in the middle of the others.
    """
    with contextlib.ExitStack() as stack:
        made = [benchmark.job(workload, engine) for engine in engines]
        for job in made:
            job["prompts"] |= {"num_videos": num_videos, "held_out": list(range(len(num_videos)))}
            if args.llm:
                job["llm"] |= args.llm
                del job["cpus"]
        if args.one_engine:
            session = stack.enter_context(BenchSession(made[1]))  # the controller
            yield [Played(session, role_of(engine)) for engine in engines]
            return
        order = list(range(len(made)))
        order.insert(len(made) // 2, order.pop(1))
        sessions = {place: stack.enter_context(BenchSession(made[place])) for place in order}
        yield [sessions[place] for place in range(len(made))]


def keepers(args: argparse.Namespace, sessions: list[Asked]) -> list[Asked]:
    """Return who reads prompts that are kept: of one engine a fixed chain, as drafts need what is measured then."""
    return sessions[2:3] if args.one_engine else sessions


def measure_mixed(
    args: argparse.Namespace, benchmark: scaling.ScalingBenchmark, workload: Workload, engines: list[Variant]
) -> list[dict[str, Any]]:
    """Let every engine answer rounds of eight hopeless and eight good requests, of sixteen good ones, and of many of
    both kinds in turn, of which sixteen run at a time; return figures of each over vanilla's, by round. The same eight
    good answers are looked at beside hopeless ones and beside good ones.
    """
    size, half = benchmark.batch_size, benchmark.batch_size // 2
    # The hopeless ones come first, as their prompts take long: the good ones then decode beside them.
    num_videos = [benchmark.num_videos] * half + [1] * size
    num = len(num_videos)
    hopeless, neighbours, good = range(half), range(half, size), range(size, num)
    asked = {
        "mixed": (*hopeless, *good),
        "good": (*neighbours, *good),
        "traffic": [place for pair in zip(hopeless, good, strict=True) for place in pair] * WAVES,
    }
    # Of one length, or of few, they would begin and end together without drafts, and one by one with them.
    least, most = benchmark.max_tokens // 2, benchmark.max_tokens * 3 // 2
    more = {"traffic": {"lengths": np.random.default_rng(0).integers(least, most + 1, WAVES * size).tolist()}}
    answered: dict[str, list[list[dict[str, Any] | None]]] = {name: [] for name in asked}

    def over_vanilla(name: str, figure: Callable[[dict[str, Any]], float]) -> list[list[float]]:
        """Return each engine's figures of the rounds but the first over the mean of those of both vanilla engines."""
        of_engines = zip(*answered[name], strict=True)
        found = [[figure(one) for one in of_engine if one is not None] for of_engine in of_engines]
        both = [statistics.mean(each) for each in zip(found[0], found[-1], strict=True)]
        ratios = [[round(one / its, 4) for one, its in zip(each, both, strict=False)] for each in found]
        return [each[LEARNING:] or each for each in ratios]

    def good_tokens_per_s(one: dict[str, Any]) -> float:
        return scaling.by_round({"answers": one["answers"][half:]})["tokens_per_s"]

    def tokens_per_s(one: dict[str, Any]) -> float:
        tokens = sum(len(answer["token_ids"]) for answer in one["answers"])
        return tokens / max(answer["last_s"] for answer in one["answers"])

    num_kept = num if benchmark.kept_requests else 0
    num_videos *= 1 if num_kept else benchmark.rounds
    with started(args, benchmark, workload, engines, num_videos) as sessions:
        going_on = {name: list[Asked | None](sessions) for name in asked}
        for index in range(num_kept):
            ask(keepers(args, sessions), benchmark, {"command": "keep", "index": index})
        for number in range(benchmark.rounds):
            begin = 0 if num_kept else num * number
            for name, places in asked.items():
                command = batch_of(benchmark, [begin + place for place in places]) | more.get(name, {})
                answered[name].append(ask(going_on[name], benchmark, command, number))
            speeds = list(map(statistics.median, over_vanilla("traffic", tokens_per_s)))
            drafted = {name: verify_steps([turns[-1][1]])[0] for name, turns in answered.items()}
            of_all = " ".join(f"{speed:.2f}" for speed in speeds)
            print(f"round {number}: tokens/s of traffic so far {of_all}; controller's drafts {drafted}", flush=True)
            if number + 1 == LEARNING:
                going_on["traffic"] = without_hopeless(sessions, engines, speeds)

    figures = {
        "good_beside_hopeless": over_vanilla("mixed", good_tokens_per_s),
        "good_beside_good": over_vanilla("good", good_tokens_per_s),
        "sixteen_tokens_per_s": over_vanilla("mixed", tokens_per_s),
        "traffic_tokens_per_s": over_vanilla("traffic", tokens_per_s),
    }
    return [
        {"engine": engine.method}
        | {name: of_engine[place] for name, of_engine in figures.items()}
        | {"verify_steps": {name: verify_steps([turn[place] for turn in turns]) for name, turns in answered.items()}}
        for place, engine in enumerate(engines)
    ]


def commit() -> str:
    """Return what a result names its commit by; "" where there is none."""
    return (provenance()["git_sha"] or "")[:10]


def run_mixed(args: argparse.Namespace) -> None:
    """Measure mixed traffic of 16 with the bundled pair, padded as asked; keep it in the file, and print it."""
    path = Path(args.json)
    found = json.loads(path.read_text()) if path.exists() else {"cells": [], "provenance": provenance()}
    for pads in map(float, args.pads.split(",")):
        benchmark, workload = benchmark_of(args, *DRAFTS["bundled"], pads, tokens=4096, batch=16)
        rows = measure_mixed(args, benchmark, workload, variants(args.fixed))
        others = [each for each in found.get("mixed", []) if each["pads"] != pads]
        found["mixed"] = [*others, {"pads": pads, "max_tokens": args.max_tokens, "commit": commit(), "rows": rows}]
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(found["mixed"][-1], flush=True)


def run(args: argparse.Namespace) -> None:
    """Measure the cells that the file does not have yet; keep each in the file, and print it."""
    path = Path(args.json)
    found = json.loads(path.read_text()) if path.exists() else {"cells": []}
    cells = found["cells"]
    known = {(cell["tokens"], cell["draft"], cell["batch"], cell["pads"]) for cell in cells}
    engines, points = variants(args.fixed), list(itertools.product(args.tokens, args.batches))
    with tempfile.TemporaryDirectory(prefix="vidspec-untrained-") as folder:
        path_of_untrained = untrained(Path(folder)) if "untrained" in args.drafts else ""
        for pads in map(float, args.pads.split(",")):
            for name in args.drafts.split(","):
                todo = [(tokens, batch) for tokens, batch in points if (tokens, name, batch, pads) not in known]
                if not todo:
                    continue
                family, draft = DRAFTS[name] or (FAMILY, path_of_untrained)
                for tokens, batch, rounds, rows in measure(args, family, draft, pads, engines, todo):
                    cell = {"tokens": tokens, "draft": name, "batch": batch, "pads": pads}
                    cell |= {"max_tokens": args.max_tokens, "rounds": rounds - LEARNING, "kept": args.keep}
                    cells.append(cell | {"commit": commit(), "rows": rows})
                    path.write_text(json.dumps(found | {"provenance": provenance()}, indent=1) + "\n")
                    print(cells[-1], flush=True)


def measure(
    args: argparse.Namespace,
    family: str,
    draft: str,
    pads: float,
    engines: list[Variant],
    points: list[tuple[int, int]],
) -> Iterator[tuple[int, int, int, list[dict[str, Any]]]]:
    """Let the same engines answer the rounds of one cell after another; yield each cell's tokens, batch, number of
    rounds and rows.
    """
    longest, largest = map(max, zip(*points, strict=True))
    benchmark, workload = benchmark_of(args, family, draft, pads, longest, largest)
    # Requests of a point follow those of the one before; kept ones are the same for all batches of a length.
    lengths = [point[0] for point in points]
    kept = {tokens: args.keep * place for place, tokens in enumerate(dict.fromkeys(lengths))} if args.keep else {}
    nums = [args.keep] * len(kept) or [batch * args.rounds for _, batch in points]
    num_videos = np.repeat(np.array(list(kept) or lengths) // scaling.VIDEO_TOKENS, nums).tolist()
    begin = 0
    with started(args, benchmark, workload, engines, num_videos) as sessions:
        keeps = [{"command": "keep", "index": index} for index in range(len(kept) * args.keep)]
        cold = [ask(keepers(args, sessions), benchmark, command) for command in keeps]
        for tokens, batch in points:
            asked, turns = list[Asked | None](sessions), list[list[dict[str, Any] | None]]()
            end = time.monotonic() + args.seconds
            while len(turns) < args.rounds or time.monotonic() < end:
                number = len(turns)
                indices = range(begin, begin + batch)
                if args.keep:
                    indices = [
                        kept[tokens] + place % args.keep for place in range(number * batch, (number + 1) * batch)
                    ]
                turns.append(ask(asked, benchmark, batch_of(benchmark, indices), number))
                each = ["-" if one is None else f"{1e3 * scaling.by_round(one)['tpot_s']:.2f}" for one in turns[-1]]
                print(f"{tokens} tokens, batch {batch}, round {number}: ms a token {' '.join(each)}", flush=True)
                begin += batch
                if number + 1 == LEARNING:
                    asked = without_hopeless(sessions, engines, [row["speedup"] for row in rows_of(engines, turns)])
            rows = rows_of(engines, turns)
            if args.keep and not args.one_engine:  # which has read all prompts once its first role has
                of_length = cold[kept[tokens] : kept[tokens] + args.keep]
                for row, alone in zip(rows, rows_of(engines, of_length), strict=True):
                    row |= {"cold_ttft_ms": alone["ttft_ms"], "speedup_first": alone["speedup_first"]}
            yield tokens, batch, len(turns), rows


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=numbers, default="256,1024,4096,14848")
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--batches", type=numbers, default="1,4,16")
    parser.add_argument("--pads", default="0,9", help="forwards of the draft that one of the target costs; 0: as it is")
    parser.add_argument("--fixed", type=numbers, default="5,2")
    parser.add_argument("--rounds", type=int, default=LEARNING + 5)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for so long with each cell (needs --keep)")
    parser.add_argument(
        "--keep",
        type=int,
        default=0,
        help="ask about so many videos again and again (0: new ones; --mixed: all or none)",
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--layers", type=numbers, help="no-op layers of target and draft, in place of --pads")
    parser.add_argument("--llm", type=json.loads, help="arguments of the engine that replace ours, as JSON: a GPU's")
    parser.add_argument("--json", help="finished cells, which are kept; default: what docs/never-slower.md is made of")
    parser.add_argument("--one-engine", action="store_true", help="let one engine play all of them (needs --keep)")
    parser.add_argument("--mixed", action="store_true", help="measure mixed traffic, and no cells")
    args = parser.parse_args()
    args.json = args.json or f"docs/results/{ONE_ENGINE if args.one_engine else NAME}.json"
    if args.one_engine and not args.keep:
        parser.error("--one-engine needs --keep")
    if args.seconds and not args.keep:
        parser.error("--seconds needs --keep: every round asks about other videos without")
    if args.mixed:
        run_mixed(args)
        return
    run(args)


if __name__ == "__main__":
    main()
