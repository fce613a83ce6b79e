"""PrefillJob: how far the draft's prefill of a request has come; PrefillPiece: a part of it; pure data."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_vidspec.config import PruneKnobs
from vllm_vidspec.pruning import get_pruner
from vllm_vidspec.pruning.prompt import PromptItem, PromptPlan, PrunedPrompt


@dataclass(eq=False)
class PrefillJob:
    """A request in the draft, from `DraftPrefill.add` to `remove`: encoded ahead, in the queue, or read."""

    req_id: str
    req_state_idx: int
    plan: PromptPlan  # its prompt, until that has been read
    scores: list[torch.Tensor] | None  # the target's guidance by what is pruned together (`PromptPlan.units`), or None
    kept: list[torch.Tensor | None] = field(default_factory=list)  # by item which embeddings stay, None until known
    # by item those embeddings [k_i, hidden_size], None until they are made; all while its unit's choice waits
    media: list[torch.Tensor | None] = field(default_factory=list)
    whole: list[torch.Tensor | None] = field(default_factory=list)  # by item all of them, where an observer keeps them
    prompt: PrunedPrompt | None = None  # what the draft sees, once every item is there
    embeds: torch.Tensor | None = None  # the media of it, [num_media, hidden_size]
    num_done: int = 0  # KV entries that the draft has
    knobs: PruneKnobs | None = None  # by which it is pruned; None of text alone
    is_borrowed: bool = False  # whether some scores are those of an earlier prompt
    # by item that is encoded in parts and no cache can gather: how many embeddings are made, and those that stay
    gathered: dict[int, tuple[int, list[torch.Tensor]]] = field(default_factory=dict)
    ahead: dict[str, PromptItem] = field(default_factory=dict)  # by name: encoded before their guidance is here

    def __post_init__(self) -> None:
        # All that is left to know of a prompt that was read: its KV entries, tokens of it that have none; and of the
        # text after it rope position minus logical position, and their axes.
        self.num_kept, self.num_dropped = self.plan.num_kept, self.plan.num_dropped
        self.pos_delta, self.num_axes = self.plan.pos_delta, self.plan.num_axes

    def finish(self) -> None:
        """Let go of a prompt, or of text behind one, that was read."""
        self.plan = None  # type: ignore[assignment]
        self.scores = self.prompt = self.embeds = None
        self.kept, self.media, self.whole, self.gathered = [], [], [], {}

    def resume(self, num_tokens: int) -> None:
        """Read on in the text from `num_tokens` committed tokens on, none of them the prompt's."""
        nothing = torch.zeros(0, dtype=torch.int64)
        self.prompt = PrunedPrompt(nothing.int(), nothing.expand(self.num_axes, 0), nothing)
        self.num_done = max(self.num_kept, num_tokens - self.num_dropped)

    @property
    def compares(self) -> bool:
        """Whether what is kept follows from the tower's embeddings."""
        return self.knobs is not None and "features" in get_pruner(self.knobs.pruner).needs

    def unseen(self) -> list[int]:
        """Return the items that the tower has yet to encode; none that keeps nothing."""
        if self.prompt is not None:
            return []
        keeps_some = [kept is None or len(kept) > 0 for kept in self.kept]
        return [i for i, media in enumerate(self.media) if keeps_some[i] and media is None]


@dataclass(frozen=True)
class PrefillPiece:
    """KV entries `start` to `end` of a request: of its pruned prompt, and from `num_kept` on of the text after it."""

    job: PrefillJob
    start: int
    end: int

    def token_ids(self) -> torch.Tensor:
        """Return `[end - start]` int32 ids; 0 for the text after the prompt, which the device knows."""
        assert self.job.prompt is not None
        inside = self.job.prompt.token_ids[self.start : self.end]
        return torch.cat((inside, inside.new_zeros(self.end - self.start - len(inside))))

    def positions(self) -> torch.Tensor:
        """Return `[num_axes, end - start]` int64 rope positions."""
        job = self.job
        assert job.prompt is not None
        inside = job.prompt.positions[:, self.start : self.end]
        first = max(self.start, job.num_kept)
        after = torch.arange(first, max(self.end, first)) + job.num_dropped + job.pos_delta
        return torch.cat((inside, after.expand(job.num_axes, -1)), dim=1)

    def media(self) -> tuple[int, int, torch.Tensor]:
        """Return which of the prompt's media embeddings are in here, first and end, and where, `[n]` int64."""
        assert self.job.prompt is not None
        media_at = self.job.prompt.media_at
        low, high = np.searchsorted(media_at.numpy(), (self.start, self.end)).tolist()
        return low, high, media_at[low:high] - self.start
