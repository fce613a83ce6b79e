"""Which device nodes are a GPU, and that the rule is in one place."""

import subprocess
import sys

import pytest

from vllm_vidspec import devices


@pytest.mark.parametrize(
    ("files", "is_nvidia", "is_gpu"),
    [
        ([], False, False),
        (["dev/nvidiactl"], True, True),
        (["dev/kfd"], False, True),
        (["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"], True, True),
        (["dev/dxg", "usr/lib/x86_64-linux-gnu/libcuda.so.1"], True, True),
        (["dev/dxg", "usr/lib/wsl/lib/libd3d12.so"], False, False),
        (["usr/lib/x86_64-linux-gnu/libcuda.so.1"], False, False),
    ],
    ids=["none", "nvidia", "amd", "wsl", "wsl-container", "wsl-without-nvidia", "library-alone"],
)
def test_what_is_a_gpu(tmp_path, files, is_nvidia, is_gpu):
    """Catches: WSL2 taken for a machine without a GPU, so that kernels are interpreted; an Intel GPU for NVIDIA's."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert (devices.has_nvidia_gpu(tmp_path), devices.has_gpu(tmp_path)) == (is_nvidia, is_gpu)


def test_the_makefile_can_ask():
    """Catches: an exit code that is the wrong way round; an import that a bare Python does not have."""
    done = subprocess.run([sys.executable, "-S", devices.__file__], check=False)
    assert done.returncode == (0 if devices.has_gpu() else 1)
