"""Measure the kernels against their peers, beside the floor of the device.

python -m benchmarks.kernels [draw tree_attention ...] [--sizes num_reqs=1,8 nodes=25] [--json]

Those that read the vocabulary, the KV cache or stored states; the others are bound by the latency of a launch, and are
measured as parts of a step (the engines of `benchmarks.gpu`). A kernel's cases are a
file beside this one: its axes with sizes, which `--sizes` replaces, and what it is measured against. On a GPU "triton"
is the kernel, on a CPU "torch" is its reference. A case's implementations are called in turn, so that other load on the
machine affects all of them. The floor is the larger of two times: `traffic`, the bytes that must move at the copy
bandwidth, and `product`, the operations at the rate of a square matrix product. Both rates are measured beside each
case, because a shared machine's change by the minute.
"""

import argparse
import importlib
import json
from typing import Any

from benchmarks.kernels import KERNELS
from benchmarks.kernels.timing import rows
from vllm_vidspec.tools.provenance import provenance


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", default=KERNELS, help=f"of {', '.join(KERNELS)}; default: all")
    parser.add_argument("--sizes", nargs="*", default=[], metavar="AXIS=VALUES", help="values, comma-separated")
    parser.add_argument("--rounds", type=int, help="calls of each implementation per case")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    axes = {name for kernel in options.kernels for name in importlib.import_module(f"benchmarks.kernels.{kernel}").AXES}
    if unknown := {text.partition("=")[0] for text in options.sizes} - axes:
        parser.error(f"no axis {', '.join(sorted(unknown))}; there are {', '.join(sorted(axes))}")
    found: list[dict[str, Any]] = []
    for kernel in options.kernels:
        for row in rows(kernel, options.sizes, options.rounds):
            found.append(row)
            if not options.json:
                show(row)
    if options.json:
        print(json.dumps({"rows": found, "provenance": provenance()}))
    return found


def show(row: dict[str, Any]) -> None:
    figures = row["note"] or "median {median:>10} p20 {p20:>10} p80 {p80:>10}".format(**row)
    floor = "floor {floor} us (traffic {traffic}, product {product})".format(**row)
    print(f"{row['kernel']} {row['case']} {row['impl']:>14}: {figures} {floor}", flush=True)


if __name__ == "__main__":
    main()
