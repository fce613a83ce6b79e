"""What target and drafter say to each other besides the tables; a row and its epoch there name a request."""

import msgspec
import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams


class Add(msgspec.Struct, tag=True):
    """A request has got a row: the drafter may encode its media. Its committed text stands in the tables."""

    req_id: str
    req_state_idx: int
    epoch: int
    token_ids: np.ndarray  # [n] int32 prompt, and after a preemption the output so far
    prompt_len: int
    limit: int  # the longest text that it can have
    features: list[MultiModalFeatureSpec]
    sampling: SamplingParams  # the seed that the target uses among them


class Prefill(msgspec.Struct, tag=True):
    """The drafter may read a prompt: what guides its pruning is known."""

    req_state_idx: int
    epoch: int
    scores: list[torch.Tensor] | None  # one float32 [m] per feature; None where there is no guidance
    outcome: list[str]  # counters to add to once the drafter has the prompt: what came of the guidance


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


class Encode(msgspec.Struct, tag=True):
    """Show the tower the media of a request that has arrived."""

    req_state_idx: int


class Read(msgspec.Struct, tag=True):
    """Read on in the prompts of `[n]` rows, whose committed texts have `[n]` tokens."""

    rows: np.ndarray
    lengths: np.ndarray
    new_text: list[tuple[int, np.ndarray]]  # by row where its text goes on, and [m] int32 tokens committed since


class Requeue(msgspec.Struct, tag=True):
    """Put `[n]` rows back into the queue, to read on after `[n]` tokens of their text."""

    rows: np.ndarray
    num_fed: np.ndarray


class Draw(msgspec.Struct, tag=True):
    """Draw the next tokens of `[n]` rows."""

    rows: np.ndarray
    lengths: np.ndarray  # [n] int64 tokens of text and stream
    last: np.ndarray  # [n, 2] int32 the last two of them
    missing: np.ndarray  # [n] bool: the first of these two has no KV
    goes_on: bool = False  # whether the last draw was of these rows in this order, and each text is what it was then


ToDrafter = Add | Prefill | Remove | ForgetMedia | Retune | Stop
ToTarget = Ready | Failed | Refused
ToRanks = ToDrafter | Encode | Read | Requeue | Draw
