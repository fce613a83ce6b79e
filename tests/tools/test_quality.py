"""`vidspec bench quality` without an engine: the sweep, engine commands, tables, files, errors."""

import functools
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import captioned, quality
from benchmarks.quality import DEFAULTS, Quality, Setting, setting_name
from benchmarks.views import draw_quality, longest_kept, longest_words, panels
from tools.common import FAMILIES, answer_captions, invoke
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import progress


def quality_row(setting: Setting, **fields) -> dict:
    return {"method": setting.scorer} | {name: getattr(setting, name) for name in DEFAULTS} | fields


def test_settings_are_every_combination_and_name_every_knob():
    """Catches: a scorer or a value that is left out, strict that is not first, a knob left over from the one before."""
    what = Quality(scorers=("strict", *quality.LOSSY), lambdas=(0.6, 0.1), relevance_rows=("token", "prediction"))
    assert [setting_name(quality_row(setting)) for setting in what.settings()] == [
        *("strict", "loose 0.6", "loose 0.1", "loose 0.6 shift", "loose 0.1 shift"),
        *("loose 0.6 pred", "loose 0.1 pred", "loose 0.6 shift pred", "loose 0.1 shift pred"),
        *("fly 0.3", "fly-entropy 0.3", "random 0.6", "random 0.1", "oracle"),
    ]
    for setting in what.settings():
        assert setting.knobs().keys() == {"scorer", "protected_tokens", *DEFAULTS}
    others = DEFAULTS | {"protected_tokens": None}
    assert Setting("random", 0.3, position_shift=False).knobs() == others | {"scorer": "random", "lambda_loose": 0.3}


SMALL = {"requests": 3, "lambdas": (0.5, 0.7), "position_shifts": (False,)}


def test_one_engine_per_family_and_role(sessions):
    what = Quality(families=FAMILIES, temperatures=(0.0, 1.0), draft_noise="independent", **SMALL)
    told = []
    rows = quality.run(what, lambda event, fields: told.append(fields))["rows"]
    assert len(rows) == told[0]["total"] == sum("note" in fields for fields in told)
    llms = [session.job["llm"] for session in sessions]
    roles = [(Path(llm["model"]).name, llm.get("speculative_config", {}).get("draft_noise")) for llm in llms]
    assert roles == [("target", None), ("draft", None), ("target", "independent")] * 2
    for session in sessions:
        assert session.job["prompts"]["held_out"] == [0, 1, 2]
        assert session.job["llm"]["max_num_seqs"] == 16
    spec = sessions[2].job["llm"]["speculative_config"]
    assert (spec["scorer"], spec["num_speculative_tokens"], spec["on_draft_error"]) == ("loose", 10, "raise")

    settings, asked = what.settings(), sessions[2].asked
    assert (asked[0]["knobs"], asked[0].get("watch")) == (None, None), "every video once, before any time is taken"
    assert [command["knobs"] for command in asked[1:]] == [setting.knobs() for setting in settings] * 2
    temperatures = [command["sampling"]["temperature"] for command in asked[1:]]
    assert temperatures == [0.0] * len(settings) + [1.0] * len(settings)
    assert all(command["seed"] == 0 for command in asked)

    first = [(row["family"], row["temperature"], row["draft_noise"], row["method"]) for row in rows[:4]]
    assert first == [
        *(("qwen2.5-vl", 0.0, None, "target"), ("qwen2.5-vl", 0.0, None, "draft")),
        *(("qwen2.5-vl", 0.0, "independent", "strict"), ("qwen2.5-vl", 0.0, "independent", "loose")),
    ]
    names = ("temperature 0", "temperature 1, independent noise")
    assert list(panels(rows)) == [f"{family}, {name}" for family in FAMILIES for name in names]


def test_the_far_draft_takes_the_drafts_place(sessions):
    """Catches: a pair that drafts with one and shows the captions of the other."""
    rows = quality.run(Quality(draft="far", **SMALL))["rows"]
    models = [session.job["llm"].get("speculative_config", session.job["llm"])["model"] for session in sessions]
    assert [Path(model).name for model in models] == ["target", "far", "far"]
    assert {row["draft"] for row in rows} == {"far"}
    with pytest.raises(VidSpecError, match="--draft: 'near' is neither draft nor far"):
        quality.check(Quality(draft="near"))


def test_rows_say_what_was_measured(sessions):
    target, draft, strict, loose, *_ = quality.run(Quality(**SMALL))["rows"]
    assert (target["accuracy"], target["retention"], target["identical_frac"]) == (1.0, 1.0, 1.0)
    assert target["acceptance_length"] is target["exact_frac"] is target["relevance_auc"] is None
    assert 0.5 < draft["retention"] == draft["accuracy"] < 1
    assert draft["group"]["color"] < 1 == draft["group"]["motion"]
    assert (strict["acceptance_length"], strict["ratio_to_strict"], strict["retention"]) == (4.0, 1.0, 1.0)
    assert (loose["acceptance_length"], loose["ratio_to_strict"]) == (6.0, 1.5)
    assert loose["group"]["motion"] < 1 == loose["group"]["color"]
    assert loose["identical_frac"] == 0.0
    assert loose["loosened_frac"] == pytest.approx(0.5, abs=0.01)
    assert loose["relevance_auc"] == 1.0
    num_tokens = sum(len(captioned.held_out(i).caption.split()) for i in range(3))
    assert loose["tokens_per_caption"] == num_tokens / 3
    assert loose["delivered_length"] == (num_tokens - 3) / 100, "a request's first token comes from its prefill"
    knobs = ("lambda_loose", "position_shift", "fly_entropy")
    assert [loose[name] for name in knobs] == [0.5, False, None]


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({"skipped_pool_full": 1}, r"strict: requests ran without speculation \(pool_full\)"),
        ({"strict_memory": 2}, r"loose: requests were verified strictly \(memory\)"),
        ({"drafts": 0}, "nothing was drafted"),
    ],
)
def test_a_batch_that_is_no_measurement_is_refused(fake_engines, counters, words):
    fake_engines(functools.partial(answer_captions, **counters))
    with pytest.raises(VidSpecError, match=words):
        quality.run(Quality(**SMALL))


def test_longest_of_what_keeps_enough():
    def row(method, length, kept, **knobs):
        return quality_row(Setting(method, **knobs), acceptance_length=length, ratio_to_strict=1.0, retention=kept)

    rows = [
        row("strict", 9.0, 1.0),
        row("loose", 6.0, 0.98, lambda_loose=0.5),
        row("loose", 5.0, 1.01, lambda_loose=0.2),
        row("loose", 7.0, 0.9799, lambda_loose=0.9),
        row("random", 8.0, 0.5, lambda_loose=0.5),
    ]
    found = longest_kept(rows)
    assert found == {"loose": rows[1], "random": None}
    words = longest_words(rows)
    assert "loose 0.5 with 6.00 tokens per step" in words
    assert "random nowhere" in words


def test_command_writes_table_and_files(sessions, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(VidSpecError, match="no row has drafts"):
        draw_quality([{"family": "x", "temperature": 0, "draft_noise": None}], "f.png")
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("svg", "json")}
    result = invoke(
        *("-m", "benchmarks.quality", "--requests", "3"),
        *("--temperature", "0,1", "--draft-noise", "independent", "--lambda", "0.5,0.7"),
        *("--plot", str(files["svg"]), "--json", str(files["json"])),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("loose 0.7 shift") == 2
    for words in ("qwen2.5-vl, temperature 0 ", "temperature 1, independent noise", "At least 98 % kept", "kept"):
        assert words in result.stdout, words
    assert "…" not in result.stdout, "80 columns are enough"
    written = json.loads(files["json"].read_text())
    assert set(written) == {"rows", "provenance"}
    assert {row["method"] for row in written["rows"]} == {"target", "draft", "strict", *quality.LOSSY}
    assert files["svg"].read_text().startswith("<?xml")


def test_view_shows_the_batches(sessions):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress.bars(console) as bars:
        view = progress.View(bars)
        view("plan", {"total": 3})
        view("loading", {"label": "the pair"})
        assert bars.tasks[0].description == "loading the pair"
        view("measured", {"note": "fly: 50.0 % kept"})
        assert (bars.tasks[0].completed, bars.tasks[0].fields["note"]) == (1, "fly: 50.0 % kept")
