"""What every tool stands on: prompts as the chat templates render them, arguments, logs, metrics, processes."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tools.common import ROOT, is_gone
from vllm_vidspec import assets, metrics
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs, processes, scrape


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
    """Catches: a counter that is not shown, an engine that is not counted, sizes per token that are added up."""
    prometheus_client = pytest.importorskip("prometheus_client")
    values = {name: index + 1 for index, name in enumerate(metrics.NAMES)}
    files = {engine: metrics.MetricsFile.create(tmp_path / f"m{engine}") for engine in (0, 1)}
    for name, value in values.items():
        is_each = name.endswith("_per_token") or name == "speculation_on" or name in scrape.EXPECTED_OF_CLASSES
        share = value if is_each else value // 2
        files[0].set(name, share)
        files[1].set(name, value - share or value)  # on is where both are on
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(files, 'a "model" {of} ours'))
    assert scrape.from_prometheus(prometheus_client.generate_latest(registry).decode()) == values
    assert scrape.from_prometheus("vllm:num_requests_running 3.0\n") == dict.fromkeys(metrics.NAMES, 0)


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
    assert is_gone(grandchild)


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


@pytest.mark.parametrize("family", assets.CLONE_ONLY)
def test_a_pair_in_a_clone_alone(family, monkeypatch, tmp_path):
    """Catches: a stack trace where the wheel has no such pair; a calibration for a pair that was never calibrated."""
    kwargs = pairs.llm_kwargs(family, "draft")
    assert "calibration" not in kwargs["speculative_config"] and pairs.calibrated(family) == {}
    assert kwargs["model"].endswith(f"{family}/target") and family not in pairs.FAMILIES
    with pytest.raises(VidSpecError, match=f"no bundled checkpoint {family} / far"):
        pairs.llm_kwargs(family, "far")
    monkeypatch.setattr(assets, "_CLONE_ROOT", tmp_path)
    with pytest.raises(VidSpecError, match="in a clone of the repository alone"):
        pairs.llm_kwargs(family, "draft")


# ---- how many frames of a video a server reads ---------------------------------------------------------------------

FRAMES = re.compile(r"^\| (.+?) \| (`\w+`(?:, `\w+`)*) \| `(.+?)` \|$", re.MULTILINE)
ADVICE = FRAMES.findall((ROOT / "docs" / "serve.md").read_text())


def read_by(processor, **settings):
    """Return how many frames of the bundled video vLLM's own loader of a video processor reads."""
    pytest.importorskip("vllm")
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.media.video import VideoMediaIO
    from vllm.multimodal.video import get_video_loader_backend_for_processor

    if backend := get_video_loader_backend_for_processor(processor):
        settings["video_backend"] = backend
    return len(VideoMediaIO(ImageMediaIO(), **settings).load_bytes(pairs.sample_video().read_bytes()).media[0])


@pytest.mark.parametrize(("families", "processors", "setting"), ADVICE)
def test_advice_on_frames_has_its_effect(families, processors, setting):
    """Catches: a setting of `--media-io-kwargs` that vLLM's loader of the family ignores."""
    for processor in re.findall(r"\w+", processors):
        assert (read_by(processor), read_by(processor, **json.loads(setting)["video"])) == (32, 8)


def test_advice_on_frames_is_in_one_place_and_of_every_bundled_family():
    """Catches: the same given elsewhere, without its effect; a tool that sets what is ignored."""
    assert len(ADVICE) == 3 and all(family in "".join(one[0] for one in ADVICE) for family in pairs.FAMILIES)
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")):
        for line in page.read_text().splitlines():  # all of these commands serve a Qwen pair
            assert not re.search(r"media.io.kwargs.*num_frames", line) or page.name == "serve.md", page.name
    for family in pairs.FAMILIES:
        (told,) = {
            found
            for path in Path(pairs.checkpoint(family, "target")).glob("*process*.json")
            for found in re.findall(r'"video_processor_type": "(\w+)"', path.read_text())
        }
        (processor,) = [kind for _, kinds, _ in ADVICE for kind in re.findall(r"\w+", kinds) if kind == told]
        assert read_by(processor, **pairs.video_sampling(family, 8)) == 8
        args = pairs.serve_args(family)
        given = json.loads(args[args.index("--media-io-kwargs") + 1])["video"]
        assert given == pairs.video_sampling(family, pairs.pair_for(family).num_frames)
