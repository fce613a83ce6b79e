"""Speed: what drafts gain, from lengths and times, whoever measured or modelled them; times in any one unit.

Sequential drafting has a closed form; parallel drafting is followed event by event (`run_streams`), as docs/parallel.md
describes it.
"""

import random
from dataclasses import dataclass

from vllm_vidspec.planning.acceptance import Agreement


def speedup(length: float, target: float, draft: float, verify: float, overhead: float = 0.0) -> float:
    """Return tokens per second over vanilla's: tau T_t / (gamma T_d + T_t^gamma) (SpecVLM eq. 3).

    `length` is tau, `draft` gamma T_d (all draft forwards of a step), `verify` T_t^gamma.
    """
    return length * target / (draft + verify + overhead)


def window_of(target: float, draft: float, rate: float, most: int) -> int:
    """Return the window of parallel drafting: c* = T_t / T_d (ParallelVLM eq. 6), rounded as by `WindowRule`.

    `target` is T_t^gamma, `draft` T_d, `rate` the acceptance rate, which is added before rounding down, `most` K.
    """
    return min(max(int(target / draft + rate), 1), most)


@dataclass
class StreamRun:
    tokens: int = 0  # emitted, an answer's end observed
    time: float = 0.0  # in the unit of the times
    steps: int = 0  # of the target
    drafts: int = 0  # steps that verified something
    accepted: int = 0  # accepted draft tokens
    stale: int = 0  # steps whose stream had diverged from the committed tokens
    drawn: int = 0  # tokens of the drafter

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step that verified something, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of any step, those that verified nothing included: what a step's time is divided by."""
        return self.tokens / self.steps

    def speedup(self, target: float) -> float:
        return self.tokens * target / self.time


class _Drafter:
    """One stream: tokens 0 to `end` are drafted, `wrong` is the first that the target would reject, None: none is."""

    def __init__(self, agreement: Agreement, turn: float, most_ahead: int, rng: random.Random, run: StreamRun):
        self.end = self.committed = 0
        self.wrong: int | None = None
        self._agreement, self._most_ahead, self._rng, self._run = agreement, most_ahead, rng, run
        self._turn = turn
        self._begins = 0  # where the stream was cut last
        self._done: float | None = turn  # when the forward under way ends; None: it waits

    def commit(self, committed: int, now: float) -> None:
        """Take what the target has committed; it counts from the next forward on, and a drafter that waits resumes."""
        self.committed = committed
        if self._done is None:
            self._follow()
            if self.end - self.committed < self._most_ahead:
                self._done = now + self._turn

    def draft_until(self, now: float) -> None:
        """Finish the forwards that end by then."""
        while self._done is not None and self._done <= now:
            if self.wrong is None and self._rng.random() >= self._agreement.at(self.end - self._begins + 1):
                self.wrong = self.end
            self.end += 1
            self._run.drawn += 1
            self._follow()
            self._done = self._done + self._turn if self.end - self.committed < self._most_ahead else None

    def _follow(self) -> None:
        """Cut the stream where it has diverged from the committed tokens, or where the target has overtaken it."""
        diverged = self.wrong is not None and self.wrong < self.committed
        if diverged or self.end < self.committed:
            self.end = self._begins = self.committed
            self.wrong = None if diverged else self.wrong


def run_streams(
    agreement: Agreement, window: int, step: float, turn: float, answer: int = 4000, seed: int = 0, most_ahead: int = 24
) -> StreamRun:
    """Follow a drafter that never stops and a target that verifies what is there (ParallelVLM section 4).

    A step of the target takes `step` and verifies the next tokens of the stream, `window` at most, if the stream agrees
    with what was committed; else none. The drafter takes `turn` for a token, whatever goes with it, learns of a commit
    when its forward ends, is cut at the first other token, and waits where it is `most_ahead` tokens ahead. Depths of
    `agreement` count from the last cut; `answer` is tokens behind the first, `seed` is of what the drafter gets wrong.
    """
    run = StreamRun(tokens=answer)
    drafter, committed = _Drafter(agreement, turn, most_ahead, random.Random(seed), run), 0
    while committed < answer:
        end, wrong = drafter.end, drafter.wrong
        is_stale = wrong is not None and wrong < committed
        drafts = 0 if is_stale else min(max(end - committed, 0), window)
        accepted = drafts if wrong is None or is_stale else min(drafts, wrong - committed)
        drafter.commit(committed, run.time)
        run.time += step
        drafter.draft_until(run.time)
        committed += accepted + 1  # what a last step says past the end is dropped
        run.steps += 1
        run.stale += is_stale
        run.drafts += drafts > 0
        run.accepted += accepted
    return run
