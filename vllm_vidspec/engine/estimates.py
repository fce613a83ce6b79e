"""What the policy expects of steps: seconds by option, batch size and context, and the tokens they give; numpy only.

Seconds are measured once at start-up and corrected slowly by real steps; acceptance is an EMA by class and position.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_CLASSES, MAX_SIZE = 256, 1024  # of requests in a step
_PRIOR, _PRIOR_STEPS = 0.8, 2.0  # acceptance of a class that is not known, and the verify steps that this counts as
_MEMORY, _PAUSED_MEMORY = 1024.0, 6.0  # verify steps in a class's EMA; and once it is paused, so that a probe counts
_CORRECTION = 0.05  # weight of a step in its entry's correction
_SETTLED = 32  # steps after which what changes in an entry is the machine's: entries not in use follow it


class Option(NamedTuple):
    """What a step may draft for each of its requests."""

    shape: str  # As in `config.Plan`; "none" with 0 tokens
    num_tokens: int  # Draft tokens of each request
    num_levels: int  # Forwards of the draft, one after another; 0 where they run elsewhere, at the same time
    is_prefix: bool  # Whether fewer tokens are the first of these, as of a chain: acceptance is then known by position

    @property
    def depth(self) -> int:
        """The most draft tokens that can be accepted in a step."""
        return self.num_levels or self.num_tokens


NONE = Option("none", 0, 0, True)


class StepCosts:
    """Seconds of a step.

    Args:
        num_options: Options, the last of which drafts nothing.
        measured: By option's index, requests, and thousands of tokens in each one's context: seconds of a step in which
            all of them have drafts. Every option at the same sizes with the least context; any of them with others.

    Attributes:
        sizes: Numbers of requests that were measured.
    """

    def __init__(self, num_options: int, measured: Mapping[tuple[int, int, float], float]):
        least = min(context for _, _, context in measured)
        sizes = sorted({size for _, size, context in measured if context == least})
        slopes = np.zeros(num_options)  # seconds of a thousand tokens
        for option in range(num_options):
            found = [
                (seconds - measured[option, size, least]) / (size * (context - least))
                for (of, size, context), seconds in measured.items()
                if of == option and context > least
            ]
            slopes[option] = max(0.0, float(np.median(found))) if found else 0.0
        base = np.array([[measured[option, size, least] for size in sizes] for option in range(num_options)])
        base = np.maximum.accumulate(base, axis=1) - slopes[:, None] * least * np.array(sizes)
        self.sizes, self._slope = sizes, slopes[-1]
        # By number of requests, interpolated, and in proportion beyond the largest: seconds without drafts, and by
        # option those of drafts beside that, whose context is the draft's.
        number = np.arange(MAX_SIZE + 1)
        beyond = np.maximum(number / sizes[-1], 1.0)
        self._none = np.interp(number, sizes, base[-1]) * beyond
        extra = np.maximum(base - base[-1], 0.0)
        self._extra = np.stack([np.interp(number, sizes, values) * beyond for values in extra])
        self._draft_slopes = np.maximum(slopes - slopes[-1], 0.0)
        shape = num_options, 12, 12  # by option, log2 of the requests, log2 of their mean context in 256 tokens
        self._factor, self._machine_then, self._machine = np.ones(shape), np.ones(shape), 1.0
        self._count, self._at = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    @staticmethod
    def _entry(option: int, size: int, context: float) -> tuple[int, int, int]:
        return option, min(11, max(0, size - 1).bit_length()), min(11, int(4 * context / max(size, 1)).bit_length())

    def _correction(self, entry: tuple[int, int, int]) -> float:
        """Return the factor on what was measured; of an entry not seen yet that of the nearest batch size."""
        option, size, context = entry
        if not self._count[entry] and len(seen := np.flatnonzero(self._count[option, :, context])):
            entry = option, int(seen[np.abs(seen - size).argmin()]), context
        return float(self._factor[entry] * self._machine / self._machine_then[entry])

    def seconds(self, option: int, size: int, drafted: Any, context: float, draft_context: Any) -> Any:
        """Return seconds of a step, or `[m]` of several.

        Args:
            option: Index of theirs.
            size: Requests of each.
            drafted: How many of these have drafts, 1,024 at most; `[m]` int64 of several.
            context: Thousands of tokens that the target has of all.
            draft_context: The same that the draft has of those with drafts; `[m]` of several.
        """
        entry = self._entry(option, size, context)
        none = self._none[min(size, MAX_SIZE)] + self._slope * context
        extra = self._extra[option, drafted] + self._draft_slopes[option] * draft_context
        return (none + extra) * self._correction(entry)

    def observe(
        self, option: int, size: int, context: float, predicted: float, seconds: float, num_steps: int, now: int
    ) -> None:
        """Correct an entry by steps that were `predicted` to take so long and took `seconds`; `now` counts steps."""
        entry = self._entry(option, size, context)
        weight = max(1 - (1 - _CORRECTION) ** num_steps, 1 / (1 + self._count[entry]))
        change = min(2.0, max(0.5, seconds / predicted)) ** weight
        factor = self._correction(entry) * change
        if self._count[entry] >= _SETTLED:
            self._machine *= change
        self._factor[entry], self._machine_then[entry] = factor, self._machine
        self._count[entry] += num_steps
        self._at[entry] = now
        none = len(self._extra) - 1, *entry[1:]  # it takes no longer than with drafts
        most = predicted * change / (self._none[min(size, MAX_SIZE)] + self._slope * context)
        if option != none[0] and self._correction(none) > most:
            self._factor[none], self._machine_then[none] = most, self._machine
            self._count[none] = max(1, self._count[none])

    def shares(self, context: np.ndarray) -> np.ndarray:
        """Return `[n]` shares of a step without drafts that its requests take, of so many thousands of tokens each."""
        seconds = self._none[min(len(context), MAX_SIZE)] / len(context) + self._slope * context
        return seconds / seconds.sum()

    def summary(self, options: Sequence[Option]) -> str:
        """Return the measured milliseconds by option and number of requests, for the log."""
        totals = (self._none + self._extra)[:, self.sizes]
        return "; ".join(
            f"K = {option.num_tokens} ({option.shape}) "
            + ", ".join(f"{1e3 * s:.1f} ms of {size}" for s, size in zip(row, self.sizes, strict=True))
            for option, row in zip(options, totals.tolist(), strict=True)
        )

    def age(self, option: int, size: int, context: float, now: int) -> int:
        """Return how many steps ago an entry was corrected."""
        return now - int(self._at[self._entry(option, size, context)])


class Acceptance:
    """Tokens that the options' drafts give, by class.

    Attributes:
        mean: `[classes, options]` tokens of a verify step beside the target's own.
        expected: The same and a standard error more, so that what is hardly known is tried.
        verify_steps: `[classes]` verify steps that they rest on.
    """

    def __init__(self, options: Sequence[Option]):
        self._options, most = options, max(option.depth for option in options)
        # By position, of chains and of all trees together, as what one has shown is expected of another.
        self._passed, self._reached = np.zeros((2, MAX_CLASSES, 2, most))
        self._sum, self._tries = np.zeros((2, MAX_CLASSES, len(options)))  # of an option that is no chain
        self.verify_steps = np.zeros(MAX_CLASSES)
        self.mean, self.expected = np.zeros((2, MAX_CLASSES, len(options)))
        self._expect(np.arange(MAX_CLASSES))

    def observe(self, option: int, classes: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from `[v]` verify steps of an option: their classes and accepted tokens."""
        those, places, counts = np.unique(classes, return_inverse=True, return_counts=True)
        self._remember(those, np.maximum(0.0, 1 - counts / _MEMORY))
        self.verify_steps[those] += counts
        one = self._options[option]
        if one.is_prefix or one.num_levels:
            most, kind = one.depth, int(not one.is_prefix)
            found = np.bincount(places * (most + 1) + accepted, minlength=len(those) * (most + 1))
            at_least = found.reshape(-1, most + 1)[:, ::-1].cumsum(axis=1)[:, ::-1]  # `[classes, most + 1]` steps
            self._passed[those, kind, :most] += at_least[:, 1:]
            self._reached[those, kind, :most] += at_least[:, :most]
        if not one.is_prefix:
            self._sum[those, option] += np.bincount(places, accepted)
            self._tries[those, option] += counts
        self._expect(those)

    def pause(self, of_class: int) -> None:
        """Let a class's next verify steps count for more than those so far."""
        those = np.array([of_class])
        self._remember(those, np.minimum(1.0, _PAUSED_MEMORY / np.maximum(self.verify_steps[those], 1.0)))

    def _remember(self, classes: np.ndarray, share: np.ndarray) -> None:
        for counts in (self._passed, self._reached, self._sum, self._tries, self.verify_steps):
            counts[classes] *= share.reshape(-1, *[1] * (counts.ndim - 1))

    def _expect(self, classes: np.ndarray) -> None:
        """Keep what classes are expected to accept: at a position as at the one before, where it is not known."""
        passed, reached = self._passed[classes], self._reached[classes]
        tries = reached + _PRIOR_STEPS
        chances = np.empty_like(passed)
        before = np.full(len(classes), _PRIOR)
        for position in range(passed.shape[2]):
            before = (passed[:, 0, position] + _PRIOR_STEPS * before) / tries[:, 0, position]
            chances[:, 0, position] = before
        twins = 1 - (1 - chances[:, 0]) ** 2  # before any tree is tried: two candidates a level
        chances[:, 1] = (passed[:, 1] + _PRIOR_STEPS * twins) / tries[:, 1]
        for found, errors in ((self.mean, 0.0), (self.expected, 1.0)):
            likely = np.minimum(1.0, chances + errors * np.sqrt(chances * (1 - chances) / tries))
            lengths = np.cumsum(np.cumprod(likely, axis=2), axis=2)
            for index, option in enumerate(self._options[:-1]):
                is_tree = not option.is_prefix and option.num_levels > 0
                prior = lengths[:, int(is_tree), option.depth - 1]
                if option.is_prefix:
                    found[classes, index] = prior
                    continue
                num = self._tries[classes, index] + _PRIOR_STEPS
                mean = (self._sum[classes, index] + _PRIOR_STEPS * prior) / num
                mean = mean + errors * np.sqrt(mean * (1 + mean) / num)
                found[classes, index] = np.minimum(option.depth, mean)
