"""`vidspec calibrate --costs`: which shape of draft pays on this machine, by batch size; engines are subprocesses."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_vidspec.config import parse_config
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
        calibration: The pair, the videos and the knobs; `num_speculative_tokens` is the chain's.
        rounds: How often every shape takes its turn, each time in a new engine.
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

    def num_speculative_tokens(self, shape: str) -> int:
        """Return K of a shape."""
        if shape == CHAIN:
            return self.calibration.num_speculative_tokens
        return pairs.num_speculative_tokens(shape)

    def job(self, shape: str) -> dict[str, Any]:
        """Return what `session_job` reads."""
        what, spec = self.calibration, {} if self.knobs is None else {"calibration": self.knobs}
        # `drafting` is the knob `draft` under the name that `pairs` gives it.
        name = "drafting" if what.target is None else "draft"
        job = what.job(**spec, **{name: shape}, num_speculative_tokens=self.num_speculative_tokens(shape))
        if shape == VANILLA:
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
        """Return the batches of a round, as indices of prompts: the same for every shape."""
        first = number * _REQUESTS_PER_ROUND
        starts = [
            (start, size) for size in self.batch_sizes for start in range(0, max(size, _REQUESTS_PER_ROUND), size)
        ]
        return [[(first + start + i) % self.num_prompts for i in range(size)] for start, size in starts]


@dataclass(frozen=True)
class Cost:
    """What a shape costs and brings at one batch size.

    Attributes:
        shape: One of TREES, "chain" or "vanilla".
        batch_size: Requests that decode at once.
        num_speculative_tokens: K; 0 for vanilla.
        acceptance_length: Tokens that a verify step of a request emits, over all rounds.
        step_ms: Median wall time of a step in which all requests decode.
        tokens_per_s: Of the whole batch: what of these two follows.
        num_steps: Steps that were timed.
    """

    shape: str
    batch_size: int
    num_speculative_tokens: int
    acceptance_length: float
    step_ms: float
    tokens_per_s: float
    num_steps: int


def check(costs: Costs, out: str | None = None) -> None:
    """Refuse a wrong value before an engine starts.

    Raises:
        VidSpecError: One line naming it.
    """
    check_pair(costs.calibration, out)
    if costs.rounds < 1:
        raise VidSpecError("--rounds must be at least 1")
    if not costs.batch_sizes:
        raise VidSpecError("--engine-args: max_num_seqs must be at least 1")
    for shape in (CHAIN, *TREES):
        parse_config(costs.job(shape)["llm"]["speculative_config"])


def read_file(path: str, calibration: Calibration) -> dict[str, Any]:
    """Return what a calibration file holds, to add a table to it; nothing where there is none yet.

    Raises:
        VidSpecError: It is something else, or of another pair.
    """
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
    """Measure every shape in turn, round by round, and make the table.

    Args:
        costs: What to measure.
        report: Called with "plan", "loading" and "measured", as `progress.View` takes them.

    Returns:
        `config` (the table), the pair, `costs` (one row per shape and batch size), and `provenance`.

    Raises:
        VidSpecError: A wrong value, an engine that stopped, or prompts that were not drafted for.
    """
    check(costs)
    shapes = (VANILLA, CHAIN, *TREES)
    report("plan", {"total": costs.rounds * len(shapes)})
    runs: dict[str, list[dict[str, Any]]] = {shape: [] for shape in shapes}
    for number in range(costs.rounds):
        for shape in shapes:
            report("loading", {"label": f"round {number + 1}: {shape}"})
            with EngineSession(costs.job(shape)) as session:
                command = {"batches": costs.batches(number), "max_tokens": costs.calibration.max_tokens}
                answer = session.ask({"command": "cost"} | command)
            runs[shape] += _checked(shape, answer["runs"])
            report("measured", {})
    k = {shape: 0 if shape == VANILLA else costs.num_speculative_tokens(shape) for shape in shapes}
    measured = [cost_of(shape, size, k[shape], runs[shape]) for size in costs.batch_sizes for shape in shapes]
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


def _checked(shape: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs of an engine.

    Raises:
        VidSpecError: Something was not drafted for, or no step had the whole batch.
    """
    for found in runs:
        counters, size = found["metrics"], found["batch_size"]
        if counters and ((skipped := reasons(counters, "skipped_")) or not counters["drafts"]):
            why = skipped or "their answers are too short"
            raise VidSpecError(f"{shape}, batch size {size}: requests ran without speculation ({why})")
        if not found["step_s"]:
            raise VidSpecError(
                f"{shape}: no step decoded for {size} requests at once: longer answers (--max-tokens) or a smaller "
                "max_num_seqs (--engine-args) are needed"
            )
    return runs


def cost_of(shape: str, batch_size: int, num_tokens: int, runs: Sequence[Mapping[str, Any]]) -> Cost:
    """Sum up the runs of one shape at one batch size.

    Args:
        shape: As in `Cost`.
        batch_size: Whose runs to take.
        num_tokens: K.
        runs: Each with `batch_size`, `step_s` (of every step that decoded for all) and `metrics` (None for vanilla).
    """
    ours = [found for found in runs if found["batch_size"] == batch_size]
    steps = [seconds for found in ours for seconds in found["step_s"]]
    length = 1.0
    if shape != VANILLA:
        drafts, accepted = (sum(found["metrics"][name] for found in ours) for name in ("drafts", "accepted_tokens"))
        length += accepted / drafts
    step_s = statistics.median(steps)
    return Cost(shape, batch_size, num_tokens, length, 1e3 * step_s, batch_size * length / step_s, len(steps))


def draft_table(costs: Sequence[Cost]) -> list[TableRow]:
    """Return the rows of the knob `draft_table`: at each batch size what emits the most tokens per second.

    An engine drafts chains and one kind of tree at most: the one that is the fastest of all at more batch sizes, and of
    two that are so equally often the one with the greater gain over the chain, summed over batch sizes. What was not
    measured belongs to the next larger batch size that was.

    Args:
        costs: Of the chain and both trees at every batch size; what is vanilla's is not looked at.
    """
    speed = {(cost.shape, cost.batch_size): cost.tokens_per_s for cost in costs}
    num_tokens = {cost.shape: cost.num_speculative_tokens for cost in costs}
    sizes = sorted({cost.batch_size for cost in costs})

    def fastest(size: int, shapes: Sequence[str]) -> str:
        return max(shapes, key=lambda shape: speed[shape, size])  # of equal ones the first: the chain

    wins = [fastest(size, (CHAIN, *TREES)) for size in sizes]
    gains = {tree: sum(speed[tree, size] / speed[CHAIN, size] for size in sizes) for tree in TREES}
    tree = max(TREES, key=lambda shape: (wins.count(shape), gains[shape]))
    table: list[TableRow] = []
    for last, size in zip([0, *sizes], sizes, strict=False):
        shape = fastest(size, (CHAIN, tree))
        first = table.pop()[0] if table and table[-1][2] == shape else last + 1
        table.append((first, size, shape, num_tokens[shape]))
    return table
