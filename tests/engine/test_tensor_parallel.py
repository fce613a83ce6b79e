"""Two ranks, each with half the heads of target and draft: the same output, the same acceptance, the same guidance."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.engine import guidance_reference
from vllm_vidspec.bench import shape_world

# What runs on one rank, to compare with.
SINGLE = (
    (1, "draft", "specvlm", "chain"),
    (1, "vanilla", "specvlm", "chain"),
    (1, "draft", "specvlm", "tree-adaptive"),
)
FAMILY = "llava-onevision"  # its bundled vision towers have an even number of heads


@pytest.fixture(scope="module")
def run():
    """`run(size, draft, pruner, shape)` -> what `tests.engine.tensor_parallel` prints, in a process each."""
    results: dict[tuple, dict] = {}

    def get(*arguments: int | str) -> dict:
        key = (*arguments, *("specvlm", "chain")[len(arguments) - 2 :])
        if not results:  # a single rank leaves a core to another
            with ThreadPoolExecutor(2) as pool:
                results.update(zip(SINGLE, pool.map(lambda single: _run(*single), SINGLE), strict=True))
        if key not in results:
            results[key] = _run(*key)
        return results[key]

    return get


def _run(size: int, draft: str, pruner: str, shape: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if size > 1:
        cores = sorted(os.sched_getaffinity(0))[:size]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in cores)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.tensor_parallel", FAMILY, str(size), draft, pruner, shape],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    return json.loads(lines[-1].split("RESULT ", 1)[1])


@pytest.mark.parametrize("shape", ["chain", "tree-adaptive"])
def test_two_ranks_equal_one(run, shape):
    """Catches: ranks that draft different tokens or size their pools differently; a draft sharded by the wrong rank;
    trees that differ between ranks."""
    vanilla = run(1, "vanilla")
    one, two = (run(size, "draft", "specvlm", shape) for size in (1, 2))
    assert two["token_ids"] == one["token_ids"] == vanilla["token_ids"]
    for name in ("drafts", "draft_tokens", "draft_depth", "accepted_tokens", "visual_tokens_kept", "guided_prompts"):
        assert two["counters"][name] == one["counters"][name] > 0


def test_loose_ranks_decide_alike(run):
    """Each rank holds half of the video's states; the merged relevance, and so the text, is that of one rank.

    The states are those that the strict requests before them have left. Catches: a shard whose Top-N are never merged,
    or merged as a mean of means; a token that both ranks keep.
    """
    one, two = (run(size, "draft")["loose"] for size in (1, 2))
    assert two["token_ids"] == one["token_ids"]
    for name in ("drafts", "exact_tokens", "loosened_tokens", "relevance_prompts", "relevance_reused"):
        assert two["counters"][name] == one["counters"][name] > 0
    assert two["counters"]["shifted_tokens"] == one["counters"]["shifted_tokens"]
    assert 2 * two["counters"]["relevance_bytes_per_token"] == one["counters"]["relevance_bytes_per_token"]
    assert len(two["scored"]) == 2 and two["scored"][0] == two["scored"][1]
    for ours, alone in zip(two["scored"][0], one["scored"][0], strict=True):
        assert ours["kinds"] == alone["kinds"]
        values = [
            torch.tensor([value for value in record["relevance"] if value is not None]) for record in (ours, alone)
        ]
        torch.testing.assert_close(*values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pruner", ["specvlm", "uv"])
def test_guidance_of_two_ranks_equals_the_reference(run, pruner):
    """Catches: one rank's heads only, heads counted twice, ranks that keep different tokens."""
    two = run(2, "draft", pruner)
    assert len(two["scores"]) == 2 and two["scores"][0] == two["scores"][1]
    assert two["kept_indices"][0] == two["kept_indices"][1]
    for i in range(2):
        video = shape_world.held_out(i).frames
        reference, is_visual, states = guidance_reference.run(FAMILY, two["prompt_ids"][i], [video])
        ours = torch.tensor(two["scores"][0][i])
        if pruner == "specvlm":
            expected = guidance_reference.attention_scores(reference, is_visual)
            assert guidance_reference.relative_error(ours, expected) <= 1e-4
        else:
            expected = guidance_reference.uv_scores(states, is_visual, layer=3)
            assert float((ours - expected).abs().max() / expected.abs().mean()) <= 1e-4
