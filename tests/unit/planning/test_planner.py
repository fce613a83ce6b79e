"""The planner: what it recommends follows from its candidates, its limits are exact, what cannot be is refused."""

import dataclasses
import re
from pathlib import Path

import pytest

from vllm_vidspec.config.static_tree import SPECVLM_PATHS, grow_paths, level_widths, most_nodes
from vllm_vidspec.drafting.static import topology_of
from vllm_vidspec.planning.acceptance import RUNNER_UP, Agreement, default_agreement
from vllm_vidspec.planning.candidates import Question, notes
from vllm_vidspec.planning.planner import DRAFT, EYES, NOTHING, SELF, WORTH, Planner, choices, plan, replicas
from vllm_vidspec.planning.roofline import ASSUMED, GPUS, Placement, forward_seconds, prefill_seconds
from vllm_vidspec.planning.shapes import FP8, INT4, draft_shape, target_shape


def question(target="Qwen2.5-VL-32B", draft="7B", gpu="h200", ranks=2, **given):
    shape = target_shape(target)
    return Question(
        shape, draft_shape(draft, shape), GPUS[gpu], ranks, **{"draft_gpus": 0, "video_tokens": 1000} | given
    )


def test_a_chain_by_hand():
    """Two tokens in the first draft forward, one in the others; K + 1 rows verified; overheads once a step."""
    asked = question(agreement=Agreement((0.8,)), prune_ratios=(0.9,))
    place = Placement(asked.gpu, 2)
    target, verify = (forward_seconds(asked.target, place, 8, rows, 1512) + 0.5e-3 for rows in (1, 4))
    draft = sum(forward_seconds(asked.draft, place, 8, rows, 612) for rows in (2, 1, 1))
    found = Planner(asked).chain(8, 3, 0.9)
    length = 1 + 0.8 + 0.64 + 0.512
    assert found.acceptance_length == pytest.approx(length)
    assert (found.target_s, found.verify_s, found.drafting_s) == pytest.approx((target, verify, draft))
    assert (found.forwards, found.draft_s) == (3, pytest.approx(draft / 3)), "T_d is one forward"
    assert found.speedup == pytest.approx(length * target / (verify + draft + 0.3e-3))


def test_a_whole_answer_has_every_prefill_in_it():
    """Eight requests read 1,512 tokens and see 1,000 each, the draft 612 and as many. Catches: an answer without the
    target's prefill, a tower that sees what is kept, a prefill that keeps nobody else waiting.
    """
    asked = question(agreement=Agreement((0.8,)), prune_ratios=(0.9,))
    place = Placement(asked.gpu, 2)
    read = prefill_seconds(asked.target, place, 1512, 1000)
    own = prefill_seconds(asked.draft, place, 612, 1000)
    found, vanilla = Planner(asked).chain(8, 3, 0.9), Planner(asked).vanilla(8)
    assert (vanilla.ttft_s, found.ttft_s) == pytest.approx((read, read + own))
    assert vanilla.answer_s == pytest.approx(8 * read + 256 * found.target_s)
    assert found.answer_s == pytest.approx(8 * (read + own) + 256 * found.target_s / found.speedup)
    assert found.answer_speedup == pytest.approx(vanilla.answer_s / found.answer_s)
    assert found.videos_per_hour == pytest.approx(3600 * 8 / found.answer_s)


def test_a_draft_with_the_targets_eyes_reads_faster_and_weighs_less():
    """Catches: a tower that is left in, a map that takes a tower's time; `self` that reads, or holds weights."""
    asked = question(prune_ratios=(0.9,))
    found = {choice: Planner(of).chain(8, 3, 0.9) for choice, of in choices(asked).items()}
    draft, eyes, own = found[DRAFT], found[EYES], found[SELF]
    tower = asked.draft.vision_flops * 1000 / 2 / (ASSUMED.flops_frac * asked.gpu.flops)
    mapped = asked.draft.with_eyes_of(asked.target).vision_flops * 1000 / 2 / (ASSUMED.flops_frac * asked.gpu.flops)
    assert draft.waited_s - eyes.waited_s == pytest.approx(tower - mapped) and mapped < tower / 50
    weights = asked.draft.vision_params - asked.draft.hidden * asked.target.hidden
    assert draft.memory.draft_weights - eyes.memory.draft_weights == pytest.approx(2 * weights / 2)
    assert eyes.memory.draft_media < draft.memory.draft_media and eyes.speedup == draft.speedup
    assert (own.ttft_s, own.memory.draft_weights, own.memory.draft_media) == (own.read_s, 0, 0)
    assert own.memory.draft_kv == pytest.approx(8 * 100 * 262_144 / 2), "a tenth of each request's video"


@pytest.mark.parametrize(
    ("target", "quantised", "batch", "gains"),
    [
        ("Qwen3-VL-8B", False, 8, (1.23, 1.32, 1.52)),
        ("Qwen3-VL-8B", False, 16, (1.43, 1.59, 1.93)),
        ("Qwen3-VL-8B", False, 24, (1.58, 1.78, 2.22)),
        ("Qwen2.5-VL-7B", False, 24, (1.30, 1.42, 1.67)),
        ("Qwen2.5-VL-32B", True, 8, (1.19, 1.28, 1.46)),
    ],
)
def test_self_gains_what_another_model_of_it_says(target, quantised, batch, gains):
    """Decoding on an H200 over 25k tokens, at 0.8, 0.87 and 0.95, as modelled apart from this planner (no measurement).
    Catches: a draft forward over the whole video; a gain at one request, where there is none.
    """
    shape = target_shape(target).quantised(FP8) if quantised else target_shape(target)
    asked = Question(shape, shape, GPUS["h200"], video_tokens=25_000, prune_ratios=(0.9,))
    for rate, gain in zip((0.8, 0.87, 0.95), gains, strict=True):
        planner = Planner(dataclasses.replace(asked, agreement=Agreement((rate,))))
        assert planner.fastest(batch).speedup == pytest.approx(gain, rel=0.05)
    assert planner.fastest(1).speedup < 1.1


def test_a_tree_runs_as_often_and_as_wide_as_ours():
    """Catches: widths of another tree than the engine's."""
    for paths in (SPECVLM_PATHS, grow_paths(24, 2), grow_paths(17, 4)):
        assert tuple(map(len, topology_of(paths).frontiers())) == level_widths(paths)


def test_trees_of_one_tile_are_those_that_can_be_configured():
    """By query heads to a KV head. Catches: a plan for a target of group 1 whose K is refused, above 64."""
    assert [most_nodes(group) for group in (8, 7, 5, 4, 2, 1)] == [15, 17, 24, 31, 63, 64]


def test_limits_are_exact():
    """The last batch size that pays and the next one; the last that fits and the next. Catches: powers of two only."""
    planner = Planner(question())
    most = planner.most_requests()
    assert planner.vanilla(most).fits and not planner.vanilla(most + 1).fits
    ((first, last),) = planner.paying()
    assert first == 1 and last < most and last & (last - 1), "no power of two, so the search has looked between"
    assert planner.pays(last) and not planner.pays(last + 1)
    assert (
        f"for 1 to {last} at a time ({most} requests fit). From {last + 1} on no draft gains 5 %"
        in planner.sentence(planner.paying())
    )
    full = planner.fullest()
    assert planner.has_room(full.batch, full.prune_ratio, full.shape)
    assert not planner.has_room(full.batch + 1, full.prune_ratio, full.shape)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            dict(target="Qwen2.5-VL-7B", draft="self", gpu="h100", ranks=1, video_tokens=2000),
            "Do not draft for new videos: nothing gains 5 %",
        ),
        (dict(target="Qwen2.5-VL-7B", draft="self", gpu="h100", ranks=1, video_tokens=25_000), "Below "),
        (dict(gpu="h100", video_tokens=25_000, draft_gpus=1), "Drafts pay for as many at a time as fit"),
        (dict(target="Qwen2.5-VL-72B", gpu="h100", ranks=4, video_tokens=24_000), "there is no room for the draft"),
        (dict(gpu="a100", ranks=1, video_tokens=100_000), "Not even one request fits"),
    ],
)
def test_the_sentence_says_when(given, words):
    planner = Planner(question(**given))
    said = planner.sentence(planner.paying())
    assert words in said, said


def test_break_even_is_where_the_gain_is_lost():
    """A little below the plan gains less than WORTH, a little above more. Catches: the plan's own agreement."""
    planner = Planner(question())
    found = planner.chain(16, 3, 0.9)
    even = planner.break_even(found)
    for rate, gains in ((even - 0.01, False), (even + 0.01, True)):
        assert (planner.chain(16, 3, 0.9, Agreement((rate,))).speedup > WORTH) is gains
    large = Planner(question(draft="32B"))
    assert large.break_even(large.chain(1, 3, 0.9)) is None, "not even a perfect draft"


def test_memory_of_both_places():
    """In turns the draft's weights and KV are on the target's cards, in parallel on its own cards."""
    asked = question(draft_gpus=1)
    turns, apart = Planner(asked).chain(8, 3, 0.9), Planner(asked).parallel(8, 0.9)
    assert turns.memory.draft_weights == pytest.approx(asked.draft.params) and turns.drafter_memory is None
    free = 0.9 * 141e9 - (turns.memory.target_weights + turns.memory.draft_weights)
    assert turns.memory.draft_media == pytest.approx(0.03 * free)
    # A tenth is kept, and a twentieth is for text: the pool's share of what is left, for both caches' tokens.
    share = 0.15 * 57_344
    assert turns.memory.draft_kv == pytest.approx(0.97 * free * share / (262_144 + share), rel=1e-6)
    assert turns.memory.draft_kv == Planner(asked).chain(1, 3, 0.9).memory.draft_kv, "whatever the batch"
    assert Planner(asked).chain(1, 3, 0.0).memory.draft_kv > 2 * turns.memory.draft_kv, "the whole video"
    assert apart.memory.draft_weights == apart.memory.draft_kv == 0
    assert apart.drafter_memory.draft_weights == pytest.approx(2 * asked.draft.params)
    assert apart.drafter_memory.draft_kv == pytest.approx(8 * 612 * 57_344)
    assert turns.memory.target_kv == apart.memory.target_kv == pytest.approx(8 * 1512 * 262_144 / 2)


def test_a_parallel_drafter_reads_while_the_target_goes_on_alone():
    """Eight prompts of 612 tokens at the drafter's speed, vanilla's meanwhile. Catches: a prefill that is free."""
    asked = question(draft_gpus=1)
    found = Planner(asked).parallel(8, 0.9)
    reading = 8 * prefill_seconds(asked.draft, Placement(asked.gpu, 1), 612, 1000)
    vanilla = 256 * found.target_s
    decode = reading + (vanilla - reading) / found.speedup
    assert (found.ttft_s, found.answer_s) == pytest.approx((found.read_s, 8 * found.read_s + decode))
    short = Planner(dataclasses.replace(asked, answer_tokens=1)).parallel(8, 0.9)
    assert short.answer_speedup == pytest.approx(1.0), "the answer is over before its drafter begins"


def test_windows_come_to_rest():
    """The window is the rule's for the step that verifies it. Catches: a window of a longer step; one above K."""
    planner = Planner(question(draft_gpus=1))
    for batch in (1, 16, 200):
        for most in (16, 4):
            found = planner.parallel(batch, 0.9, Agreement((0.5,)), most)
            step = found.verify_s + 0.3e-3
            assert found.num_tokens == max(1, min(most, int(step / found.draft_s + 0.5)))
    windows = {one.num_tokens for one in planner.candidates(200) if one.shape == "parallel"}
    assert min(windows) <= 2 < 8 < max(windows), "short ones are tried where long ones cost"


def test_measured_times_are_met():
    """Catches: a scale that is not applied, or to the wrong model."""
    asked = question(target_ms=40.0, draft_ms=7.0, prune_ratios=(0.9,))
    planner, modelled = Planner(asked), Planner(question())
    assert planner.target_seconds(1, 1) == pytest.approx(40e-3)
    assert planner.draft_seconds(1, 1, 0.9, Placement(asked.gpu, 2)) == pytest.approx(7e-3)
    ratio = planner.target_seconds(32, 4) / planner.target_seconds(1, 1)
    assert ratio == pytest.approx(modelled.target_seconds(32, 4) / modelled.target_seconds(1, 1))


def test_a_draft_that_ranks_cannot_share_drafts_apart():
    """28 heads on 8 ranks, which the engine refuses. Catches: a plan that the server would not start with."""
    asked = question(target="Qwen2.5-VL-72B", gpu="h100", ranks=8, draft_gpus=1)
    assert {one.shape for one in Planner(asked).candidates(1)} == {"parallel"} and [*choices(asked)] == [DRAFT, SELF]
    assert any("28 heads, which 8 ranks cannot share" in note for note in notes(asked))


def test_rows_are_the_plan():
    """Catches: a row that says something else than its candidate; a batch that does not fit with a speed-up."""
    asked = question(gpu="h100", video_tokens=25_000)
    result = plan(asked, (1, 5000))
    groups = [[row for row in result["rows"] if row["batch"] == 1], [row for row in result["rows"] if row["is_full"]]]
    assert [[row["choice"] for row in group] for group in groups] == 2 * [[NOTHING, DRAFT, EYES, SELF]]
    planner = Planner(asked)
    for (nothing, row, *_), best in zip(groups, (planner.fastest(1), planner.fullest()), strict=True):
        said = (row["batch"], row["shape"], row["num_speculative_tokens"], row["prune_ratio"], row["draft_forwards"])
        assert said == (best.batch, best.shape, best.num_tokens, best.prune_ratio, best.forwards)
        times = (row["t_target_ms"], row["t_draft_ms"], row["ttft_ms"], row["answer_ms"])
        assert times == pytest.approx([1e3 * s for s in (best.target_s, best.draft_s, best.ttft_s, best.answer_s)])
        assert row["memory"] == dataclasses.asdict(best.memory)
        assert row["videos_per_hour"] == best.videos_per_hour == 2 * row["videos_per_hour_per_gpu"]
        assert row["answer_speedup"] == pytest.approx(best.videos_per_hour / nothing["videos_per_hour"])
        assert nothing["answer_speedup"] == nothing["speedup"] == 1
    assert groups[0][1]["speedup"] == pytest.approx(planner.fastest(1).speedup)
    (none,) = [row for row in result["rows"] if row["batch"] == 5000]
    assert none["fits"] is False and none["speedup"] is none["answer_ms"] is None and none["memory"]["left"] < 0
    assert result["kind"] == "modelled" and "not measured" in result["notes"][0]


def test_more_cards_are_compared_with_more_servers():
    """A target that one card holds, on two; and a parallel drafter's card. Catches: a second card that counts for
    drafts alone; replicas where there is one card.
    """
    alone, two = question("Qwen2.5-VL-7B", "3B", ranks=1), question("Qwen2.5-VL-7B", "3B", ranks=2)
    assert replicas(alone) is None
    number, ranks, one = replicas(two)
    assert (number, ranks) == (2, 1) and one.batch == Planner(alone).most_requests()
    assert 2 * one.videos_per_hour > Planner(two).vanilla(Planner(two).most_requests()).videos_per_hour
    assert replicas(dataclasses.replace(alone, draft_gpus=1))[:2] == (2, 1)
    (row,) = [row for row in plan(two, (1,))["rows"] if row["choice"] == "2 x tp 1"]
    assert row["is_full"] and row["gpus"] == 2 and row["answer_speedup"] > 1
    assert row["videos_per_hour_per_gpu"] == pytest.approx(one.videos_per_hour)


def page_of(name):
    return (Path(__file__).resolve().parents[3] / "docs" / "notebook" / f"{name}.md").read_text()


def test_the_page_says_what_the_planner_says():
    """docs/notebook/planning.md is a record. Catches: an assumption or plan that has changed, and the page not."""
    page = page_of("planning")
    for words in (
        f"| {100 * ASSUMED.memory_frac:.0f} % (fitted) |",
        f"| {100 * ASSUMED.flops_frac:.0f} % and {100 * ASSUMED.link_frac:.0f} % |",
        f"| {1e6 * ASSUMED.layer_s:g} µs, in fp8 {1e6 * ASSUMED.fp8_layer_s:g} µs (fitted), "
        f"in four bits {1e6 * ASSUMED.int4_layer_s:g} µs |",
        f"| {1e6 * ASSUMED.tree_layer_s:g} µs a layer, and a read of its KV cache's bytes takes "
        f"{ASSUMED.tile_passes:g} for each 64 rows of a KV head (fitted), {ASSUMED.wide_tile_passes:g} for 128 |",
        f"| {1e6 * ASSUMED.flash_tree_layer_s:g} µs a layer, and the KV cache is read once |",
        f"| {1e6 * ASSUMED.level_layer_s:g} µs a layer (fitted) |",
        f"| {1e3 * ASSUMED.step_s:g} ms a step, {1e3 * ASSUMED.speculation_s:g} ms more with drafts |",
        f"| memory for weights and KV | {100 * ASSUMED.usable_frac:.0f} % |",
        f"| a gain that counts as one | {100 * (WORTH - 1):.0f} % |",
    ):
        assert words in page, words
    for family, *rates in re.findall(r"^\| `([\w.-]+)` \|" + r" (0\.\d+) \|" * 5, page, re.M):
        agreements = [default_agreement(family, ratio) for ratio in (0, 0.5, 0.9, 0.99, 1)]
        assert rates == [f"{one.rates[0]:.3f}" for one in agreements], family


@pytest.mark.parametrize("is_now", [False, True])
def test_the_page_says_what_trees_of_one_tile_come_to(is_now):
    """docs/notebook/planning.md, before and now. Catches: a shape, time or gain that has changed, and the page not."""
    plan_cells = r" \| (\S+) (\d+) \| ([\d.]+) \+ ([\d.]+) \| ([\d., ]+)"
    cells = r"^\| (\S+ \S+), (\S+) \| (\d) x (\w+) \| (\d+)( \(no room\))? \| ([\d.]+)" + 2 * plan_cells + r" \|$"
    rows = re.findall(cells, page_of("planning"), re.M)
    assert len(rows) == 14
    assumed = ASSUMED if is_now else dataclasses.replace(ASSUMED, flash_tree_layer_s=ASSUMED.tree_layer_s)
    shapes, lengths = (("tree-2", "tree-3", "tree-4"), range(1, 6)) if is_now else (("tree-static",), (5,))
    for target, draft, ranks, gpu, requests, no_room, vanilla, *cells in rows:
        shape, number, draft_ms, verify_ms, gains = cells[5 * is_now : 5 * is_now + 5]
        whole = target_shape("Qwen/" + target.replace(" ", "-") + "-Instruct")
        small = draft_shape(draft, whole).quantised(INT4 if is_now else FP8)
        whole = whole.quantised(FP8) if "32B" in target else whole
        for rate, gain in zip((0.6, 0.7, 0.77), gains.split(", "), strict=True):
            agreement = Agreement((rate,), RUNNER_UP)
            given = {"draft_gpus": 0, "prune_ratios": (0.9,), "agreement": agreement, "assumed": assumed}
            planner = Planner(Question(whole, small, GPUS[gpu], int(ranks), **given))
            chains = [planner.chain(int(requests), length, 0.9) for length in lengths]
            found = [*chains, *(planner.tree(int(requests), 0.9, shape=name) for name in shapes)]
            best = max(found, key=lambda one: one.speedup)
            assert f"{best.speedup:.2f}" == gain, (target, requests, rate)
            if rate == 0.7:
                times = [f"{1e3 * seconds:.1f}" for seconds in (best.target_s, best.drafting_s, best.verify_s)]
                assert (best.shape, best.num_tokens) == (shape, int(number)) and times == [vanilla, draft_ms, verify_ms]
                assert not is_now or best.fits is not bool(no_room)
