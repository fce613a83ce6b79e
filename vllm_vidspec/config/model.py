"""VidSpecConfig: one speculative configuration, given flat, in groups or both; needs pydantic only."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_vidspec.config.groups import (
    Group,
    ParallelKnobs,
    PoolKnobs,
    PruneKnobs,
    ScoreKnobs,
    TreeKnobs,
    nearest,
)
from vllm_vidspec.config.plans import NONE, Cap, Plan, PlanRow, capped, without_gaps
from vllm_vidspec.errors import VidSpecError, quoted

METHOD = "vidspec"
SELF = "self"
MOST_AUTO_CHAIN = 8  # of `draft_shape: auto`, which has trees for more
MOST_FLY_WINDOW = 6  # of vLLM's own FLy, where none is given

# What `vidspec calibrate` finds out for a pair, and on a machine.
CALIBRATED_KEYS = frozenset({"lambda_r", "guidance_layers", "uv_layer", "draft_table", "pruner", "prune_ratio"})

# Keys of vLLM's own speculative config that pass through unchanged.
PASS_THROUGH_KEYS = frozenset({"quantization", "revision", "code_revision", "draft_load_config"})

GROUPS: dict[str, type[Group]] = {
    "prune": PruneKnobs,
    "tree": TreeKnobs,
    "score": ScoreKnobs,
    "pool": PoolKnobs,
    "parallel": ParallelKnobs,
}
# What an error quotes, in characters, and how many complaints it makes.
_LONGEST_KEY, _LONGEST_VALUE, _LONGEST_PATH, _MOST_COMPLAINTS = 60, 120, 500, 6
# Other spellings of a knob's name.
_ALIASES = {"draft": "draft_shape", "drafting": "draft_shape"}
# The group of each knob that is in one, and its name there, by its flat name.
_PLACES = {flat: (group, name) for group, knobs in GROUPS.items() for name, flat in knobs.flat_names().items()}

Shape = Literal["chain", "tree-static", "tree-adaptive", "none"]


class VidSpecConfig(BaseModel):
    """One validated speculative configuration. Unknown keys are refused with the nearest known name."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    model: str
    """Draft model: a Hugging Face name or a path, of the target's family; or "self" to draft with the target's own
    weights (shared, not loaded twice) over the pruned video."""
    num_speculative_tokens: int = Field(ge=1, le=64)
    """K: draft tokens proposed, and verified, per step."""
    draft_shape: Literal["chain", "tree-static", "tree-adaptive", "auto"] = "chain"
    """Shape of the draft: `chain` proposes K tokens one after another; `tree-static` always the same tree of K tokens
    (`tree_paths`); `tree-adaptive` (SAGE) at most K, deep and narrow where the draft is confident, shallow and wide
    where it is not; `auto` chains or trees, whichever gains most (`adaptive_tokens`; the tree is `tree-static` where K
    is its number of nodes), or one of these by batch size (`draft_table`). Requests with structured outputs draft
    chains only: with trees they run without speculation. `draft` and `drafting` are other names of this key."""
    draft_table: tuple[tuple[PositiveInt, PositiveInt, Shape, NonNegativeInt], ...] | None = None
    """`auto`: rows `[first batch size, last, shape, tokens per step]`, as `vidspec calibrate --costs` measures them on
    a machine. One tree shape at most beside `chain`. `none` with 0 tokens: batches of these sizes run without
    speculation, and take it up again when fewer requests run."""
    num_speculative_tokens_per_batch_size: tuple[tuple[PositiveInt, PositiveInt, NonNegativeInt], ...] | None = None
    """vLLM's own schedule: rows `[first batch size, last, tokens per step]` that no step exceeds, whatever the shape. 0
    is `none`, as in `draft_table`."""
    adaptive_tokens: bool = True
    """Decide for every request and step how many tokens are drafted, from 0 to K (and with `draft_shape: auto` in which
    shape), by expected tokens over expected time, learned from the engine's own steps: a request whose drafts do not
    pay rests, one of a class that has not paid is not shown to the draft, and both are probed now and then. The output
    is the same. `draft_table` and `num_speculative_tokens_per_batch_size` are upper bounds then. `false` always drafts
    K tokens, or what these say."""
    draft_noise: Literal["shared", "independent", "greedy"] = Field(
        "shared", json_schema_extra={"instruments": ["greedy"]}
    )
    """How the draft samples when temperature > 0. `shared`: with the target's own noise (highest acceptance);
    `independent`: with noise of its own; `greedy`: argmax. The output is the same with each."""
    max_draft_len: int | None = Field(default=None, ge=1)
    """Longest pruned prompt, in tokens, that is drafted for; longer ones run without speculation."""
    on_draft_error: Literal["skip", "raise"] = "skip"
    """What an exception on the draft's side does: `skip` logs it, counts it and goes on without speculation for those
    requests; `raise` stops the engine (for tests)."""
    max_draft_failures: int = Field(default=8, ge=1)
    """Exceptions on the draft's side within `failure_window_s` seconds after which speculation switches itself off for
    `cooldown_s` seconds; a batch that fails at once is one."""
    failure_window_s: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """See `max_draft_failures`."""
    cooldown_s: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """See `max_draft_failures`."""
    calibration: str | None = None
    """A file that `vidspec calibrate` or `auto_file` wrote: its values replace the defaults of `draft_table`,
    `guidance_layers`, `lambda_r`, `prune_ratio`, `pruner`, `uv_layer`; what is given beside it wins."""
    prune: PruneKnobs = PruneKnobs()
    tree: TreeKnobs = TreeKnobs()
    score: ScoreKnobs = ScoreKnobs()
    pool: PoolKnobs = PoolKnobs()
    parallel: ParallelKnobs = ParallelKnobs()

    @model_validator(mode="before")
    @classmethod
    def _in_groups(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Put every knob into its group, however it was spelled."""
        grouped: dict[str, Any] = {}
        for flat, value in flatten(given).items():
            _refuse_senseless(flat, value)
            group, name = _PLACES.get(flat, ("", flat))
            (grouped.setdefault(group, {}) if group else grouped)[name] = value
        return grouped

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _whole_schedule(cls, caps: tuple[Cap, ...] | None) -> tuple[Cap, ...] | None:
        return None if caps is None else without_gaps(caps)

    @model_validator(mode="after")
    def _whole_table(self) -> "VidSpecConfig":
        if self.draft_shape != "auto":
            return self
        if not self.draft_table:
            if self.adaptive_tokens:
                return self
            raise ValueError(
                "draft_shape auto with adaptive_tokens false needs draft_table: measure one with `vidspec calibrate "
                "--costs` and give its file as calibration"
            )
        end = 0
        for first, last, shape, num_tokens in self.draft_table:
            if first != end + 1 or last < first:
                raise ValueError(f"draft_table: batch sizes must follow each other from 1 on, got {first} to {last}")
            end = last
            if num_tokens > self.num_speculative_tokens:
                raise ValueError(
                    f"draft_table: {num_tokens} tokens a step, num_speculative_tokens is {self.num_speculative_tokens}"
                )
            if (shape == NONE) != (num_tokens == 0):
                raise ValueError(f"draft_table: 0 tokens a step are the shape none, got {shape} with {num_tokens}")
        if len(self.shapes - {"chain"}) > 1:
            raise ValueError("draft_table: chain and one tree shape, not two")
        return self

    @model_validator(mode="after")
    def _tokens_for_a_tree(self) -> "VidSpecConfig":
        if "tree-adaptive" in self.shapes and self.num_speculative_tokens < self.tree.depth_min:
            raise ValueError(
                f"tree-adaptive needs num_speculative_tokens of at least tree_depth_min, {self.tree.depth_min}, got "
                f"{self.num_speculative_tokens}"
            )
        if "tree-static" not in self.shapes:
            return self
        num_nodes = len(self.tree.static_paths)
        wrong = {num for _, _, shape, num in self._rows if shape == "tree-static"} - {num_nodes}
        if wrong:
            raise ValueError(
                f"this static tree has {num_nodes} nodes: num_speculative_tokens must be {num_nodes}, not {min(wrong)}"
            )
        return self

    @property
    def _rows(self) -> tuple[tuple[int, int, str, int], ...]:
        """The rows of `draft_table`, or the one that a single shape makes; `auto` without a table is a tree at most."""
        if self.draft_shape == "auto":
            most = self.num_speculative_tokens
            return self.draft_table or ((1, 1, self._auto_tree, most),)
        return ((1, 1, self.draft_shape, self.num_speculative_tokens),)

    @property
    def _auto_tree(self) -> Shape:
        """The tree of `draft_shape: auto` without a table."""
        is_static = len(self.tree.static_paths) == self.num_speculative_tokens
        return "tree-static" if is_static else "tree-adaptive"

    @property
    def _finds_shape(self) -> bool:
        """Whether chains and trees are chosen from without a table."""
        return self.draft_shape == "auto" and not self.draft_table

    @property
    def shapes(self) -> frozenset[str]:
        """Every shape that this configuration can draft; the chain's where it never drafts."""
        found = frozenset(row.plan.shape for row in self.plans if row.plan.num_tokens) or frozenset({"chain"})
        return found | {"chain"} if self._finds_shape else found

    @property
    def in_trees(self) -> bool:
        """Whether a draft can be a tree."""
        return self.shapes != {"chain"}

    @property
    def max_path(self) -> int:
        """The most drafts that can follow each other in one step."""
        return max(
            {
                NONE: lambda num_tokens: 1,
                "chain": lambda num_tokens: num_tokens,
                "tree-static": lambda num_tokens: max(map(len, self.tree.static_paths)),
                "tree-adaptive": lambda num_tokens: min(num_tokens, self.tree.depth_max),
            }[row.plan.shape](row.plan.num_tokens)
            for row in self.plans
        )

    @property
    def fly_window(self) -> int:
        """Drafts after a mismatch that must match exactly for `fly`; by default vLLM's, whose chains are our paths."""
        given = self.score.fly_window
        return max(1, min(MOST_FLY_WINDOW, self.max_path - 1)) if given is None else given

    @functools.cached_property
    def plans(self) -> tuple[PlanRow, ...]:
        """What is drafted by batch size, which is also vLLM's schedule of tokens; past the end the last row holds."""
        return capped(self._rows, self.num_speculative_tokens_per_batch_size)

    @property
    def changes_with_load(self) -> bool:
        """Whether the number of tokens may differ from step to step."""
        return self.has_schedule or self.adaptive_tokens

    @property
    def has_schedule(self) -> bool:
        """Whether tokens by batch size were given."""
        has_table = self.draft_shape == "auto" and self.draft_table is not None
        return has_table or self.num_speculative_tokens_per_batch_size is not None

    def choices(self, has_graphs: bool) -> tuple[Plan, ...]:
        """Return what `adaptive_tokens` chooses from beside nothing, trees first and long chains before short ones.

        Args:
            has_graphs: Whether each number of tokens costs graphs: then chains are whole or half.
        """
        plans = {row.plan for row in self.plans if row.plan.num_tokens}
        trees = sorted(plan for plan in plans if plan.shape != "chain")
        longest = max((plan.num_tokens for plan in plans if plan.shape == "chain"), default=0)
        if self._finds_shape:
            longest = min(self.num_speculative_tokens, MOST_AUTO_CHAIN)
        if has_graphs:
            lengths = {longest, -(-longest // 2)}
        else:
            lengths = {longest >> shift for shift in range(7)} | {length for length in (3, 5) if length <= longest}
        return (*trees, *(Plan("chain", length) for length in sorted(lengths - {0}, reverse=True)))

    def plan_for(self, num_reqs: int) -> Plan:
        """Return what a step of so many requests drafts for each."""
        return next((row.plan for row in self.plans if num_reqs <= row.last), self.plans[-1].plan)

    @model_validator(mode="after")
    def _chains_in_parallel(self) -> "VidSpecConfig":
        if self.is_parallel and self.in_trees:
            raise ValueError(
                "parallel drafting streams a chain: a tree would be of text that the target has not reached; use "
                "draft_shape chain, or drop parallel"
            )
        return self

    @property
    def is_parallel(self) -> bool:
        """Whether the drafter runs in a process of its own."""
        return self.parallel.device is not None

    @property
    def is_self_draft(self) -> bool:
        """Whether the target drafts for itself."""
        return self.model == SELF

    def flat(self) -> dict[str, Any]:
        """Return every knob by its flat name."""
        return flatten(self.model_dump())

    def changed(self, knobs: Mapping[str, Any]) -> "VidSpecConfig":
        """Return this configuration with some knobs changed, however spelled; no calibration is read again.

        Raises:
            VidSpecError: One line naming the wrong key or value.
        """
        return _validated(self.flat() | flatten(knobs), knobs)

    def summary(self) -> str:
        """Return the active configuration as one line for the start-up log."""
        return " ".join(f"{key}={value}" for key, value in self.flat().items() if value is not None)


def parse_config(raw: dict[str, Any]) -> tuple[VidSpecConfig, dict[str, Any]]:
    """Split a `--speculative-config` dict into our configuration and the keys that vLLM itself understands.

    Args:
        raw: The dict as given; `method` is ignored, dashes in keys count as underscores.

    Returns:
        The validated configuration and the pass-through dict.

    Raises:
        VidSpecError: One line naming the wrong key or value, with the nearest known name.
    """
    given = {key.replace("-", "_"): value for key, value in raw.items()}
    given.pop("method", None)
    passed = {key: given.pop(key) for key in list(given) if key in PASS_THROUGH_KEYS}
    flat = flatten(given)
    if flat.get("calibration") is not None:
        flat = _read_calibration(flat["calibration"]) | flat
    return _validated(flat, given), passed


def flatten(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return knobs by their flat names, however they are spelled.

    Raises:
        VidSpecError: An unknown key, a group that is none, or a knob that is given twice.
    """
    flat: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unknown = []
    for spelling, name, value in _spellings(given):
        if not name:
            unknown.append(f"{quoted(spelling)}{nearest(spelling[:_LONGEST_KEY], _KNOWN)}")
        elif name in flat:
            raise VidSpecError(f"speculative config: {spelled[name]} and {spelling} are one knob: give one of them")
        else:
            flat[name], spelled[name] = value, spelling
    if unknown:
        raise VidSpecError(f"speculative config: unknown key {_some(unknown)}")
    return flat


def _spellings(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each knob's spelling (`tree.depth_max` in a group), its flat name ("" if it has none) and its value."""
    for key, value in given.items():
        if key not in GROUPS:
            name = _ALIASES.get(key, key)
            yield key, name if name in _FLAT_NAMES else "", value
            continue
        if isinstance(value, Group):
            value = value.model_dump(exclude_unset=True)
        if not isinstance(value, Mapping):
            raise VidSpecError(f"speculative config: {key}: a group takes an object of its knobs, got {quoted(value)}")
        for own, inner in value.items():
            own = own.replace("-", "_")
            yield f"{key}.{own}", GROUPS[key].flat_names().get(own, ""), inner


_FLAT_NAMES = (*(name for name in VidSpecConfig.model_fields if name not in GROUPS), *_PLACES)
_KNOWN = (*_FLAT_NAMES, *map(".".join, _PLACES.values()), *GROUPS, *sorted(PASS_THROUGH_KEYS))


def _refuse_senseless(name: str, value: Any) -> None:
    """Refuse what no knob takes, however deep in a value: NaN, and integers beyond a machine's word.

    Raises:
        ValueError: One line.
    """
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, list | tuple):
            left += found
        elif (isinstance(found, int) and abs(found) >= 1 << 63) or found != found:
            raise ValueError(f"{name}: no knob takes such a number, got {quoted(found)}")


def _validated(flat: dict[str, Any], given: Mapping[str, Any]) -> VidSpecConfig:
    """Return the configuration of knobs by their flat names; an error has the names that the user gave.

    Raises:
        VidSpecError: One line for all that is wrong.
    """
    try:
        return VidSpecConfig(**flat)
    except ValidationError as error:
        spelled = {name: spelling for spelling, name, _ in _spellings(given)}
        raise VidSpecError(f"speculative config: {_one_line(error, spelled)}") from None


def _read_calibration(path: Any) -> dict[str, Any]:
    """Return the knobs of a calibration file.

    Raises:
        VidSpecError: The file is missing, is no JSON object or holds other keys than `vidspec calibrate` writes.
    """
    # What is not printable in a path would break the line; a path is otherwise named as it is.
    where = path if isinstance(path, str) and path.isprintable() and len(path) <= _LONGEST_PATH else quoted(path)
    not_ours = VidSpecError(f"speculative config: calibration: {where} is not a file of `vidspec calibrate`")
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise not_ours  # a pipe would be waited for, a device read for ever
        values = json.loads(Path(path).read_text())["config"]
        unknown = sorted(values.keys() - CALIBRATED_KEYS)
    except OSError as error:
        raise VidSpecError(f"speculative config: calibration: {where}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise not_ours from None
    if unknown:
        raise VidSpecError(
            f"speculative config: calibration: {where} sets {quoted(unknown[0])}, which is not calibrated"
        )
    return values


def _one_line(error: ValidationError, spelled: Mapping[str, str]) -> str:
    parts = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if where and where[0] in GROUPS:  # a rule between knobs of a group names them itself
            where = [GROUPS[where[0]].flat_names()[where[1]], *where[2:]] if len(where) > 1 else []
        path = ".".join([spelled.get(where[0], where[0]), *where[1:]]) if where else ""
        message = item["msg"].removeprefix("Value error, ")
        got = "" if item["type"] in ("missing", "value_error") else f", got {quoted(item['input'], _LONGEST_VALUE)}"
        parts.append(f"{path}: {message[:_LONGEST_PATH]}{got}" if path else message[:_LONGEST_PATH])
    return _some(parts)


def _some(parts: Sequence[str]) -> str:
    """Return complaints in a line; of very many the first."""
    more = [f"and {len(parts) - _MOST_COMPLAINTS} more"] if len(parts) > _MOST_COMPLAINTS else []
    return "; ".join([*parts[:_MOST_COMPLAINTS], *more])
