"""Looks into a running engine of ours: what was pruned of each prompt.

`LLM.collective_rpc(pruning, args=(True,))` begins, the same with False returns what was seen since, by rank.
"""

from typing import Any

from vllm_vidspec.errors import VidSpecError


def pruning(worker: Any, on: bool, as_lists: bool = False) -> list[dict[str, Any]]:
    """Return what was pruned since watching began, and go on watching or not.

    Per prompt `req_id`, and per image, video or run of images that are pruned as one `grids`, `kept_indices`, `scores`,
    `embeddings` (None if not measured). With `as_lists` only indices and scores, as numbers: an engine in another
    process cannot send tensors.
    """
    runner = worker.model_runner
    if not hasattr(runner, "parts"):  # a pipeline stage before the last
        return []
    if runner.knobs.current.is_parallel:
        raise VidSpecError("pruning traces are unavailable with parallel drafting")
    records = prompts_of(runner.speculator.backend.drafter.prefills, on)
    if not as_lists:
        return records
    return [
        {"req_id": record["req_id"]}
        | {name: [item.tolist() for item in record[name] or ()] for name in ("kept_indices", "scores")}
        for record in records
    ]


def prompts_of(prefills: Any, on: bool) -> list[dict[str, Any]]:
    """Return what a `DraftPrefill` has pruned since watching began; see `pruning`."""
    watch, prefills.on_pruned = prefills.on_pruned, PruneWatch() if on else None
    prefills.vision.keeps_looks = on
    return list(watch or ())


class PruneWatch(list):
    """The records of what was pruned."""

    def __call__(self, job: Any, kept: list[Any]) -> None:
        """Take in a `PrefillJob` whose items are all there, and what stays of each, `[k_i]` int64."""
        units, looks = job.plan.units, [look for look in job.looks if look is not None]
        is_seen = len(looks) == len(job.looks)
        self.append(
            {
                "req_id": job.req_id,
                "grids": tuple(unit.grid for unit in units),
                "kept_indices": tuple(unit.merged(kept) for unit in units),
                "scores": job.scores,
                "embeddings": [unit.joined(looks) for unit in units] if is_seen else None,
            }
        )
