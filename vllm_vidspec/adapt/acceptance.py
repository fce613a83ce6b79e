"""AcceptanceTable: how many draft tokens of a request are accepted, learned by request and by class; numpy only.

A chain has an acceptance rate by position, given that all tokens before it were accepted; a tree has one figure, its
mean accepted tokens. A request begins with the estimates of its class, a new class with a guess.
"""

import numpy as np

_FIRST = 0.7  # acceptance rate before anything was verified
_OWN = 10.0  # verified tokens of a request that weigh as much as the estimate of its class
_CLASS = 8.0  # verified tokens of a class at one position that weigh as much as its mean over positions
_HALF_LIFE = 256.0  # verify steps of a class after which they count half
_REQUEST_DECAY = 0.98  # of a request's verified tokens, a step
_FORGOTTEN = 12.0  # verified tokens that `forget` leaves of a class
_MOST_CLASSES = 128


class AcceptanceTable:
    """Estimates by slot (a running request) and by class.

    Args:
        num_slots: Requests that run at the same time, at most.
        num_positions: K, the longest chain.
    """

    def __init__(self, num_slots: int, num_positions: int):
        self.num_positions = num_positions
        # [2, ..., K + 1] verified and accepted tokens: of chains by position; last, steps and accepted tokens of trees.
        self._own = np.zeros((2, num_slots, num_positions + 1))
        self._of_class = np.zeros((2, _MOST_CLASSES, num_positions + 1))
        self._tries, self._accepted = self._own
        self._class_tries, self._class_accepted = self._of_class
        self.classes = np.zeros(num_slots, dtype=np.int64)  # [num_slots]

    def begin(self, slot: int, class_index: int) -> None:
        """Give a slot to a request."""
        self._tries[slot] = self._accepted[slot] = 0.0
        self.classes[slot] = min(class_index, _MOST_CLASSES - 1)

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, is_chain: bool) -> None:
        """Take in what was verified in some steps that followed one another; all of it is of one age.

        Args:
            slots: `[n]` int64, a slot once for each step.
            drafted: `[n]` draft tokens that were verified of it, at least 1.
            accepted: `[n]` how many of them were accepted.
            is_chain: Whether they were chains; trees otherwise.
        """
        num_steps = np.bincount(slots, minlength=len(self.classes))
        gained = np.zeros_like(self._own)
        if is_chain:
            gained[0, :, :-1] = self._reached(slots, np.minimum(accepted + 1, drafted))
            gained[1, :, :-1] = self._reached(slots, accepted)
        else:
            gained[0, :, -1] = num_steps
            gained[1, :, -1] = np.bincount(slots, accepted, minlength=len(self.classes))
        self._own *= _REQUEST_DECAY ** num_steps[:, None]
        self._own += gained
        of_class = np.bincount(self.classes, num_steps)
        for c in np.flatnonzero(of_class).tolist():
            self._of_class[:, c] *= 0.5 ** (of_class[c] / _HALF_LIFE)
            self._of_class[:, c] += gained[:, self.classes == c].sum(axis=1)

    def _reached(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return `[num_slots, K]`: how many of a slot's `[n]` lengths reach beyond each position."""
        num = self.num_positions + 1
        of_length = np.bincount(slots * num + lengths, minlength=len(self.classes) * num).reshape(-1, num)
        return of_length[:, :0:-1].cumsum(axis=1)[:, ::-1]

    def tries(self, class_index: int) -> float:
        """Return how many recent verify steps of a class are known."""
        tries = self._class_tries[min(class_index, _MOST_CLASSES - 1)]
        return float(max(tries[0], tries[-1]))

    def forget(self, class_index: int) -> None:
        """Let what comes from now on count more than what was verified of a class so far."""
        c = min(class_index, _MOST_CLASSES - 1)
        tries = self._class_tries[c]
        scale = _FORGOTTEN / np.maximum(tries, _FORGOTTEN)
        self._class_accepted[c] *= scale
        tries *= scale

    def expected(self, slots: np.ndarray, hopeful_from: int | None = None) -> np.ndarray:
        """Return `[n, K + 1]` accepted tokens of each slot that are expected of a chain of 0 to K.

        Args:
            slots: `[n]` int64.
            hopeful_from: Position from which on a class's rates are taken a standard error too high; None for nowhere.
        """
        classes = self.classes[slots]
        rates = self._class_rates(classes)
        if hopeful_from is not None:
            spread = np.sqrt(rates * (1 - rates) / (self._class_tries[classes, :-1] + _CLASS))
            rates[:, hopeful_from:] = np.minimum(rates + spread, 1.0)[:, hopeful_from:]
        tries = self._tries[slots, :-1]
        return _of_chain((self._accepted[slots, :-1] + _OWN * rates) / (tries + _OWN))

    def expected_tree(self, slots: np.ndarray, is_hopeful: bool = False) -> np.ndarray:
        """Return `[n]` accepted tokens of each slot that are expected of a tree."""
        classes = self.classes[slots]
        means = self._class_means(classes)
        if is_hopeful:
            means = means * (1 + 1 / np.sqrt(self._class_tries[classes, -1] + _OWN))
        return (self._accepted[slots, -1] + _OWN * means) / (self._tries[slots, -1] + _OWN)

    def expected_of_class(self, class_index: int) -> tuple[np.ndarray, float]:
        """Return the same of a request of a class that nothing is known of: `[K + 1]`, and of a tree."""
        classes = np.array([min(class_index, _MOST_CLASSES - 1)])
        return _of_chain(self._class_rates(classes))[0], float(self._class_means(classes)[0])

    def _class_rates(self, classes: np.ndarray) -> np.ndarray:
        """Return `[n, K]` acceptance rates by position; a new position has those of the positions that are not."""
        tries, accepted = self._class_tries[classes, :-1], self._class_accepted[classes, :-1]
        mean = (accepted.sum(axis=1) + _FIRST) / (tries.sum(axis=1) + 1.0)
        return (accepted + _CLASS * mean[:, None]) / (tries + _CLASS)

    def _class_means(self, classes: np.ndarray) -> np.ndarray:
        """Return `[n]` accepted tokens of a tree; before one was verified, those of a chain of K and a fifth more."""
        of_chain = 1.2 * _of_chain(self._class_rates(classes))[:, -1]
        tries, accepted = self._class_tries[classes, -1], self._class_accepted[classes, -1]
        return (accepted + _OWN * of_chain) / (tries + _OWN)


def _of_chain(rates: np.ndarray) -> np.ndarray:
    """Return `[n, K + 1]` expected lengths of chains of 0 to K, given `[n, K]` chances by position."""
    lengths = np.zeros((len(rates), rates.shape[1] + 1))
    np.cumsum(np.cumprod(rates, axis=1), axis=1, out=lengths[:, 1:])
    return lengths
