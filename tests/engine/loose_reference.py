"""What loose verification did, judged in float64: the Hugging Face model reads the emitted text back."""

from typing import Any

import numpy as np
import torch

from tests.engine import guidance_reference


def read_back(
    family: str, prompt_ids: list[int], token_ids: list[int], videos: list[np.ndarray], top_n: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each emitted token the target's most likely one in its place, given the emitted ones before it, `[n]`
    int64; and the visual relevance (LVSpec eq. 8) of its own final hidden state, `[n]` float64.
    """
    output, is_visual, states = guidance_reference.run(family, [*prompt_ids, *token_ids], videos)
    _, model = guidance_reference._load(family)
    with torch.no_grad():
        final = model.model.language_model.norm(states[-1])
    unit = final / final.norm(dim=-1, keepdim=True)
    cosines = unit[len(prompt_ids) :] @ unit[is_visual].T
    likely = output.logits[0, len(prompt_ids) - 1 : -1].argmax(-1)
    return likely, cosines.topk(top_n).values.mean(-1)


def check(
    family: str,
    outputs: list[Any],
    videos: list[list[np.ndarray]],
    records: list[dict],
    max_unmeasured: int = 1,
    tolerance: float = 1e-4,
) -> int:
    """Every token is what the record says, and only tokens said to be loosened or shifted are not the target's own.

    Return how many these were. The last token's relevance is never measured, nor that of what no step verified.
    """
    by_req = {record["req_id"].split("-")[0]: record for record in records}
    num_loosened = 0
    for output, shown in zip(outputs, videos, strict=True):
        record, tokens = by_req[output.request_id.split("-")[0]], list(output.outputs[0].token_ids)
        # A step may have verified drafts past the end of the text.
        assert record["tokens"][: len(tokens)] == tokens
        likely, relevance = read_back(family, list(output.prompt_token_ids), tokens, shown)
        kinds = torch.tensor(record["kinds"][: len(tokens)])
        is_own = likely == torch.tensor(tokens)
        assert torch.equal(is_own, kinds < 2), [i for i in range(len(tokens)) if bool(is_own[i]) != (kinds[i] < 2)]
        measured = [(i, value) for i, value in enumerate(record["relevance"][: len(tokens)]) if value is not None]
        assert len(measured) >= len(tokens) - max_unmeasured
        ours = torch.tensor([value for _, value in measured], dtype=torch.float64)
        error = float((ours - relevance[[i for i, _ in measured]]).abs().max())
        assert error <= tolerance, error
        num_loosened += int((~is_own).sum())
    return num_loosened
