"""Measure decode tokens per second of this checkout and of an earlier commit, in turns.

python benchmarks/bench_before.py COMMIT [--drafting chain,tree-static,tree-adaptive] [--batch 1,16] [--rounds 5]

Each has an engine in a process of its own, both with the same models, the bundled LLaVA-OneVision pair; both are alive
at once, one of them answers, and the order changes with every round, so that other load on the machine affects both
alike. All answer the same held-out videos, greedily; tokens per second count from the first token of any request to the
last of all. `ratio` is this checkout's over the earlier's: the median over rounds, with its 20th and 80th percentile. A
first round is not counted.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FAMILY = "llava-onevision"
ANSWER_TOKENS = 96
NOW, BEFORE = "now", "before"


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
        """Return what `answer` measures: `rate`, and the `tokens` of each request."""
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


def compare(before: Path, drafting: str, batch_sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per batch size."""
    engines = {name: Engine(path, drafting, max(batch_sizes)) for name, path in ((BEFORE, before), (NOW, ROOT))}
    for batch_size in batch_sizes:
        found: dict[str, list[dict[str, Any]]] = {BEFORE: [], NOW: []}
        for turn in range(rounds + 1):
            for name in engines if turn % 2 else reversed(engines):
                found[name].append(engines[name].ask(batch_size))
        same = all(old["tokens"] == now["tokens"] for old, now in zip(found[BEFORE], found[NOW], strict=True))
        old, now = ([answer["rate"] for answer in found[name][1:]] for name in (BEFORE, NOW))
        ratios = [b / a for a, b in zip(old, now, strict=True)]
        p20, p80 = np.quantile(ratios, [0.2, 0.8])
        yield {
            "drafting": drafting, "batch_size": batch_size, "rounds": rounds,
            "before_tokens_per_s": round(statistics.median(old), 1),
            "now_tokens_per_s": round(statistics.median(now), 1), "ratio": round(statistics.median(ratios), 3),
            "ratio_p20": round(float(p20), 3), "ratio_p80": round(float(p80), 3), "same_tokens": same,
        }  # fmt: skip
    for engine in engines.values():
        engine.close()


def measure(options: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of every draft shape."""
    with checkout_of(options.commit) as before:
        for drafting in options.drafting:
            yield from compare(before, drafting, options.batch, options.rounds)


def main() -> int:
    """Run the benchmark, or one engine of it."""
    if sys.argv[1:2] == ["--answer"]:
        return answer(sys.argv[2], int(sys.argv[3]))
    import harness  # not in an engine's process, whose code is of the checkout in its path

    shapes = ["chain", "tree-static", "tree-adaptive"]
    harness.command(__doc__, measure, "commit", drafting=shapes, batch=[1, 16], rounds=5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
