"""Lets `import torchvision` succeed beside a CPU-only torch; copied into site-packages, touches `sys.meta_path` only.

The registry's torchvision wheel is a CUDA build: its C++ operators do not load beside a CPU torch, and its import then
fails on `register_fake("torchvision::nms")`. Their schemas are all that video processors need. A `.pth` file calls
`install()` at interpreter start, which must stay cheap: torch is imported only when torchvision is.
"""

import sys

_SCHEMA = "{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARIES: list = []  # A torch.library.Library undoes its definitions when it is collected.


class _TorchvisionFinder:
    """A finder that finds nothing: it defines the missing schemas just before torchvision is first imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            try:
                _define_missing_operators()
            except Exception as error:
                # A shim must never make an import worse than it was, but it may say why it did not help.
                print(f"vllm_vidspec: torchvision fix-up failed: {error}", file=sys.stderr)
        return None


def install() -> None:
    """Put the finder first in `sys.meta_path`, once."""
    if not any(type(finder).__name__ == "_TorchvisionFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


def _define_missing_operators() -> None:
    """Define `torchvision::nms` and `qnms`, unless torchvision's own operators load: two definitions would abort."""
    from importlib.machinery import PathFinder
    from pathlib import Path

    import torch

    spec = PathFinder.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library in sorted(Path(folder).glob("_C*.so")):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                continue
            return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(_SCHEMA.format(name=name))
    _LIBRARIES.append(library)
