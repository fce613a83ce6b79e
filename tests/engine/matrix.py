"""Every pair of settings that can meet, in as few engines as that takes: axes, what cannot meet, and the rows.

Pure Python, and deterministic: the same rows in every run. What a row does to a running engine is in matrix_run.py.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vllm_vidspec.names import PRUNERS

LOSSY = ("loose", "fly", "fly-entropy")
GUIDED = ("specvlm", "attention", "uv")
TREES = ("tree-static", "tree-adaptive")
FAMILIES = ("qwen2.5-vl", "llava-onevision")  # each drafts for itself in every shape
# Families without a bundled pair: their models are untrained, made by random_models.py.
UNTRAINED_FAMILIES = ("qwen2-vl", "qwen3-vl-moe")
SEVERAL = 4  # requests of a batch that has several

# What an engine is started with, what is set on a running one before a batch, and what a request brings.
ENGINE = {
    "family": (*FAMILIES, "qwen3-vl", *UNTRAINED_FAMILIES),
    "draft": ("bundled", "self", "far", "untrained"),
    "shape": ("chain", *TREES),
    "drafting": ("sequential", "parallel"),
    "scheduler": ("in-step", "ahead"),
    "allows": ("strict", "all"),  # scorers that a request may ask for
    "observes": ("attention", "uv", "both"),  # of the target, for pruners
}
BATCH = {
    "pruner": (*PRUNERS, "auto"),
    "prefill": ("plain", "chunked", "prefix-hit", "preempted"),
    "requests": ("one", "several"),
}
REQUEST = {
    "input": ("video", "videos", "images", "frames", "text"),
    "sampling": ("greedy", "sampled", "penalties", "truncated", "banned", "logprobs", "grammar"),
    "scorer": ("strict", *LOSSY),
}
AXES: dict[str, tuple[str, ...]] = ENGINE | BATCH | REQUEST

Cell = dict[str, str]  # axis -> value, of all axes
Pair = tuple[str, str, str, str]  # axis, value, later axis, value


class Refusal(NamedTuple):
    """Two settings that cannot meet, any value of the one with any of the other."""

    values: dict[str, tuple[str, ...]]
    why: str
    asked: str  # how one asks for it (`matrix_run.ASKED`)
    line: str  # a regular expression of the answer

    def pairs(self) -> Iterator[Pair]:
        (one, values), (other, others) = sorted(self.values.items(), key=lambda item: list(AXES).index(item[0]))
        for value, another in itertools.product(values, others):
            yield one, value, other, another


REFUSALS = (
    Refusal(
        {"drafting": ("parallel",), "shape": TREES},
        "a stream runs ahead of the target: a tree would be of text that it has not reached",
        "engine",
        "parallel drafting streams a chain",
    ),
    Refusal(
        {"family": UNTRAINED_FAMILIES, "draft": ("bundled", "far")},
        "no pair of it was trained",
        "checkpoint",
        "unknown family",
    ),
    Refusal(
        {"allows": ("strict",), "scorer": LOSSY},
        "clients cannot ask for less than the operator allows",
        "request",
        "this server allows strict, got",
    ),
    Refusal(
        {"observes": ("attention",), "pruner": ("uv",)},
        "hidden states are read by an engine that was started for it",
        "retune",
        "does not observe the target's uv",
    ),
    Refusal(
        {"observes": ("uv",), "pruner": ("specvlm", "attention")},
        "attention is read by an engine that was started for it",
        "retune",
        "does not observe the target's attention",
    ),
    Refusal(
        {"observes": ("attention", "uv"), "pruner": ("auto",)},
        "who learns counts from the first request on",
        "retune",
        "pruner cannot change to auto",
    ),
)


class Reason(NamedTuple):
    """What a request is counted as, once, where all of these axes have one of these values."""

    where: dict[str, tuple[str, ...]]
    counter: str
    why: str


# Whatever else is counted as skipped, unguided or strict is a failure, and so is one of these that is not counted.
REASONS = (
    Reason({"shape": TREES, "sampling": ("grammar",)}, "skipped_structured", "a grammar is checked along one line"),
    Reason({"scorer": LOSSY, "sampling": ("grammar",)}, "strict_structured", "a grammar holds of the target's tokens"),
    Reason({"scorer": LOSSY, "sampling": ("logprobs",)}, "strict_logprobs", "they are the target's own"),
)


def reasons(cell: Cell) -> set[str]:
    """Return what a cell's request is counted as."""
    return {one.counter for one in REASONS if all(cell[axis] in values for axis, values in one.where.items())}


def is_drafted(cell: Cell) -> bool:
    """Return whether drafts are proposed for a cell."""
    return not any(counter.startswith("skipped_") for counter in reasons(cell))


def is_guided(cell: Cell) -> bool | None:
    """Return whether the draft's prompt is pruned by scores of the target; None where `auto` decides."""
    if cell["pruner"] == "auto":
        return None
    return cell["pruner"] in GUIDED and cell["input"] != "text" and is_drafted(cell)


def is_equal(cell: Cell) -> bool:
    """Return whether the draft is the target itself, sees all that it sees and knows what it samples by."""
    knows = cell["sampling"] in ("greedy", "sampled", "truncated", "logprobs")
    return cell["draft"] == "self" and cell["pruner"] == "none" and knows


def is_able(cell: Cell) -> bool:
    """Return whether a draft surely guesses some tokens: it was trained, and what it guesses is not ruled out.

    A stream has to guess the token before a draft as well, as it runs ahead.
    """
    is_trained = cell["draft"] != "untrained" and cell["family"] not in UNTRAINED_FAMILIES
    is_free = cell["sampling"] not in ("grammar", "banned")
    is_near = cell["drafting"] == "sequential" or cell["draft"] != "far"
    return is_drafted(cell) and (is_equal(cell) or (is_trained and is_free and is_near))


# ---- pairs -----------------------------------------------------------------------------------------------------------


def pairs_of(cell: Cell) -> set[Pair]:
    """Return the pairs of values in a cell, or in part of one."""
    return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations([axis for axis in AXES if axis in cell], 2)}


def refused_pairs() -> set[Pair]:
    return {pair for refusal in REFUSALS for pair in refusal.pairs()}


def possible_pairs(axes: Iterable[str] = tuple(AXES)) -> set[Pair]:
    """Return the pairs of some axes' values that can meet."""
    return {
        (a, x, b, y)
        for a, b in itertools.combinations([axis for axis in AXES if axis in axes], 2)
        for x, y in itertools.product(AXES[a], AXES[b])
    } - refused_pairs()


def _combinations(axes: dict[str, tuple[str, ...]], given: Cell | None = None) -> list[Cell]:
    """Return every combination of some axes that can meet itself and what is given."""
    refused, known = refused_pairs(), given or {}
    found = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [one for one in found if not pairs_of(known | one) & refused]


# ---- rows ------------------------------------------------------------------------------------------------------------

Batch = tuple[Cell, ...]  # cells that run together on one engine: they differ in what requests bring


class Row(NamedTuple):
    engine: Cell
    batches: tuple[Batch, ...]


# Each family drafts for itself, unpruned, in each way: whatever is lost or misplaced on the way, a rejection tells.
EQUAL_ENGINES = [
    *({"family": f, "draft": "self", "drafting": "sequential", "shape": s} for f in FAMILIES for s in ENGINE["shape"]),
    *({"family": f, "draft": "self", "drafting": "sequential"} for f in ENGINE["family"][len(FAMILIES) :]),
    *({"family": f, "draft": "self", "drafting": "parallel"} for f in ENGINE["family"]),
]
EQUAL_BATCHES = [{"pruner": "none", "prefill": way, "requests": "several"} for way in BATCH["prefill"]]
EQUAL_REQUESTS = [
    {"input": "video", "sampling": "greedy", "scorer": "strict"},
    {"input": "videos", "sampling": "sampled", "scorer": "strict"},
    {"input": "frames", "sampling": "truncated", "scorer": "strict"},
    {"input": "images", "sampling": "logprobs", "scorer": "strict"},
]


def is_slow(engine: Cell) -> bool:
    """Return whether an engine is left to the slow tests: a drafter's process starts for ten seconds."""
    return engine["drafting"] == "parallel" and engine["draft"] != "self"


def engines() -> list[Cell]:
    """Return engines in which every pair of what an engine is started with meets: greedily the next best."""
    left, choices, found = _Open(possible_pairs(ENGINE)), _combinations(ENGINE), []
    while left.num_pairs or len(found) < len(EQUAL_ENGINES):
        wanted = EQUAL_ENGINES[len(found)] if len(found) < len(EQUAL_ENGINES) else {}
        found.append(max((one for one in choices if wanted.items() <= one.items()), key=left.count))
        left.cover(found[-1])
    return found


def make_rows() -> list[Row]:
    """Return rows in which every pair that can meet does: time and again, the batch that covers most of the rest.

    Slow engines are left what no other covers.
    """
    chosen, left = engines(), _Open(possible_pairs())
    choices = [(engine, _combinations(BATCH, engine), _combinations(REQUEST, engine)) for engine in chosen]
    batches: list[list[Batch]] = [[] for _ in chosen]

    def add(number: int, batch: Batch) -> None:
        batches[number].append(batch)
        for cell in batch:
            left.cover(cell)

    for number, engine in enumerate(chosen[: len(EQUAL_ENGINES)]):
        for way in EQUAL_BATCHES:
            add(number, tuple(engine | way | request for request in EQUAL_REQUESTS))
    for numbers in ([i for i, one in enumerate(chosen) if not is_slow(one)], range(len(chosen))):
        while left.num_pairs:
            offers = {number: _fill(*choices[number], left) for number in numbers}
            best = max(offers, key=lambda number: offers[number][0])
            if not offers[best][0]:
                break
            add(best, offers[best][1])
    return [Row(engine, tuple(own)) for engine, own in zip(chosen, batches, strict=True)]


class _Open:
    """The pairs that are left, by value: of each the values, as bits, that it has not met."""

    def __init__(self, pairs: set[Pair]):
        self._bits = {(axis, value): 1 << n for n, (axis, value) in enumerate((a, v) for a in AXES for v in AXES[a])}
        self._left = dict.fromkeys(self._bits, 0)
        for a, x, b, y in pairs:
            self._left[a, x] |= self._bits[b, y]
            self._left[b, y] |= self._bits[a, x]

    @property
    def num_pairs(self) -> int:
        return sum(left.bit_count() for left in self._left.values()) // 2

    def count(self, cell: Cell) -> int:
        """Return how many of them a cell has."""
        mask = sum(self._bits[item] for item in cell.items())
        return sum((self._left[item] & mask).bit_count() for item in cell.items()) // 2

    def promise(self, batch: Cell) -> int:
        """Return how many of them a batch's own values have with what requests bring."""
        return sum(self._left[item].bit_count() for item in batch.items())

    def cover(self, cell: Cell) -> None:
        mask = sum(self._bits[item] for item in cell.items())
        for item in cell.items():
            self._left[item] &= ~mask


def _fill(engine: Cell, batches: list[Cell], requests: list[Cell], left: _Open) -> tuple[int, Batch]:
    """Return the most promising batch of an engine, requests that cover most joined to it, and what they cover."""

    def worth(batch: Cell) -> float:
        return left.count(engine | batch) + 0.1 * left.promise(batch) * (batch["requests"] == "several")

    batch, trial = engine | max(batches, key=worth), copy.deepcopy(left)
    cells: list[Cell] = []
    for _ in range(SEVERAL if batch["requests"] == "several" else 1):
        cells.append(max((batch | request for request in requests), key=trial.count))
        trial.cover(cells[-1])
    return left.num_pairs - trial.num_pairs, tuple(cells)
