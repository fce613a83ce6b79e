"""Stories that hypothesis draws, on one engine: answers are vanilla's, and an engine at rest knows of nobody."""

import contextlib
from unittest import mock

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import QWEN, Engine, token_ids
from tests.fuzz.running import drawing
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.requests import Phase

pytestmark = [pytest.mark.engine, pytest.mark.draft_errors]

# Answers that are known up to their 40th token: greedy ones, and sampled ones.
PROMPTS = ("endless", "endless sampled")
LONGEST = 40
# Blocks of 128 tokens: a prompt takes three, so three requests fill the cache and a fourth one is put off or puts off.
OVERRIDES = {"num_gpu_blocks_override": 11, "max_model_len": 512, "max_num_seqs": 4}

# Where the draft fails, once.
FAILURES = {
    "admit": (Drafter, "add"),
    "prefill": (Drafter, "prefill"),
    "draft": (Drafter, "draft"),
    "vision": (DraftModel, "encode"),
    "forward": (DraftModel, "forward"),
}
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 10), st.integers(1, LONGEST)),
    st.tuples(st.just("add"), st.integers(0, 10), st.integers(1, LONGEST)),
    st.tuples(st.just("step"), st.integers(1, 12), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 10), st.none()),
    st.tuples(st.just("fail"), st.sampled_from(sorted(FAILURES)), st.none()),
    st.tuples(st.just("sleep"), st.none(), st.none()),
)
STORIES = st.lists(EVENTS, min_size=4, max_size=12)


class Story:
    """One story on an engine that others have run on before; `answers` are vanilla's token ids of the `requests`."""

    def __init__(self, engine: Engine, requests: list[tuple[dict, dict]], answers: list[list[int]]):
        self.engine, self.requests, self.answers = engine, requests, answers
        self.asked: dict[str, tuple[int, int]] = {}  # by request id: which prompt, how many tokens
        self.finished: dict[str, list[int]] = {}
        self.num_failures = 0

    def tell(self, events: list[tuple]) -> None:
        """Let it happen, then let everybody finish; check every answer, and that nobody is known afterwards."""
        with contextlib.ExitStack() as failing:
            for what, first, second in [*events, ("add", 0, 8)]:
                getattr(self, what)(first, second, failing)
            while self.engine.core.has_unfinished_requests():
                self._step()
        assert self.finished.keys() == self.asked.keys(), "a request was not answered"
        for name, tokens in self.finished.items():
            prompt, length = self.asked[name]
            assert tokens == self.answers[prompt][:length], f"request {name} is answered as vanilla does not"
        self.nobody_is_known()

    def add(self, prompt: int, length: int, _failing: contextlib.ExitStack) -> None:
        text, sampling = self.requests[prompt]
        arguments = harness._params(**sampling | {"max_tokens": length})
        (internal,) = self.engine.llm.enqueue([text], arguments, use_tqdm=False)
        name = self.engine.core.output_processor.request_states[internal].external_req_id  # by which outputs go
        self.asked[name] = (prompt, length)

    def step(self, count: int, _: None, _failing: contextlib.ExitStack) -> None:
        for _step in range(count):
            if self.engine.core.has_unfinished_requests():
                self._step()

    def _step(self) -> None:
        for output in self.engine.core.step():
            if output.finished and output.request_id in self.asked:
                self.finished[output.request_id] = list(output.outputs[0].token_ids)

    def abort(self, place: int, _: None, _failing: contextlib.ExitStack) -> None:
        running = [name for name in self.asked if name not in self.finished]
        if running:
            name = running[place % len(running)]
            self.engine.core.abort_request([name])
            del self.asked[name]

    def fail(self, where: str, _: None, failing: contextlib.ExitStack) -> None:
        owner, name = FAILURES[where]
        original, is_due = getattr(owner, name), [True]

        def planted(*args, **kwargs):
            if is_due:
                is_due.clear()
                self.num_failures += 1
                raise RuntimeError(f"planted in {where}")
            return original(*args, **kwargs)

        failing.enter_context(mock.patch.object(owner, name, planted))

    def sleep(self, _first: None, _second: None, _failing: contextlib.ExitStack) -> None:
        """What the draft knows of everybody is about to be lost, as when an engine sleeps."""
        self.engine.runner.forget_kv()

    def nobody_is_known(self) -> None:
        """Look at every table of an engine at rest; the last request, of one token, is still in its row."""
        engine = self.engine
        assert engine.used_blocks() == 0
        prefills, rows = engine.speculator.backend.drafter.prefills, engine.runner.requests
        told = [rows.unstarted, prefills._jobs, engine.guides[0]._prompts]
        assert not any(told), "a request that has ended is known"
        assert sorted(engine.kv._free) == list(range(1, engine.kv.num_blocks)), "a block is lost, or free twice"
        assert sum(phase != Phase.UNSEEN for phase in rows.phase) <= 1
        assert not rows.has_draft_np.any() and not rows.has_draft.any()


@pytest.fixture(scope="module")
def known(reference):
    requests = [request for name in PROMPTS for request in SCENARIOS[name](QWEN)]
    return requests, [ids[0] for name in PROMPTS for ids in token_ids(reference(QWEN, name))]


def tell_stories(engine: Engine, known: tuple, usual: int, **how) -> None:
    """Draw scenarios, and tell each on this engine."""

    @drawing(usual, **how)
    @given(STORIES)
    def tell(events: list[tuple]) -> None:
        story = Story(engine, *known)
        with engine.preemptions() as preempted:
            try:
                story.tell(events)
            finally:
                engine.abort()
                engine.idle()
        event(f"preempted: {bool(preempted)}")
        event(f"failed: {story.num_failures > 0}")

    tell()


@pytest.mark.parametrize(
    ("shape", "is_ahead", "usual"),
    [("chain", False, 10), ("tree-adaptive", True, 4)],
    ids=["chain", "trees and a scheduler that runs ahead"],
)
def test_any_scenario_is_answered_as_by_vanilla(known, shape, is_ahead, usual):
    """Catches: an abort, a preemption or a failure that another request pays for, or that leaves something behind."""
    with harness.engine(QWEN, "draft", OVERRIDES, is_ahead, drafting=shape, on_draft_error="skip") as engine:
        start = engine.counters()
        tell_stories(engine, known, usual)
        assert engine.counters()["accepted_tokens"] > start["accepted_tokens"]
