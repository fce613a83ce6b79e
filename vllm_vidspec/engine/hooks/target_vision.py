"""TargetVision: what the target's tower makes of images and videos, as the draft's would have made it.

The target encodes an item whole, a moment before its language model reads it, and lets go of the embeddings soon after:
with several videos a prompt that is before the draft's prefill. So they are turned into the draft's as they are made,
into its cache; a chat's next turn, whose video the target does not encode again, finds them there, too. What is in
neither is encoded again, by the target's tower (`DraftModel.encode`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.pruning.prompt import content_name

logger = init_logger("vllm.vidspec")


class TargetVision:
    """Hands on what requests that may be drafted for will be shown; ranks make the same calls in the same order."""

    def __init__(
        self,
        model_state: Any,
        outputs: Mapping[str, torch.Tensor],  # the target's, by identifier, as long as vLLM keeps them
        as_draft: Callable[[torch.Tensor], torch.Tensor],  # turns its [..., width] into the draft's [m, width]
        agreement: Agreement,
    ):
        self._outputs, self._as_draft, self._agreement = outputs, as_draft, agreement
        self._wanted: dict[int, dict[str, str]] = {}  # by row: names of what its prompt has, by identifier
        self.keep: Callable[[str, torch.Tensor], Any] | None = None  # where embeddings of a name go; None: nowhere yet
        compat.observe_encoder(model_state, self._hand_on)

    def add(self, req_state_idx: int, features: Iterable[Any]) -> None:
        """Expect that the draft will be shown these features of vLLM's for a row."""
        self._wanted[req_state_idx] = {feature.identifier: content_name(feature) for feature in features}

    def remove(self, req_state_idx: int) -> None:
        self._wanted.pop(req_state_idx, None)

    def active_rows(self) -> Iterable[int]:
        return self._wanted

    def find(self, identifier: str, num_tokens: int, kept: torch.Tensor | None) -> torch.Tensor | None:
        """Return an item's embeddings `[num_tokens, width]`, or those of `[k]` int64 kept ones on the host; None where
        the target has let go of them.
        """
        found = self._outputs.get(identifier)
        if found is None or found.shape[:-1].numel() != num_tokens:
            return None
        found = found.flatten(0, -2)
        return self._as_draft(found if kept is None else found[async_tensor_h2d(kept, device=found.device)])

    def _hand_on(self, outputs: dict[str, torch.Tensor]) -> None:
        names = {identifier: name for row in self._wanted.values() for identifier, name in row.items()}
        made = [(names[identifier], output) for identifier, output in outputs.items() if identifier in names]
        if not made or self.keep is None:
            return
        error = self._agreement.run("visual map", self._turn, made, self.keep)
        if error is not None:  # what is missing will be encoded again
            logger.warning("vidspec: visual embeddings were not handed to the draft (%s)", error)

    def _turn(self, made: list[tuple[str, torch.Tensor]], keep: Callable[[str, torch.Tensor], Any]) -> None:
        for name, embeddings in [(name, self._as_draft(output)) for name, output in made]:
            keep(name, embeddings)
