"""Questions: a pair, cards and requests to plan for, and what of that has no answer; plain Python."""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.planning.acceptance import Agreement, default_agreement
from vllm_vidspec.planning.gpus import Gpu
from vllm_vidspec.planning.roofline import ASSUMED, Assumptions, weight_bytes
from vllm_vidspec.planning.shapes import ModelShape

RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Question:
    target: ModelShape  # the target's shape
    draft: ModelShape  # the draft's; the target's own object: it drafts for itself
    gpu: Gpu  # the card
    ranks: int = 1  # tensor-parallel ranks of the target; a sequential draft has as many
    draft_gpus: int = 1  # cards of a parallel drafter's own; 0: none, so no parallel drafting
    video_tokens: int = 25_000  # of a request's prompt
    text_tokens: int = 512  # the prompt's text and what of the answer is written on average
    answer_tokens: int = 256  # of an answer, over which the draft's prefill is spread
    prune_ratios: tuple[float, ...] = RATIOS  # r to choose from
    agreement: Agreement | None = None  # of the pair, at the one ratio; None: what the papers tell
    target_ms: float | None = None  # measured T_t of one request; None: by the roofline
    draft_ms: float | None = None  # measured T_d of one request, at the one ratio; None: by the roofline
    assumed: Assumptions = ASSUMED  # what cards reach of their data sheets

    @property
    def is_self(self) -> bool:
        return self.draft is self.target

    @property
    def context(self) -> int:
        return self.video_tokens + self.text_tokens

    def draft_context(self, prune_ratio: float) -> float:
        return (1 - prune_ratio) * self.video_tokens + self.text_tokens

    def agreement_at(self, prune_ratio: float) -> Agreement:
        return self.agreement or default_agreement(self.target.family, prune_ratio, self.is_self)

    @property
    def may_be_sequential(self) -> bool:
        return self.is_self or self.draft.is_shared_by(self.ranks)


def check(question: Question) -> None:
    for ratio in question.prune_ratios:
        if not 0 <= ratio <= 1:
            raise VidSpecError(f"--prune-ratio {ratio:g}: a share lies between 0 and 1")
    for option, value in (("--target-ms", question.target_ms), ("--draft-ms", question.draft_ms)):
        if value is not None and not 0 < value < float("inf"):
            raise VidSpecError(f"{option} must be above 0 and finite, not {value:g}")
    for option, is_given in (("--acceptance", question.agreement), ("--draft-ms", question.draft_ms)):
        if is_given is not None and len(question.prune_ratios) > 1:
            raise VidSpecError(f"{option}: it was measured at one prune ratio; give that one as --prune-ratio")
    if not question.target.is_shared_by(question.ranks):
        sizes = ", ".join(str(size) for size in range(1, 65) if question.target.is_shared_by(size))
        raise VidSpecError(f"--tp {question.ranks}: ranks cannot share the target's heads evenly; {sizes} would do")
    if question.draft_gpus and not question.draft.is_shared_by(question.draft_gpus):
        raise VidSpecError(f"--draft-gpus {question.draft_gpus}: ranks cannot share the draft's heads evenly")
    if not question.may_be_sequential and not question.draft_gpus:
        raise VidSpecError(
            f"the draft's {question.draft.heads} heads cannot be shared by --tp {question.ranks} ranks: choose another "
            "--tp, or give it GPUs of its own, --draft-gpus 1"
        )
    weights = weight_bytes(question.target, question.ranks)
    if weights > question.assumed.usable_frac * question.gpu.memory_bytes:
        raise VidSpecError(
            f"--tp {question.ranks}: a rank of {question.target.name} has {weights / 1e9:.0f} GB of weights, "
            f"more than {question.gpu.name} takes"
        )


def notes(question: Question) -> Iterator[str]:
    yield (
        "Modelled, not measured: data sheets, and what steps of one H100 took beside them (fitted). "
        "The vision tower is left out."
    )
    if not question.may_be_sequential:
        yield (
            f"{question.draft.name} has {question.draft.heads} heads, which {question.ranks} ranks cannot share: it "
            "cannot draft sequentially, but in parallel on GPUs of its own or not at all."
        )
    if question.draft_gpus:
        yield (
            f"Parallel drafting takes {question.draft_gpus} GPU{'s' * (question.draft_gpus > 1)} more than vanilla; "
            "what vanilla would gain by as many is not counted."
        )
