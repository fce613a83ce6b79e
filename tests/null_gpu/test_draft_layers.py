"""Drafts in four bits start beside targets in bf16 and fp8, and their layers are as few kernels as they can be."""

import json
import os
import subprocess
import sys

import pytest

from null_gpu import draft_layers
from null_gpu.conftest import ROOT, TIMEOUT_S, is_oldest

pytestmark = pytest.mark.every_version
# What is counted in every run; the others are in the table of docs/notebook/gpu.md.
RUN = ("fp8, Marlin", "w4a16", "w4a16, Marlin", "AWQ", "GPTQ", "w4a16 of an fp8 target", draft_layers.HEAD)


def counted(names, folder):
    """Return what is counted of drafts, by name, and what their process says."""
    path, log = folder / "rows.json", folder / "log"
    command = [sys.executable, "-m", "null_gpu.draft_layers", str(path), *names]
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=TIMEOUT_S, env=os.environ)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["name"]: row for row in rows}, log.read_text()[-6000:]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    names = [name for name in RUN if name != draft_layers.HEAD or not is_oldest()]
    found, log = counted(names, tmp_path_factory.mktemp("drafts"))
    assert [*found] == names, log
    return found


def test_a_layer_in_four_bits_is_few_kernels(rows):
    """Catches: a draft in four bits that does not start, a kernel that quantises what it multiplies, a bias added by a
    kernel of its own, a backend that is not the one asked for.
    """
    for name in ("w4a16", "w4a16, Marlin", "AWQ", "GPTQ", "w4a16 of an fp8 target"):
        assert len(rows[name]["kernels"]) <= BUDGET[name], rows[name]["kernels"]


def test_a_drafts_backend_is_its_own(rows):
    assert draft_layers.products(rows["fp8, Marlin"]) == draft_layers.products(rows["w4a16, Marlin"]) == "Marlin"


def test_a_quantised_head_replaces_the_one_of_sixteen_bits(rows):
    """By its bytes. Catches: a copy beside the head that it is of."""
    if is_oldest():
        pytest.skip("from 0.33 on")
    plain, head = rows["w4a16"], rows[draft_layers.HEAD]
    assert head["head"] != plain["head"]
    rows_of_head = 152_064
    assert plain["draft_bytes"] - head["draft_bytes"] == rows_of_head * (3584 - 4)
