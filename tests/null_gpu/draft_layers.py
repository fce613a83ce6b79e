"""Counts the kernels of a draft's layer by the format of its weights, and which kernels multiply them.

    python -m null_gpu.draft_layers OUT.json [NAME...]          # a draft of 7B beside 32B, few layers of both
    python -m null_gpu.draft_layers --table RESULTS.json PAGE.md

A draft step of a chain is replayed from its graph. Between two writes to the KV cache lies one layer, whatever it has.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("NULLGPU_MEM_GB", "400")  # an engine leaves its weights to the process that it ran in

from benchmarks import made_up
from benchmarks.pages.__main__ import written
from null_gpu.cases import QWEN, Case
from null_gpu.situations import kernels_of_drafts
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.tables import markdown

NAMES, SHARE, PIXELS = ("Qwen2.5-VL 32B", "Qwen2.5-VL 7B"), 14, (200_704, 200_704)
SIZES = [1, 2, 4, 8]
CACHE_WRITE = "reshape_and_cache"  # once a layer


@dataclass(frozen=True)
class Draft(Case):
    """A draft whose layers are counted."""

    target_weights: str | None = None  # a key of `made_up.QUANTISED`; None: bf16
    draft_weights: str | None = None  # the same
    knobs: dict[str, Any] = field(default_factory=dict)  # of the speculative configuration
    is_compiled: bool = False  # by torch.compile; in a whole graph always

    def llm_kwargs(self) -> dict[str, Any]:
        where = made_up.write_pair(
            QWEN, Path(tempfile.mkdtemp(prefix="null-gpu-")), NAMES, pixels=PIXELS, weights=self.target_weights,
            draft_weights=self.draft_weights, share=SHARE,
        )  # fmt: skip
        spec = pairs.speculative_config(QWEN, where["draft"], pruner="uniform", on_draft_error="raise", **self.knobs)
        compilation = {"mode": 3 if self.is_compiled else 0, "cudagraph_capture_sizes": SIZES}
        sizes = {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 4, "max_num_batched_tokens": 8192}
        memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
        return made_up.user_kwargs(where, spec) | sizes | memory | {"compilation_config": compilation}


MARLIN_FP8 = {"linear_backend_per_quant": {"fp8_w8a8": "marlin"}}
MARLIN = {"linear_backend_per_quant": {"mixed_precision": "marlin"}}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"draft_weights": "fp8"},
    "fp8, Marlin": {"draft_weights": "fp8", "knobs": MARLIN_FP8},
    "w4a16": {"draft_weights": "w4a16"},
    "w4a16, Marlin": {"draft_weights": "w4a16", "knobs": MARLIN},
    "AWQ": {"draft_weights": "awq"},
    "GPTQ": {"draft_weights": "gptq"},
    "w4a16 of an fp8 target": {"draft_weights": "w4a16", "target_weights": "fp8"},
}
HEAD = "w4a16, head in fp8"  # where vLLM has it, from 0.33 on
FORMATS[HEAD] = {"draft_weights": "w4a16", "knobs": {"draft_lm_head_quantization": "fp8"}}
COMPILED = ", compiled"
DRAFTS = {
    draft.name: draft
    for suffix in ("", COMPILED)
    for name, what in FORMATS.items()
    for draft in [Draft(name + suffix, spec={}, is_compiled=bool(suffix), **what)]
}


@dataclass
class Layer:
    name: str  # of DRAFTS
    kernels: list[str]  # what those of a layer do, in their order from one write to the KV cache to the next
    beside: float  # kernels of a draft forward that are no layer's: embedding, positions, last norm, head, draw
    num_forwards: int
    num_layers: int
    head: str  # how the output head is multiplied: its method's class
    draft_bytes: int  # of the draft's weights


def layer_of(kernels: Sequence[str], num_layers: int) -> list[str]:
    """Return the kernels of one layer of a draft step's, in order; ValueError where its layers are not alike."""
    marks = [index for index, name in enumerate(kernels) if CACHE_WRITE in name]
    layers = [kernels[first:last] for first, last in itertools.pairwise(marks)]
    within = [layer for index, layer in enumerate(layers, 1) if index % num_layers]
    size = statistics.mode(map(len, within))
    if not within or {len(layer) for layer in within} != {size}:
        raise ValueError(f"layers of {Counter(map(len, within))} kernels")
    return list(within[0])


def count(draft: Draft) -> Layer:
    """Start an engine with a draft, and count."""
    from null_gpu.engine_run import Session

    session = Session(draft)
    model = session.worker.model_runner.speculator.backend.draft_model
    num_layers = model.config.model_config.get_total_num_hidden_layers()
    kernels = kernels_of_drafts(session)["replayed"]
    layer, num_writes = layer_of(kernels, num_layers), sum(CACHE_WRITE in name for name in kernels)
    num_forwards = num_writes // num_layers
    found = Layer(
        name=draft.name,
        kernels=[kind_of(kernel) for kernel in layer],
        beside=(len(kernels) - num_writes * len(layer)) / num_forwards,
        num_forwards=num_forwards,
        num_layers=num_layers,
        head=type(model.model.get_language_model().lm_head.quant_method).__name__,
        draft_bytes=sum(one.nbytes for one in model.model.state_dict().values()),
    )
    session.close()
    return found


# What a kernel's name says of it, the first that is found.
KINDS = {
    CACHE_WRITE: "cache write", "FlashAttnFwdCombine": "attention, parts joined", "FlashAttnFwd": "attention",
    "machete": "Machete", "arlin": "Marlin", "cublas": "cuBLAS", "GemmUniversal": "CUTLASS", "mrope": "rotation",
    "triton_": "fused", "quant": "quantisation", "rms_norm": "norm", "act_and_mul": "activation",
    "CUDAFunctor_add": "bias", "index_elementwise": "gather", "direct_copy": "copy",
}  # fmt: skip
PRODUCTS = ("CUTLASS", "Machete", "Marlin", "cuBLAS")


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name; the beginning of the name where nothing is known of it."""
    return next((kind for part, kind in KINDS.items() if part in kernel), kernel[:60])


def products(layer: dict[str, Any]) -> str:
    """Return the kinds of kernels that multiply a layer's weights."""
    return ", ".join(kind for kind in PRODUCTS if kind in layer["kernels"])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, a draft's compiled layer beside the other."""
    sizes = {row["name"]: str(len(row["kernels"])) for row in rows}
    cells = [
        [row["name"], products(row), sizes[row["name"]], sizes.get(row["name"] + COMPILED, ""), f"{row['beside']:g}"]
        for row in rows
        if not row["name"].endswith(COMPILED)
    ]
    return markdown(["weights of the draft", "products", "kernels of a layer", "compiled", "beside layers"], cells)


def main() -> None:
    """Count the drafts named on the command line, all if none is, and write them to the file named there."""
    if sys.argv[1] == "--table":
        results, page = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
        versions = ", ".join(f"{name} {results['provenance']['versions'][name]}" for name in ("vllm", "torch"))
        section = f"{table(results['rows'])}\n\n{results['provenance']['date'][:10]}, {versions}."
        page.write_text(written(page.read_text(), {"draft-layers": lambda: section}))
        return
    from null_gpu import emulate
    from vllm_vidspec.tools.provenance import provenance

    emulate.zero_blocks()
    path, rows = Path(sys.argv[1]), []
    for name in sys.argv[2:] or DRAFTS:
        try:
            rows.append(asdict(count(DRAFTS[name])))
        except Exception:
            traceback.print_exc()
            continue
        print(f"[null GPU] {name}: {len(rows[-1]['kernels'])} kernels a layer", file=sys.stderr, flush=True)
        origin = provenance() | {"argv": ["python", "-m", "null_gpu.draft_layers"], "device": "null GPU"}
        path.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
