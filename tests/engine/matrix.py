"""Every pair of settings that can meet, in as few engines as that takes: axes, what cannot meet, and the rows.

Pure Python, and deterministic: the same rows in every run. What a row does to a running engine is in matrix_run.py.
"""

import itertools
from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from vllm_vidspec.names import PRUNERS

LOSSY = ("loose", "fly", "fly-entropy")
GUIDED = ("specvlm", "specvlm:stride", "attention", "uv")
TREES = ("tree-static", "tree-adaptive")
# They choose places alone, whatever the target and the pixels say: what one of them meets, all meet. They take turns.
BLIND = tuple(name for name in PRUNERS if name not in (*GUIDED, "none", "fastvid", "dycoke"))
FAMILIES = ("qwen2.5-vl", "llava-onevision")  # each drafts for itself in every shape
# Families without a bundled pair: their models are untrained, made by random_models.py.
UNTRAINED_FAMILIES = ("qwen2-vl", "qwen3-vl-moe")
SEVERAL = 4  # requests of a batch that has several
NUM_OFFERS = 60  # batches of which the best is taken

# What an engine is started with, what is set on a running one before a batch, and what a request brings.
ENGINE = {
    "family": (*FAMILIES, "qwen3-vl", *UNTRAINED_FAMILIES),
    # The target itself; a twin of it; or others, of a pair that errs often, or of no training, which are always wrong.
    "draft": ("self", "twin", "other"),
    "shape": ("chain", *TREES),
    "drafting": ("sequential", "parallel"),
    "scheduler": ("in-step", "ahead"),
    "allows": ("strict", "all"),  # scorers that a request may ask for
    "observes": ("attention", "uv", "both"),  # of the target, for pruners
}
BATCH = {
    "pruner": ("none", *GUIDED, "fastvid", "dycoke", "blind", "auto"),
    "prefill": ("plain", "chunked", "prefix-hit", "preempted"),
    "requests": ("one", "several"),
}
REQUEST = {
    "input": ("video", "videos", "images", "frames", "text"),
    "sampling": ("greedy", "sampled", "penalties", "truncated", "banned", "logprobs", "grammar"),
    "scorer": ("strict", *LOSSY),
}
AXES: dict[str, tuple[str, ...]] = ENGINE | BATCH | REQUEST

Cell = dict[str, str]  # axis -> value, of all axes; and "blind", where the pruner is one of these
Pair = tuple[str, str, str, str]  # axis, value, later axis, value


class Refusal(NamedTuple):
    """Two settings that cannot meet, any value of the one with any of the other."""

    values: dict[str, tuple[str, ...]]
    asked: str  # how one asks for it (`matrix_run.ASKED`)
    line: str  # a regular expression of the answer

    def pairs(self) -> Iterator[Pair]:
        (one, values), (other, others) = sorted(self.values.items(), key=lambda item: list(AXES).index(item[0]))
        for value, another in itertools.product(values, others):
            yield one, value, other, another


REFUSALS = (
    # A stream runs ahead of the target: a tree would be of text that it has not reached.
    Refusal({"drafting": ("parallel",), "shape": TREES}, "engine", "parallel drafting streams a chain"),
    # Over the target's own cache there is nothing that another process could draft, nor does a tower encode.
    Refusal({"draft": ("self",), "drafting": ("parallel",)}, "engine", 'parallel with "model": "self"'),
    Refusal({"draft": ("self",), "pruner": ("fastvid", "dycoke")}, "retune", "no tower encodes for the draft"),
    # Clients cannot ask for less than the operator allows.
    Refusal({"allows": ("strict",), "scorer": LOSSY}, "request", "this server allows strict, got"),
    # What is read of the target is read by an engine that was started for it.
    Refusal({"observes": ("attention",), "pruner": ("uv",)}, "retune", "does not observe the target's uv"),
    Refusal(
        {"observes": ("uv",), "pruner": ("specvlm", "specvlm:stride", "attention")},
        "retune",
        "does not observe the target's attention",
    ),
    # Who learns counts from the first request on.
    Refusal({"observes": ("attention", "uv"), "pruner": ("auto",)}, "retune", "pruner cannot change to auto"),
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
    return {one.counter for one in REASONS if all(cell[axis] in values for axis, values in one.where.items())}


def is_drafted(cell: Cell) -> bool:
    return not any(counter.startswith("skipped_") for counter in reasons(cell))


def is_guided(cell: Cell) -> bool | None:
    """Return whether the draft's prompt is pruned by scores of the target; None where `auto` decides."""
    if cell["pruner"] == "auto":
        return None
    return cell["pruner"] in GUIDED and cell["input"] != "text" and is_drafted(cell)


def is_equal(cell: Cell) -> bool:
    """Return whether the draft is the target itself, sees all that it sees and knows what it samples by."""
    knows = cell["sampling"] in ("greedy", "sampled", "truncated", "logprobs")
    return cell["draft"] != "other" and cell["pruner"] == "none" and knows


def is_able(cell: Cell) -> bool:
    """Return whether a draft surely guesses some tokens: trained, nothing ruled out, and a stream not sampled."""
    is_trained = cell["family"] not in UNTRAINED_FAMILIES
    # Without a video no pair says anything that it was trained for: here and there it repeats a word, and drafts none.
    is_trained &= cell["input"] != "text"
    is_free = cell["sampling"] not in ("grammar", "banned")
    is_near = cell["drafting"] == "sequential" or (cell["draft"] == "twin" and cell["sampling"] == "greedy")
    return is_drafted(cell) and (is_equal(cell) or (is_trained and is_free and is_near))


def pairs_of(cell: Cell) -> set[Pair]:
    return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations([axis for axis in AXES if axis in cell], 2)}


REFUSED: set[Pair] = {pair for refusal in REFUSALS for pair in refusal.pairs()}


def possible_pairs(axes: Iterable[str] = tuple(AXES)) -> set[Pair]:
    """Return the pairs of some axes' values that can meet."""
    return {
        (a, x, b, y)
        for a, b in itertools.combinations([axis for axis in AXES if axis in axes], 2)
        for x, y in itertools.product(AXES[a], AXES[b])
    } - REFUSED


Batch = tuple[Cell, ...]  # cells that run together on one engine: they differ in what requests bring


class Row(NamedTuple):
    engine: Cell
    batches: tuple[Batch, ...]


# Each family drafts for itself, unpruned, and so does its twin: whatever is lost or misplaced, a rejection tells.
# Where one shape will do, it is the one that leaves fewest pairs to further engines.
EQUAL_ENGINES = [
    *({"family": f, "draft": "self", "drafting": "sequential", "shape": s} for f in FAMILIES for s in ENGINE["shape"]),
    *({"family": f, "draft": "self", "drafting": "sequential", "shape": TREES[0]} for f in ENGINE["family"][2:]),
    *({"family": f, "draft": "twin", "drafting": "sequential"} for f in ENGINE["family"][:3]),
    *({"family": f, "draft": "twin", "drafting": "parallel"} for f in ENGINE["family"]),
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
    return engine["drafting"] == "parallel" and engine["draft"] == "other"


def engines() -> list[Cell]:
    """Return engines in which every pair of what an engine is started with meets: greedily the next best."""
    left, found = possible_pairs(ENGINE), []
    cells = [dict(zip(ENGINE, values, strict=True)) for values in itertools.product(*ENGINE.values())]
    choices = [(cell, pairs) for cell in cells if not (pairs := pairs_of(cell)) & REFUSED]
    while left or len(found) < len(EQUAL_ENGINES):
        wanted = EQUAL_ENGINES[len(found)] if len(found) < len(EQUAL_ENGINES) else {}
        fitting = [choice for choice in choices if wanted.items() <= choice[0].items()]
        best, pairs = max(fitting, key=lambda choice: len(choice[1] & left))
        found.append(best)
        left -= pairs
    return found


def make_rows() -> list[Row]:
    """Return rows in which every pair meets that can: greedily, over drawn candidates (Cohen et al., AETG, 1997)."""
    random, chosen, left = Random(0), engines(), possible_pairs()
    batches: list[list[Batch]] = [[] for _ in chosen]
    to_come = list(BLIND)  # who has had no turn yet

    def add(number: int, batch: Batch) -> None:
        if batch[0]["pruner"] == "blind":
            name = to_come.pop(0) if to_come else random.choice(BLIND)
            batch = tuple(cell | {"blind": name} for cell in batch)
        batches[number].append(batch)
        left.difference_update(*map(pairs_of, batch))

    for number in range(len(EQUAL_ENGINES)):
        for way in EQUAL_BATCHES:
            add(number, tuple(chosen[number] | way | request for request in EQUAL_REQUESTS))
    while left or to_come:
        a, x, b, y = min(left, default=("pruner", "blind", "requests", "several"))
        offers = [_draw(random, chosen, {a: x, b: y}) for _ in range(NUM_OFFERS)]
        add(*max(offers, key=lambda offer: len(left.intersection(set().union(*map(pairs_of, offer[1]))))))
    return [Row(engine, tuple(own)) for engine, own in zip(chosen, batches, strict=True)]


def _draw(random: Random, chosen: list[Cell], wanted: Cell) -> tuple[int, Batch]:
    """Return an engine by number, a slow one only where no other can, and a batch of it with some wanted values."""
    able = [i for i, engine in enumerate(chosen) if engine | wanted == wanted | engine]  # they agree
    able = [i for i in able if not pairs_of(chosen[i] | wanted) & REFUSED]
    number = random.choice([i for i in able if not is_slow(chosen[i])] or able)
    first = _complete(random, chosen[number] | wanted)
    shared = {axis: first[axis] for axis in ENGINE | BATCH}
    num_more = SEVERAL - 1 if first["requests"] == "several" else 0
    return number, (first, *(_complete(random, shared) for _ in range(num_more)))


def _complete(random: Random, part: Cell) -> Cell:
    """Return a cell with the given values, and others that can meet."""
    while True:
        cell = {axis: part.get(axis) or random.choice(values) for axis, values in AXES.items()}
        if not pairs_of(cell) & REFUSED:
            return cell
