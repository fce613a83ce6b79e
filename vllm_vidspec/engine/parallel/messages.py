"""What target and drafter say to each other besides the tables: the ends of a request's life, and what goes wrong."""

import msgspec
import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams


class Add(msgspec.Struct, tag=True):
    """A request has got a row: the drafter may look at its media. Its committed text stands in the tables.

    Attributes:
        req_id: vLLM's request id.
        req_state_idx: Its persistent row.
        epoch: The request's number in the tables.
        token_ids: `[n]` int32 prompt, and after a preemption the output so far.
        prompt_len: Tokens of the prompt.
        limit: The longest text that it can have.
        features: vLLM's multimodal features in prompt order.
        sampling: Its parameters, the seed that the target uses among them.
    """

    req_id: str
    req_state_idx: int
    epoch: int
    token_ids: np.ndarray
    prompt_len: int
    limit: int
    features: list[MultiModalFeatureSpec]
    sampling: SamplingParams


class Prefill(msgspec.Struct, tag=True):
    """The drafter may read a prompt: what guides its pruning is known.

    Attributes:
        req_state_idx, epoch: Of a request that has arrived.
        scores: The target's guidance, one float32 `[m]` tensor per feature; None where there is none.
        outcome: Counters to add to once the draft is shown the prompt: what came of the guidance.
    """

    req_state_idx: int
    epoch: int
    scores: list[torch.Tensor] | None
    outcome: list[str]


class Remove(msgspec.Struct, tag=True):
    """A request has lost its row."""

    req_state_idx: int
    epoch: int


class ForgetMedia(msgspec.Struct, tag=True):
    """Weights have changed, or the memory that holds the draft's vision embeddings has."""


class Retune(msgspec.Struct, tag=True):
    """Knobs have changed, by their flat names, as JSON."""

    knobs: str


class Stop(msgspec.Struct, tag=True):
    """End."""


class Ready(msgspec.Struct, tag=True):
    """The drafter has loaded."""


class Failed(msgspec.Struct, tag=True):
    """The drafter ends, for a reason of one line."""

    reason: str


class Refused(msgspec.Struct, tag=True):
    """A request is not drafted for any more: why, as `SKIP_REASONS` has it, and what to say of it."""

    req_state_idx: int
    epoch: int
    reason: str
    detail: str


# ---- among the drafter's own ranks: what its first one has decided ---------------------------------------------------


class Look(msgspec.Struct, tag=True):
    """Show the tower the media of a request that has arrived."""

    req_state_idx: int


class Read(msgspec.Struct, tag=True):
    """Read on in the prompts of `[n]` rows, whose committed texts have `[n]` tokens.

    Attributes:
        new_text: By row where its text goes on, and `[m]` int32 tokens that were committed since.
    """

    rows: np.ndarray
    lengths: np.ndarray
    new_text: list[tuple[int, np.ndarray]]


class Requeue(msgspec.Struct, tag=True):
    """Put `[n]` rows back into the queue, to read on after `[n]` tokens of their text."""

    rows: np.ndarray
    num_fed: np.ndarray


class Draw(msgspec.Struct, tag=True):
    """Draw the next tokens of `[n]` rows.

    Attributes:
        rows: `[n]` int64.
        lengths: `[n]` int64 tokens of text and stream.
        last: `[n, 2]` int32 the last two of them.
        missing: `[n]` bool: the first of these two has no KV.
        goes_on: Whether the last draw was of these rows, in this order, and each text is what it was after that.
    """

    rows: np.ndarray
    lengths: np.ndarray
    last: np.ndarray
    missing: np.ndarray
    goes_on: bool = False


ToDrafter = Add | Prefill | Remove | ForgetMedia | Retune | Stop
ToTarget = Ready | Failed | Refused
ToRanks = ToDrafter | Look | Read | Requeue | Draw
