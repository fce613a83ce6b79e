"""Speed: what drafts gain, from lengths and times, whoever measured or modelled them; plain Python, no units but one.

Times may be in any unit as long as it is one. In turns a closed form says everything; target and drafter at a time are
followed event by event (`run_streams`), as docs/parallel.md has them, with the papers' closed form beside it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from vidspec_tools.planning.acceptance import Agreement


def speedup(length: float, target: float, draft: float, verify: float, overhead: float = 0.0) -> float:
    """Return tokens per second over vanilla's: tau T_t / (gamma T_d + T_t^gamma) (SpecVLM eq. 3, METHODS' speed model).

    Args:
        length: tau, mean tokens of a step, the target's own included.
        target: T_t, a decode step of vanilla.
        draft: gamma T_d: all draft forwards of a step.
        verify: T_t^gamma, the target's step over the drafts.
        overhead: What else a step with drafts takes.
    """
    return length * target / (draft + verify + overhead)


def window_of(target: float, draft: float, rate: float, most: int) -> int:
    """Return the window of parallel drafting: c* = T_t / T_d (ParallelVLM eq. 6), rounded as by `WindowRule`.

    Args:
        target: T_t^gamma.
        draft: T_d.
        rate: Share of drafts that stand, added before rounding down.
        most: K.
    """
    return min(max(int(target / draft + rate), 1), most)


def rounds_speedup(rate: float, window: int, target: float, draft: float) -> float:
    """Return the speed-up of rounds in lockstep (ParallelVLM algorithm 1; its theorem 5, pre-verify rounds counted).

    In post-verify a round emits the window if all of it stands, else up to the first miss and the target's own token;
    then pre-verify rounds emit one token each until the first draft stands. A round takes max(gamma T_d, T_t). The
    modes are a Markov chain of two states, and its stationary share of each is known.

    Args:
        rate: p.
        window: gamma.
        target: T_t.
        draft: T_d.
    """
    stands = rate**window
    emitted = window if rate == 1 else (1 - stands) / (1 - rate)  # sum of j P(j), the token at a miss included
    leave_post, leave_pre = 1 - stands, rate
    if leave_post + leave_pre == 0:
        return 1.0
    share = leave_pre / (leave_post + leave_pre)
    return (share * emitted + (1 - share)) * target / max(window * draft, target)


@dataclass(frozen=True)
class StreamTimes:
    """What target and drafter take while both run.

    Attributes:
        step: Drafts verified, 0 to K -> the target's step.
        turn: One token of the drafter, whatever goes with it.
        startup: From an answer's first token until its drafter draws.
    """

    step: Callable[[int], float]
    turn: float
    startup: float = 0.0


@dataclass
class StreamRun:
    """What became of a run.

    Attributes:
        tokens: Emitted, an answer's end observed.
        time: In the unit of the times.
        steps: Of the target.
        drafts: Steps that verified something.
        accepted: Draft tokens that stood.
        late: Steps whose stream was too short.
        stale: Steps whose stream had said something else than was committed.
        drawn: Tokens of the drafter.
        rejections: Steps that ended a stream.
    """

    tokens: int = 0
    time: float = 0.0
    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    late: int = 0
    stale: int = 0
    drawn: int = 0
    rejections: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step that verified something, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def speedup(self, target: float) -> float:
        """Return tokens per time over vanilla's, whose step takes `target`."""
        return self.tokens * target / self.time


class _Drafter:
    """One stream: tokens 0 to `end` are said, `wrong` is the first that the target would not say, None: none is."""

    def __init__(self, agreement: Agreement, times: StreamTimes, most_ahead: int, rng: random.Random, run: StreamRun):
        self.end = self.heard = 0
        self.wrong: int | None = None
        self._agreement, self._most_ahead, self._rng, self._run = agreement, most_ahead, rng, run
        self._turn = times.turn
        self._begins = 0  # where the stream was cut last
        self._done: float | None = times.startup + times.turn  # when the forward under way ends; None: it waits

    def hear(self, committed: int, now: float) -> None:
        """Take what the target has committed; it counts from the next turn on, and one that waits goes on at once."""
        self.heard = committed
        if self._done is None:
            self._follow()
            if self.end - self.heard < self._most_ahead:
                self._done = now + self._turn

    def draw_until(self, now: float) -> None:
        """Finish the forwards that end by then."""
        while self._done is not None and self._done <= now:
            if self.wrong is None and self._rng.random() >= self._agreement.at(self.end - self._begins + 1):
                self.wrong = self.end
            self.end += 1
            self._run.drawn += 1
            self._follow()
            self._done = self._done + self._turn if self.end - self.heard < self._most_ahead else None

    def _follow(self) -> None:
        """Cut the stream where it said something else than was committed, or where the target has overtaken it."""
        if self.wrong is not None and self.wrong < self.heard:
            self.end = self._begins = self.heard
            self.wrong = None
        elif self.end < self.heard:
            self.end = self._begins = self.heard


def run_streams(
    agreement: Agreement,
    window: int,
    times: StreamTimes,
    answers: int = 1,
    answer: int = 4000,
    seed: int = 0,
    most_ahead: int = 24,
) -> StreamRun:
    """Follow a drafter that never stops and a target that verifies what is there (ParallelVLM section 4).

    A step of the target takes the next tokens of the stream, `window` at most, if the stream agrees with what was
    committed; else none. The drafter hears of a commit when its forward ends, and is cut at the first other token.

    Args:
        agreement: Of drafter and target; its depths count from the last cut.
        window: Most drafts of a step.
        times: Of both.
        answers: How many, each with a stream of its own.
        answer: Tokens of each, behind the first.
        seed: Of what the drafter gets wrong; the same seed gives the same run.
        most_ahead: Tokens that a stream may be ahead of what was committed.
    """
    rng, run = random.Random(seed), StreamRun()
    for _ in range(answers):
        drafter, now, committed = _Drafter(agreement, times, most_ahead, rng, run), 0.0, 0
        while committed < answer:
            end, wrong = drafter.end, drafter.wrong
            is_stale = wrong is not None and wrong < committed
            drafts = 0 if is_stale else min(max(end - committed, 0), window)
            accepted = drafts
            if wrong is not None and not is_stale:
                accepted = min(drafts, wrong - committed)
            drafter.hear(committed, now)
            now += times.step(drafts)
            drafter.draw_until(now)
            committed += accepted + 1
            run.steps += 1
            run.stale += is_stale
            run.late += not is_stale and not drafts
            run.drafts += drafts > 0
            run.accepted += accepted
            run.rejections += accepted < drafts
        run.time += now
        run.tokens += answer  # what a last step says past the end is dropped
    return run
