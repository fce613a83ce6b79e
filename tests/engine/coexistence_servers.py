"""What the rows of `coexistence` run with servers: data parallelism, several API servers, Ray, NIXL, two nodes."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.engine import harness, ray_on_cpu
from tests.engine.harness import LLAVA, QWEN
from tests.serve.restarts import SMALL, serving
from vllm_vidspec.metrics import difference
from vllm_vidspec.tools import pairs, user_files
from vllm_vidspec.tools.demo import ask, data_url
from vllm_vidspec.tools.processes import LoggedProcess, VllmServer, free_port

QUESTION, MAX_TOKENS = pairs.DEFAULT_QUESTION, 40


def _vanilla(family: str) -> list[int]:
    """Return vanilla's answer to the bundled video, of one engine."""
    frames = user_files.read_video(pairs.sample_video())
    with harness.engine(family, overrides={"max_num_seqs": 4}) as engine:
        (output,) = engine.generate(
            [(pairs.video_prompt(family, frames, QUESTION), {"temperature": 0.0, "max_tokens": MAX_TOKENS})]
        )
    return list(output.outputs[0].token_ids)


def _ask(url: str) -> list[int]:
    return ask(url, QUESTION, video=pairs.sample_video(), max_tokens=MAX_TOKENS, temperature=0.0).token_ids


def _asked(folder: Path, family: str, times: int, **settings) -> tuple[dict[str, int], str]:
    """Let a server answer as vanilla does, so many times; return what it has counted, and its /metrics."""
    expected = _vanilla(family)
    with serving(folder, **settings) as server:
        before = server.metrics()
        for _ in range(times):
            assert _ask(server.base_url) == expected
        return difference(before, server.metrics()), server.metrics_text()


def data_parallel(folder: Path) -> tuple[dict[str, int], str]:
    """Two engines: each has counters of its own on /metrics, and their sum is what was asked."""
    counted, text = _asked(folder, QWEN, 4, data_parallel_size=2)
    found = re.findall(r'^vidspec:prompts_total\{engine="(\d)".*\} (\d+)', text, re.MULTILINE)
    assert [engine for engine, _ in found] == ["0", "1"], found
    assert counted["prompts"] == 4 and all(float(number) for _, number in found)
    return counted, "; prompts of " + ", ".join(f"engine {engine}: {number}" for engine, number in found)


def api_servers(folder: Path) -> tuple[dict[str, int], str]:
    """Two API servers over one engine: whichever answers a scrape shows all counters."""
    expected = _vanilla(QWEN)
    with serving(folder, api_server_count=2) as server:
        before = server.metrics()
        for _ in range(3):
            assert _ask(server.base_url) == expected
        scrapes = [difference(before, server.metrics()) for _ in range(6)]
    assert {scrape["prompts"] for scrape in scrapes} == {3}
    return scrapes[0], "; every scrape shows the same"


def stages(folder: Path) -> tuple[dict[str, int], str]:
    """The target in two pipeline stages; guidance observes the second, where the draft is."""
    counted, _ = _asked(folder, QWEN, 2, pipeline_parallel_size=2)
    assert counted["guided_prompts"] == counted["prompts"] == 2
    return counted, "; two stages, the draft on the second, guided by its layers"


def ray(folder: Path) -> tuple[dict[str, int], str]:
    """Ray starts and places two ranks of target and draft."""
    settings = {"env": ray_on_cpu.environment(folder, 2), "distributed_executor_backend": "ray"}
    counted, _ = _asked(folder, LLAVA, 2, tensor_parallel_size=2, **settings)
    log = (folder / "server.log").read_text()
    assert len(set(re.findall(r"\(RayWorkerProc pid=(\d+)", log))) == 2, "these are not Ray's workers"
    assert counted["prompts"] == 2 and counted["accepted_tokens"] > 0
    return counted, "; two ranks as Ray's actors, counters on /metrics; one GPU a rank is made up for Ray"


def nixl(folder: Path) -> tuple[dict[str, int], str]:
    """A server prefills, another fetches its entries over NIXL and decodes; each drafts for what it decodes."""
    expected, fetched = _vanilla(QWEN), []
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    sides = [
        {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"} for _ in range(2)
    ]
    content = [
        {"type": "video_url", "video_url": {"url": data_url(pairs.sample_video())}},
        {"type": "text", "text": QUESTION},
    ]
    body = {"model": "target", "messages": [{"role": "user", "content": content}], "temperature": 0}

    def tell(server: VllmServer, max_tokens: int, transfer: dict) -> dict:
        more = {"max_tokens": max_tokens, "return_token_ids": True, "kv_transfer_params": transfer}
        done = httpx.post(f"{server.base_url}/v1/chat/completions", json=body | more, timeout=300)
        assert done.status_code == 200, done.text
        return done.json()

    with (
        serving(folder, "prefills", sides[0], kv_transfer_config=connector) as first,
        serving(folder, "decodes", sides[1], kv_transfer_config=connector) as second,
    ):
        before = second.metrics()
        sent = tell(first, 1, {"do_remote_decode": True, "do_remote_prefill": False})["kv_transfer_params"]
        answer = tell(second, MAX_TOKENS, sent)
        counted = difference(before, second.metrics())
        fetched = re.findall(r"^vllm:nixl_bytes_transferred_sum\{.*\} ([\d.e+]+)", second.metrics_text(), re.MULTILINE)
    assert answer["choices"][0]["token_ids"] == expected
    assert counted["accepted_tokens"] > 0 and float(fetched[0]) > 0, fetched
    return counted, f"; {float(fetched[0]) / 1024:.0f} kB of entries fetched from the other server's memory"


_NODES = (("vidspec-a", "vs-a", "10.231.0.1"), ("vidspec-b", "vs-b", "10.231.0.2"))


@contextmanager
def _namespaces() -> Iterator[None]:
    """Make two network namespaces that reach each other; needs root and iproute2."""

    def ip(line: str) -> None:
        subprocess.run(["ip", *shlex.split(line)], check=True, capture_output=True)

    with ExitStack() as stack:
        for name, _, _ in _NODES:
            ip(f"netns add {name}")
            stack.callback(ip, f"netns del {name}")
        (a, at_a, _), (b, at_b, _) = _NODES
        ip(f"link add {at_a} netns {a} type veth peer name {at_b} netns {b}")
        for name, device, address in _NODES:
            ip(f"-n {name} addr add {address}/24 dev {device}")
            ip(f"-n {name} link set {device} up")
            ip(f"-n {name} link set lo up")
        yield


def nodes(folder: Path, parts: str = "tensor_parallel_size", part: str = "rank") -> tuple[dict[str, int], str]:
    """A rank of target and draft, or a stage, on each of two nodes, with nothing but a network in common."""
    expected, port, cores = _vanilla(LLAVA), 8000, sorted(os.sched_getaffinity(0))
    settings = {parts: 2, "nnodes": 2, "master_addr": _NODES[0][2], "master_port": 29555}
    settings |= SMALL | {"distributed_executor_backend": "mp"}
    serve = [str(Path(sys.executable).with_name("vllm")), "serve"]
    serve += pairs.serve_args(LLAVA, "draft", port=port, overrides=settings, pruner="uniform", on_draft_error="raise")
    with _namespaces(), ExitStack() as stack:
        for rank, (name, device, address) in reversed(list(enumerate(_NODES))):
            (folder / name).mkdir()
            where = {"GLOO_SOCKET_IFNAME": device, "VLLM_HOST_IP": address, "TMPDIR": str(folder / name)}
            where["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[rank % len(cores)])
            command = ["ip", "netns", "exec", name, "env", *(f"{key}={value}" for key, value in where.items())]
            node = LoggedProcess(folder / f"{name}.log")
            stack.callback(node.end)
            node.start([*command, *serve, "--node-rank", str(rank), *(["--headless"] if rank else [])])
        script = ["ip", "netns", "exec", _NODES[0][0], sys.executable, "-m", __spec__.name, str(port)]
        asked = subprocess.run(script, capture_output=True, text=True, timeout=900)
        assert asked.returncode == 0, asked.stderr[-2000:] + (folder / "vidspec-a.log").read_text()[-3000:]
    found = json.loads(asked.stdout.splitlines()[-1])
    assert found["token_ids"] == expected
    assert found["counted"]["accepted_tokens"] > 0
    return found["counted"], f"; two network namespaces, a {part} in each, counters on the first node's /metrics"


def stages_on_nodes(folder: Path) -> tuple[dict[str, int], str]:
    """The target's stages on two nodes, the draft and its counters on the second."""
    return nodes(folder, "pipeline_parallel_size", "stage")


def _from_inside(port: int) -> None:
    """Ask the server that runs in this network namespace; print the answer and our counters."""
    server, start = VllmServer([], port, Path(os.devnull)), time.monotonic()
    while not server.healthy():
        assert time.monotonic() - start < 800, "the server does not answer"
        time.sleep(0.5)
    print(json.dumps({"token_ids": _ask(server.base_url), "counted": server.metrics()}))


if __name__ == "__main__":
    _from_inside(int(sys.argv[1]))
