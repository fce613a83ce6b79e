"""`vidspec bench paper`: the papers' methods interleaved with vanilla on the same requests, published figures beside.

The engines and their interleaving are those of `bench speed`: three at once, vanilla among them.
"""

from dataclasses import dataclass
from typing import Any

from vidspec_tools.bench import interleaved
from vidspec_tools.bench.methods import METHODS, STOCK, VANILLA, figure
from vidspec_tools.bench.trials import Benchmark, Variant
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools.progress import Report, silent

AUTOREGRESSIVE = "autoregressive"  # what papers call vanilla
ALL = (AUTOREGRESSIVE, *METHODS)
# What columns of times begin with.
_TIMES = ("speedup", "tokens_per_s", "inter_token_ms", "ttft_s", "t_step_ms", "request_ms")
# What --quick has in place of these: minutes for a family.
QUICK = {"requests": 2, "rounds": 3, "max_tokens": 64}
USUAL = {"requests": 4, "rounds": 5, "max_tokens": 128}


@dataclass(frozen=True)
class PaperBenchmark(Benchmark):
    """What to measure; the setting is each method's own here."""

    methods: tuple[str, ...] = ALL  # of ALL; autoregressive always runs

    def variants(self, ratio: float) -> list[Variant]:
        """Return what runs beside vanilla at a ratio, in the order of the table."""
        return [Variant.of(name, method, ratio) for name, method in METHODS.items() if name in self.methods]


def check(benchmark: PaperBenchmark) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    if unknown := [name for name in benchmark.methods if name not in ALL]:
        raise VidSpecError(f"--methods: {unknown[0]!r} is none of {', '.join(ALL)}")
    interleaved.check(benchmark)


def run(benchmark: PaperBenchmark, report: Report = silent) -> dict[str, Any]:
    """Return what `interleaved.run` does; vanilla's row is called AUTOREGRESSIVE, and a step of it emits one token.

    On the CPU engine vLLM's own method has no times: its kernels are interpreted there, where ours are compiled.
    """
    check(benchmark)
    result = interleaved.run(benchmark, report)
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
