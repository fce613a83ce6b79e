"""Compiles vLLM's penalties kernel and ours, and prints JSON: float32 operations of each kind a token takes."""

import importlib
import importlib.util
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernels import compiled
from vidspec_kernels.warm_up import floats, i32, i64

VOCAB, ARITHMETIC = 151_936, ("fma", "mul", "div", "add", "sub", "neg")


def vllms_kernel(folder: Path) -> Any:
    """Return vLLM's kernel from its source alone: importing vLLM may leave Triton out."""
    package = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])  # type: ignore[union-attr, index]
    source = (package / "v1/worker/gpu/sample/penalties.py").read_text()
    found = re.search(r"@triton\.jit\ndef _penalties_kernel\(.*?\n(?=\n\ndef )", source, re.DOTALL)
    assert found is not None
    (folder / "vllms_penalties.py").write_text(f"import triton\nimport triton.language as tl\n\n{found[0]}\n")
    sys.path.insert(0, str(folder))
    return importlib.import_module("vllms_penalties")._penalties_kernel


def operations(ptx: str, per_thread: int) -> dict[str, float]:
    """Return the operations on float32 of a program's thread, by token, and how products and quotients round."""
    kinds = re.findall(rf"\b((?:{'|'.join(ARITHMETIC)})(?:\.\w+)*\.f32)\s", ptx)
    return {kind: count / per_thread for kind, count in Counter(kinds).items() if not kind.startswith("neg")}


def main() -> int:
    ours, rows = importlib.import_module("vidspec_kernels.path_penalties.api"), {}
    tables = (*(floats(8) for _ in range(3)), i32(8, VOCAB // 32), VOCAB // 32, i32(8, VOCAB), VOCAB, VOCAB)
    vectors = (floats(4, VOCAB), VOCAB, i64(4), i32(4), i32(4))
    with tempfile.TemporaryDirectory() as folder:
        theirs = vllms_kernel(Path(folder))
        for arch in (80, 90):
            with compiled.pretending(arch):
                ptx = theirs.warmup(*vectors, *tables, BLOCK_SIZE=8192, grid=(4, 19)).asm["ptx"]
                rows[f"vllm {arch}"] = operations(ptx, 8192 // 128)
                sizes = {"SHARE": ours._SHARE, "BLOCK": ours._BLOCK}
                ptx = ours._path_penalties_kernel.warmup(
                    *vectors, i32(9, 65), 65, *tables, **sizes, grid=(4, 19), enable_fp_fusion=True
                ).asm["ptx"]
                rows[f"ours {arch}"] = operations(ptx, ours._BLOCK // 128)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
