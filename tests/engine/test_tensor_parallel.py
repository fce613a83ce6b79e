"""Two ranks, each with half the heads of target and draft: the same output, the same acceptance, the same guidance."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.engine import float64, harness, ranks
from tests.engine.ranks import FAMILY

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def answered():
    """What vanilla answers to the four greedy and the four sampled requests, and to videos and texts."""
    with harness.engine(FAMILY) as engine:
        return [
            harness.token_ids(engine.generate(ask(FAMILY)))
            for ask in (harness.greedy_and_sampled, harness.videos_and_texts)
        ]


@pytest.fixture(scope="module")
def vanilla(answered):
    return answered[0]


@pytest.fixture(scope="module")
def one(vanilla):
    with harness.engine(FAMILY, "draft", **ranks.SPEC) as engine:
        return json.loads(json.dumps(ranks.ask_all(engine)))


@pytest.fixture(scope="module")
def two():
    return _run("two")[0]


@pytest.fixture(scope="module")
def failing():
    return _run("failing")


def _run(*arguments: int | str) -> tuple[dict, str]:
    """Run a program of `ranks` to its end, with one core per rank; return its result and all that it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    cores = sorted(os.sched_getaffinity(0))
    environment["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    command = [sys.executable, "-m", "tests.engine.ranks", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    assert lines, done.stderr[-3000:] + done.stdout[-3000:]
    return json.loads(lines[-1].split("RESULT ", 1)[1]), done.stdout + done.stderr


@pytest.mark.parametrize("phase", ["strict", "trees"])
def test_two_ranks_equal_one(vanilla, one, two, phase):
    """Catches: ranks that draft, shard or size pools differently."""
    assert two[phase]["token_ids"] == one[phase]["token_ids"] == vanilla[: 3 if phase == "trees" else 8]
    ours, alone = two[phase]["counters"], one[phase]["counters"]
    for name in ("drafts", "draft_tokens", "draft_depth", "accepted_tokens", "visual_tokens_kept", "guided_prompts"):
        assert ours[name] == alone[name] > 0
    if phase == "trees":
        assert ours["draft_tokens"] > ours["draft_depth"]


@pytest.mark.parametrize(
    ("num_ranks", "num_stages"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)], ids=["ranks", "stages"]
)
def test_ranks_follow_one_decision(answered, num_ranks, num_stages):
    """Requests rest and go on, on two ranks or stages. Catches: a rank that decides alone, and hangs."""
    found, _ = _run("adaptive", num_ranks, num_stages)
    assert found["token_ids"] == answered[1]
    assert harness.skipped(found["counters"]) == {} and found["counters"]["accepted_tokens"] > 0
    assert num_stages > 1 or found["counters"]["undrafted_steps"] > 0, "nobody was at rest"


def test_ranks_draft_for_themselves(vanilla):
    """Each copies the entries of its own heads. Catches: ranks that see different tokens, or other blocks."""
    found, _ = _run("itself")
    for name in ("pruned", "whole"):
        assert found[name]["token_ids"] == vanilla
        assert len(found[name]["kept_indices"]) == 2
        assert found[name]["kept_indices"][0] == found[name]["kept_indices"][1]
        assert harness.skipped(found[name]["counters"]) == {}
    harness.assert_all_stands(found["whole"]["counters"])
    counted = found["pruned"]["counters"]
    assert counted["accepted_tokens"] > 0 and counted["visual_tokens_kept"] < 0.3 * counted["visual_tokens_full"]


def test_loose_ranks_decide_alike(one, two):
    """Each rank holds half of the video's states; the merged relevance, and so the text, is that of one rank."""
    one, two = one["loose"], two["loose"]
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


@pytest.mark.parametrize("pruner", ["specvlm", pytest.param("uv", marks=pytest.mark.slow)])
def test_guidance_of_two_ranks_equals_the_reference(request, pruner):
    """Catches: one rank's heads only, heads counted twice, ranks that keep different tokens."""
    # Whom each fixture runs takes a minute: only the one that is asked for.
    if pruner == "specvlm":
        found, count, layer = request.getfixturevalue("two")["strict"], 2, None
    else:
        found, count, layer = request.getfixturevalue("failing")[0]["uv"], 1, 3
    assert len(found["scores"]) == 2 and found["scores"][0] == found["scores"][1]
    assert found["kept_indices"][0] == found["kept_indices"][1]
    for i, video in enumerate(harness.shown(count)):
        ours = torch.tensor(found["scores"][0][i])
        assert float64.guidance_error(ours, FAMILY, found["prompt_ids"][i], [video], layer) <= 1e-4


# What an injected failure costs the request that it hits; everything else is as without one.
DRAFTS_NOT = {"skipped_draft_error": 1, "drafts": 0, "draft_tokens": 0}
PRUNED_UNIFORMLY = {"unguided_error": 1, "guided_prompts": 0, "skipped_draft_error": 0}
STRICT = {"loosened_tokens": 0, "skipped_draft_error": 0}
COSTS = {
    **dict.fromkeys(("observe 1", "allocate 1", "listen 1"), PRUNED_UNIFORMLY),
    **dict.fromkeys(("take 1", "encode 1", "look 1", "plan 1", "prefill 1", "prefill 0", "draft both"), DRAFTS_NOT),
    **dict.fromkeys(("claim 1", "hear 1", "finish 1", "relevance 0"), STRICT | {"strict_error": 1}),
    "relevance 1": STRICT,
}


@pytest.mark.slow
def test_ranks_act_alike_on_what_fails_on_one_of_them(vanilla, failing):
    """A failure of one rank costs the same on all, and nobody later; while decoding it ends the engine with a line."""
    result, printed = failing
    assert set(COSTS) < set(result)
    for name, found in result.items():
        assert name.startswith("loose") or found["token_ids"] == vanilla[0][0][: len(found["token_ids"])], name
        assert found["kept_indices"][0] == found["kept_indices"][1], name
        assert {counter: found["counters"][counter] for counter in COSTS.get(name, {})} == COSTS.get(name, {}), name
    for name in ("strict", "loose"):
        first, again = result[name], result[f"{name} again"]
        assert first["token_ids"] == again["token_ids"]
        for counter in ("drafts", "accepted_tokens", "loosened_tokens", "guided_prompts", "relevance_prompts"):
            assert first["counters"][counter] == again["counters"][counter]
    assert result["loose"]["counters"]["loosened_tokens"] > 0
    off, on = result["off"]["counters"], result["on again"]["counters"]
    assert off["draft_steps"] == off["drafts"] == off["speculation_on"] == 0
    assert on["accepted_tokens"] > 0 and on["speculation_on"] == 1
    assert all(result[name]["counters"]["guided_prompts"] == 1 for name in ("strict", "loose", "uv"))

    assert "rank 1 of 2 ends the engine: in drafting rank 0 did not answer within 1 s" in printed
    (ended,) = [line for line in printed.splitlines() if "ENDED " in line]
    assert json.loads(ended.split("ENDED ", 1)[1])[1] < 60


def test_two_stages_equal_one(vanilla):
    """Vanilla's tokens; a draft equal to the target always stands. Catches: a draft of the last stage's layers alone;
    stages that differ in what was drafted; counts of another batch, as two are under way; a grammar passed by."""
    found, _ = _run("stages")
    assert found["guided"]["token_ids"] == found["equal"]["token_ids"] == vanilla
    counted = {name: of["counters"] for name, of in found.items()}
    for name in ("guided", "loose", "equal"):
        assert harness.skipped(counted[name]) == {} and counted[name]["accepted_tokens"] > 0
    assert counted["guided"]["guided_prompts"] == counted["guided"]["prompts"] == 8
    harness.assert_all_stands(counted["equal"])
    assert counted["loose"]["loosened_tokens"] > 0
    assert harness.skipped(counted["structured"]) == {"structured": 8}
    assert all(
        re.fullmatch("(blue|circle|vertically)+", text.replace(" ", "")) for text in found["structured"]["texts"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("of_target", "of_drafter", "num_stages"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_target_and_drafter_have_ranks_of_their_own(vanilla, of_target, of_drafter, num_stages):
    """Vanilla's tokens, drafts that stand. Catches: ranks that take other windows or miss commits or commands."""
    result, _ = _run("parallel", of_target, of_drafter, num_stages)
    assert result["token_ids"] == vanilla
    counted = result["counters"]
    # A drafter that is slow beside others may not have read every prompt by the end of its answer.
    assert counted["guided_prompts"] == counted["prompts"] > 0
    assert counted["stream_tokens"] >= counted["accepted_tokens"]
    expected, counted = vanilla[0][0], result["counters_long"]
    assert result["long"][: len(expected)] == expected
    assert counted["accepted_tokens"] > 50, "of 400 tokens"


def test_two_ranks_show_a_draft_what_both_have_encoded():
    """A draft without a tower. Catches: ranks of which one encodes again and waits for the other for good."""
    found, _ = _run("shown")
    first, again = found["found"]
    assert found["vision"] == "target" and first["token_ids"] == again["token_ids"]
    for part, misses in ((first, 0), (again, 4)):
        assert part["counters"]["accepted_tokens"] == part["counters"]["draft_tokens"] > 0
        assert part["counters"]["draft_encoder_misses"] == misses
