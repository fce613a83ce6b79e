"""`vidspec plan`: what it prints, and what its JSON promises."""

import json
import shlex

import pytest

from tools.common import invoke, printed
from vllm_vidspec.config import parse_config
from vllm_vidspec.planning.candidates import TREES

QUICK = ("plan", "--video-tokens", "1000", "--prune-ratio", "0.9")
APART = "plan --target Qwen2.5-VL-72B --draft 7B --tp 8 --draft-gpus 1 --batch 1"
TIMES = {
    *("ttft_ms", "answer_ms", "answer_speedup", "speedup", "videos_per_hour", "videos_per_hour_per_gpu"),
    *("acceptance_length", "t_target_ms", "t_verify_ms", "t_draft_ms"),
}
ROW = TIMES | {
    *("choice", "batch", "is_full", "fits", "shape", "num_speculative_tokens", "draft_forwards", "prune_ratio"),
    *("gpus", "draft_gpus", "memory", "drafter_memory"),
}


def planned(*options):
    return printed(*QUICK, *options)


def test_json_is_all_that_is_printed():
    """Catches: a field that is gone, a table in front of the JSON, figures that do not say that they are modelled."""
    result = planned("--target", "Qwen/Qwen2.5-VL-72B-Instruct", "--draft", "7B", "--tp", "4", "--batch", "1,1000")
    assert set(result) == {
        *("kind", "target", "draft", "choice", "gpu", "tp", "draft_gpus", "video_tokens", "text_tokens", "fps", "rows"),
        *("answer_tokens", "when", "paying", "serve", "break_even_agreement", "notes", "agreement", "measured"),
        *("assumed", "fitted", "provenance", "quantised_drafts"),
    }
    asked = [result[name] for name in ("kind", "target", "draft", "gpu", "tp", "draft_gpus")]
    assert asked == ["modelled", "Qwen2.5-VL 72B", "Qwen2.5-VL 7B", "h100", 4, 0]
    assert all(set(row) == ROW for row in result["rows"])
    memory = {"target_weights", "draft_weights", "target_kv", "draft_kv", "draft_media", "reserved", "left"}
    assert result["rows"][0]["memory"].keys() == memory
    assert [row["choice"] for row in result["rows"] if row["batch"] == 1] == ["nothing", "draft", "eyes", "self"]
    draft = result["rows"][1]
    assert draft["shape"] in ("chain", *TREES) and draft["speedup"] > 1.5
    (none,) = [row for row in result["rows"] if row["batch"] == 1000]
    assert {name for name in ROW if none[name] is None} >= TIMES


def test_options_reach_the_plan():
    """Each changes what it is about. Catches: an option that nothing reads."""
    row = planned("--batch", "4")["rows"][1]
    changed = {
        ("--gpu", "h20"): "t_target_ms",
        ("--target", "Qwen/Qwen3-VL-8B-Instruct-FP8"): "t_target_ms",
        ("--tp", "2"): "t_target_ms",
        ("--video-tokens", "9000"): "t_target_ms",
        ("--text-tokens", "5000"): "t_target_ms",
        ("--prune-ratio", "0.2"): "t_draft_ms",
        ("--draft-quantization", "int4"): "t_draft_ms",
        ("--draft", "4B"): "t_draft_ms",
        ("--acceptance", "0.99"): "acceptance_length",
        ("--answer-tokens", "2"): "answer_speedup",
        ("--target-ms", "50"): "t_target_ms",
        ("--draft-ms", "1"): "t_draft_ms",
    }
    for options, name in changed.items():
        assert planned("--batch", "4", *options)["rows"][1][name] != row[name], options
    apart = printed(*APART.split())["rows"][1]
    assert (apart["shape"], apart["gpus"], apart["draft_forwards"]) == ("parallel", 9, 0)
    assert all(one["gpus"] == 1 for one in planned("--batch", "1,4")["rows"]), "no second card that nobody asked for"
    (agreement,) = printed("plan", "--acceptance", "0.9,0.8,0.7")["agreement"]
    assert agreement["prune_ratio"] == 0.9 and agreement["rates"] == pytest.approx([0.9, 0.8 / 0.9, 0.7 / 0.8])


def test_minutes_are_tokens():
    """Two minutes at a frame a second, of 150 tokens each. Catches: seconds for minutes, vLLM's own sampling."""
    result = printed("plan", "--target", "Qwen2.5-VL-7B", "--draft", "3B", "--minutes", "2", "--fps", "1")
    assert result["video_tokens"] == 120 * 150
    assert '--media-io-kwargs \'{"video": {"fps": 1.0, "num_frames": -1}}\'' in result["serve"]
    assert printed("plan", "--minutes", "2")["video_tokens"] == 240 * 110


@pytest.mark.parametrize(
    "options",
    [
        "--target Qwen/Qwen2.5-VL-32B-Instruct --draft 7B --tp 2 --draft-quantization int4",
        "--target Qwen/Qwen2.5-VL-7B-Instruct-AWQ --draft 3B --draft-quantization fp8_per_tensor --minutes 3",
        "--target Qwen2.5-VL-7B --draft self --batch 16",
        "--target llava-onevision-7b --draft 0.5b --gpu l40s --prune-ratio 0.5",
        APART.removeprefix("plan "),
        "--target Qwen2.5-VL-3B --draft 3B",
    ],
)
def test_the_line_to_serve_is_one_that_vllm_takes(options):
    """By vLLM's own parser and by our configuration. Catches: an option of another version, a key that is refused, JSON
    that a shell takes apart, a shape whose K is another's.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    result = printed("plan", *options.split())
    program, command, *words = shlex.split(result["serve"])
    assert (program, command) == ("vllm", "serve")
    parser = FlexibleArgumentParser()
    parser.add_argument("model_tag")
    asked = AsyncEngineArgs.add_cli_args(parser).parse_args(words)
    assert asked.model_tag.count("/") == 1 and asked.tensor_parallel_size == result["tp"]
    longest = result["video_tokens"] + result["text_tokens"] + result["answer_tokens"]
    assert 0 <= asked.max_model_len - longest < 1024
    drafts = [row for row in result["rows"] if row["choice"] == result["choice"] and row["speedup"] > 1.05]
    assert (asked.speculative_config is not None) == bool(drafts)
    if drafts:
        config, _ = parse_config(asked.speculative_config)
        assert config.num_speculative_tokens in {row["num_speculative_tokens"] for row in drafts}
        assert config.is_self_draft == ("--draft self" in options) and config.is_parallel == ("gpus" in options)
        if not config.is_self_draft:
            assert config.model.count("/") == 1


def test_tables_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(*QUICK, "--batch", "1,5000", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    for said in ("(modelled)", "tree-3 31", "does not fit", "Drafts pay for 1 to", "no draft gains 5 %", "tau: tokens"):
        assert said in words, said
    written = json.loads((tmp_path / "plan.json").read_text())
    assert f"{written['rows'][1]['answer_speedup']:.2f}x" in words
    assert result.stdout.rstrip().endswith(written["serve"])
    many = invoke(*APART.split(), "--video-tokens", "1000").stdout
    assert "…" not in result.stdout + many, "eighty columns hold the tables"
    assert len(result.stdout.splitlines()) < 50, "one screen"
