"""The benchmarks' pure parts: prompts against the chat templates, arguments, logs, /metrics text, engine subprocess."""

import csv
import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_vidspec import metrics
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs, plots, processes, tables, user_files
from vllm_vidspec.tools.bench import acceptance
from vllm_vidspec.tools.provenance import provenance


@pytest.mark.parametrize("family", pairs.FAMILIES)
@pytest.mark.parametrize("media", [[], ["video"], ["image", "video"]])
def test_prompt_is_what_the_chat_template_renders(family, media):
    jinja2 = pytest.importorskip("jinja2")
    with open(f"{pairs.checkpoint(family, 'target')}/chat_template.jinja") as file:
        template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(file.read())
    content = [{"type": kind} for kind in media] + [{"type": "text", "text": "describe the video"}]
    rendered = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
    assert pairs.chat_prompt(family, "describe the video", media) == rendered


@pytest.mark.parametrize(("family", "num_frames"), [("qwen2.5-vl", 32), ("llava-onevision", 16)])
def test_video_prompt(family, num_frames):
    frames = np.arange(32, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    prompt = pairs.video_prompt(family, frames, "what is it")
    (video,) = prompt["multi_modal_data"]["video"]
    if family == "qwen2.5-vl":
        video, metadata = video
        assert metadata["fps"] == 2.0
        assert metadata["frames_indices"] == list(range(32))
    assert video.shape == (num_frames, 4, 4, 3)
    assert (video[0, 0, 0, 0], video[-1, 0, 0, 0]) == (0, 31)
    assert "what is it" in prompt["prompt"]


def test_llm_kwargs_and_serve_args_say_the_same():
    kwargs = pairs.llm_kwargs("qwen2.5-vl", "target", prune_ratio=0.5)
    assert kwargs["speculative_config"]["model"] == "self"
    assert "speculative_config" not in pairs.llm_kwargs("qwen2.5-vl")
    args = pairs.serve_args("qwen2.5-vl", "target", port=1234, prune_ratio=0.5)
    assert args[0] == kwargs["model"]
    assert json.loads(args[args.index("--speculative-config") + 1]) == kwargs["speculative_config"]
    assert args[args.index("--max-num-seqs") + 1] == "4"
    assert "--enforce-eager" in args
    assert args[args.index("--port") + 1] == "1234"
    assert "--enforce-eager" not in pairs.serve_args("qwen2.5-vl", overrides={"enforce_eager": False})


def test_default_spec_is_valid():
    config, passed = parse_config(pairs.speculative_config("qwen2.5-vl", "target"))
    assert config.is_self_draft
    assert not passed


def test_mp4_round_trip(tmp_path):
    pytest.importorskip("cv2")
    frames = world.held_out(0).frames
    world.write_mp4(frames, tmp_path / "v.mp4")
    loaded = user_files.read_video(tmp_path / "v.mp4")
    assert loaded.shape == frames.shape
    assert np.abs(loaded.astype(int) - frames).mean() < 10
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    for path in (tmp_path / "bad.mp4", tmp_path / "absent.mp4"):
        with pytest.raises(VidSpecError):
            user_files.read_video(path)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", "it wrote nothing"),
        ("INFO x\nlast words\n", "last words"),
        ("(EngineCore pid=3) ERROR x.py ValueError: too long\nINFO bye", "ValueError: too long"),
        ("ValueError: a\nvidspec: unknown pruner 'x'\nRuntimeError: b", "unknown pruner 'x'"),
        (
            "OSError: full disk\nRuntimeError: Engine core initialization failed. See root cause above.",
            "OSError: full disk",
        ),
    ],
)
def test_last_error_line(log, line):
    assert processes.last_error_line(log) == line


def test_prometheus_text_round_trip(tmp_path):
    prometheus_client = pytest.importorskip("prometheus_client")
    """Catches: a counter that is not shown, an engine that is not counted."""
    values = {name: index + 1 for index, name in enumerate(metrics.NAMES)}
    files = {engine: metrics.MetricsFile.create(tmp_path / f"m{engine}") for engine in (0, 1)}
    for name, value in values.items():
        files[0].set(name, value // 2)
        files[1].set(name, value - value // 2)
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics._Collector(files, 'a "model" {of} ours'))
    assert processes.from_prometheus(prometheus_client.generate_latest(registry).decode()) == values
    assert processes.from_prometheus("vllm:num_requests_running 3.0\n") == dict.fromkeys(metrics.NAMES, 0)


def test_end_group_ends_children_too():
    child = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        grandchild = int(stdout.readline())
    start = time.monotonic()
    processes.end_group(process, grace_s=5)
    processes.end_group(process)  # a second time does no harm
    assert time.monotonic() - start < 5
    with open(f"/proc/{grandchild}/stat", "rb") if _exists(grandchild) else open("/dev/null", "rb") as file:
        assert file.read().split(b")")[-1].strip()[:1] in (b"", b"Z")


def _exists(pid: int) -> bool:
    time.sleep(0.2)
    return subprocess.run(["test", "-e", f"/proc/{pid}/stat"]).returncode == 0


def test_a_server_that_stops_gives_its_reason(tmp_path, monkeypatch):
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\necho 'vidspec: no such draft' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(tmp_path / "python"))
    with (
        processes.VllmServer([], processes.free_port(), tmp_path / "log") as server,
        pytest.raises(VidSpecError, match="vllm serve stopped: no such draft"),
    ):
        server.wait_ready(timeout_s=20)


def test_an_engine_that_fails_is_one_line(tmp_path):
    pytest.importorskip("vllm")
    job = {"llm": {"model": str(tmp_path / "absent")}, "samplings": [{}], "prompts": {"family": "qwen2.5-vl"}}
    with pytest.raises(VidSpecError, match="the engine stopped: ") as caught:
        acceptance.run_job(job, lambda _event, _fields: None, acceptance.Running())
    assert "\n" not in str(caught.value)


def test_identical_frac_counts_lengths():
    assert acceptance.identical_frac([[1, 2], [3]], [[1, 2], [3]]) == 1.0
    assert acceptance.identical_frac([[1, 2], [3]], [[1, 2, 3], [3]]) == 0.5


def test_percent_never_rounds_up_to_all():
    assert [tables.percent(x) for x in (None, 1.0, 0.99999, 0.5)] == ["-", "100 %", "99.9 %", "50.0 %"]


def test_provenance_is_json():
    found = json.loads(json.dumps(provenance()))
    assert found["versions"]["python"]
    assert found["num_cpus"] >= 1


PRUNERS = ("none", "random", "uniform", "specvlm", "attention", "uv", "window:front", "frame", "fastvid", "dycoke")
RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)


def _sweep(**given) -> acceptance.Sweep:
    """A sweep of the named axes; what is no axis is a field of `Sweep`."""
    axes = {"family": ["qwen2.5-vl"], "draft": ["draft"], "pruner": ["uniform"], "prune_ratio": [0.9]}
    axes |= {"drafting": ["chain"], "num_speculative_tokens": [5], "scorer": ["strict"], "draft_noise": ["shared"]}
    axes |= {"draft_positions": ["original"], **{name: [off] for name, off in acceptance.SAMPLING_AXES.items()}}
    axes |= {"temperature": [0.0]} | {name: list(given.pop(name)) for name in list(given) if name in acceptance.AXES}
    return acceptance.Sweep(axes, **{"requests": 2} | given)


def _fake_engine(job, report, running):
    """Answer as an engine would: the less the draft sees, the less stands; no request differs from vanilla's."""
    ours = job["llm"].get("speculative_config")
    counters = None
    if ours:
        kept = 1.0 if ours["pruner"] == "none" else 1 - ours["prune_ratio"]
        counters = dict.fromkeys(metrics.NAMES, 0) | {
            "drafts": 100,
            "draft_tokens": 500,
            "accepted_tokens": round(200 + 200 * kept),
            "text_tokens": 20,
            "visual_tokens_full": 1000,
            "visual_tokens_kept": round(1000 * kept),
            "draft_kv_bytes_per_token": 8,
            "draft_depth": 500,
            "draft_forwards": 100,
            "draft_steps": 20,
        }
    report("ready", {})
    fields = {
        "seconds": 1.0,
        "metrics": counters,
        "token_ids": [[1, 2]] * len(job["prompts"]["held_out"]),
        "scheduling": "sync",
    }
    return [fields for _ in job["samplings"]]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (("none", 0.9), ("none", 0.0)),
        (("none", 1.0), ("none", 0.0)),
        (("uv", 0.0), ("none", 0.0)),
        (("uv", 1.0), ("uniform", 1.0)),
        (("uv", 0.999), ("uv", 0.999)),
        (("window", 0.5), ("window:middle", 0.5)),
    ],
)
def test_canonical_names_what_the_draft_sees(given, seen):
    assert tuple(acceptance.canonical(*given).values()) == seen


def test_each_distinct_configuration_is_run_once():
    families = ("qwen2.5-vl", "llava-onevision")
    sweep = _sweep(family=families, pruner=PRUNERS, prune_ratio=RATIOS)
    engines = list(sweep.engines().values())
    assert len(engines) == 2 * (1 + 1 + 9 * 5 + 1), "vanilla, unpruned, nine pruners at five ratios, text only"
    assert [engine.family for engine in engines if engine.draft is None] == list(families)
    assert engines[0].draft is None
    assert len(list(_sweep(pruner=("none",), num_speculative_tokens=(3, 5)).engines())) == 1 + 2
    assert len(list(_sweep(prune_ratio=(1.0,), draft_positions=("original", "compacted")).engines())) == 1 + 2


@pytest.mark.parametrize("jobs", [1, 3])
def test_rows_are_all_combinations_in_order(monkeypatch, jobs):
    monkeypatch.setattr(acceptance, "run_job", _fake_engine)
    families = ("llava-onevision", "qwen2.5-vl")
    result = acceptance.run(_sweep(family=families, pruner=PRUNERS, prune_ratio=RATIOS, jobs=jobs))
    rows = result["rows"]
    found = [(row["family"], row["pruner"], row["prune_ratio"]) for row in rows]
    assert found == list(itertools.product(families, PRUNERS, RATIOS))
    assert {row["jobs"] for row in rows} == {result["provenance"]["jobs"]} == {jobs}
    themselves = {key for row, key in zip(rows, found, strict=True) if acceptance.measured_itself(row)}
    assert len(themselves) == 2 * 47
    for row in rows:
        assert (row["family"], *row["measured_as"].values()) in themselves, "it names a row of this result"
        assert acceptance.canonical(**row["measured_as"]) == acceptance.canonical(row["pruner"], row["prune_ratio"])
    assert rows[0]["measured_as"] == {"pruner": "none", "prune_ratio": 0.0}
    assert rows[13]["measured_as"] == {"pruner": "random", "prune_ratio": 1.0}, "the first that was asked for"


def test_engines_run_at_once_but_no_more_than_jobs(monkeypatch):
    barrier, lock, counts = threading.Barrier(2, timeout=20), threading.Lock(), [0, 0]

    def run_job(job, report, running):
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        barrier.wait()  # nobody passes alone
        with lock:
            counts[0] -= 1
        return _fake_engine(job, report, running)

    monkeypatch.setattr(acceptance, "run_job", run_job)
    busy = []
    report = lambda event, fields: (busy.append(event), fields["engine"])  # noqa: E731
    rows = acceptance.run(_sweep(prune_ratio=(0.2, 0.3, 0.4), jobs=2), report)["rows"]
    assert len(rows) == 3
    assert counts[1] == 2
    assert busy.count("start") == busy.count("done") == 4


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_family_without_vanilla_has_no_rows(monkeypatch, jobs):
    started = []

    def run_job(job, report, running):
        started.append(job)
        if job["prompts"]["family"] == "qwen2.5-vl" and "speculative_config" not in job["llm"]:
            raise VidSpecError("no")
        return _fake_engine(job, report, running)

    monkeypatch.setattr(acceptance, "run_job", run_job)
    sweep = _sweep(family=("qwen2.5-vl", "llava-onevision"), prune_ratio=(0.2, 0.3, 0.4, 0.5), jobs=jobs)
    result = acceptance.run(sweep)
    assert result["failures"] == [{"family": "qwen2.5-vl", "draft": None, "reason": "no"}]
    assert {row["family"] for row in result["rows"]} == {"llava-onevision"}
    if jobs == 1:
        assert len(started) == 1 + 5, "nothing of that family after vanilla"


def test_a_failed_engine_is_missing_from_all_its_rows(monkeypatch):
    def run_job(job, report, running):
        if job["llm"].get("speculative_config", {}).get("prune_ratio") == 1.0:
            raise VidSpecError("no")
        return _fake_engine(job, report, running)

    monkeypatch.setattr(acceptance, "run_job", run_job)
    result = acceptance.run(_sweep(pruner=("random", "uniform"), prune_ratio=(0.9, 1.0)))
    assert [(row["pruner"], row["prune_ratio"]) for row in result["rows"]] == [("random", 0.9), ("uniform", 0.9)]
    assert [(failure["pruner"], failure["prune_ratio"]) for failure in result["failures"]] == [
        ("random", 1.0),
        ("uniform", 1.0),
    ]


def test_an_interrupt_ends_the_engines(monkeypatch):
    """What is no VidSpecError, here out of one engine's thread, ends what the other threads wait for."""
    processes_run = []

    def run_job(job, report, running):
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        processes_run.append(process)
        with running.holding(process):
            if len(processes_run) == 2:
                raise KeyboardInterrupt
            process.wait()
        raise VidSpecError("the engine stopped")

    monkeypatch.setattr(acceptance, "run_job", run_job)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        acceptance.run(_sweep(prune_ratio=(0.2, 0.3, 0.4, 0.5), jobs=2))
    assert time.monotonic() - start < 20
    assert len(processes_run) <= 3, "the queue is dropped"
    assert all(process.poll() is not None for process in processes_run)


@pytest.fixture
def result(monkeypatch):
    """What a small sweep over both families returns."""
    monkeypatch.setattr(acceptance, "run_job", _fake_engine)
    axes = {"family": ("qwen2.5-vl", "llava-onevision"), "pruner": ("none", "random", "uv"), "prune_ratio": (0, 0.9, 1)}
    return acceptance.run(_sweep(**axes, jobs=2))


def test_csv_round_trip(result, tmp_path):
    path = tmp_path / "rows.csv"
    plots.write_csv(str(path), result)
    comment, header, *lines = path.read_text().splitlines()
    assert json.loads(comment.removeprefix("# ")) == result["provenance"]
    assert tuple(header.split(",")) == plots.COLUMNS
    assert len(lines) == len(result["rows"]) == 18
    (row, *_) = csv.DictReader([header, *lines])
    assert (row["measured_as_pruner"], row["skipped_pool_full"], row["unguided_cached"]) == ("none", "0", "0")
    assert (row["acceptance_length"], row["jobs"], row["seed"]) == ("5.0", "2", "0")
    assert plots.read_csv(str(path)) == [plots.flatten(row) for row in result["rows"]]
    plots.write_csv(str(path), result | {"rows": []})
    assert path.read_text().splitlines()[1] == header, "the header is there without rows, too"
    assert plots.read_csv(str(path)) == []


def test_csv_of_before_there_were_trees_is_read():
    path = Path(__file__).resolve().parents[2] / "docs" / "results" / "R3.csv"
    rows = plots.read_csv(str(path))
    assert len(rows) == 2 * len(PRUNERS) * len(RATIOS)
    assert (rows[0]["knobs"], rows[0]["nodes_per_step"]) == ("", None)


SHAPES = ("chain", "tree-static", "tree-adaptive")


def _rows_by_shape(**given) -> list[dict]:
    """Flat rows of all shapes, and of the adaptive tree with another depth."""
    sweep = _sweep(family=("qwen2.5-vl", "llava-onevision"), num_speculative_tokens=(None,), drafting=SHAPES, **given)
    shallow = dataclasses.replace(sweep, axes=sweep.axes | {"drafting": ["tree-adaptive"]}, knobs={"tree_depth_max": 5})
    return [plots.flatten(row) for what in (sweep, shallow) for row in acceptance.run(what)["rows"]]


@pytest.mark.parametrize("given", [{"temperature": (0.0, 1.0)}, {"prune_ratio": (0.0, 0.9)}, {}])
def test_figure_by_shape_is_the_same_from_csv(monkeypatch, tmp_path, given):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(acceptance, "run_job", _fake_engine)
    rows = _rows_by_shape(**given)
    source, direct, redrawn = (str(tmp_path / name) for name in ("rows.csv", "a.svg", "b.svg"))
    plots.write_csv(source, {"rows": rows, "provenance": {}})
    plots.draw(rows, direct)
    plots.draw(plots.read_csv(source), redrawn)
    assert Path(direct).read_bytes() == Path(redrawn).read_bytes()


def test_figure_by_shape_has_a_bar_or_a_line_for_each(monkeypatch):
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(acceptance, "run_job", _fake_engine)
    names = [*SHAPES, "tree-adaptive, tree_depth_max 5"]
    rows = [row | {"drafting": plots.shape_of(row)} for row in _rows_by_shape(temperature=(0.0, 1.0))]
    panel = matplotlib_figure.Figure().subplots()
    bars = plots._draw_bars(panel, rows[:6] + rows[12:14], names)
    assert list(bars) == names
    assert all([bar.get_height() for bar in bars[name]] == [pytest.approx(3.2)] * 2 for name in names)
    places = [bar.get_x() for name in names for bar in bars[name]]
    assert len(set(places)) == len(places), "none hides another"
    assert [label.get_text() for label in panel.get_xticklabels()] == ["temperature 0", "temperature 1"]

    rows = [row | {"drafting": plots.shape_of(row)} for row in _rows_by_shape(prune_ratio=(0.0, 0.9))]
    panel = matplotlib_figure.Figure().subplots()
    lines = plots._draw_panel(panel, rows[:6] + rows[12:14], [0.0, 0.9])
    assert list(lines) == names
    assert all(line.get_xydata().tolist() == [[0, 5.0], [1, pytest.approx(3.2)]] for line in lines.values())
    assert len({line.get_color() for line in lines.values()}) == len(names)


def test_figures_per_step():
    counters = dict.fromkeys(metrics.NAMES, 0)
    assert set(acceptance.shape_figures(counters).values()) == {None}
    counters |= {"drafts": 4, "draft_tokens": 100, "draft_depth": 20, "draft_steps": 2, "draft_forwards": 10}
    assert acceptance.shape_figures(counters) == {
        "nodes_per_step": 25.0,
        "depth_per_step": 5.0,
        "draft_forwards_per_step": 5.0,
        "max_acceptance_length": 6.0,
    }


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_figure_is_the_same_from_csv(result, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    source, direct, redrawn = (str(tmp_path / name) for name in ("rows.csv", f"a{suffix}", f"b{suffix}"))
    plots.write_csv(source, result)
    plots.draw([plots.flatten(row) for row in result["rows"]], direct)
    command = [sys.executable, "-m", "vllm_vidspec.tools.plots", source, redrawn]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert Path(direct).stat().st_size > 5_000
    assert Path(direct).read_bytes() == Path(redrawn).read_bytes()


def test_figure_has_a_line_per_pruner_and_two_dashed_ones(result):
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    panel = matplotlib_figure.Figure().subplots()
    rows = [plots.flatten(row) for row in result["rows"][:9]]
    lines = plots._draw_panel(panel, rows, [0.0, 0.9, 1.0])
    assert list(lines) == ["random", "uv"], "none is a dashed line"
    for line in lines.values():
        assert line.get_xydata().tolist() == [[0, 5.0], [1, pytest.approx(3.2)], [2, 3.0]]
    assert [text.get_text() for text in panel.texts] == [
        "draft sees the whole video: 5.00",
        "draft sees no video: 3.00",
    ]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0", "0.9", "1"]
    assert len({(line.get_color(), line.get_marker()) for line in lines.values()}) == 2


def test_every_pruner_has_a_colour_and_a_marker_of_its_own():
    from vllm_vidspec.config import PRUNERS as known

    assert set(plots._STYLES) == set(known) - {"none"}
    for styles in zip(*plots._STYLES.values(), strict=True):
        assert len(set(styles)) == len(styles)


def test_plots_errors_are_one_line(result, tmp_path, capsys, monkeypatch):
    good, other, empty = (str(tmp_path / name) for name in ("good.csv", "other.csv", "empty.csv"))
    plots.write_csv(good, result)
    plots.write_csv(empty, result | {"rows": []})
    Path(other).write_text("a,b\n1,2\n")
    for args, words in (
        ([str(tmp_path / "absent.csv"), "f.png"], "cannot read"),
        ([other, "f.png"], "is not a file of `vidspec bench acceptance --csv`"),
        ([good, "f.gif"], ".png or .svg"),
        ([empty, "f.png"], "no row has an acceptance length"),
        ([good, str(tmp_path / "no" / "f.png")], "cannot write"),
        ([], "usage: "),
    ):
        monkeypatch.setattr(sys, "argv", ["plots", *args])
        assert plots.main() == 2
        said = capsys.readouterr().err
        assert words in said
        assert len(said.splitlines()) == 1


def test_figure_has_no_room_for_another_axis(monkeypatch, tmp_path):
    monkeypatch.setattr(acceptance, "run_job", _fake_engine)
    rows = acceptance.run(_sweep(num_speculative_tokens=(3, 5)))["rows"]
    with pytest.raises(VidSpecError, match="a figure shows one num_speculative_tokens, there are 2"):
        plots.draw([plots.flatten(row) for row in rows], str(tmp_path / "f.png"))


def _load(path: str):
    """Import a script of this repository."""
    path = Path(__file__).resolve().parents[2] / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make_results():
    return _load("scripts/make_results.py")


def test_results_page_has_a_table_per_family(result, tmp_path, monkeypatch):
    script = _make_results()
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    text = script.body_of("R3", result)
    assert "| `qwen2.5-vl` | 0 | 0.9 | 1 | share of unpruned at 0.9 |" in text
    assert "| `none` | 5.00 | *5.00* | *5.00* | 100.0 % |" in text
    assert "| `random` | *5.00* | 3.20 | 3.00 | 64.0 % |" in text
    assert "| `uv` | *5.00* | 3.20 | *3.00* | 64.0 % |" in text
    line = (
        "Compared with vanilla: 8 requests of 4 engines, 8 identical. In italics: not run itself, the draft sees the "
    )
    assert text.count(line + "same tokens as with `none` at 0 or `random` at 1.\n") == 2
    assert "![" not in text
    (tmp_path / "R3.png").touch()
    assert "](R3.png)" in script.body_of("R3", result)

    result["rows"][1 + 3]["unguided"]["memory"] = 3
    result["rows"][1 + 3]["identical_frac"] = 0.5
    assert "8 requests of 4 engines, 7 identical." in script.body_of("R3", result)
    assert "Unguided (memory): 3." in script.body_of("R3", result)
    assert len(script.measurements(result["rows"])) == 2 * 4


def test_results_of_several_commands_are_one(monkeypatch, tmp_path):
    """R9 from its own command lines, with engines that are not there: rows, table, CSV, figure."""
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from vllm_vidspec.cli import app

    monkeypatch.setattr(acceptance, "run_job", _fake_engine)
    script = _make_results()
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    parts = []
    for command in script.COMMANDS["R9"]:
        out = CliRunner().invoke(app, [*command.replace("--jobs 2", "").split(), "--json", "-"])
        assert out.exit_code == 0, out.stderr
        parts.append(json.loads(out.stdout))
    merged = script.merge(parts)
    shapes = [
        "chain",
        "tree-static",
        "tree-adaptive",
        "tree-adaptive, tree_depth_max 5, tree_depth_min 5, tree_fill true",
    ]
    assert [(row["family"], plots.shape_of(plots.flatten(row)), row["temperature"]) for row in merged["rows"]] == list(
        itertools.product(("qwen2.5-vl", "llava-onevision"), shapes, (0.0, 1.0))
    )
    assert {row["requests"] for row in merged["rows"]} == {64}
    text = script.body_of("R9", merged)
    assert "| `qwen2.5-vl` | tree-adaptive, tree_depth_max 5, tree_depth_min 5, tree_fill true | 1 |" in text
    assert "`qwen2.5-vl`, sync scheduling. Compared with vanilla: 512 requests of 8 engines, 512 identical." in text
    plots.write_csv(str(tmp_path / "R9.csv"), merged)
    plots.draw(plots.read_csv(str(tmp_path / "R9.csv")), str(tmp_path / "R9.png"))
    assert "](R9.png)" in script.body_of("R9", merged)


def test_results_by_name():
    script = _make_results()
    assert script.chosen("R9") == ["R9", "R9-sage"]
    assert script.chosen("R9-sage,R1") == ["R1", "R9-sage"]
    assert script.chosen(",".join(script.COMMANDS)) == list(script.COMMANDS)
    with pytest.raises(SystemExit, match="no result is called 'R99'"):
        script.chosen("R99")


def test_every_result_has_its_place_on_the_page():
    script = _make_results()
    page = script.PAGE.read_text()
    for name in script.COMMANDS:
        assert f"<!-- {name} -->\n" in page
        assert f"<!-- /{name} -->\n" in page


def test_results_page_shows_host_time_and_costs():
    script = _make_results()
    origin = {"git_sha": None, "git_dirty": None, "versions": {}, "device": "x", "date": "2026-01-01", "argv": []}
    row = {"drafting": "chain", "scheduling": "sync", "own_ms": 0.5, "p20_ms": 0.4, "p80_ms": 0.6, "kernels_ms": 0.1}
    row |= {"steps": 9, "parts": {"verify": 0.25}}
    rows = [row | {"batch_size": size, "budget_ms": 1 + 0.02 * size} for size in (1, 16)]
    text = script.body_of("R10", {"rows": rows, "provenance": origin})
    assert "| chain | sync | 16 | 0.50 | 0.40 to 0.60 | 1.32 | 0.10 | 9 |" in text
    assert "| part, 16 requests (ms) | chain |" in text
    assert "| verify | 0.250 |" in text
    cost = {"shape": "vanilla", "batch_size": 1, "tokens_per_s": 40.0, "acceptance_length": 1.0, "step_ms": 25.0}
    parts = [
        {"target": f"{family}/target", "config": {"draft_table": [[1, 1, "chain", 5]]}, "costs": [cost]}
        | {"provenance": origin}
        for family in script.FAMILIES
    ]
    text = script.body_of("R11", script.merge(parts))
    assert "| `llava-onevision`, requests | vanilla |" in text
    assert text.count("| 1 | 40 (1.00; 25.0 ms) |") == text.count('`draft_table`: `[[1, 1, "chain", 5]]`') == 2


@pytest.mark.parametrize("is_fine", [False, True])
def test_host_time_is_what_is_not_inside_other_calls(monkeypatch, is_fine):
    """Ours calls a part of ours, which calls what is not ours; each spends a millisecond before and after."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else the script sets it for good
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = _load("benchmarks/bench_host_time.py")
    clock = [0.0]
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    calls = SimpleNamespace()

    def spend(inner=None):
        clock[0] += 1e-3
        if inner is not None:
            inner()
        clock[0] += 1e-3

    calls.foreign = spend
    calls.part = lambda: spend(lambda: calls.foreign())
    calls.entry = lambda: spend(lambda: calls.part())
    watch = script.Stopwatch()
    watch.is_fine = is_fine
    watch.wrap(calls, "entry", "entry")
    watch.wrap(calls, "part", "part", fine=True)
    watch.wrap(calls, "foreign", script.FOREIGN)
    calls.entry()
    parts = watch.take()
    assert sum(parts.values()) == pytest.approx(4e-3)
    assert set(parts) == ({"entry", "part"} if is_fine else {"entry"})
    assert watch.take() == {}
    watch.unwrap()
    assert calls.foreign is spend


def test_results_page_shows_no_times_of_engines_that_ran_at_once(result):
    script = _make_results()
    assert "vanilla s" not in script.acceptance_table(result, ("pruner",))
    for row in result["rows"]:
        row["jobs"] = 1
    assert "| 1.0 | 1.0 |" in script.acceptance_table(result, ("pruner",))
