"""`python -m benchmarks.full_server`: both servers have the same memory, clients are as many as fit; its intervals."""

import argparse
import json
from types import SimpleNamespace

from benchmarks import full_server
from benchmarks.pages.results import ratio_with_interval
from vllm_vidspec.config import parse_config

ARGS = argparse.Namespace(
    tokens=1024, answers=[16, 128], held=6, pads=0.0, waves=2, target="", draft="", spec="{}", server_args="--seed 7"
)


def options(args, name):
    words = full_server.server_args(args, name, 8000)
    return words, {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}


def test_servers_differ_by_the_draft_alone():
    """Catches: a draft whose weights take no memory; an option that only one of the two has."""
    (_, vanilla), (_, ours) = (options(ARGS, name) for name in (full_server.VANILLA, full_server.OURS))
    config, _ = parse_config(json.loads(ours.pop("--speculative-config")))
    assert config.adaptive_tokens and config.prune_ratio == 0.9
    memory = [int(of.pop("--kv-cache-memory-bytes")) for of in (vanilla, ours)]
    assert 1e6 < memory[0] - memory[1] < 2e6, "the draft's weights"
    assert memory[0] == 6 * 1280 * 2 * 4 * 3 * 64, "six of the longest, in float32, of three layers with one KV head"
    assert vanilla == ours and vanilla["--seed"] == "7"


def test_a_target_of_ones_own_is_served_as_users_serve_it():
    args = argparse.Namespace(
        **vars(ARGS) | {"target": "org/target", "draft": "org/draft", "spec": '{"prune_ratio": 0.5}'}
    )
    words, ours = options(args, full_server.OURS)
    assert words[0] == "org/target" and "--enforce-eager" not in words and "--kv-cache-memory-bytes" not in words
    config = json.loads(ours["--speculative-config"])
    assert (config["model"], config["prune_ratio"]) == ("org/draft", 0.5)
    assert "--speculative-config" not in options(args, full_server.VANILLA)[1]


def test_clients_are_as_many_as_the_memory_holds():
    """Catches: cached videos that push each other out; a Poisson cell in a closed loop."""
    asked = []

    def ask(_server, videos, answer, *how):
        asked.append((videos, answer, how))
        names = ("output_throughput", "request_throughput", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
        return dict.fromkeys(names, 1.0) | {"total_input_tokens": 1040 * len(videos)}

    clients = SimpleNamespace(args=ARGS, ask=ask)
    closed = full_server.play(clients, None, ("closed", "new", 128), 40, 6 * 1280, 0.0)
    assert (closed["clients"], closed["requests"], closed["prompt_tokens"]) == (6, 12, 1040)
    assert asked == [([*range(40, 52)], 128, ("--max-concurrency", "6"))]
    random = full_server.play(clients, None, ("poisson", "cached", 128), 40, 6 * 1280, 2.5)
    (fill, _, _), (videos, _, how) = asked[1:]
    assert len(fill) == 3 and set(videos) == set(fill) and how == ("--request-rate", "2.500000")
    assert random["request_rate"] == 2.5 and closed["request_rate"] is None


def test_what_a_kv_cache_holds_is_what_the_server_says():
    text = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="57",user_specified="False"} 1.0\n'
    assert full_server.kv_tokens(SimpleNamespace(metrics_text=lambda: text)) == 57 * 16


def test_ratios_are_of_rounds():
    """Catches: a ratio of means, which a slow round decides; an interval of normal quantiles, too narrow for few."""
    assert ratio_with_interval([2.0], [1.0]) == "2.00"
    assert ratio_with_interval([2.0, 20.0], [1.0, 10.0]) == "2.00 (2.00 to 2.00)"
    assert ratio_with_interval([1.0, 1.21], [1.0, 1.0]) == f"1.10 (0.33 to {1.1 * 1.21 ** (12.71 / 2):.2f})"
