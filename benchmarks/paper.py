"""The papers' methods interleaved with vanilla on the same requests, published figures beside.

The engines and their interleaving are those of `bench speed`: three at once, vanilla among them.
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.inflated import InflatedBenchmark
from benchmarks.methods import METHODS, STOCK, figure
from vllm_vidspec.cli import options, running
from vllm_vidspec.cli.bench import measure
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.bench import speed
from vllm_vidspec.tools.bench.speed import VANILLA, Variant, Workload
from vllm_vidspec.tools.progress import Report, silent

AUTOREGRESSIVE = "autoregressive"  # what papers call vanilla
ALL = (AUTOREGRESSIVE, *METHODS)
# What columns of times begin with.
_TIMES = ("speedup", "tokens_per_s", "inter_token_ms", "ttft_s", "t_step_ms", "request_ms")
# What --quick has in place of these: minutes for a family.
QUICK = {"requests": 2, "rounds": 3, "max_tokens": 64}
USUAL = {"requests": 4, "rounds": 5, "max_tokens": 128}


@dataclass(frozen=True)
class PaperBenchmark(InflatedBenchmark):
    """What to measure; the setting is each method's own here."""

    methods: tuple[str, ...] = ALL  # of ALL; autoregressive always runs

    def variants(self, workload: Workload) -> list[Variant]:
        """Return what runs beside vanilla on a pair, in the order of the table."""
        return [one.variant(name, workload.ratio) for name, one in METHODS.items() if name in self.methods]


def check(benchmark: PaperBenchmark) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    if unknown := [name for name in benchmark.methods if name not in ALL]:
        raise VidSpecError(f"--methods: {unknown[0]!r} is none of {', '.join(ALL)}")
    benchmark.check()


def run(benchmark: PaperBenchmark, report: Report = silent) -> dict[str, Any]:
    """Return what `speed.run` does; vanilla's row is called AUTOREGRESSIVE, and a step of it emits one token.

    On the CPU engine vLLM's own method has no times: its kernels are interpreted there, where ours are compiled.
    """
    check(benchmark)
    result = speed.run(benchmark, report)
    is_interpreted = result["provenance"]["device"] == "cpu"
    for row in result["rows"]:
        row |= figure(row["family"], row["method"])
        if row["mode"] == STOCK and is_interpreted:
            row |= dict.fromkeys(name for name in row if name.startswith(_TIMES))
        row["draft"] = benchmark.draft
        if row["mode"] == VANILLA:
            row |= {"method": AUTOREGRESSIVE, "acceptance_length": 1.0, "draft": None}
        elif method_draft := METHODS[row["method"]].draft:
            row["draft"] = method_draft
    return result


# ---- the command -----------------------------------------------------------------------------------------------------

Ratios = Annotated[
    str, options.sweep("Target time to draft time, by no-op layers appended to target or draft. 0: the pair as it is.")
]


def command(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[
        str, typer.Option(help="draft, target (itself), another role of the bundled pair, or a path. Not of self-SD.")
    ] = "draft",
    methods: Annotated[str, options.sweep("Rows of the table; autoregressive always runs. Default: all.")] = "all",
    inflate: Ratios = "0",
    quick: Annotated[
        bool, typer.Option("--quick", help="3 rounds of 2 requests of 64 tokens, where nothing else is given.")
    ] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Held-out videos of a round. Default: 4.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Longest answer in tokens. Default: 128.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; each has its own videos. Default: 5.")] = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    draft_device: options.DraftDevice = "cpu",
    knob: options.Knobs = None,
    json_path: options.Json = None,
) -> None:
    """Run the methods of the papers interleaved with vanilla vLLM, what they publish beside.

    The rows: autoregressive, SD-chain, SD-tree, SD-Rand, SpecVLM, SAGE, ParallelVLM, LVSpec, FLy, OnSD, self-SD, and
    stock draft_model, which is vLLM's own way to draft without us. Two methods and vanilla are alive at once and answer
    the same requests alternately, one request at a time; figures are medians over rounds, with their 20th and 80th
    percentiles. The target has one core, the parallel drafter another one.

    speedup is decode speed, from a request's first token to its last, divided by vanilla's in the same round; forwards
    are the target's after the prefill, per answer; acceptance lengths hold the target's own token, published ones too.
    --inflate says what vanilla's step is to be over a draft forward; which layers that takes is measured once and kept
    in ~/.cache/vidspec/inflated. Exit status 1 if a method fails.
    """
    given = locals()
    from benchmarks.views import paper_tables

    usual = QUICK if quick else USUAL
    chosen = {name: default if given[name] is None else given[name] for name, default in usual.items()}
    chosen["methods"] = ALL if methods == "all" else tuple(options.values("--methods", methods, str))
    chosen["families"] = tuple(options.values("--family", family, str))
    chosen["inflate"] = tuple(options.values("--inflate", inflate, float))
    what = options.pick(PaperBenchmark, given, knobs=options.knobs(knob), **chosen)
    measure(sys.modules[__name__], what, given, paper_tables)


app = typer.Typer(add_completion=False, rich_markup_mode=None)
running.add(app, command, "python -m benchmarks.paper --quick --rounds 1 --methods SD-chain,SpecVLM")

if __name__ == "__main__":
    app()
