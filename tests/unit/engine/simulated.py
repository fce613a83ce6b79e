"""An engine without models for tests of the policy: requests with a chance of acceptance, and what steps cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_vidspec.engine.policy import NONE, Decision, Observed, Option, Policy, StepCosts, class_label

CHAINS = tuple(Option("chain", k, k, True) for k in (5, 3, 2, 1))
OPTIONS = (*CHAINS, NONE)


@dataclass
class Running:
    """A request: `chance` that a draft is accepted, tokens of its answer and those `left`, `context`, if it is
    `admitted`, drafts in flight; whether the draft has read its prompt.
    """

    chance: float
    length: int
    left: int
    context: float
    admitted: bool
    is_read: bool = False
    in_flight: int = 0


def memory_bound(num_reqs: int, context: np.ndarray, drafted: np.ndarray, levels: int) -> float:
    """Return seconds of a step whose rows cost little beside its context and the draft's levels."""
    rows = (drafted * (2e-4 + 1e-4 * context)).sum()
    return 4e-3 + 5e-4 * num_reqs + 3e-4 * float(context.sum()) + float(rows) + 1e-3 * levels


def like_a_small_pair(num_reqs: int, context: np.ndarray, drafted: np.ndarray, levels: int) -> float:
    """Return seconds of a step as the bundled pair takes them on a CPU core: the draft costs a third of the target."""
    num_drafted, rows = np.count_nonzero(drafted), float(drafted.sum())
    seconds = 1.85e-3 + 2e-4 * num_reqs + 3e-4 * float(context.sum()) + 3e-5 * rows
    return seconds + 9e-4 * (rows > 0 or levels > 0) + levels * (6e-4 + 1.4e-4 * max(num_drafted, 1))


def noisy(cost: Callable[..., float], seed: int) -> Callable[..., float]:
    """Return a cost whose steps vary by 12 %; one in a hundred takes four times as long."""
    random = np.random.default_rng(seed)

    def vary(*batch):
        return cost(*batch) * float(np.exp(random.normal(0, 0.12))) * (4.0 if random.random() < 0.01 else 1.0)

    return vary


def measured(cost: Callable[..., float], options: Sequence[Option] = OPTIONS) -> StepCosts:
    """Return what an engine measures of such steps while it starts: medians of five, with prompts of text."""

    def step_s(option: Option, size: int, context: float) -> float:
        batch = size, np.full(size, context), np.full(size, option.num_tokens), option.num_levels
        return float(np.median([cost(*batch) for _ in range(5)]))

    points = [(size, 0.05) for size in (1, 4, 16, 64)] + [(4, 2.0)]
    return StepCosts(
        len(options),
        {(index, *point): step_s(option, *point) for index, option in enumerate(options) for point in points},
    )


class SimulatedEngine:
    """Runs requests under a policy; time is the sum of its steps' costs.

    Args:
        fixed: Length of a chain that is always drafted, 0 for none; None for the policy.
        cost: `(requests, [n] thousands of tokens, [n] drafts to verify, levels of the draft) -> seconds`.
        start_s: Of the draft's prefill, by thousands of visual tokens.
        seed: Of what is accepted.
    """

    def __init__(
        self, fixed: int | None = None, cost: Callable[..., float] = memory_bound, start_s: float = 5e-3, seed: int = 0
    ):
        self.policy = Policy(OPTIONS, measured(cost), 64, False)
        self._fixed = None if fixed is None else Decision(Option("chain", fixed, fixed, True) if fixed else NONE)
        self._cost, self._start_s, self._random = cost, start_s, np.random.default_rng(seed)
        self.running: dict[str, Running] = {}
        self.seconds, self.tokens, self.num_added, self.num_admitted = 0.0, 0, 0, 0
        self._last: Decision | None = None
        self.decisions: list[Decision] = []

    def slow_down(self, factor: float) -> None:
        """Let every later step take `factor` times as long."""
        cost = self._cost
        self._cost, self._start_s = lambda *batch: factor * cost(*batch), factor * self._start_s

    def add(self, num_visual: int, chance: float, length: int) -> None:
        """Let a request come, about a video of so many tokens."""
        self._last = None
        req_id = f"r{self.num_added}"
        sizes = num_visual + 50, num_visual // 10 + 50
        admitted = self.policy.add(req_id, class_label(num_visual, 0), (), *sizes, 1024)
        if self._fixed is not None:
            admitted = self._fixed.option.num_tokens > 0
        self.running[req_id] = Running(chance, length, length, (num_visual + 50) / 1e3, admitted)
        self.num_added, self.num_admitted = self.num_added + 1, self.num_admitted + admitted

    def step(self) -> Decision:
        """Let every request decode."""
        ids, requests = list(self.running), list(self.running.values())
        decision = self._fixed or self.policy.decide(ids, 5)
        drafted = np.array([request.in_flight for request in requests])
        accepted = np.array([self._accepted(request) for request in requests])
        starters = []
        for req_id, request in zip(ids, requests, strict=True):
            request.in_flight = 0
            if decision.option.num_tokens and request.admitted and req_id not in decision.paused:
                starters += [] if request.is_read else [req_id]
                request.is_read, request.in_flight = True, decision.option.num_tokens
        levels = decision.option.num_levels if any(request.in_flight for request in requests) else 0
        seconds = self._cost(len(ids), np.array([request.context for request in requests]), drafted, levels)
        reading_s = sum(self._start_s * self.running[req_id].context for req_id in starters)
        seconds += reading_s
        self.seconds += seconds
        if self._fixed is None:
            known = seconds if self._last is not None else None
            step = Observed(decision, self._last, ids, 1 + accepted, drafted > 0, known, starters, reading_s)
            self.policy.observe(step)
        self._last = decision
        self.decisions.append(decision)
        for req_id, request, gained in zip(ids, requests, (1 + accepted).tolist(), strict=True):
            self.tokens += min(gained, request.left)
            request.left -= gained
            request.context += gained / 1e3
            if request.left <= 0:
                self._last = None
                self.policy.remove(req_id, request.length)
                del self.running[req_id]
        return decision

    def serve(self, *kinds: tuple, batch: int = 1, requests: int = 20, length: int = 128) -> float:
        """Run requests of these kinds (visual tokens, chance) in turn, `batch` at a time; return tokens a second."""
        tokens, seconds, last = self.tokens, self.seconds, self.num_added + requests
        while self.num_added < last or self.running:
            while len(self.running) < batch and self.num_added < last:
                self.add(*kinds[self.num_added % len(kinds)], length)
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _accepted(self, request: Running) -> int:
        rejected = self._random.random(request.in_flight) >= request.chance
        return int(rejected.argmax()) if rejected.any() else request.in_flight
