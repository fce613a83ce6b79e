"""What the counters say: differences of snapshots, and the figures that this project reports."""

from vllm_vidspec.metrics.catalogue import GAUGES, NAMES


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return what the counters gained between two snapshots; gauges keep their later value."""
    return {name: after[name] if name in GAUGES else after[name] - before[name] for name in NAMES}


def summarize(values: dict[str, int]) -> dict[str, float | int | None]:
    """Turn counters, a snapshot or the `difference` of two, into the figures that this project reports.

    Returns:
        `acceptance_length` (mean tokens a verify step emits, the target's own included) and `acceptance_rate`
        (accepted / drafted), None where nothing was drafted; `num_drafts`; `draft_kv_bytes` that the draft's prompts
        took and `full_draft_kv_bytes` that they would take unpruned.
    """
    drafts, drafted, accepted = values["drafts"], values["draft_tokens"], values["accepted_tokens"]
    token_bytes, text = values["draft_kv_bytes_per_token"], values["text_tokens"]
    return {
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "num_drafts": drafts,
        "draft_kv_bytes": (text + values["visual_tokens_kept"]) * token_bytes,
        "full_draft_kv_bytes": (text + values["visual_tokens_full"]) * token_bytes,
    }
