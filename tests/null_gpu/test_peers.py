"""The benchmark beside others goes its whole way on the null GPU: what fails there would cost minutes of a real one."""

import json

import pytest

from null_gpu.conftest import TIMEOUT_S


@pytest.mark.slow
def test_one_command_fills_both_tables(dry_run):
    """Catches: a peer that no longer fits its library, an engine that does not start beside ours; numbers of a dry run
    that look like measurements."""
    process, out, log = dry_run
    assert process.wait(TIMEOUT_S) == 0, log.read_text()[-4000:]
    found = json.loads(out.read_text())
    assert "these numbers mean nothing" in found["note"] and found["note"] in out.with_suffix(".md").read_text()
    notes = {row["impl"]: row["note"] for row in found["attention"]}
    assert notes.keys() == {"triton", "flash_and_nodes", "sdpa", "flex_attention", "xformers"}
    assert all(row["median"] is not None for row in found["attention"] if not row["note"])
    assert not any(notes[impl] for impl in ("triton", "flash_and_nodes", "sdpa")), notes
    assert not any(row["note"] for row in found["drafting"]), found["drafting"]
    assert [row["method"] for row in found["drafting"]] == ["vanilla", "vidspec", "draft_model", "eagle"]
    assert all((row["propose_ms"] is None) == (row["method"] == "vanilla") for row in found["drafting"])
