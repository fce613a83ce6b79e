"""`vidspec bench quality` without an engine: accuracy, AUC, the sweep, engine commands, tables, files, errors."""

import csv
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_vidspec import metrics
from vllm_vidspec.cli import app
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.shapeworld import captions as caption_quality
from vllm_vidspec.shapeworld import world
from vllm_vidspec.shapeworld.captions import accuracies, auc, count_right, kind_shares, relevance_auc, retention
from vllm_vidspec.tools import progress, quality_views, session_job
from vllm_vidspec.tools.bench import quality
from vllm_vidspec.tools.bench.quality import DEFAULTS, Quality, Setting
from vllm_vidspec.tools.engine_session import answer_command
from vllm_vidspec.tools.quality_views import longest_kept, panels, setting_name

FAMILIES = ("qwen2.5-vl", "llava-onevision")


def test_every_attribute_is_in_one_group():
    scored = {name for i in range(20) for name in world.score_caption("", world.held_out(i).facts)}
    assert sorted(caption_quality.ATTRIBUTES) == sorted(scored)
    assert {"color", "new_color"} <= set(caption_quality.GROUPS["color"])


def test_words_of_a_caption_are_about_the_video_or_filler():
    about, filler = caption_quality.ATTRIBUTE_WORDS, caption_quality.FILLER_WORDS
    assert not about & filler
    words = {word for i in range(50) for word in world.held_out(i).caption.split()}
    assert words <= about | filler
    assert {"red", "navy", "dotted", "ring", "large", "upwards", "left", "middle", "turns", "four"} <= about
    assert {"the", "background", "on", ",", ".", "scenes", "and", "which"} <= filler


FACTS = (
    world.SceneFact(
        "navy",
        "plain",
        (
            world.ObjectFact("left", "small", "red", "ring", "upwards", "turns", "blue"),
            world.ObjectFact("right", "large", "green", "cross", "sideways", "remains"),
        ),
    ),
)
WORDS = (
    "the video shows a plain navy background , on the left there is a small red ring that goes upwards and then turns "
    "blue , on the right there is a large green cross that goes sideways and then remains . in total the clip has one "
    "scenes ."
)


def test_accuracy_by_hand():
    """One scene of two objects: 4 attributes of scenes, 6 of each object, and what one of them turns into."""
    right = count_right([WORDS], [FACTS])
    assert sum(total for _, total in right.values()) == 4 + 6 + 6 + 1
    assert accuracies(right)["accuracy"] == 1.0
    wrong = WORDS.replace("turns blue", "turns red").replace("cross", "ring").replace("navy", "teal")
    found = accuracies(count_right([wrong], [FACTS]))
    assert found["accuracy"] == 14 / 17
    # color: both colours, what one turns into, the background; shape: two shapes, two sizes, the pattern.
    assert found["group"] == {"color": 2 / 4, "shape": 4 / 5, "motion": 1.0, "order": 1.0}
    assert found["attribute"]["new_color"] == 0.0
    both = accuracies(count_right([WORDS, wrong], [FACTS, FACTS]))
    assert both["accuracy"] == 31 / 34, "pooled over captions, not averaged"
    empty = accuracies(count_right([], []))
    assert empty["accuracy"] is empty["group"]["color"] is empty["attribute"]["motion"] is None
    assert accuracies(count_right([""], [FACTS]))["accuracy"] == 0.0


def test_retention_and_shares_by_hand():
    assert retention(0.49, 0.5) == pytest.approx(0.98)
    assert retention(0.6, 0.5) == pytest.approx(1.2)
    assert retention(0.5, 0.0) is retention(None, 0.5) is None
    shares = kind_shares([[0, 1, 1, 2], [1, 3, 0]])
    assert shares == {"exact_frac": 3 / 5, "loosened_frac": 1 / 5, "shifted_frac": 1 / 5}
    assert set(kind_shares([[0, 0], []]).values()) == {None}


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"),
    [
        ([3, 4], [1, 2], 1.0),
        ([1, 2], [3, 4], 0.0),
        ([1, 3], [2], 0.5),
        ([2], [2, 2], 0.5),
        ([1, 2, 3], [2, 0], (1 + 1.5 + 2) / 6),
        ([], [1], None),
        ([1], [], None),
    ],
)
def test_auc_by_hand(positives, negatives, expected):
    assert auc(positives, negatives) == (None if expected is None else pytest.approx(expected))


def test_relevance_is_compared_over_all_captions():
    words = [[" red", " the", "<|im_end|>"], ["ring", " .", " a"]]
    assert relevance_auc(words, [[0.9, 0.5, 1.0], [0.4, None, 0.4]]) == pytest.approx((2 + 0.5) / 4)
    assert relevance_auc(words, [[None] * 3] * 2) is None
    with pytest.raises(ValueError):
        relevance_auc(words, [[0.9], [0.4, 0.4, 0.4]])


def names(what: Quality) -> list[str]:
    return [setting_name(quality_row(setting)) for setting in what.settings()]


def quality_row(setting: Setting, **fields) -> dict:
    """What a setting needs to be named."""
    return {"method": setting.scorer} | {name: getattr(setting, name) for name in DEFAULTS} | fields


def test_settings_of_the_default_sweep():
    assert names(Quality()) == [
        "strict",
        *("loose 0.2", "loose 0.5", "loose 0.7", "loose 0.9"),
        *("loose 0.2 shift", "loose 0.5 shift", "loose 0.7 shift", "loose 0.9 shift"),
        *("fly 0.2", "fly-entropy 0.2"),
        *("random 0.2", "random 0.5", "random 0.7", "random 0.9", "oracle"),
    ]


def test_one_thing_departs_at_a_time():
    what = Quality(scorers=("loose",), lambdas=(0.6, 0.1), top_ns=(1, 9, 100), relevance_rows=("token", "prediction"))
    assert names(what) == [
        *("strict", "loose 0.6 N9", "loose 0.1 N9", "loose 0.6 N9 shift", "loose 0.1 N9 shift"),
        *("loose 0.6 N9 pred", "loose 0.1 N9 pred", "loose 0.6 N1", "loose 0.6 N100"),
        *("loose 0.6 N1 pred", "loose 0.6 N100 pred"),
    ]
    assert names(Quality(scorers=("loose", "strict"), lambdas=(0.5, 0.5), position_shifts=(True,))) == [
        *("strict", "loose 0.5 shift")
    ]


def test_every_setting_names_every_knob():
    """Catches: a knob left over from the setting before."""
    for setting in Quality().settings():
        assert setting.knobs.keys() == {"scorer", "protected_tokens", *DEFAULTS}
    others = DEFAULTS | {"protected_tokens": None}
    assert Setting("random", 0.3, position_shift=False).knobs == others | {"scorer": "random", "lambda_loose": 0.3}


class FakeSession:
    """An engine of shape-world captions: the target's are true, the draft's know no colour, loose ones no motion."""

    sessions: ClassVar[list["FakeSession"]] = []
    counters: ClassVar[dict] = {}

    def __init__(self, job):
        self.job, self.asked = job, []
        self.sessions.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, command):
        self.asked.append(command)
        spec, knobs = self.job["llm"].get("speculative_config"), command["knobs"] or {}
        scorer = knobs.get("scorer", "strict")
        captions = [world.held_out(i).caption for i in self.job["prompts"]["held_out"]]
        if spec is None and "/draft" in self.job["llm"]["model"]:
            captions = [" ".join("red" if word in world.COLORS else word for word in c.split()) for c in captions]
        if scorer in ("loose", "random"):
            captions = [" ".join("nowhere" if word in world.MOTIONS else word for word in c.split()) for c in captions]
        token_ids = [[hash(word) for word in caption.split()] for caption in captions]
        answer = {"seconds": 1.0, "texts": captions, "token_ids": token_ids, "metrics": None, "captions": None}
        if spec is None:
            return answer
        gained = {"strict": 4, "loose": 6, "fly": 5}.get(scorer, 4.5)
        counters = {"drafts": 100, "draft_tokens": 1000, "accepted_tokens": round(100 * (gained - 1))}
        answer["metrics"] = dict.fromkeys(NAMES, 0) | counters | self.counters
        if command["watch"]:
            answer["captions"] = [
                {
                    "words": caption.split(),
                    "relevance": [0.5 if word in caption_quality.ATTRIBUTE_WORDS else 0.25 for word in caption.split()],
                    "kinds": [0, *([1, 2] * len(caption.split()))[: len(caption.split()) - 1]],
                }
                for caption in captions
            ]
        return answer


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.setattr(quality, "EngineSession", FakeSession)
    monkeypatch.setattr(FakeSession, "sessions", [])
    monkeypatch.setattr(FakeSession, "counters", {})
    return FakeSession.sessions


SMALL = {"requests": 3, "lambdas": (0.5, 0.7), "position_shifts": (False,)}


def test_one_engine_per_family_and_noise(sessions):
    what = Quality(families=FAMILIES, temperatures=(0.0, 1.0), draft_noises=("shared", "independent"), **SMALL)
    totals, measured = [], []
    result = quality.run(
        what,
        lambda event, fields: (totals.append(fields.get("total")), measured.append(fields.get("note"))),
    )
    rows = result["rows"]
    assert len(rows) == what.num_batches == totals[0] == len([row for row in measured if row])
    assert len(sessions) == 2 * (1 + 1 + 2)
    roles = [
        (
            Path(session.job["llm"]["model"]).name,
            (session.job["llm"].get("speculative_config") or {}).get("draft_noise"),
        )
        for session in sessions
    ]
    assert roles[:4] == [("target", None), ("draft", None), ("target", "shared"), ("target", "independent")]
    for session in sessions:
        assert session.job["prompts"]["held_out"] == [0, 1, 2]
        assert session.job["llm"]["max_num_seqs"] == 16
    spec = sessions[2].job["llm"]["speculative_config"]
    assert (spec["scorer"], spec["num_speculative_tokens"], spec["on_draft_error"]) == ("loose", 10, "raise")

    settings = what.settings()
    asked = sessions[2].asked
    assert (asked[0]["knobs"], asked[0]["watch"]) == (None, False), "every video once, before any time is taken"
    assert [command["knobs"] for command in asked[1:]] == [setting.knobs for setting in settings] * 2
    assert [command["sampling"]["temperature"] for command in asked[1:]] == [0.0] * len(settings) + [1.0] * len(
        settings
    )
    assert {command["sampling"]["temperature"] for command in sessions[3].asked[1:]} == {1.0}, "at 0 noise is nothing"
    assert all(command["seed"] == 0 for command in asked)

    first = [(row["family"], row["temperature"], row["draft_noise"], row["method"]) for row in rows[:4]]
    assert first == [
        *(("qwen2.5-vl", 0.0, None, "target"), ("qwen2.5-vl", 0.0, None, "draft")),
        *(("qwen2.5-vl", 0.0, "shared", "strict"), ("qwen2.5-vl", 0.0, "shared", "loose")),
    ]
    assert list(panels(rows)) == [
        (family, *condition)
        for family in FAMILIES
        for condition in ((0.0, "shared"), (1.0, "shared"), (1.0, "independent"))
    ]


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
    num_tokens = sum(len(world.held_out(i).caption.split()) for i in range(3))
    assert loose["tokens_per_caption"] == num_tokens / 3
    assert loose["delivered_length"] == (num_tokens - 3) / 100, "a request's first token comes from its prefill"
    assert (loose["lambda_loose"], loose["top_n"], loose["position_shift"], loose["fly_entropy"]) == (
        *(0.5, 10, False, None),
    )


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({"skipped_pool_full": 1}, r"strict: requests ran without speculation \(pool_full\)"),
        ({"strict_memory": 2}, r"loose: requests were verified strictly \(memory\)"),
        ({"drafts": 0}, "nothing was drafted"),
    ],
)
def test_a_batch_that_is_no_measurement_is_refused(sessions, monkeypatch, counters, words):
    monkeypatch.setattr(FakeSession, "counters", counters)
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
    words = quality_views.longest_words(rows)
    assert "loose 0.5 with 6.00 tokens per step" in words
    assert "random nowhere" in words


def invoke(*options: str):
    return CliRunner().invoke(app, ["bench", "quality", "--requests", "3", *options])


def test_command_writes_table_and_files(sessions, tmp_path):
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("csv", "svg", "json")}
    result = invoke(
        *("--temperature", "0,1", "--draft-noise", "shared,independent", "--lambda", "0.5,0.7", "--top-n", "1,10"),
        *("--csv", str(files["csv"]), "--plot", str(files["svg"]), "--json", str(files["json"])),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("loose 0.7 N1") == 3
    for words in ("qwen2.5-vl, temperature 0 ", "temperature 1, independent noise", "At least 98 % kept", "kept"):
        assert words in result.stdout, words
    assert "…" not in result.stdout, "80 columns are enough"
    written = json.loads(files["json"].read_text())
    assert set(written) == {"rows", "provenance"}
    comment, header, *lines = files["csv"].read_text().splitlines()
    assert json.loads(comment.removeprefix("# ")) == written["provenance"]
    assert tuple(header.split(",")) == quality_views.COLUMNS
    assert len(lines) == len(written["rows"])
    (first, *_) = csv.DictReader([header, *lines])
    assert (first["method"], first["draft_noise"], first["retention"]) == ("target", "", "1.0")
    rows = quality_views.read_csv(str(files["csv"]))
    assert [row["position_shift"] for row in rows] == [row["position_shift"] for row in written["rows"]]
    for shown, row in zip(rows, written["rows"], strict=True):
        assert shown["group_motion"] == row["group"]["motion"]
        assert setting_name(shown) == setting_name(row)

    redrawn = tmp_path / "again.svg"
    command = [sys.executable, "-m", "vllm_vidspec.tools.quality_views", str(files["csv"]), str(redrawn)]
    subprocess.run(command, check=True)
    assert redrawn.read_bytes() == files["svg"].read_bytes()


def test_json_alone_is_on_standard_output(sessions):
    result = invoke("--json", "-")
    assert result.exit_code == 0, result.output
    assert {row["method"] for row in json.loads(result.stdout)["rows"]} == {"target", "draft", "strict", *quality.LOSSY}


def test_figure_has_a_line_per_way_and_levels(sessions):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    place = figure.subplots()
    rows = quality.run(Quality(**SMALL | {"top_ns": (1, 10), "position_shifts": (False, True)}))["rows"]
    lines = quality_views.draw_panel(place, rows)
    assert list(lines) == [
        *("the target alone", "98 % of it", "the draft alone", "strict"),
        *("loose", "loose shift", "fly", "fly-entropy", "random", "oracle"),
    ]
    kept = 100 * rows[3]["retention"]
    assert lines["loose"].get_xydata().tolist() == [[6.0, kept]] * 2
    assert lines["strict"].get_xydata().tolist() == [[4.0, 100.0]]
    assert [text.get_text() for text in place.texts] == ["N 1"]
    drawn = [lines[name].get_color() for name in list(lines)[4:]]
    assert len(set(drawn)) == len(drawn)


def test_figure_errors_are_one_line(tmp_path, capsys, monkeypatch, sessions):
    good, other = tmp_path / "good.csv", tmp_path / "other.csv"
    quality_views.write_csv(str(good), quality.run(Quality(**SMALL)))
    other.write_text("a,b\n1,2\n")
    empty = tmp_path / "empty.csv"
    quality_views.write_csv(str(empty), {"rows": [], "provenance": {}})
    for args, words in (
        ([str(tmp_path / "absent.csv"), "f.png"], "cannot read"),
        ([str(other), "f.png"], "is not a file of `vidspec bench quality --csv`"),
        ([str(good), "f.gif"], ".png or .svg"),
        ([str(empty), "f.png"], "no row has drafts"),
        ([str(good), str(tmp_path / "no" / "f.png")], "cannot write"),
        ([], "usage: "),
    ):
        monkeypatch.setattr(sys, "argv", ["quality_views", *args])
        assert quality_views.main() == 2
        said = capsys.readouterr().err
        assert words in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--family", "llava"], "unknown family 'llava'"),
        (["--scorer", "lose"], "scorer"),
        (["--lambda", "0.5,1.5"], "lambda_loose"),
        (["--lambda", "much"], "--lambda: 'much' is not a list of float values"),
        (["--top-n", "0"], "top_n"),
        (["--top-n", "2.5"], "--top-n"),
        (["--position-shift", "maybe"], "--position-shift: 'maybe' is neither on nor off"),
        (["--relevance-rows", "tokens"], "relevance_rows"),
        (["--fly-entropy", "2"], "fly_entropy"),
        (["--temperature", "-1"], "--temperature: -1 is no temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--draft-noise", "loud"], "draft_noise"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens"),
        (["--prune-ratio", "2"], "prune_ratio"),
        (["--knob", "fly_windw=3"], "did you mean 'fly_window'?"),
        (["--knob", "lambda_loose=0.3"], "--knob lambda_loose: it has an option of its own"),
        (["--csv", "/no/such/folder/rows.csv"], "no such folder"),
        (["--json", "/tmp"], "it is a folder"),
        (["--plot", "figure.gif"], ".png or .svg"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(sessions, options, words):
    result = invoke(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith("vidspec: ")
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not sessions, "no engine starts before every value is checked"


def test_view_shows_the_batches(sessions):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress.bars(console) as bars:
        view = progress.View(bars)
        view("plan", {"total": 3})
        view("loading", {"label": "the pair"})
        assert bars.tasks[0].description == "loading the pair"
        view("measured", {"note": "fly: 50.0 % kept"})
        assert (bars.tasks[0].completed, bars.tasks[0].fields["note"]) == (1, "fly: 50.0 % kept")


class FakeLLM:
    """Answers three requests; every batch drafts more steps, and a knob says which token the first answer ends in."""

    def __init__(self, speculates=True):
        config = SimpleNamespace(speculative_config=speculates or None, instance_id="x")
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.counters, self.calls, self.last = dict.fromkeys(NAMES, 0), [], 1

    def collective_rpc(self, name, args):
        self.calls.append((name, *args))
        if name == "vidspec_retune":
            self.last = args[0]["top_n"]
        if name == "vidspec_watch_scores" and not args[0]:
            return [
                [
                    # Watched past the end of the answer; vLLM's suffix on the id; not in the requests' order.
                    {"req_id": "8-b1b2", "tokens": [7, 8], "relevance": [None, 0.5], "kinds": [0, 2]},
                    {"req_id": "7-a1b2", "tokens": [5, self.last, 9], "relevance": [0.1, None, 1], "kinds": [0, 1, 3]},
                ]
            ]
        return [None]

    def generate(self, requests, params, use_tqdm):
        self.calls.append(("generate", requests, [(one.seed, one.temperature, one.max_tokens) for one in params]))
        self.counters["drafts"] += len(self.calls)
        answers = ([5, self.last], [7, 8], [6])
        return [
            SimpleNamespace(request_id=str(7 + i), outputs=[SimpleNamespace(text=f"text {i}", token_ids=ids)])
            for i, ids in enumerate(answers)
        ]

    def get_tokenizer(self):
        return SimpleNamespace(decode=lambda ids: " ".join(f"w{token}" for token in ids))


@pytest.fixture
def sampling_params(monkeypatch):
    """SamplingParams without vLLM."""
    params = lambda **given: SimpleNamespace(**{"max_tokens": None} | given)  # noqa: E731
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=params))


def command(top_n, watch=True):
    knobs = None if top_n is None else {"top_n": top_n}
    fields = answer_command(knobs, seed=3, watch=watch, temperature=0.5, max_tokens=9)
    return {name: value for name, value in fields.items() if name != "command"}


def test_a_batch_is_retuned_watched_and_counted_by_itself(monkeypatch, sampling_params):
    llm = FakeLLM()
    monkeypatch.setattr(metrics, "read_metrics", lambda path: dict(llm.counters))
    engine = session_job.Engine(llm, ["a", "b", "c"])
    answers = [engine.answer(**command(top_n)) for top_n in (1, 2)]
    generate = ("generate", ["a", "b", "c"], [(3, 0.5, 9), (4, 0.5, 9), (5, 0.5, 9)])
    watch = [("vidspec_watch_scores", on) for on in (True, False)]
    assert llm.calls == [
        *(("vidspec_retune", {"top_n": 1}), watch[0], generate, watch[1]),
        *(("vidspec_retune", {"top_n": 2}), watch[0], generate, watch[1]),
    ]
    assert [answer["metrics"]["drafts"] for answer in answers] == [3, 7], "each batch's own gain"
    first, second = answers
    assert first["texts"] == ["text 0", "text 1", "text 2"]
    assert first["captions"] == [
        {"words": ["w5", " w1"], "relevance": [0.1, None], "kinds": [0, 1]},
        {"words": ["w7", " w8"], "relevance": [None, 0.5], "kinds": [0, 2]},
        {"words": ["w6"], "relevance": [None], "kinds": [0]},
    ]
    assert second["token_ids"][0] == [5, 2]
    json.dumps(answers)


def test_vanilla_is_neither_retuned_nor_watched(sampling_params):
    llm = FakeLLM(speculates=False)
    answer = session_job.Engine(llm, ["a", "b", "c"]).answer(**command(None, watch=False))
    assert [call[0] for call in llm.calls] == ["generate"]
    assert answer["metrics"] is answer["captions"] is None


def test_what_was_watched_must_be_what_was_said():
    llm = FakeLLM()
    (watched,) = llm.collective_rpc("vidspec_watch_scores", (False,))
    outputs = llm.generate([], [], False)
    watched[0]["tokens"][1] = 9
    with pytest.raises(VidSpecError, match="not the tokens of the answer"):
        session_job._watched_captions(llm.get_tokenizer(), outputs, watched)


def test_token_texts_add_up():
    """A tokenizer of bytes: a character of several tokens belongs to the last of them."""
    text = "a é☂ b�"
    tokens = list(text.encode()[:-3])
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))
    assert session_job.token_texts(tokenizer, tokens) == ["a", " ", "", "é", "", "", "☂", " ", "b"]
    assert session_job.token_texts(tokenizer, tokens[:3]) == ["a", " ", "�"], "cut in the middle"
    assert session_job.token_texts(tokenizer, []) == []


def make_results():
    path = Path(__file__).resolve().parents[2] / "scripts" / "make_results.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_page_has_tables_and_what_keeps_enough(sessions, tmp_path, monkeypatch):
    """R12 from its own command line, with engines that are not there."""
    pytest.importorskip("matplotlib")
    script = make_results()
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    parts = []
    for command in script.commands_of("R12"):
        result = CliRunner().invoke(app, [*command.split(), "--requests", "2", "--json", "-"])
        assert result.exit_code == 0, result.stderr
        parts.append(json.loads(result.stdout))
    found = script.merge(parts)
    assert [row["method"] for row in found["rows"]].count("strict") == 4, "once a panel"
    assert sum(row["method"] == "oracle" for row in found["rows"]) == 4
    quality_views.draw(found["rows"], str(tmp_path / "R12.png"))
    text = script.body_of("R12", found)
    panels = ("temperature 0: length", "temperature 1, independent noise: length")
    assert f"| `qwen2.5-vl` | {' | '.join(f'{panel} | of strict' + chr(39) + 's | kept' for panel in panels)} |" in text
    assert "| `strict` | 4.00 | 1.00 | 100.0 % | 4.00 | 1.00 | 100.0 % |" in text
    assert text.count("At least 98 % kept: loose nowhere; fly 0.05 with 5.00 tokens per step (1.25 of strict's") == 4
    assert "| LVSpec's table 3 | length of strict's: paper | `qwen2.5-vl` | `llava-onevision` | kept: paper |" in text
    kept = script.share(next(row["retention"] for row in found["rows"] if row["method"] == "loose"))
    assert f"| `loose 0.7` | 1.88 | 1.50 | 1.50 | 98.5 % | {kept} | {kept} |" in text
    assert f"| `loose 0.7 N100` | - | 1.50 | 1.50 | 93.4 % | {kept} | {kept} |" in text
    assert "](R12.png)" in text
    columns = {line.count("|") for line in text.splitlines() if line.startswith("| `strict` | 4.00")}
    assert columns == {8}


def test_results_page_shows_relevance(tmp_path, monkeypatch):
    script = make_results()
    monkeypatch.setattr(script, "FOLDER", tmp_path / "results")
    origin = {"git_sha": None, "git_dirty": None, "versions": {}, "device": "x", "date": "2026-01-01", "argv": []}
    row = {"words": ["a"] * 9, "acceptance_length": 5.0, "loosened_frac": 0.25, "shifted_frac": 0.0}
    parts = [
        {"rows": [row | {"family": family, "relevance_auc": 0.75}], "provenance": origin} for family in script.FAMILIES
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "relevance-qwen2.5-vl.png").touch()
    text = script.body_of("R12-relevance", script.merge(parts))
    assert text.count("![") == text.count("](../relevance-qwen2.5-vl.png)") == 1
    assert "| `llava-onevision` | 9 | 5.00 | 25.0 % | 0.0 % | 0.75 |" in text
    assert script.chosen("R12") == ["R12", "R12-relevance"]
