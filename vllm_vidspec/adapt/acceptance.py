"""AcceptanceTable: how many drafts of a request are accepted, learned by request and by class; numpy only.

A chain's draft at position j is tried when all before it were accepted, so what is estimated is the chance that it is
then accepted too. A request begins with what its class has shown, a class with what all classes have. A tree has one
figure: how many of its drafts are accepted in a step.
"""

import numpy as np

_FIRST = 0.7  # of a first draft, before anything was seen
_OWN = 10.0  # tries of a request that weigh as much as what its class has shown
_CLASS = 8.0  # tries of a class that weigh as much as what all have shown
_HALF_LIFE = 256.0  # observations of a class after which they count half
_REQUEST_DECAY = 0.98  # of a request's tries, a step
_FORGOTTEN = 24.0  # tries that `forget` leaves of a class
_MOST_CLASSES = 128


class AcceptanceTable:
    """Estimates by slot (a running request) and by class.

    Args:
        num_slots: Requests that run at the same time, at most.
        num_positions: K, the longest chain.
    """

    def __init__(self, num_slots: int, num_positions: int):
        self.num_positions = num_positions
        self._positions = np.arange(num_positions)
        # [2, ..., K + 1] tries, and what was accepted of them: of chains by position, and of trees steps and drafts.
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
        """Take in a verify step.

        Args:
            slots: `[n]` int64, distinct.
            drafted: `[n]` drafts that were verified of each.
            accepted: `[n]` how many of them were accepted.
            is_chain: Whether they were chains; trees otherwise.
        """
        gained = np.zeros((2, len(slots), self.num_positions + 1))
        if is_chain:
            num_accepted = accepted[:, None]
            np.less(self._positions, np.minimum(num_accepted + 1, drafted[:, None]), out=gained[0, :, :-1])
            np.less(self._positions, num_accepted, out=gained[1, :, :-1])
        else:
            gained[0, :, -1], gained[1, :, -1] = 1.0, accepted
        self._own[:, slots] = _REQUEST_DECAY * self._own[:, slots] + gained
        classes = self.classes[slots]
        counts = np.bincount(classes)
        for c in np.flatnonzero(counts).tolist():
            mine = gained if counts[c] == len(classes) else gained[:, classes == c]
            self._of_class[:, c] = 0.5 ** (counts[c] / _HALF_LIFE) * self._of_class[:, c] + mine.sum(axis=1)

    def tries(self, class_index: int) -> float:
        """Return how many verify steps, recent ones, are known of a class."""
        tries = self._class_tries[min(class_index, _MOST_CLASSES - 1)]
        return float(max(tries[0], tries[-1]))

    def forget(self, class_index: int) -> None:
        """Let what comes from now on count more than what a class has shown so far."""
        c = min(class_index, _MOST_CLASSES - 1)
        tries = self._class_tries[c]
        scale = _FORGOTTEN / np.maximum(tries, _FORGOTTEN)
        self._class_accepted[c] *= scale
        tries *= scale

    def expected(self, slots: np.ndarray) -> np.ndarray:
        """Return `[n, K + 1]` drafts of each slot that are accepted of a chain of 0 to K."""
        classes = self.classes[slots]
        rates = self._class_rates(classes, slice(0, -1))
        tries = self._tries[slots, :-1]
        return _of_chain((self._accepted[slots, :-1] + _OWN * rates) / (tries + _OWN))

    def expected_tree(self, slots: np.ndarray) -> np.ndarray:
        """Return `[n]` drafts of each slot that are accepted of a tree."""
        means = self._class_means(self.classes[slots])
        return (self._accepted[slots, -1] + _OWN * means) / (self._tries[slots, -1] + _OWN)

    def expected_of_class(self, class_index: int) -> tuple[np.ndarray, float]:
        """Return the same of a request of a class that nothing is known of: `[K + 1]`, and of a tree."""
        classes = np.array([min(class_index, _MOST_CLASSES - 1)])
        return _of_chain(self._class_rates(classes, slice(0, -1)))[0], float(self._class_means(classes)[0])

    def _class_rates(self, classes: np.ndarray, where: slice) -> np.ndarray:
        """Return `[n, K]` chances by position; where a position is new, those of the positions that are not."""
        tries, stood = self._class_tries[classes, where], self._class_accepted[classes, where]
        mean = (stood.sum(axis=1) + _FIRST) / (tries.sum(axis=1) + 1.0)
        return (stood + _CLASS * mean[:, None]) / (tries + _CLASS)

    def _class_means(self, classes: np.ndarray) -> np.ndarray:
        """Return `[n]` accepted drafts of a tree; before one was verified, those of a chain of K and a fifth more."""
        of_chain = 1.2 * _of_chain(self._class_rates(classes, slice(0, -1)))[:, -1]
        tries, stood = self._class_tries[classes, -1], self._class_accepted[classes, -1]
        return (stood + _OWN * of_chain) / (tries + _OWN)


def _of_chain(rates: np.ndarray) -> np.ndarray:
    """Return `[n, K + 1]` expected lengths of chains of 0 to K, given `[n, K]` chances by position."""
    lengths = np.zeros((len(rates), rates.shape[1] + 1))
    np.cumsum(np.cumprod(rates, axis=1), axis=1, out=lengths[:, 1:])
    return lengths
