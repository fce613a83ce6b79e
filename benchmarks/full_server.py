"""A full server: as many clients as the target's KV memory holds, vanilla and ours in turns in the same memory.

    python -m benchmarks.full_server --json full-server.json
    python -m benchmarks.full_server --target T --draft D --tokens 16384 --server-args "--gpu-memory-utilization 0.92"

A cell is how requests come (`closed`: a client's next one when its last is answered; `poisson`: at random, at 0.8 of
the rate at which vanilla answers closed ones), whether videos are new or asked about before, and the answers' length.
`vllm bench serve` asks. There is a row for each cell, server and round; ratios are of a round's two rows. On CPUs both
servers are up and play each cell in turn; a GPU has memory for one, so that they start in turn, round by round. Without
--target it is the bundled long pair, its target padded to as many forwards of the draft as --pads says.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness, inflation, reel
from benchmarks.long import FAMILY, padding
from vllm_vidspec import devices
from vllm_vidspec.config import METHOD
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.processes import VllmServer, free_port

VANILLA, OURS = "vanilla", "vidspec"
TEXT_TOKENS = 128  # of a prompt, more than a question has
LOAD = 0.8  # of what vanilla answers, as `poisson` requests come
KEPT = 10_000_000  # where the videos begin that are asked about again and again
# What users have where they say no more: the policy drafts as many as pay.
SPEC: dict[str, Any] = {"num_speculative_tokens": 5, "adaptive_tokens": True}

Cell = tuple[str, str, int]  # load, videos, tokens of an answer


def server_args(args: argparse.Namespace, name: str, port: int) -> list[str]:
    """Return what follows `vllm serve`: the same for both but for what drafts."""
    longest = args.tokens + TEXT_TOKENS + max(args.answers)
    spec = SPEC | json.loads(args.spec)
    if args.target:
        words = [args.target, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
        words += ["--max-model-len", str(longest), "--limit-mm-per-prompt", '{"image": 0, "video": 1}']
        if name == OURS:
            words += ["--speculative-config", json.dumps({"method": METHOD, "model": args.draft, **spec})]
    else:
        original, layers = pairs.checkpoint(FAMILY, "target"), padding(args.pads, 1024, FAMILY)
        target = inflation.inflate(original, layers)
        # Weights of a draft take what the target's cache would have, as within a share of a GPU's memory.
        weights = sum(path.stat().st_size for path in Path(pairs.checkpoint(FAMILY, "draft")).glob("*.safetensors"))
        overrides = {
            "max_model_len": longest,
            "max_num_batched_tokens": longest,
            "max_num_seqs": 256,
            "limit_mm_per_prompt": {"video": 1, "image": 0},
            "kv_cache_memory_bytes": args.held * longest * _token_bytes(target) - weights * (name == OURS),
        }
        knobs = inflation.guidance_knobs(original, spec) if name == OURS else {}
        draft = "draft" if name == OURS else None
        words = pairs.serve_args(FAMILY, draft, target=str(target), port=port, overrides=overrides, **knobs)
    # The video stands before the question, whatever order a client sends them in.
    words += ["--allowed-local-media-path", tempfile.gettempdir(), "--chat-template-content-format", "string"]
    return [*words, *shlex.split(args.server_args)]


def _token_bytes(checkpoint: Path) -> int:
    """Return the bytes of a token in the KV cache of a bundled target, in float32."""
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    return 2 * 4 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_dim


class Clients:
    """Asks servers about videos, which are written as they are needed."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self._folder = args, folder
        self._tokenizer = args.target or pairs.checkpoint(FAMILY, "target")

    def _entry(self, index: int) -> dict[str, Any]:
        """Return a video and its question, as a ShareGPT file has them."""
        path = self._folder / f"{index}.mp4"
        frames, question = reel.held_out(index, self.args.tokens)
        if not path.exists():
            world.write_mp4(frames, path)
        turns = [{"from": "human", "value": question.text}, {"from": "gpt", "value": question.answer}]
        return {"id": str(index), "video": str(path), "conversations": turns}

    def ask(self, server: VllmServer, videos: list[int], answer: int, *options: str) -> dict[str, Any]:
        """Return what `vllm bench serve` says of one answer of so many tokens about each video."""
        from vllm.benchmarks.serve import add_cli_args, main
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        known = {index: self._entry(index) for index in sorted(set(videos))}
        path = self._folder / "sharegpt.json"
        path.write_text(json.dumps([known[index] for index in videos]))
        words = ["--base-url", server.base_url, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        words += ["--model", "target", "--tokenizer", self._tokenizer, "--dataset-name", "sharegpt"]
        words += ["--dataset-path", str(path), "--disable-shuffle", "--enable-multimodal-chat", "--num-prompts"]
        words += [str(len(videos)), "--sharegpt-output-len", str(answer), "--ignore-eos", "--temperature", "0"]
        words += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99", "--disable-tqdm"]
        words += ["--ready-check-timeout-sec", "0", *options]
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        with (self._folder / "bench.log").open("w") as log, contextlib.redirect_stdout(log):
            found = main(parser.parse_args(words))
        if found["completed"] < len(videos):
            raise RuntimeError(f"{len(videos) - found['completed']} requests failed (log: {server.log_path})")
        return found


def kv_tokens(server: VllmServer) -> int:
    """Return how many tokens the target's KV cache holds."""
    labels = dict(re.findall(r'(\w+)="(\d+)"', server.metrics_text()))
    return int(labels["num_gpu_blocks"]) * int(labels["block_size"])


def play(clients: Clients, server: VllmServer, cell: Cell, first: int, holds: int, rate: float) -> harness.Row:
    """Let clients ask about videos from number `first` on, as many at a time as fit `holds` tokens of KV."""
    load, videos, answer = cell
    fit = max(2, holds // (clients.args.tokens + TEXT_TOKENS + answer))
    asked = [first + index for index in range(clients.args.waves * fit)]
    if videos == "cached":
        asked = [KEPT + index % (fit // 2) for index in range(len(asked))]  # half of the memory keeps them
        clients.ask(server, sorted(set(asked)), 1, "--max-concurrency", "2")
    how = ["--max-concurrency", str(fit)] if load == "closed" else ["--request-rate", f"{rate:.6f}"]
    found = clients.ask(server, asked, answer, *how)
    return {
        "load": load,
        "videos": videos,
        "answer_tokens": answer,
        "clients": fit,
        "requests": len(asked),
        "request_rate": rate if load == "poisson" else None,
        "prompt_tokens": found["total_input_tokens"] / len(asked),
        "tokens_per_s": found["output_throughput"],
        "answers_per_s": found["request_throughput"],
        "ttft_p50_ms": found["median_ttft_ms"],
        "ttft_p99_ms": found["p99_ttft_ms"],
        "tpot_ms": found["mean_tpot_ms"],
        "acceptance_length": found.get("spec_decode_acceptance_length"),
    }


def measure(args: argparse.Namespace) -> Iterator[harness.Row]:
    # What vanilla answers comes first: the rate of `poisson` is a share of it.
    cells = [(load, *one) for load in ("closed", "poisson") for one in itertools.product(args.videos, args.answers)]
    holds: dict[str, int] = {}
    rates: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="vidspec-full-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        clients = Clients(args, folder)

        def start(which: str, stack: contextlib.ExitStack) -> VllmServer:
            port = free_port()
            server = VllmServer(server_args(args, which, port), port, folder / f"{which}.log")
            stack.enter_context(server).wait_ready(1800)
            holds[which] = kv_tokens(server)
            clients.ask(server, [KEPT - 1], 8)
            return server

        def row(which: str, server: VllmServer, turn: int, number: int) -> harness.Row:
            load, videos, answer = cells[number]
            most = math.ceil(args.waves * holds[VANILLA] / args.tokens)  # videos of a cell, and more
            first = (turn * len(cells) + number) * most
            rate = rates.get((videos, answer), 0.0)
            found = play(clients, server, cells[number], first, holds[VANILLA], rate)
            if which == VANILLA and load == "closed":
                rates.setdefault((videos, answer), LOAD * found["answers_per_s"])
            return {"round": turn, "server": which, "kv_tokens": holds[which], **found}

        up: dict[str, VllmServer] = {}
        if not devices.has_gpu():
            up = {which: start(which, stack) for which in (VANILLA, OURS)}
        for turn in range(args.rounds):
            order = (VANILLA, OURS) if turn % 2 == 0 else (OURS, VANILLA)
            if up:
                for number, which in itertools.product(range(len(cells)), order):
                    yield row(which, up[which], turn, number)
                continue
            for which in order:
                with contextlib.ExitStack() as alone:
                    server = start(which, alone)
                    for number in range(len(cells)):
                        yield row(which, server, turn, number)


if __name__ == "__main__":
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would count in place of kv_cache_memory_bytes
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended, too
    # held: requests of the longest answers that vanilla's KV memory holds, of the bundled pair; waves: requests of a
    # client in a cell; spec: further knobs of ours, as JSON; server_args: of both servers.
    sizes = {"rounds": 4, "tokens": 1024, "answers": [16, 128, 512], "waves": 2, "held": 8, "pads": 9.0}
    harness.command(
        __doc__,
        measure,
        **sizes,
        videos=["new", "cached"],
        target="",
        draft="",
        spec="{}",
        server_args="",
    )
