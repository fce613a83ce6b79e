"""An engine without models for tests of the controller: requests with a chance of acceptance, and what steps cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_vidspec.adapt import REST, Controller, Decision, Option, StepKind, class_label

CHAINS = tuple(Option("chain", k, k, True) for k in (5, 3, 2, 1))


@dataclass
class Running:
    """A request: `chance` that a draft is accepted, tokens of its answer and those `left`, `context`, if it is `shown`,
    drafts in flight; whether the draft has read its prompt, and lacks tokens that came since.
    """

    chance: float
    length: int
    left: int
    context: float
    shown: bool
    is_read: bool = False
    is_behind: bool = False
    in_flight: int = 0
    verified: int = 0


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


def cold(cost: Callable[..., float]) -> Callable[..., float]:
    """Return a cost whose first steps with drafts, and the first of each number of drafts, take longer."""
    seen: list[int] = []

    def slow_at_first(num_reqs: int, context: np.ndarray, drafted: np.ndarray, levels: int) -> float:
        factor = 1.0 if not levels else max(1.0, 4.0 - len(seen)) * (1.0 if levels in seen else 1.5)
        seen.extend([levels] * (levels > 0))
        return cost(num_reqs, context, drafted, levels) * factor

    return slow_at_first


def settling(cost: Callable[..., float]) -> Callable[..., float]:
    """Return a cost whose first steps without drafts after others take longer, a fifth at most, each less than the one
    before."""
    num_at_rest = 0

    def slow_to_settle(num_reqs: int, context: np.ndarray, drafted: np.ndarray, levels: int) -> float:
        nonlocal num_at_rest
        num_at_rest = 0 if levels or drafted.any() else num_at_rest + 1
        return cost(num_reqs, context, drafted, levels) * (1 + 0.2 * 0.85**num_at_rest * (num_at_rest > 0))

    return slow_to_settle


class SimulatedEngine:
    """Runs requests under a controller; time is the sum of its steps' costs.

    Args:
        controller: What decides; a number of tokens for a fixed chain of so many.
        cost: `(requests, [n] thousands of tokens, [n] drafts to verify, levels of the draft) -> seconds`.
        start_s: Of showing a prompt to the draft, by thousands of visual tokens.
        catch_up_s: Of a step in which the draft reads tokens that came while it rested.
        seed: Of what is accepted.
    """

    def __init__(
        self,
        controller: Controller | int | None = None,
        cost: Callable[..., float] = memory_bound,
        start_s: float = 5e-3,
        seed: int = 0,
        catch_up_s: float = 0.0,
    ):
        fixed = controller if isinstance(controller, int) else None
        self.controller = (
            Controller((*CHAINS, REST), 64, False) if fixed is not None or controller is None else controller
        )
        option = REST if not fixed else Option("chain", fixed, fixed, True)
        self._fixed = None if fixed is None else Decision(option, frozenset(), 0, False)
        self._cost, self._start_s, self._random = cost, start_s, np.random.default_rng(seed)
        self._catch_up_s = catch_up_s
        self.running: dict[str, Running] = {}
        self.seconds, self.tokens, self.num_added, self.num_shown = 0.0, 0, 0, 0
        self.num_catch_ups = 0  # steps in which the draft caught up
        self._last: Decision | None = None
        self._alike: tuple = ((), None)  # what the last step was alike by, and its kind
        self._passed, self._may_pass = list[float](), 0  # seconds of quiet steps, and how many more may pass
        self.decisions: list[Decision] = []

    def add(self, num_visual: int, chance: float, length: int, kind: tuple = ()) -> Running:
        """Let a request come, about a video of so many tokens; `kind` is what else tells its class from others."""
        self._look()
        req_id = f"r{self.num_added}"
        label, sizes = class_label(num_visual, 0), (num_visual + 50, num_visual // 10 + 50)
        shown = self.controller.add(req_id, label, kind, *sizes, 1024, list(self.running))
        if self._fixed is not None:
            shown = self._fixed.option.num_tokens > 0
        request = self.running[req_id] = Running(chance, length, length, (num_visual + 50) / 1e3, shown)
        self.num_added, self.num_shown = self.num_added + 1, self.num_shown + shown
        return request

    def step(self) -> Decision:
        """Let every request decode."""
        ids, requests = list(self.running), list(self.running.values())
        decision = self._last if self._may_pass else self._fixed or self.controller.decide(ids)
        drafted = np.array([request.in_flight for request in requests])
        accepted = np.array([self._accepted(request) for request in requests])
        starters, late = [], []
        for req_id, request in zip(ids, requests, strict=True):
            request.verified += request.in_flight > 0
            request.in_flight = 0
            if decision.option.num_tokens and request.shown and req_id not in decision.resting:
                starters += [] if request.is_read else [req_id]
                late += [req_id] if request.is_behind else []
                request.is_read, request.in_flight = True, decision.option.num_tokens
            request.is_behind = request.is_read and not request.in_flight
        levels = decision.option.num_levels if any(request.in_flight for request in requests) else 0
        seconds = self._cost(len(ids), np.array([request.context for request in requests]), drafted, levels)
        reading_s = sum(self._start_s * self.running[req_id].context for req_id in starters)
        reading_s += self._catch_up_s * bool(late)
        self.num_catch_ups += bool(late)
        seconds += reading_s
        self.seconds += seconds
        self._observe(decision, ids, drafted, accepted, (frozenset(starters + late), reading_s), seconds)
        self.decisions.append(decision)
        for req_id, request, gained in zip(ids, requests, (1 + accepted).tolist(), strict=True):
            self.tokens += min(gained, request.left)
            request.left -= gained
            request.context += gained / 1e3
            if request.left <= 0:
                self._look()
                self.controller.remove({req_id: request.length})
                del self.running[req_id]
        return decision

    def _observe(
        self,
        decision: Decision,
        ids: list[str],
        drafted: np.ndarray,
        accepted: np.ndarray,
        reading: tuple[frozenset[str], float],
        seconds: float,
    ) -> None:
        """Tell the controller of a step, as `SchedulerControl` does: quiet ones pass, alike ones share a kind."""
        self._passed.append(seconds)
        if self._may_pass:
            self._may_pass -= 1
            return
        mean_s, num_passed = float(np.mean(self._passed)), len(self._passed) - 1
        self._passed.clear()
        if num_passed:
            self.controller.pass_over(num_passed, mean_s)
        is_steady = self._last is not None and self._last.number == decision.number
        key = decision.number, ids, drafted.tolist(), is_steady
        if self._alike[0] != key or reading[0]:
            is_chain = self._last is None or self._last.option.is_prefix
            self._alike = key, StepKind(decision, ids, drafted, is_chain, is_steady, *reading)
        self.controller.observe(self._alike[1], 1 + accepted, mean_s if self._last else None)
        self._last, self._may_pass = decision, 0 if self._fixed else self.controller.num_quiet

    def _look(self) -> None:
        """Look at the next step, which is not like those before."""
        if not (self._passed or self._may_pass):
            return
        if self._passed:
            self.controller.pass_over(len(self._passed), float(np.mean(self._passed)))
            self._passed.clear()
        self._last, self._may_pass = None, 0

    def serve(self, *kinds: tuple, batch: int = 1, requests: int = 20, lengths: Sequence[int] = (128,)) -> float:
        """Run `requests` of these kinds (visual tokens, chance, what else tells a class) and lengths in turn, so many
        at a time; return tokens a second.
        """
        tokens, seconds, last = self.tokens, self.seconds, self.num_added + requests
        while self.num_added < last or self.running:
            while len(self.running) < batch and self.num_added < last:
                num_visual, chance, *kind = kinds[self.num_added % len(kinds)]
                self.add(num_visual, chance, lengths[self.num_added % len(lengths)], tuple(kind))
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _accepted(self, request: Running) -> int:
        rejected = self._random.random(request.in_flight) >= request.chance
        return int(rejected.argmax()) if rejected.any() else request.in_flight
