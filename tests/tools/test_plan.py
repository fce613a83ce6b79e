"""`vidspec plan`: what it prints, and what its JSON promises."""

import json

import pytest

from tools.common import invoke, printed
from vllm_vidspec.planning.candidates import TREES

QUICK = ("plan", "--video-tokens", "1000", "--draft-gpus", "0", "--prune-ratio", "0.9")
ROW = {
    *("batch", "fits", "shape", "num_speculative_tokens", "prune_ratio", "speedup", "answer_speedup"),
    *("acceptance_length", "t_target_ms", "t_verify_ms", "t_draft_ms", "draft_gpus", "break_even_agreement"),
    *("memory", "drafter_memory", "alternatives"),
}


def planned(*options):
    return printed(*QUICK, *options)


def test_json_is_all_that_is_printed():
    """Catches: a field that is gone, a table in front of the JSON, figures that do not say that they are modelled."""
    result = planned("--target", "Qwen/Qwen2.5-VL-72B-Instruct", "--draft", "7B", "--tp", "4", "--batch", "1,100")
    assert set(result) == {
        *("kind", "target", "draft", "gpu", "tp", "draft_gpus", "video_tokens", "text_tokens", "answer_tokens", "rows"),
        *("when", "paying", "notes", "agreement", "measured", "assumed", "fitted", "provenance", "quantised_drafts"),
    }
    asked = [result[name] for name in ("kind", "target", "draft", "gpu", "tp")]
    assert asked == ["modelled", "Qwen2.5-VL 72B", "Qwen2.5-VL 7B", "h100", 4]
    assert [row["batch"] for row in result["rows"]] == [1, 100]
    assert all(set(row) == ROW for row in result["rows"])
    memory = {"target_weights", "draft_weights", "target_kv", "draft_kv", "draft_media", "reserved", "left"}
    assert result["rows"][0]["memory"].keys() == memory
    assert result["rows"][0]["shape"] in ("chain", *TREES) and result["rows"][0]["speedup"] > 1.5


def test_options_reach_the_plan():
    """Each changes what it is about. Catches: an option that nothing reads."""
    row = planned("--batch", "4")["rows"][0]
    changed = {
        ("--gpu", "h20"): "t_target_ms",
        ("--tp", "4"): "t_target_ms",
        ("--video-tokens", "9000"): "t_target_ms",
        ("--text-tokens", "5000"): "t_target_ms",
        ("--prune-ratio", "0.2"): "t_draft_ms",
        ("--draft-quantization", "int4"): "t_draft_ms",
        ("--draft", "3B"): "t_draft_ms",
        ("--acceptance", "0.99"): "acceptance_length",
        ("--answer-tokens", "2"): "answer_speedup",
        ("--target-ms", "50"): "t_target_ms",
        ("--draft-ms", "1"): "t_draft_ms",
    }
    for options, name in changed.items():
        assert planned("--batch", "4", *options)["rows"][0][name] != row[name], options
    parallel = planned("--batch", "4", "--draft-gpus", "1")["rows"][0]
    assert parallel["alternatives"].keys() == {"chain", *TREES, "parallel"}
    (agreement,) = printed("plan", "--acceptance", "0.9,0.8,0.7", "--draft-gpus", "0")["agreement"]
    assert agreement["prune_ratio"] == 0.9 and agreement["rates"] == pytest.approx([0.9, 0.8 / 0.9, 0.7 / 0.8])


def test_tables_and_files(tmp_path):
    result = invoke(*QUICK, "--batch", "1,5000", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    for said in (
        "(modelled)",
        "tree-3 24",
        "does not fit",
        "Drafts pay at batch sizes 1 to",
        "no draft gains 5 %",
    ):
        assert said in words, said
    written = json.loads((tmp_path / "plan.json").read_text())
    assert f"{written['rows'][0]['answer_speedup']:.2f}x" in words
    assert "…" not in result.stdout, "eighty columns hold the tables"
