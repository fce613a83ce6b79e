"""What the engine benchmarks share: an in-process engine of a bundled pair, its counters, and a command."""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
# ruff: noqa: E402
from benchmarks.decode_steps import runner_of
from vllm_vidspec import metrics
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.provenance import provenance

Row = dict[str, Any]


class Engine:
    def __init__(self, kwargs: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**kwargs)
        self.runner = runner_of(self.llm.llm_engine)
        self._path = metrics.path_for(self.llm.llm_engine.vllm_config.instance_id)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.runner
        gc.collect()  # an engine's memory is free once nothing refers to it
        cleanup_dist_env_and_memory()

    def counters(self) -> dict[str, int]:
        return metrics.read_metrics(self._path)

    def answer(self, prompts: list[Row], **sampling: Any) -> list[list[int]]:
        """Return the token ids of the answers, greedy unless `sampling` says otherwise, each with a seed of its own."""
        from vllm import SamplingParams

        params = [SamplingParams(**{"temperature": 0.0, "seed": i} | sampling) for i in range(len(prompts))]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def measure(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, int]]:
        before = self.counters()
        result = call(*args, **kwargs)
        return result, metrics.difference(before, self.counters())


def pair(family: str, **knobs: Any) -> Engine:
    return Engine(pairs.llm_kwargs(family, "draft", **knobs))


def videos(family: str, numbers: Iterable[int]) -> list[Row]:
    return [pairs.video_prompt(family, world.held_out(i).frames) for i in numbers]


def command(doc: str | None, measure: Callable[[argparse.Namespace], Iterable[Row]], /, **defaults: Any) -> list[Row]:
    """Print a benchmark's rows as they come, write them to `--json`, and return them; options are `defaults`, a list
    is given with commas."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parse: Callable[[str], Any] = type(default)
        if isinstance(default, list):
            parse = lambda text, kind=type(default[0]): [kind(part) for part in text.split(",")]  # noqa: E731
        how: dict[str, Any] = {"action": "store_true"} if default is False else {"type": parse, "default": default}
        parser.add_argument("--" + name.replace("_", "-"), **how, help=f"default: {default}".replace("%", "%%"))
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows = []
    for row in measure(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")
    return rows


def cases(doc: str | None, known: dict[str, tuple[Callable[[argparse.Namespace], Iterable[Row]], Row]]) -> list[Row]:
    """Run one of several cases, the first word of the command line; each has what measures it, and its options."""
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        raise SystemExit(f"{doc}\nCases: {', '.join(known)}; each has --help.")
    measure, options = known[sys.argv.pop(1)]
    return command(doc, measure, **options)
