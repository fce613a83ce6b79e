"""The policy on a running engine: answers stay vanilla's; requests and classes that do not pay are paused."""

import contextlib
import itertools
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from tests.engine import harness
from tests.engine.harness import QWEN, Engine, assert_same_answers, skipped
from tests.engine.test_parallel import PARALLEL, let_drafts_come
from vllm_vidspec import metrics
from vllm_vidspec.engine import scheduling
from vllm_vidspec.engine.compat.scheduler import decision_of, report_of
from vllm_vidspec.engine.policy import NONE, Decision, StepCosts

pytestmark = pytest.mark.engine


@contextlib.contextmanager
def adaptive(is_async: bool, **knobs) -> Iterator[Engine]:
    """Load the bundled pair as a user has it, the policy on."""
    knobs |= {"adaptive_tokens": True, "is_ahead": is_async}
    with harness.engine(QWEN, "draft", harness.NO_CACHE, **knobs) as engine:
        yield engine


@contextlib.contextmanager
def wrong_drafts(engine: Engine, of_videos: bool) -> Iterator[list[bool]]:
    """Let every draft for prompts with videos, or without, be wrong; yield whether each was admitted to it."""
    speculator = engine.speculator
    drafter, admit, is_wrong = speculator.backend.drafter, speculator.backend.add, set()
    draft, admitted = drafter.draft, []

    def noting(arrival):
        if bool(arrival.features) == of_videos:
            admitted.append(arrival.is_admitted)
            is_wrong.add(arrival.req_state_idx)
        else:
            is_wrong.discard(arrival.req_state_idx)
        admit(arrival)

    def wrong(message):
        drafts = draft(message)
        rows = [place for place, row in enumerate(message.idx_mapping_np.tolist()) if row in is_wrong]
        drafts.tokens[rows] = (drafts.tokens[rows] + 1) % 50
        return drafts

    with mock.patch.object(speculator.backend, "add", noting), mock.patch.object(drafter, "draft", wrong):
        yield admitted


@contextlib.contextmanager
def steps(engine: Engine) -> Iterator[list]:
    """Yield each step's decision, scheduled drafts and who had real ones; a step takes 10 ms and 1 ms a level."""
    side, seen, now = engine.scheduler._vidspec_side, [], [0.0]
    observe = side.observe
    step_s = {
        (index, size, 0.05): 0.010 + 0.001 * option.num_levels
        for index, option in enumerate(side.options)
        for size in (1, 16)
    }
    side._policy.costs = StepCosts(len(side.options), step_s)  # and not those of this machine

    def noting(scheduler_output, output):
        now[0] += 0.010 + 0.001 * decision_of(scheduler_output).option.num_levels
        drafts = scheduler_output.scheduled_spec_decode_tokens
        decision, drafted = decision_of(scheduler_output), report_of(output).drafted
        seen.append((decision, {req_id: len(tokens) for req_id, tokens in drafts.items()}, drafted))
        observe(scheduler_output, output)

    clock = mock.Mock(monotonic=lambda: now[0])
    with (
        mock.patch.object(side, "observe", noting),
        mock.patch.object(scheduling, "time", clock),
        mock.patch.object(scheduling.compat, "report_of", lambda output: report_of(output)._replace(reading_s=0.0)),
    ):
        yield seen


@pytest.mark.parametrize(("shape", "is_async"), [("chain", False), ("auto", True)])
def test_answers_are_vanillas_whatever_is_decided(reference, is_async, shape):
    """Every sampling parameter and kind of prompt in one batch, then videos alone; nobody loses speculation."""
    knobs = {"drafting": "auto", "num_speculative_tokens": 12} if shape == "auto" else {}
    mixed, videos = reference(QWEN, "mixed"), reference(QWEN, "videos")
    endless = [answer for (answer,) in harness.token_ids(reference(QWEN, "videos and texts"))]
    with adaptive(is_async, **knobs) as engine, steps(engine) as seen:
        outputs, counted = engine.measured(harness.mixed_batch(QWEN))
        assert_same_answers(mixed, outputs)
        assert skipped(counted) == {} and counted["accepted_tokens"] > 0
        for shape in ("chain", "tree-2", "tree-4", "auto") if knobs else ():  # an operator's choice
            engine.begin(harness.videos_and_texts(QWEN), steps=5)
            engine.retune(draft_shape=shape)  # while they run
            assert engine.finish() == endless
            engine.idle()
            seen.clear()
            outputs, counted = engine.measured(harness.videos(QWEN, 8))
            assert_same_answers(videos, outputs)
            assert skipped(counted) == {} and counted["accepted_tokens"] > 0
            drafted = {decision.option.shape for decision, *_ in seen} - {"none"}
            assert drafted == {shape} or (shape == "auto" and drafted)
        outputs, counted = engine.measured(harness.videos(QWEN, 8))
        assert_same_answers(videos, outputs)
        assert skipped(counted) == {} and counted["admitted_video_256"] == 8


def test_hopeless_requests_are_paused_beside_good_ones(reference):
    """Drafts for texts are all wrong: texts are paused, hold no rows, delay nobody, are not admitted; videos go on."""
    expected = reference(QWEN, "videos and texts")
    requests = harness.videos_and_texts(QWEN)
    with adaptive(True) as engine, wrong_drafts(engine, of_videos=False) as admitted, steps(engine) as seen:
        before = engine.counters()
        for _ in range(6):
            assert_same_answers(expected, engine.generate(requests))
            engine.idle()
        counted = metrics.difference(before, engine.counters())
    assert skipped(counted) == {}
    assert counted["pauses_text"] > counted["resumes_text"] and counted["unadmitted_text"] > 0, "texts are paused"
    assert counted["pauses_video_256"] == counted["unadmitted_video_256"] == 0 < counted["admitted_video_256"]
    assert admitted.count(False) == counted["unadmitted_text"], "the worker does what was decided"
    mixed = [(before[0].paused, after) for before, after in itertools.pairwise(seen) if before[0].paused]
    assert mixed, "some step has drafted for some of its requests"
    for paused, (_, scheduled, drafted) in mixed:
        assert not paused & scheduled.keys() and not paused & drafted, "who is paused has one row, and no draft forward"
    assert counted["accepted_tokens"] > 0.6 * counted["draft_tokens"], "what is drafted is mostly accepted"
    assert np.mean([decision.option.num_tokens > 0 for decision, *_ in seen]) > 0.2


@pytest.mark.slow
def test_a_class_that_begins_to_pay_is_found_again():
    """Videos are paused, as every draft is wrong; then the draft is good, and within 200 requests they are admitted."""
    requests = harness.videos(QWEN, 4, max_tokens=60, ignore_eos=True)
    with adaptive(False) as engine, steps(engine):
        with wrong_drafts(engine, of_videos=True):
            for _ in range(12):
                engine.generate(requests)
            engine.idle()
            before = engine.counters()
        assert before["pauses_video_256"] == before["resumes_video_256"] + 1
        num_requests, counted = 0, {"resumes_video_256": 0}
        while counted["resumes_video_256"] == 0 and num_requests < 200:
            engine.generate(requests)
            engine.idle()
            num_requests += len(requests)
            counted = metrics.difference(before, engine.counters())
        print(f"found again after {num_requests} requests")
        assert counted["resumes_video_256"] == 1 and counted["unadmitted_video_256"] > 0
        _, counted = engine.measured(requests)
        assert counted["admitted_video_256"] == 4 and counted["accepted_tokens"] > 100


def test_who_is_paused_takes_nothing_and_gives_its_draft_memory_to_others():
    """Catches: requests that are admitted and never read, because nothing is drafted; blocks that a paused request
    keeps while another waits for room."""
    text, nothing = harness.videos_and_texts(QWEN)[-1], Decision(NONE)
    with adaptive(False) as engine:
        with mock.patch.object(engine.scheduler._vidspec_side._policy, "decide", return_value=nothing):
            engine.generate([text] * 5)
            engine.core.step()  # vLLM tells of the last one's end with the next step
        counted = engine.counters()
        assert counted["undrafted_paused"] == 5 and counted["drafted_requests"] == counted["prompts"] == 0
        engine.begin(harness.videos(QWEN, 2, max_tokens=200, ignore_eos=True), steps=12)
        paused, working = list(engine.runner.req_states.req_id_to_index)
        assert engine.kv.num_used_blocks > 0
        policy = engine.scheduler._vidspec_side._policy
        decide = policy.decide

        def pausing_one(*step):
            option = max(policy.options, key=lambda option: option.num_tokens)
            return decide(*step)._replace(option=option, paused=frozenset({paused}))

        with mock.patch.object(policy, "decide", pausing_one):
            for _ in range(4):
                engine.core.step()
            rows = engine.runner.req_states.req_id_to_index
            kv, drafter = engine.kv, engine.speculator.backend.drafter
            held = kv.capacity_np[rows[paused]]
            with (
                mock.patch.object(drafter, "has_room", lambda *_: False),
                mock.patch(
                    "vllm_vidspec.engine.draft.local_backend.without_room",
                    side_effect=[iter([(0, "pool_full", "")]), iter([])],
                ),
            ):
                engine.core.step()
            assert held > 0 and kv.capacity_np[rows[paused]] == 0 < kv.capacity_np[rows[working]]
        assert engine.counters()["released_paused"] == 1
        engine.abort()


def test_a_drafter_of_its_own_is_asked_for_what_is_decided(reference):
    """Catches: answers that change, a request that loses its speculation, windows taken for paused requests."""
    expected = reference(QWEN, "videos and texts")
    with adaptive(False, parallel=PARALLEL) as engine, let_drafts_come(engine), steps(engine) as seen:
        before = engine.counters()
        for _ in range(3):
            assert_same_answers(expected, engine.generate(harness.videos_and_texts(QWEN)))
        counted = metrics.difference(before, engine.counters())
    assert skipped(counted) == {} and counted["accepted_tokens"] > 0
    for before, (_, _, drafted) in itertools.pairwise(seen):
        assert not before[0].paused & drafted
