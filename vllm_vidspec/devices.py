"""Whether there is a GPU, by device nodes and libraries: needed before torch is imported, or installed.

Standard library only. As a program it exits with 0 where there is a GPU, for the Makefile.
"""

from __future__ import annotations

import sys
from pathlib import Path


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Return whether there is an NVIDIA GPU with its driver, in the file system below `root`."""
    if (root / "dev/nvidiactl").exists():
        return True
    # Under WSL2 every GPU of the host, of whatever make, is behind one node; NVIDIA's driver comes with a library.
    folders = ("usr/lib/wsl/lib", "usr/lib/*-linux-gnu", "usr/lib64")
    return (root / "dev/dxg").exists() and any(any(root.glob(f"{folder}/libcuda.so*")) for folder in folders)


def has_gpu(root: Path = Path("/")) -> bool:
    """Return whether there is a GPU that vLLM has an engine for, AMD's included."""
    return has_nvidia_gpu(root) or (root / "dev/kfd").exists()


if __name__ == "__main__":
    sys.exit(not has_gpu())
