"""VidSpecConfig: one checked speculative configuration, the rules between its fields and what follows from them."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError, field_validator, model_validator

from vllm_vidspec.config.fields import AUTO, Fields, ParallelKnobs
from vllm_vidspec.config.schedule import ADAPTIVE_DEPTHS, Cap, Plan, PlanRow, capped, check_table, without_gaps
from vllm_vidspec.config.spelling import explain, refusal
from vllm_vidspec.config.static_tree import GROWN_DEPTHS
from vllm_vidspec.errors import VidSpecError, quoted

METHOD = "vidspec"
SELF = "self"
OWN_TOWER, TARGET_TOWER = "own", "target"  # `draft_vision`, besides `auto` and a file
AUTO_CHAINS = (5, 3, 2, 1)  # lengths of `draft_shape: auto`, which has trees for more
AUTO_CHAINS_IN_GRAPHS = (3, 1)
MAX_FLY_WINDOW = 6  # vLLM's own FLy's
# How `state_bytes` is split between what is kept.
_STATE_PARTS = {"guidance": 5, "relevance": 5, "embeddings": 2}


class VidSpecConfig(Fields):
    """One validated speculative configuration. Unknown keys are refused with the nearest known name."""

    @classmethod
    def checked(cls, given: Mapping[str, Any], problems: Sequence[str] = ()) -> "VidSpecConfig":
        """Return the configuration of these fields; a VidSpecError says all that is wrong, and what is known to be."""
        found = None
        try:
            found = cls(**given)
        except ValidationError as error:
            problems = [*problems, *explain(error)]
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
    def _fits_together(self) -> "VidSpecConfig":
        problems: list[str] = []
        try:
            problems.extend(self._contradictions())
        except ValueError as error:  # of a table or a tree that is none: what follows from it cannot be looked at
            problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yield what is wrong between fields that are right one by one."""
        if self.request_scorers is not None and self.scorer not in (*self.request_scorers, "strict"):
            yield f"request_scorers leaves out the server's own scorer, {self.scorer!r}"
        if self.parallel.device is None and self.parallel != ParallelKnobs():
            yield "parallel: device is missing"
        if self.is_self_draft and self.is_parallel:
            yield f'parallel with "model": "{SELF}": the draft is in the target\'s own KV cache; name a draft model'
        if self.is_self_draft and self.draft_positions != "original":
            yield f'draft_positions {self.draft_positions} with "model": "{SELF}": its entries have the target\'s'
        if self._is_free and not self.adaptive_tokens:
            yield "draft_shape auto with adaptive_tokens false needs draft_table"
        if self.draft_table:
            check_table(self.draft_table, self.num_speculative_tokens)
        if self.is_parallel and self.in_trees:
            yield (
                "parallel drafting streams a chain: a tree would be of text that the target has not reached; use "
                "draft_shape chain, or drop parallel"
            )
        if "tree-adaptive" in self.shapes and self.num_speculative_tokens < ADAPTIVE_DEPTHS[0]:
            yield (
                f"tree-adaptive needs num_speculative_tokens of at least {ADAPTIVE_DEPTHS[0]}, got "
                f"{self.num_speculative_tokens}"
            )
        if "tree-static" in self.shapes:
            num_nodes = len(self.paths_of("tree-static"))
            if wrong := {num for _, _, shape, num in self._rows if shape == "tree-static"} - {num_nodes}:
                yield (
                    f"this static tree has {num_nodes} nodes: num_speculative_tokens must be {num_nodes}, not "
                    f"{min(wrong)}"
                )

    @property
    def _rows(self) -> tuple[tuple[int, int, str, int], ...]:
        """The rows of `draft_table`, or the single row of one shape; of `auto` without a table its deepest tree."""
        if self.draft_table:
            return self.draft_table
        shape = self._free_trees[0] if self.draft_shape == "auto" else self.draft_shape
        return ((1, 1, shape, self.num_speculative_tokens),)

    @property
    def _free_trees(self) -> tuple[str, ...]:
        """The trees of `auto` without a table, deep before shallow: a user's own, or those with two nodes a level."""
        if self.tree_paths is not None:
            return ("tree-static",)
        fits = [shape for shape, depth in GROWN_DEPTHS.items() if 2 * depth <= self.num_speculative_tokens]
        return tuple(reversed(fits or ["tree-2"]))

    @property
    def _is_free(self) -> bool:
        """Whether the policy chooses between chains and a tree, without a table."""
        return self.draft_shape == "auto" and not self.draft_table

    @property
    def shapes(self) -> frozenset[str]:
        """Every shape that this configuration can draft; a chain where it never drafts."""
        found = frozenset(row.plan.shape for row in self.plans if row.plan.num_tokens) or frozenset({"chain"})
        return found | {"chain", *self._free_trees} if self._is_free else found

    @property
    def in_trees(self) -> bool:
        """Whether a draft can be a tree."""
        return self.shapes != {"chain"}

    @property
    def max_path(self) -> int:
        """The most drafts that can follow each other in one step."""
        free = self.choices(has_graphs=False) if self._is_free else ()
        return max(plan.depth(self) for plan in (*free, *(row.plan for row in self.plans)))

    @property
    def fly_window(self) -> int:
        """Drafts after a mismatch that must match exactly for `fly`: vLLM's, whose chains are our paths."""
        return max(1, min(MAX_FLY_WINDOW, self.max_path - 1))

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
        return self.draft_table is not None or self.num_speculative_tokens_per_batch_size is not None

    def choices(self, has_graphs: bool) -> tuple[Plan, ...]:
        """Return the plans that the policy chooses from besides none: trees first, then chains, long before short.

        Where each number of tokens takes CUDA graphs, chains are whole or half, or two of `auto`.
        """
        plans = {row.plan for row in self.plans if row.plan.num_tokens}
        trees = sorted(plan for plan in plans if plan.shape != "chain")
        longest = max((plan.num_tokens for plan in plans if plan.shape == "chain"), default=0)
        if self._is_free:
            most = max((plan.num_tokens for plan in plans), default=0)
            trees = [Plan(shape, most) for shape in self._free_trees] if most else []
            lengths = {min(length, most) for length in (AUTO_CHAINS_IN_GRAPHS if has_graphs else AUTO_CHAINS)}
        elif has_graphs:
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

    @property
    def has_own_tower(self) -> bool:
        """Whether the draft has a vision tower of its own. Start-up replaces `auto`, as far as it can."""
        return self.draft_vision in (AUTO, OWN_TOWER) and not self.is_self_draft

    @property
    def draft_map(self) -> str | None:
        """The file of the map from the target's vision embeddings to the draft's; None where there is none."""
        return None if self.draft_vision in (AUTO, OWN_TOWER, TARGET_TOWER) else self.draft_vision

    def state_bytes_for(self, what: str) -> int | None:
        """Return how much of `state_bytes` "guidance", "relevance" or "embeddings" has; None where it is not given."""
        if self.state_bytes is None:
            return None
        kept = {
            "guidance": any(way.pruner == "uv" for way in self.variants),
            "relevance": "loose" in self.scorers,
            "embeddings": not self.is_self_draft,
        }
        whole = sum(parts for name, parts in _STATE_PARTS.items() if kept.get(name, True) or name == what)
        return self.state_bytes * _STATE_PARTS[what] // whole

    def changed(self, knobs: Mapping[str, Any]) -> "VidSpecConfig":
        """Return this configuration with some knobs changed; no calibration is read again."""
        return self.checked(self.model_dump() | dict(knobs))

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
        most = min(self.num_speculative_tokens, AUTO_CHAINS[0]) if shape == "chain" else self.num_speculative_tokens
        return self.changed({"draft_shape": shape, "num_speculative_tokens": most})

    def summary(self) -> str:
        """Return the active configuration as one line for the start-up log."""
        values = self.model_dump(exclude_none=True, exclude=set() if self.is_parallel else {"parallel"})
        return " ".join(f"{key}={value}" for key, value in values.items())
