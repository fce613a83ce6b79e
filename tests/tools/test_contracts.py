"""`make contracts`: another vLLM's sources, with and without something that no longer fits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.common import ROOT

vllm = pytest.importorskip("vllm")

PLANTED = {
    "v1/core/sched/scheduler.py": ("def update_from_output(", "def update_from_outputs("),
    "v1/worker/gpu/states.py": ("max_num_reqs: int", "max_requests: int"),
    "v1/worker/gpu/sample/gumbel.py": ("0x85EBCA6B", "0x85EBCA6D"),
}


@pytest.mark.slow
@pytest.mark.parametrize("planted", [{}, PLANTED], ids=["as it is", "changed"])
def test_it_says_what_no_longer_fits(tmp_path, planted):
    """Catches: a check that looks at the installed vLLM in place of the given one; a failure without its reason."""
    installed = Path(vllm.__file__).parent
    shutil.copytree(installed, tmp_path / "vllm", copy_function=os.symlink)
    for name, (was, now) in planted.items():
        path, text = tmp_path / "vllm" / name, (installed / name).read_text()
        assert was in text
        path.unlink()
        path.write_text(text.replace(was, now, 1))
    command = [sys.executable, "scripts/contracts.py", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == bool(planted), run.stdout + run.stderr
    assert f"vLLM {vllm.__version__}" in run.stdout
    for words in (
        ("update_from_output", "max_num_reqs", "test_the_noise", "used in") if planted else ("everything fits",)
    ):
        assert words in run.stdout, words
