"""`vidspec calibrate --costs`: which drafts pay on this machine, by batch size, if any; engines are subprocesses."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec.config import NONE, Plan, parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.calibrate import FIRST_VIDEO, Calibration
from vllm_vidspec.tools.calibrate import check as check_pair
from vllm_vidspec.tools.engine_session import EngineSession
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.subject import reasons

VANILLA = "vanilla"
CHAIN = "chain"
TREES = ("tree-static", "tree-adaptive")
BATCH_SIZES = (1, 2, 4, 8, 16)
# Requests of a round at a batch size below this: several small batches, so that no single video decides.
_REQUESTS_PER_ROUND = 4

# First batch size, last, shape, tokens per step.
TableRow = tuple[int, int, str, int]


@dataclass(frozen=True)
class Costs:
    """What to measure.

    Attributes:
        calibration: The pair, the videos and the knobs; `num_speculative_tokens` is the longest chain's.
        rounds: How often every draft takes its turn, each time in a new engine.
        knobs: The calibration file that the table will be added to, or None.
    """

    calibration: Calibration
    rounds: int = 3
    knobs: str | None = None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that the engine allows."""
        most = self.calibration.engine_args.get("max_num_seqs", BATCH_SIZES[-1])
        return tuple(size for size in BATCH_SIZES if size <= most)

    @property
    def drafts(self) -> tuple[Plan, ...]:
        """What is measured: vanilla, chains of one token and of K, between which the others lie, and trees."""
        chains = sorted({1, self.calibration.num_speculative_tokens})
        trees = (Plan(shape, pairs.num_speculative_tokens(shape)) for shape in TREES)
        return (Plan(VANILLA, 0), *(Plan(CHAIN, num_tokens) for num_tokens in chains), *trees)

    def job(self, draft: Plan) -> dict[str, Any]:
        """Return what `session_job` reads."""
        what, spec = self.calibration, {} if self.knobs is None else {"calibration": self.knobs}
        # `drafting` is the knob `draft` under the name that `pairs` gives it.
        name = "drafting" if what.target is None else "draft"
        job = what.job(**spec, **{name: draft.shape}, num_speculative_tokens=draft.num_tokens)
        if draft.shape == VANILLA:
            del job["llm"]["speculative_config"]
        job["llm"] |= {"max_num_seqs": BATCH_SIZES[-1], **what.engine_args}
        if not what.videos:
            job["prompts"]["held_out"] = list(range(FIRST_VIDEO, FIRST_VIDEO + self.num_prompts))
        return job

    @property
    def num_prompts(self) -> int:
        """How many prompts a session has; batches take them in turn."""
        return len(self.calibration.videos) or max(self.calibration.prompts, self.batch_sizes[-1])

    def batches(self, number: int) -> list[list[int]]:
        """Return the batches of a round, as indices of prompts: the same for every draft."""
        first = number * _REQUESTS_PER_ROUND
        starts = [
            (start, size) for size in self.batch_sizes for start in range(0, max(size, _REQUESTS_PER_ROUND), size)
        ]
        return [[(first + start + i) % self.num_prompts for i in range(size)] for start, size in starts]


@dataclass(frozen=True)
class Cost:
    """What a draft costs and brings at one batch size.

    Attributes:
        shape: One of TREES, "chain" or "vanilla".
        batch_size: Requests that decode at once.
        num_speculative_tokens: K; 0 for vanilla.
        acceptance_length: Tokens that a verify step of a request emits, over all rounds.
        step_ms: Median wall time of a step in which all requests decode.
        tokens_per_s: Of the whole batch: what of these two follows.
        num_steps: Steps that were timed; 0 where time and acceptance follow from those of other chains.
    """

    shape: str
    batch_size: int
    num_speculative_tokens: int
    acceptance_length: float
    step_ms: float
    tokens_per_s: float
    num_steps: int


def check(costs: Costs, out: str | None = None) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    check_pair(costs.calibration, out)
    if costs.rounds < 1:
        raise VidSpecError("--rounds must be at least 1")
    if not costs.batch_sizes:
        raise VidSpecError("--engine-args: max_num_seqs must be at least 1")
    for draft in costs.drafts:
        if draft.num_tokens:
            parse_config(costs.job(draft)["llm"]["speculative_config"])


def read_file(path: str, calibration: Calibration) -> dict[str, Any]:
    """Return what a calibration file holds, to add a table to it; nothing where there is none yet."""
    if not Path(path).is_file():
        return {}
    try:
        found = json.loads(Path(path).read_text())
        pair = {name: found[name] for name in ("target", "draft")}
        found["config"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise VidSpecError(f"--out: {path} is there and is not a file of `vidspec calibrate`") from None
    if pair != calibration.pair:
        raise VidSpecError(f"--out: {path} is of another pair: {pair['target']} and {pair['draft']}")
    return found


def run(costs: Costs, report: Report = silent) -> dict[str, Any]:
    """Measure every draft in turn, round by round, and make the table.

    Returns:
        `config` (the table), the pair, `costs` (one row per draft and batch size), and `provenance`.
    """
    check(costs)
    report("plan", {"total": costs.rounds * len(costs.drafts)})
    runs: dict[Plan, list[dict[str, Any]]] = {draft: [] for draft in costs.drafts}
    for number in range(costs.rounds):
        for draft in costs.drafts:
            report("loading", {"label": f"round {number + 1}: {label(*draft)}"})
            with EngineSession(costs.job(draft)) as session:
                command = {"batches": costs.batches(number), "max_tokens": costs.calibration.max_tokens}
                answer = session.ask({"command": "cost"} | command)
            runs[draft] += _checked(label(*draft), answer["runs"])
            report("measured", {})
    measured: list[Cost] = []
    for size in costs.batch_sizes:
        ours = {draft: [found for found in runs[draft] if found["batch_size"] == size] for draft in costs.drafts}
        measured += [cost_of(draft, size, ours[draft]) for draft in costs.drafts]
        chains = [cost for cost in measured if cost.batch_size == size and cost.shape == CHAIN]
        measured += chains_between(chains[0], chains[-1], ours[Plan(CHAIN, costs.calibration.num_speculative_tokens)])
    what = costs.calibration
    return {
        "config": {"draft_table": draft_table(measured)},
        **what.pair,
        "prune_ratio": what.prune_ratio,
        "pruner": what.pruner,
        "rounds": costs.rounds,
        "videos": what.shown_source,
        "costs": [asdict(cost) for cost in measured],
        "provenance": provenance(),
    }


def label(shape: str, num_tokens: int) -> str:
    """Return a draft's name: a tree's has its shape alone, as it has one number of tokens."""
    return f"{CHAIN} {num_tokens}" if shape == CHAIN else shape


def _checked(name: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs of an engine."""
    for found in runs:
        counters, size = found["metrics"], found["batch_size"]
        if counters and ((skipped := reasons(counters, "skipped_")) or not counters["drafts"]):
            why = skipped or "their answers are too short"
            raise VidSpecError(f"{name}, batch size {size}: requests ran without speculation ({why})")
        if not found["step_s"]:
            raise VidSpecError(
                f"{name}: no step decoded for {size} requests at once: longer answers (--max-tokens) or a smaller "
                "max_num_seqs (--engine-args) are needed"
            )
    return runs


def cost_of(draft: Plan, batch_size: int, runs: Sequence[Mapping[str, Any]]) -> Cost:
    """Sum up the runs of one draft at one batch size.

    Args:
        draft: Its shape and K.
        batch_size: Of all these runs.
        runs: Each with `step_s` (of every step that decoded for all) and `metrics` (None for vanilla).
    """
    steps = [seconds for found in runs for seconds in found["step_s"]]
    length = 1.0
    if draft.num_tokens:
        drafts, accepted = (sum(found["metrics"][name] for found in runs) for name in ("drafts", "accepted_tokens"))
        length += accepted / drafts
    return _cost(draft, batch_size, length, statistics.median(steps), len(steps))


def chains_between(first: Cost, last: Cost, runs: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Return what shorter chains than the longest would cost and bring: measured ends, a straight line between them.

    Each further token costs a draft forward and a row of the target's, the same each time. A chain that is cut off
    behind its k-th token accepts of each draft what the longest accepts of its first k.

    Args:
        first: Of the shortest chain at one batch size; `last` of the longest there.
        runs: The longest chain's, with `metrics` that tell the accepted tokens by position.
    """
    low, high = first.num_speculative_tokens, last.num_speculative_tokens
    found = []
    for num_tokens in range(low + 1, high):
        step_ms = first.step_ms + (last.step_ms - first.step_ms) * (num_tokens - low) / (high - low)
        accepted = sum(run["metrics"][f"accepted_at_pos_{i}"] for i in range(num_tokens) for run in runs)
        length = 1.0 + accepted / sum(run["metrics"]["drafts"] for run in runs)
        found.append(_cost(Plan(CHAIN, num_tokens), last.batch_size, length, step_ms / 1e3, 0))
    return found


def _cost(draft: Plan, batch_size: int, length: float, step_s: float, num_steps: int) -> Cost:
    return Cost(
        draft.shape, batch_size, draft.num_tokens, length, 1e3 * step_s, batch_size * length / step_s, num_steps
    )


def draft_table(costs: Sequence[Cost]) -> list[TableRow]:
    """Return the rows of the knob `draft_table`: at each batch size what emits the most tokens per second.

    That is no draft at all where none is faster than vanilla. An engine drafts chains and one kind of tree at most: the
    one that is the fastest of all at more batch sizes, and of two that are so equally often the one with the greater
    gain over the chain, summed over batch sizes. What was not measured belongs to the next larger batch size that was.
    """
    sizes = sorted({cost.batch_size for cost in costs})
    # Of equally fast ones the first: nothing before chains before trees, short chains before long ones.
    order = (VANILLA, CHAIN, *TREES)
    costs = sorted(costs, key=lambda cost: (order.index(cost.shape), cost.num_speculative_tokens))

    def fastest(size: int, shapes: Sequence[str]) -> Cost:
        here = [cost for cost in costs if cost.batch_size == size and cost.shape in shapes]
        return max(here, key=lambda cost: cost.tokens_per_s)

    def gain(size: int, tree: str) -> float:
        return fastest(size, (tree,)).tokens_per_s / fastest(size, (CHAIN,)).tokens_per_s

    wins = [fastest(size, order).shape for size in sizes]
    tree = max(TREES, key=lambda shape: (wins.count(shape), sum(gain(size, shape) for size in sizes)))
    table: list[TableRow] = []
    for last, size in zip([0, *sizes], sizes, strict=False):
        best = fastest(size, (VANILLA, CHAIN, tree))
        plan = Plan(NONE if best.shape == VANILLA else best.shape, best.num_speculative_tokens)
        first = table.pop()[0] if table and table[-1][2:] == plan else last + 1
        table.append((first, size, *plan))
    return table
