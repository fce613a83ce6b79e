"""Measure decode tokens per second of this checkout and of an earlier commit, in turns; or what a new video costs.

python benchmarks/bench_before.py COMMIT [--drafting chain,tree-static,tree-adaptive] [--batch 1,16] [--rounds 5]
python benchmarks/bench_before.py COMMIT --arriving 4096,15360 [--rounds 5]

Each has an engine in a process of its own, both with the same models, the bundled LLaVA-OneVision pair; both are alive
at once, one of them answers, and the order changes with every round, so that other load on the machine affects both
alike. All answer the same held-out videos, greedily; tokens per second count from the first token of any request to the
last of all. `ratio` is this checkout's over the earlier's: the median over rounds, with its 20th and 80th percentile. A
first round is not counted.

With `--arriving` two clips of the Qwen2.5-VL pair are being described when a request with a video of so many tokens
comes (frames of 16 tokens; a step has 2,048). The draft is the bundled target once more, with a vision tower of its
own, as the towers of real pairs are of one size. Reported are the seconds until its first token, and the longest
step of the running requests from its arrival on, and from its first token on: by then the target has encoded the video,
and the draft has not.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FAMILY = "llava-onevision"
ANSWER_TOKENS = 96
# Of the requests beside which a video arrives, and of the one that brings it.
ARRIVING_FAMILY, FRAME_SIDE, FRAME_TOKENS, STEP_TOKENS = "qwen2.5-vl", 112, 16, 2048
RUNNING, DRAFTED_TOKENS = 2, 48
SECONDS = ("first_token_s", "longest_step_s", "longest_later_step_s")
NOW, BEFORE = "now", "before"
ARRIVING = "arriving"
Answers = list[dict[str, Any]]  # of an engine, by round


def answer(drafting: str, max_batch: int) -> int:
    """Answer as many videos as each line of stdin asks for, in a process whose `PYTHONPATH` is a checkout."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs there
    from vllm import LLM, SamplingParams

    from vllm_vidspec.shapeworld import world
    from vllm_vidspec.tools import pairs

    overrides = {"max_num_seqs": max_batch, "limit_mm_per_prompt": {"video": 1}, "disable_log_stats": False}
    llm = LLM(**pairs.llm_kwargs(FAMILY, "draft", drafting=drafting, overrides=overrides))
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    print(json.dumps({"code": pairs.__file__}), file=lines)
    for line in sys.stdin:
        prompts = [pairs.video_prompt(FAMILY, world.held_out(i).frames) for i in range(int(line))]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = max(one.metrics.last_token_ts for one in outputs) - min(one.metrics.first_token_ts for one in outputs)
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        rate = (sum(map(len, tokens)) - len(tokens)) / seconds
        print(json.dumps({"rate": rate, "tokens": tokens}), file=lines)
    return 0


def answer_arrivals(most_tokens: int) -> int:
    """As `answer`; each line of stdin is how many tokens the video has that arrives."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs there
    from vllm import LLM
    from vllm.multimodal import encoder_budget

    from vllm_vidspec.tools import pairs

    # vLLM takes videos as long as the checkpoint's longest, or a step: the bundled ones' longest are short.
    length = most_tokens + 1024
    encoder_budget.compute_mm_encoder_budget = lambda *_: (length, length)
    overrides = {
        "max_model_len": length, "max_num_batched_tokens": STEP_TOKENS, "limit_mm_per_prompt": {"video": 1},
        "kv_cache_memory_bytes": 512 << 20, "async_scheduling": False,
    }  # fmt: skip
    draft = pairs.checkpoint(ARRIVING_FAMILY, "target")
    llm = LLM(**pairs.llm_kwargs(ARRIVING_FAMILY, draft, calibration=None, overrides=overrides))
    print(json.dumps({"code": pairs.__file__}), file=lines)
    for turn, line in enumerate(sys.stdin):
        print(json.dumps(arrive(llm.llm_engine, int(line) // FRAME_TOKENS, turn)), file=lines)
    return 0


def arrive(engine: Any, num_grids: int, turn: int) -> dict[str, Any]:
    """Return what a video of so many pairs of frames costs, in seconds, and all `tokens`."""
    from vllm import SamplingParams

    from vllm_vidspec.shapeworld import world
    from vllm_vidspec.tools import pairs

    sampling = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}

    def step() -> float:
        start = time.perf_counter()
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        return time.perf_counter() - start

    names = [f"{turn}-{i}" for i in range(RUNNING)]
    for i, name in enumerate(names):
        prompt = pairs.video_prompt(ARRIVING_FAMILY, world.held_out(turn * RUNNING + i).frames)
        engine.add_request(name, prompt, sampling)
    while min(len(tokens.get(name, ())) for name in names) < DRAFTED_TOKENS:
        step()
    side, frames = FRAME_SIDE, 2 * num_grids
    noise = np.random.default_rng(turn).integers(0, 255, (frames, 1, 1, 3), dtype=np.uint8)
    metadata = {"fps": 4.0, "duration": frames / 4, "total_num_frames": frames, "frames_indices": list(range(frames))}
    prompt = pairs.video_prompt(ARRIVING_FAMILY, world.held_out(0).frames)
    prompt["multi_modal_data"] = {
        "video": [
            (noise.repeat(side, 1).repeat(side, 2), metadata | {"video_backend": "noise", "do_sample_frames": False})
        ]
    }
    engine.add_request("video", prompt, sampling)
    before, first = [], []
    while not tokens.get("video"):
        before.append(step())
    while len(tokens["video"]) < DRAFTED_TOKENS:
        first.append(step())
    engine.abort_request([*names, "video"])
    while engine.has_unfinished_requests():
        engine.step()
    later = [before[-1], *first]
    found = dict(zip(SECONDS, (sum(before), max(before + first), max(later)), strict=True))
    return found | {"tokens": [tokens[name][:DRAFTED_TOKENS] for name in (*names, "video")]}


class Engine:
    """An engine of one checkout, in a process of its own."""

    def __init__(self, checkout: Path, drafting: str, size: int) -> None:
        path = os.pathsep.join(map(str, (checkout, checkout / "kernels")))
        env = os.environ | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, __file__, "--answer", drafting, str(size)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        code = Path(self._read()["code"])
        assert code.is_relative_to(checkout), f"{code} is not of {checkout}"

    def ask(self, size: int) -> dict[str, Any]:
        """Return what `answer` or `arrive` measures: the `tokens` of each request among it."""
        assert self.process.stdin is not None
        print(size, file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended: its last lines are above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def checkout_of(commit: str) -> Iterator[Path]:
    """Check a commit out beside this repository for a while."""
    with tempfile.TemporaryDirectory(prefix="vidspec-before-") as folder:
        path = Path(folder).resolve() / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def in_turns(before: Path, shape: str, sizes: list[int], rounds: int) -> Iterator[tuple[int, Answers, Answers, bool]]:
    """Let an engine of each checkout answer in turns, who comes first changing with every round.

    Args:
        before: The earlier checkout.
        shape: What drafts, or ARRIVING.
        sizes: What both are asked, one after the other.
        rounds: Of each size, after a warm-up.

    Yields:
        A size, the answers of the earlier checkout and of this one by round, and whether all tokens are the same.
    """
    engines = {name: Engine(path, shape, max(sizes)) for name, path in ((BEFORE, before), (NOW, ROOT))}
    for size in sizes:
        found: dict[str, Answers] = {BEFORE: [], NOW: []}
        for turn in range(rounds + 1):
            for name in engines if turn % 2 else reversed(engines):
                found[name].append(engines[name].ask(size))
        same = [old["tokens"] == now["tokens"] for old, now in zip(found[BEFORE], found[NOW], strict=True)]
        yield size, found[BEFORE][1:], found[NOW][1:], all(same)
    for engine in engines.values():
        engine.close()


def ratios_of(before: Answers, now: Answers, figure: str) -> tuple[float, float, list[float]]:
    """Return the medians of a figure, and the ratios of now to before by round."""
    old, new = ([answer[figure] for answer in answers] for answers in (before, now))
    return statistics.median(old), statistics.median(new), [b / a for a, b in zip(old, new, strict=True)]


def compare(before: Path, drafting: str, batch_sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per batch size."""
    for batch_size, old, now, same in in_turns(before, drafting, batch_sizes, rounds):
        old_rate, now_rate, ratios = ratios_of(old, now, "rate")
        p20, p80 = np.quantile(ratios, [0.2, 0.8])
        yield {
            "drafting": drafting, "batch_size": batch_size, "rounds": rounds,
            "before_tokens_per_s": round(old_rate, 1), "now_tokens_per_s": round(now_rate, 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_p20": round(float(p20), 3), "ratio_p80": round(float(p80), 3), "same_tokens": same,
        }  # fmt: skip


def compare_arrivals(before: Path, sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per size of the video that arrives, in tokens."""
    for size, old, now, same in in_turns(before, ARRIVING, sizes, rounds):
        row: dict[str, Any] = {"video_tokens": size, "rounds": rounds}
        for figure in SECONDS:
            name = figure.removesuffix("_s")
            old_s, now_s, ratios = ratios_of(old, now, figure)
            row |= {
                f"{name}_ratio": round(statistics.median(ratios), 3),
                f"{name}_ratios": [round(ratio, 3) for ratio in sorted(ratios)],
                f"before_{figure}": round(old_s, 3), f"now_{figure}": round(now_s, 3),
            }  # fmt: skip
        yield row | {"same_tokens": same}


def measure(options: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of the command line's comparison."""
    with checkout_of(options.commit) as before:
        if options.arriving:
            yield from compare_arrivals(before, options.arriving, options.rounds)
            return
        for drafting in options.drafting:
            yield from compare(before, drafting, options.batch, options.rounds)


def main() -> int:
    """Run the benchmark, or one engine of it."""
    if sys.argv[1:3] == ["--answer", ARRIVING]:
        return answer_arrivals(int(sys.argv[3]))
    if sys.argv[1:2] == ["--answer"]:
        return answer(sys.argv[2], int(sys.argv[3]))
    import harness  # not in an engine's process, whose code is of the checkout in its path

    shapes = ["chain", "tree-static", "tree-adaptive"]
    harness.command(__doc__, measure, "commit", drafting=shapes, batch=[1, 16], arriving=[], rounds=5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
