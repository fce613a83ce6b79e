"""VidSpecConfig: one checked speculative configuration, the rules between its fields and what follows from them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError, field_validator, model_validator

from vllm_vidspec.config.fields import AUTO, Fields
from vllm_vidspec.config.schedule import Cap, Plan, PlanRow, capped, check_table, without_gaps
from vllm_vidspec.config.spelling import explain, flatten, grouped, read, refusal
from vllm_vidspec.errors import VidSpecError, quoted

METHOD = "vidspec"
SELF = "self"
MAX_AUTO_CHAIN = 8  # of `draft_shape: auto`, which has trees for more
MAX_FLY_WINDOW = 6  # of vLLM's own FLy, where none is given


class VidSpecConfig(Fields):
    """One validated speculative configuration. Unknown keys are refused with the nearest known name."""

    @model_validator(mode="before")
    @classmethod
    def _in_groups(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Put every field into its group, however it was spelled."""
        return grouped(given)

    @classmethod
    def checked(cls, flat: dict[str, Any], given: Mapping[str, Any], problems: Sequence[str] = ()) -> "VidSpecConfig":
        """Return the configuration of fields by flat names; a VidSpecError says all that is wrong, as `given` does, and
        what is known to be by now.
        """
        found = None
        try:
            found = cls(**flat)
        except ValidationError as error:
            problems = [*problems, *explain(error, given)]
        if found is None or problems:
            raise refusal(problems)
        return found

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        if not model.strip():
            raise ValueError(f'a name, a path or "{SELF}" is missing')
        if model != SELF == model.strip().lower():
            raise ValueError(f"{quoted(model)} (did you mean {SELF!r}?)")
        return model

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _whole_schedule(cls, caps: tuple[Cap, ...] | None) -> tuple[Cap, ...] | None:
        return None if caps is None else without_gaps(caps)

    @model_validator(mode="after")
    def _possible_shapes(self) -> "VidSpecConfig":
        if self._is_free and not self.adaptive_tokens:
            raise ValueError("draft_shape auto with adaptive_tokens false needs draft_table")
        if self.draft_shape == "auto" and self.draft_table:
            check_table(self.draft_table, self.num_speculative_tokens)
            if len(self.shapes - {"chain"}) > 1:
                raise ValueError("draft_table: chain and one tree shape, not two")
        if self.is_parallel and self.in_trees:
            raise ValueError(
                "parallel drafting streams a chain: a tree would be of text that the target has not reached; use "
                "draft_shape chain, or drop parallel"
            )
        if "tree-adaptive" in self.shapes and self.num_speculative_tokens < self.tree.depth_min:
            raise ValueError(
                f"tree-adaptive needs num_speculative_tokens of at least tree_depth_min, {self.tree.depth_min}, got "
                f"{self.num_speculative_tokens}"
            )
        if "tree-static" not in self.shapes:
            return self
        num_nodes = len(self.tree.static_paths)
        if wrong := {num for _, _, shape, num in self._rows if shape == "tree-static"} - {num_nodes}:
            raise ValueError(
                f"this static tree has {num_nodes} nodes: num_speculative_tokens must be {num_nodes}, not {min(wrong)}"
            )
        return self

    @property
    def _rows(self) -> tuple[tuple[int, int, str, int], ...]:
        """The rows of `draft_table`, or the single row of one shape; of `auto` without a table its tree."""
        if self.draft_shape == "auto" and self.draft_table:
            return self.draft_table
        shape: str = self.draft_shape
        if shape == "auto":
            is_static = len(self.tree.static_paths) == self.num_speculative_tokens
            shape = "tree-static" if is_static else "tree-adaptive"
        return ((1, 1, shape, self.num_speculative_tokens),)

    @property
    def _is_free(self) -> bool:
        """Whether the controller chooses between chains and a tree, without a table."""
        return self.draft_shape == "auto" and not self.draft_table

    @property
    def shapes(self) -> frozenset[str]:
        """Every shape that this configuration can draft; a chain where it never drafts."""
        found = frozenset(row.plan.shape for row in self.plans if row.plan.num_tokens) or frozenset({"chain"})
        return found | {"chain"} if self._is_free else found

    @property
    def in_trees(self) -> bool:
        """Whether a draft can be a tree."""
        return self.shapes != {"chain"}

    @property
    def max_path(self) -> int:
        """The most drafts that can follow each other in one step."""
        return max(row.plan.depth(self.tree) for row in self.plans)

    @property
    def fly_window(self) -> int:
        """Drafts after a mismatch that must match exactly for `fly`; by default vLLM's, whose chains are our paths."""
        given = self.score.fly_window
        return max(1, min(MAX_FLY_WINDOW, self.max_path - 1)) if given is None else given

    @functools.cached_property
    def plans(self) -> tuple[PlanRow, ...]:
        """What is drafted by batch size, which is also vLLM's schedule; the last row holds for larger batches."""
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
        """Return the plans that the controller chooses from besides none: trees first, then chains, long before short.

        Where each number of tokens takes CUDA graphs, chains are whole or half.
        """
        plans = {row.plan for row in self.plans if row.plan.num_tokens}
        trees = sorted(plan for plan in plans if plan.shape != "chain")
        longest = max((plan.num_tokens for plan in plans if plan.shape == "chain"), default=0)
        if self._is_free:
            longest = min(self.num_speculative_tokens, MAX_AUTO_CHAIN)
        if has_graphs:
            lengths = {longest, -(-longest // 2)}
        else:
            lengths = {longest >> shift for shift in range(7)} | {length for length in (3, 5) if length <= longest}
        return (*trees, *(Plan("chain", length) for length in sorted(lengths - {0}, reverse=True)))

    def plan_for(self, num_reqs: int) -> Plan:
        """Return what a step of so many requests drafts for each."""
        return next((row.plan for row in self.plans if num_reqs <= row.last), self.plans[-1].plan)

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
        """Return this configuration with some knobs changed, however spelled; no calibration is read again."""
        flat, problems = read(knobs)
        return self.checked(self.flat() | flat, knobs, problems)

    @property
    def choosable_shapes(self) -> tuple[str, ...]:
        """The values that `draft_shape` may change to while the engine runs, `auto` first; none where it is fixed."""
        return (AUTO, *sorted(self.shapes)) if self._is_free and self.adaptive_tokens else ()

    def of_shape(self, shape: Any) -> "VidSpecConfig":
        """Return this configuration with drafts of one of its `choosable_shapes` alone; a VidSpecError for another."""
        if not self.choosable_shapes:
            raise VidSpecError("draft_shape cannot change while the engine runs: start it with auto")
        if shape not in self.choosable_shapes:
            known = ", ".join(self.choosable_shapes)
            raise VidSpecError(f"draft_shape: {known} while the engine runs, got {quoted(shape)}")
        most = min(self.num_speculative_tokens, MAX_AUTO_CHAIN) if shape == "chain" else self.num_speculative_tokens
        return self.changed({"draft_shape": shape, "num_speculative_tokens": most})

    def summary(self) -> str:
        """Return the active configuration as one line for the start-up log."""
        return " ".join(f"{key}={value}" for key, value in self.flat().items() if value is not None)
