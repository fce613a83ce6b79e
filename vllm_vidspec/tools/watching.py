"""Looks into a running engine of ours: what was pruned of each prompt.

`LLM.collective_rpc(pruning, args=(True,))` begins, the same with False returns what was seen since, by rank.
"""

from typing import Any

from vllm_vidspec.engine.report.observer import Observer
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
    records = prompts_of(runner.observers, on)
    if not as_lists:
        return records
    return [
        {"req_id": record["req_id"]}
        | {name: [item.tolist() for item in record[name] or ()] for name in ("kept_indices", "scores")}
        for record in records
    ]


def prompts_of(observers: list[Observer], on: bool) -> list[dict[str, Any]]:
    """Return what observers of a `DraftPrefill` have seen since watching began; see `pruning`."""
    watch = put_watch(observers, PruneWatch() if on else None, PruneWatch)
    return [] if watch is None else watch.records


def put_watch(observers: list[Observer], watch: Any, kind: type) -> Any:
    """Put a watch of a kind, or None, in the place of the one before; return that, None if there was none."""
    before = next((observer for observer in observers if isinstance(observer, kind)), None)
    observers[:] = [observer for observer in (*observers, watch) if observer not in (before, None)]
    return before


class PruneWatch(Observer):
    """The records of what was pruned."""

    keeps_embeddings = True

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def pruned(self, job: Any, kept: list[Any]) -> None:
        units, whole = job.plan.units, [embeddings for embeddings in job.whole if embeddings is not None]
        is_seen = len(whole) == len(job.whole)
        self.records.append(
            {
                "req_id": job.req_id,
                "grids": tuple(unit.grid for unit in units),
                "kept_indices": tuple(unit.merged(kept) for unit in units),
                "scores": job.scores,
                "embeddings": [unit.joined(whole) for unit in units] if is_seen else None,
            }
        )
