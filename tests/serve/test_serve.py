"""`vllm serve` with vidspec over HTTP: outputs identical to vanilla's, counters, bad input, start-up errors."""

import base64
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.engine import harness
from tests.fuzz import files
from tests.fuzz.running import Target
from vllm_vidspec.cli import app
from vllm_vidspec.metrics import KINDS, difference, summarize
from vllm_vidspec.pruning import budget
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs, status, user_files
from vllm_vidspec.tools.demo import ask
from vllm_vidspec.tools.processes import VllmServer, free_port

httpx = pytest.importorskip("httpx")
pytest.importorskip("vllm")

pytestmark = [pytest.mark.serve]

FAMILY = "qwen2.5-vl"
QUESTION = pairs.DEFAULT_QUESTION
MAX_TOKENS = 80
ADMIN_KEY = "the-operator's"
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}]


@pytest.fixture(scope="module")
def reference() -> list:
    """Vanilla's outputs for the bundled mp4, one for each of SAMPLINGS."""
    prompt = pairs.video_prompt(FAMILY, user_files.read_video(pairs.sample_video()), QUESTION)
    with harness.engine(FAMILY, overrides={"max_num_seqs": 4}) as engine:
        outputs = engine.generate([(prompt, {**sampling, "max_tokens": MAX_TOKENS}) for sampling in SAMPLINGS])
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    # Every frame of a video counts, so that a long one does not fit (the default samples it down).
    overrides = {"media_io_kwargs": {"video": {"num_frames": -1}}, "per_request_spec_decode_metrics": "summary"}
    # Strict, unless a request asks for less.
    loose = {"request_scorers": ["strict", "loose"], "lambda_loose": 0.9, "request_records": True}
    args = pairs.serve_args(FAMILY, "draft", port=port, overrides=overrides, on_draft_error="raise", **loose)
    args.append("--enable-scale-out")  # or there is no endpoint of tokens
    folder = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("VLLM_PLUGINS", "vidspec")  # or vLLM loads no routes of plugins
        patch.setenv("VIDSPEC_ADMIN_KEY", ADMIN_KEY)
        with VllmServer(args, port, folder / "server.log") as server:
            server.wait_ready(timeout_s=300)
            # The temporary directory is tidied: no output and no counter may depend on the file from here on.
            (counters,) = folder.glob("vidspec-*.i64")
            counters.unlink()
            yield server


def _video_message(video: bytes) -> list[dict]:
    url = "data:video/mp4;base64," + base64.b64encode(video).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def _post(server: VllmServer, messages: list[dict], **fields) -> "httpx.Response":
    body = {"model": "target", "messages": messages, "max_tokens": 16, "temperature": 0, **fields}
    return httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=120)


@pytest.mark.parametrize("index", range(len(SAMPLINGS)), ids=["greedy", "sampled"])
def test_mp4_answer_equals_vanilla_offline(reference, server, index):
    before = server.metrics()
    answer = ask(server.base_url, QUESTION, video=pairs.sample_video(), max_tokens=MAX_TOKENS, **SAMPLINGS[index])
    assert answer.token_ids == list(reference[index].token_ids)
    assert answer.text == reference[index].text
    gained = difference(before, server.metrics())
    assert gained["draft_tokens"] >= gained["drafts"] > 0 and gained["prompts"] == 1
    assert sum(gained[f"accepted_at_pos_{i}"] for i in range(64)) == gained["accepted_tokens"]
    assert gained["visual_tokens_kept"] == budget(gained["visual_tokens_full"], pairs.DEFAULT_SPEC["prune_ratio"])
    ours = set(re.findall(r"^(vidspec:\w+)", server.metrics_text(), re.MULTILINE))
    assert {"vidspec:drafts_total", "vidspec:accepted_tokens_total", "vidspec:skipped_requests_total"} <= ours
    assert not [name for name in ours if "spec_decode" in name]


def test_status_reads_a_running_server(server):
    """Catches: a metric that vLLM has renamed, figures that differ from the counters."""
    ask(server.base_url, QUESTION, video=pairs.sample_video(), max_tokens=32)
    figures = status.read(server.base_url).figures()
    assert figures["acceptance_length"] == summarize(server.metrics())["acceptance_length"] > 1
    assert None not in figures["vllm"].values()
    shown = CliRunner().invoke(app, ["status", "--server", server.base_url])
    assert shown.exit_code in (0, 1) and f"{figures['acceptance_length']:.2f}" in shown.stdout


def test_a_request_may_ask_for_loose_verification(reference, server):
    """In `vllm_xargs` or beside the other fields; responses count loosened tokens, and /metrics adds them up."""
    chosen = {"vidspec_scorer": "loose", "vidspec_lambda": 0.9}
    before = server.metrics()
    message, sampled = _video_message(pairs.sample_video().read_bytes()), {"max_tokens": MAX_TOKENS, "temperature": 1.0}
    places = (chosen, {"vllm_xargs": chosen}, chosen, {"vllm_xargs": chosen})
    answers = [_post(server, message, **sampled, seed=seed, **fields).json() for seed, fields in enumerate(places)]
    gained = difference(before, server.metrics())
    assert gained["relevance_prompts"] == 4 and gained["loosened_tokens"] > 0
    told = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for kind in ("exact", "loosened", "shifted"):
        assert sum(one[f"num_{kind}_draft_tokens"] for one in told) == gained[f"{kind}_tokens"]
    shown = re.compile(r'^vidspec:standing_tokens_total\{.*kind="loosened".*\} [1-9]', re.MULTILINE)
    assert shown.search(server.metrics_text())
    strict = ask(server.base_url, QUESTION, video=pairs.sample_video(), max_tokens=MAX_TOKENS, **SAMPLINGS[1])
    assert strict.token_ids == list(reference[1].token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_ask_for_a_record_of_itself(server, stream):
    """Its own tokens, and as many of each kind as its metrics count; nothing without being asked for.

    Catches: kinds that are shifted, a step that is lost or told twice, the field without the request's opt-in.
    """
    message = _video_message(pairs.sample_video().read_bytes())
    fields = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 1, "return_token_ids": True}
    fields |= {"vidspec_scorer": "loose", "vidspec_lambda": 0.9}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    plain, asked = (_post(server, message, **fields, **more) for more in ({}, {"vidspec_record": True}))
    assert "vidspec_record" not in plain.text
    lines = asked.text.splitlines() if stream else [f"data: {asked.text}"]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    steps = [step for chunk in chunks for step in chunk.get("vidspec_record", ())]
    tokens, kinds, text = ([each for step in steps for each in step[name]] for name in ("tokens", "kinds", "text"))
    assert tokens == [token for choice in choices for token in choice.get("token_ids") or ()]
    told = [choice.get("message") or choice["delta"] for choice in choices]
    assert "".join(text) == "".join(part.get("content") or "" for part in told)
    (counted,) = (chunk["metrics"]["speculative_decoding"] for chunk in chunks if chunk.get("metrics"))
    cut = [counted[f"num_{kind}_draft_tokens"] - kinds.count(number) for number, kind in enumerate(KINDS, 1)]
    assert min(cut) >= 0 and sum(cut) <= 5, "drafts after the answer's end are counted, and not told"
    assert kinds.count(2) > 0 < kinds.count(1) and all(step["kinds"][-1] == 0 for step in steps[:-1])
    (seen,) = (step["pruned"][0] for step in steps if "pruned" in step)
    assert seen["num_kept"] == len(seen["kept"]) == budget(256, 0.9) and max(seen["scores"]) == 255


FRAMES = world.held_out(0).frames


def _mp4(frames: np.ndarray, folder: Path) -> bytes:
    world.write_mp4(frames, folder / "video.mp4")
    return (folder / "video.mp4").read_bytes()


def test_a_request_that_asks_for_too_much_is_a_400(server, tmp_path):
    """Catches: a wish beyond the operator's limits; a refused video that the front end believes the engine to hold."""
    video = _video_message(_mp4(FRAMES[:, :, ::-1], tmp_path))  # one that the server has not seen
    scorers, shares = ("lose", "fly", {"loose": None}), (0.95, False)
    wishes = [*({"vidspec_scorer": scorer} for scorer in scorers), *({"vidspec_lambda": share} for share in shares)]
    for wrong in (*wishes, {"vidspec_lamda": 0.5}):
        for fields in ({"vllm_xargs": wrong}, wrong):
            answer = _post(server, video, **fields)
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and next(iter(wrong)) in message
            assert "\n" not in message and len(message) < 200
    assert _post(server, video).status_code == 200


_SAID = [{"role": "user", "content": "hello"}]
_SHORT = {"max_tokens": 4, "temperature": 0}
# Bodies of every endpoint that puts a text of its client's to the engine.
ENDPOINTS = {
    "/v1/chat/completions": {"messages": _SAID, **_SHORT},
    "/v1/chat/completions/batch": {"messages": [_SAID], **_SHORT},
    "/v1/completions": {"prompt": "hello", **_SHORT},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"messages": _SAID, **_SHORT},
    "/invocations": {"messages": _SAID, **_SHORT},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": _SHORT},
    "/generative_scoring": {"query": "hello", "items": ["a", "b"], "label_token_ids": [5, 6]},
}
# These put nothing to the engine, or change it.
NO_ANSWERS = re.compile(
    r"/(de)?tokenize|.*/(de)?render.*|.*count_tokens|/ping|/pause|/resume|.*lora.*|.*scal.*|.*profile.*|/load|/v1/vidspec.*|"
    r"/(un)?sleep.*|.*weight.*|.*/abort_requests|.*/cancel|/v1/systemone|/fault_tolerance.*|/vidspec.*"
)


def _within(body: dict, **args) -> dict:
    """Return where a client of an endpoint hands arguments to vLLM's sampler."""
    if "sampling_params" in body:
        return {"sampling_params": {**body["sampling_params"], "extra_args": args}}
    return {"vllm_xargs": args}


def test_every_endpoint_refuses_what_another_refuses(server):
    """Beside the other fields, and where a client may hand arguments to vLLM's sampler. Catches: an endpoint that drops
    a choice and answers, one that nobody has looked at, an internal key that is refused or listened to.
    """
    paths = httpx.get(f"{server.base_url}/openapi.json", timeout=120).json()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods and not NO_ANSWERS.fullmatch(path)}
    assert posts == set(ENDPOINTS)
    lines: dict[str, set[str]] = {}
    for path, body in ENDPOINTS.items():
        wrong = ({"vidspec_scorer": "lose"}, {"vidspec_lambda": False}, {"vidspec_calls_tools": True})
        for fields in (more for one in wrong for more in (one, _within(body, **one))):
            answer = httpx.post(server.base_url + path, json={"model": "target", **body, **fields}, timeout=120)
            assert answer.status_code == 400, (path, fields, answer.text)
            lines.setdefault(re.search("vidspec_[a-z_]+", str(fields))[0], set()).add(answer.json()["error"]["message"])
        for fields in ({"vidspec_scorer": "strict"}, _within(body, _vidspec_prune_variant=7, vidspec_scorer="loose")):
            answer = httpx.post(server.base_url + path, json={"model": "target", **body, **fields}, timeout=120)
            assert answer.status_code == 200, (path, fields, answer.text)
    assert {name: len(found) for name, found in lines.items()} == dict.fromkeys(lines, 1)


def test_an_aborted_request_gives_its_blocks_back(server):
    messages = _video_message(pairs.sample_video().read_bytes())
    body = {"model": "target", "messages": messages, "max_tokens": 1000, "ignore_eos": True, "stream": True}

    def is_drafted_for() -> bool:
        """Abort a request; return whether it was seen to hold blocks."""
        with httpx.stream("POST", f"{server.base_url}/v1/chat/completions", json=body, timeout=120) as stream:
            # A scrape takes as long as many steps: the first ones may come before the gauge is set.
            lines = itertools.islice(stream.iter_lines(), 200)
            return any(line and server.metrics()["draft_pool_blocks_used"] > 0 for line in lines)

    # On a busy machine the class may be at rest: then one request in eight is drafted for, or fewer.
    assert any(is_drafted_for() for _ in range(24))
    for _ in range(50):
        ask(server.base_url, QUESTION, max_tokens=2)  # a step of the engine publishes the gauge
        if server.metrics()["draft_pool_blocks_used"] == 0:
            return
        time.sleep(0.1)
    pytest.fail(f"{server.metrics()['draft_pool_blocks_used']} blocks are still held")


BAD_VIDEOS = {
    "not a video": lambda folder: b"this is no mp4 file" * 50,
    "cut in half": lambda folder: pairs.sample_video().read_bytes()[: pairs.sample_video().stat().st_size // 2],
    "zero bytes": lambda folder: b"",
    "zero frames": lambda folder: _mp4(np.zeros((0, 112, 112, 3), np.uint8), folder),
    "longer than max_model_len": lambda folder: _mp4(np.tile(FRAMES, (9, 1, 1, 1)), folder),  # 2,304 tokens
}


@pytest.mark.parametrize("kind", BAD_VIDEOS)
def test_bad_video_is_a_4xx_and_the_server_goes_on(server, tmp_path, kind):
    answer = _post(server, _video_message(BAD_VIDEOS[kind](tmp_path)))
    assert 400 <= answer.status_code < 500, answer.text
    message = answer.json()["error"]["message"]
    assert message.strip() and "Traceback" not in message
    good = _post(server, [{"role": "user", "content": QUESTION}])
    assert good.status_code == 200
    assert good.json()["usage"]["completion_tokens"] > 0


def test_broken_media_cost_their_own_request_alone(server):
    """Videos and images cut, changed or garbage: an answer or a refusal, vLLM's own 500s included, and the server goes
    on."""

    def check(given: tuple[str, bytes]) -> str:
        suffix, content = given
        kind, mime = ("video_url", "video/mp4") if suffix in (".mp4", "") else ("image_url", f"image/{suffix[1:]}")
        url = f"data:{mime};base64," + base64.b64encode(content).decode()
        parts = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": QUESTION}]
        answer = _post(server, [{"role": "user", "content": parts}])
        assert answer.status_code in (200, 500) or 400 <= answer.status_code < 500, answer.text
        assert "Traceback" not in answer.text and "vidspec" not in answer.text and server.healthy()
        return {200: "accepted", 500: "refused by vLLM with a 500"}.get(answer.status_code, "refused")

    outcomes = Target(files.MEDIA, check, 25).run()
    print(f"media that a server was shown: {dict(outcomes)}")
    assert outcomes["refused"]
    assert _post(server, _video_message(pairs.sample_video().read_bytes())).status_code == 200


def test_tenants_of_one_server(server):
    """The same video and question under two salts: identical outputs, and no cached state is shared."""
    message, answers = _video_message(pairs.sample_video().read_bytes()), []
    for salt in ("first", "second", "first"):
        before = server.metrics()
        answers.append(_post(server, message, cache_salt=salt, vidspec_scorer="loose"))
        gained = difference(before, server.metrics())
        assert answers[-1].status_code == 200
        assert gained["reused_guidance"] == 0 and gained["relevance_prompts"] == 1
        assert gained["relevance_reused"] == (salt == "first" and len(answers) == 3)
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_an_operator_changes_knobs_of_a_running_server(reference, server):
    """Off, on, another pruner and ratio, over vLLM's own server: the output stays the same, scheduler and worker
    follow."""

    def knobs(status: int = 200, key: str = ADMIN_KEY, **changes) -> dict:
        how = {"headers": {"Authorization": f"Bearer {key}"}} | ({"json": changes} if changes else {})
        answer = httpx.request("POST" if changes else "GET", f"{server.base_url}/vidspec/knobs", **how)
        assert answer.status_code == status, answer.text
        return answer.json()

    def gained() -> dict[str, int]:
        before = server.metrics()
        answer = ask(server.base_url, QUESTION, video=pairs.sample_video(), max_tokens=MAX_TOKENS, **SAMPLINGS[0])
        assert answer.token_ids == list(reference[0].token_ids)
        return difference(before, server.metrics())

    first = knobs()
    assert (first["pruner"], first["prune_ratio"]) == ("specvlm", 0.9)
    try:
        off = knobs(num_speculative_tokens=0)
        assert off == knobs() and (off["num_speculative_tokens"], off["speculation"]) == (0, "operator")
        assert off["configured"] == {"num_speculative_tokens": 5, "draft_shape": "chain"}
        assert gained()["drafts"] == 0
        assert status.read(server.base_url).figures()["speculation"] == "operator"
        assert knobs(num_speculative_tokens=2)["num_speculative_tokens"] == 2
        assert status.read(server.base_url).figures()["speculation"] == "on"
        two = gained()
        assert two["draft_tokens"] <= 2 * two["drafts"] > 0
        assert knobs(num_speculative_tokens=5, pruner="uniform", prune_ratio=0.5)["pruner"] == "uniform"
        half = gained()
        assert half["guided_prompts"] == 0 and half["visual_tokens_kept"] == budget(256, 0.5)
        for wrong in ({"pruner": "unifrom"}, {"num_speculative_tokens": 6}, {"model": "another"}):
            message = knobs(400, **wrong)["error"]
            assert message.removeprefix("speculative config: ").startswith(next(iter(wrong))) and "\n" not in message
        assert knobs(401, key="another", prune_ratio=0.1) == {"error": "unauthorized"}
    finally:
        knobs(pruner="specvlm", prune_ratio=0.9)
    again = gained()
    assert again["guided_prompts"] == 1 and again["visual_tokens_kept"] == budget(256, 0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prune_ratio": 1.5}, "prune_ratio.*1.5"),
        pytest.param({"model": pairs.checkpoint("llava-onevision", "draft")}, "llava", marks=pytest.mark.slow),
    ],
    ids=["ratio above one", "draft of another family"],
)
def test_vllm_serve_refuses_in_one_line_and_exits(change, message):
    spec = json.dumps(pairs.speculative_config(FAMILY, "draft") | change)
    args = pairs.serve_args(FAMILY, port=free_port())
    command = [str(Path(sys.executable).with_name("vllm")), "serve", *args, "--speculative-config", spec]
    run = subprocess.run(command, capture_output=True, text=True, env=pairs.engine_env(), timeout=120)
    assert run.returncode != 0
    (ours,) = (line for line in run.stderr.splitlines() if line.startswith("vidspec: "))
    assert re.search(message, ours)
    assert "Traceback" not in run.stderr + run.stdout
    assert "Loading safetensors" not in run.stderr + run.stdout
