"""DraftVision: the vision embeddings that prompts in the queue lack, from a cache or of a tower.

A step encodes at most the encoder budget's tokens. A video that is longer is encoded some frames at a time, where its
family's tower encodes each frame by itself, else whole. The frames of a video gather in the cache, which shares them
once they are all there; of one that it cannot hold, each request gathers what it keeps.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.draft.prefill_job import PrefillJob
from vllm_vidspec.engine.draft.vision_cache import VisionCache
from vllm_vidspec.engine.hooks.pixels import SharedPixels
from vllm_vidspec.engine.hooks.target_vision import TargetVision
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.families import FamilyAdapter
from vllm_vidspec.pruning import TokenGrid
from vllm_vidspec.pruning.prompt import PromptItem, choose_kept


class Part(NamedTuple):
    """What one call of the tower encodes of an item."""

    item: PromptItem  # the image or video
    frames: range | None  # of its grid; None for the whole of it
    start: int  # the first of the item's embeddings that come of it; `end` one past the last
    end: int
    num_encoded: int  # tokens that the tower makes

    @property
    def is_last(self) -> bool:
        return self.end == self.item.num_tokens

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.is_last


class DraftVision:
    """Encodes, and hands out."""

    def __init__(
        self,
        model: DraftModel,
        adapter: FamilyAdapter,
        counters: Counters,
        cache: VisionCache,
        agreement: Agreement,
        fail: Callable[[PrefillJob, Exception], None],  # called with a job whose item could not be encoded
        target: TargetVision | None = None,  # whose embeddings the draft is shown, where it has no tower of its own
        pixels: SharedPixels | None = None,  # what the target has copied to the device, if it runs here
        observers: Sequence[Observer] = (),
    ):
        self.model, self.cache = model, cache
        self._adapter, self._counters, self._target = adapter, counters, target
        self._agreement, self._fail, self._pixels, self._observers = agreement, fail, pixels, observers
        if target is not None:
            target.keep = lambda name, embeddings: cache.extend(name, len(embeddings), 0, embeddings)

    # ---- what a step encodes ---------------------------------------------------------------------------------------

    def encode_missing(self, due: list[PrefillJob]) -> None:
        """Get vision embeddings that requests in the queue lack, as far as the language model can come in this step."""
        wanted: dict[tuple[str, int], tuple[Part, list[tuple[PrefillJob, int]]]] = {}  # by content and start: for whom
        left, ahead = self.model.max_encoder_tokens, 0
        for job in due:
            if ahead >= self.model.max_num_tokens:
                break
            ahead += max(0, job.num_kept - job.num_done)
            for i in job.unseen():
                item = job.plan.items[i]
                start = self._num_here(job, i)
                if (item.name, start) in wanted:
                    wanted[item.name, start][1].append((job, i))
                    continue
                if self._lookup(job, i):
                    self._release_pixels([(job, i)])
                    self._counters.add("draft_encoder_hits")
                    continue
                part = self._next_part(item, start, left)
                if wanted and part.num_encoded > left:
                    ahead = self.model.max_num_tokens
                    break
                left -= part.num_encoded
                wanted[item.name, start] = part, [(job, i)]
        if wanted:
            parts = [part for part, _ in wanted.values()]
            for (part, takers), found in zip(wanted.values(), self._run_tower(parts), strict=True):
                self._distribute(part, takers, found)
            self._counters.set("draft_encoder_bytes_used", self.cache.num_used_bytes)

    def encode_ahead(self, items: dict[str, PromptItem]) -> bool:
        """Encode a step's share of items, by name, for the cache; return whether any is left in `items` to encode."""
        parts: list[Part] = []
        left = self.model.max_encoder_tokens
        for name, item in list(items.items()):
            start = self.cache.num_here(name, item.num_tokens)
            if not self.cache.can_keep(item.num_tokens) or start == item.num_tokens:
                del items[name]
                continue
            part = self._next_part(item, start, left)
            if parts and part.num_encoded > left:
                break
            left -= part.num_encoded
            parts.append(part)
        for part, found in zip(parts, self._run_tower(parts), strict=True):
            is_made = not isinstance(found, Exception)
            if is_made and self.cache.extend(part.item.name, part.item.num_tokens, part.start, found) and part.is_last:
                self._counters.add("draft_encoder_misses")
            if part.is_last or not is_made:
                del items[part.item.name]
        self._counters.set("draft_encoder_bytes_used", self.cache.num_used_bytes)
        return bool(items)

    def _num_here(self, job: PrefillJob, i: int) -> int:
        """Return how many of an item's embeddings have been made, of those that a request lacks."""
        item = job.plan.items[i]
        if self.cache.can_keep(item.num_tokens):
            return self.cache.num_here(item.name, item.num_tokens)
        return job.gathered[i][0] if i in job.gathered else 0

    def _next_part(self, item: PromptItem, start: int, left: int) -> Part:
        """Return what to encode of an item of which `start` embeddings are there: as many frames as `left` tokens let,
        one at least; all of it where it fits into a step, or cannot be cut.
        """
        grid = self._frames_of(item)
        num_encoded = item.num_tokens if grid is None else grid.num_tokens
        if grid is None or (start == 0 and num_encoded <= self.model.max_encoder_tokens):
            return Part(item, None, 0, item.num_tokens, num_encoded)
        size = grid.tokens_per_frame
        firsts = np.arange(grid.num_frames) * size  # [num_frames] a frame's first token
        starts = firsts if item.seen is None else np.searchsorted(item.seen.numpy(), firsts)
        # Frames of which the target has kept nothing are passed over.
        first = int(np.searchsorted(starts, start, side="right")) - 1
        end = min(first + max(1, left // size), grid.num_frames)
        end_row = item.num_tokens if end == grid.num_frames else int(starts[end])
        return Part(item, range(first, end), start, end_row, (end - first) * size)

    def _frames_of(self, item: PromptItem) -> TokenGrid | None:
        data = {key: element.data for key, element in item.feature.data.items()}
        grid = self._adapter.frames(item.feature.modality, data, self.model.hf_config)
        is_known = grid is not None and (item.seen is not None or grid.num_tokens == item.num_tokens)
        return grid if is_known else None

    # ---- the tower -------------------------------------------------------------------------------------------------

    def _run_tower(self, parts: list[Part]) -> list[torch.Tensor | Exception]:
        """Return each part's embeddings `[end - start, hidden_size]`, or the error that it alone is to blame for."""
        made: list[torch.Tensor] = []

        def run() -> None:
            features = [part.item.feature for part in parts]
            if self._pixels is not None:
                features = [self._pixels.on_device(part.item.feature, is_first=part.start == 0) for part in parts]
            encoded = self.model.encode(features, [part.frames for part in parts])
            made.extend(map(self._of_part, parts, encoded))

        if not parts:
            return []
        error = self._agreement.run("vision tower", run)
        if error is None:
            if sum(part.num_encoded for part in parts) > self.model.max_encoder_tokens:
                self._counters.add("draft_encoder_oversized")
            return list(made)
        if len(parts) == 1:
            return [error]
        return [found for part in parts for found in self._run_tower([part])]

    @staticmethod
    def _of_part(part: Part, encoded: torch.Tensor) -> torch.Tensor:
        """Return the item's embeddings among those that the tower has made of a part of it."""
        item, first = part.item, 0
        if part.frames is not None:
            size = part.num_encoded // len(part.frames)
            first = part.frames.start * size
            if not part.is_last:
                encoded = encoded[: part.num_encoded]  # what trails the grid belongs behind the last frame
        if item.seen is not None:
            encoded = _rows(encoded, item.seen[part.start : part.end] - first)
        if len(encoded) != part.end - part.start:
            raise ValueError(f"the tower made {len(encoded)} embeddings for {part.end - part.start} tokens")
        return encoded

    # ---- who gets it -----------------------------------------------------------------------------------------------

    def _distribute(self, part: Part, takers: list[tuple[PrefillJob, int]], found: torch.Tensor | Exception) -> None:
        """Keep what the tower has made of a part, and give it to the requests that wait for it."""
        item = part.item
        if isinstance(found, Exception):
            self.cache.drop(item.name)
            for job, _ in takers:
                self._fail(job, found)
            return
        self.cache.extend(item.name, item.num_tokens, part.start, found)
        if part.is_whole or not self.cache.can_keep(item.num_tokens):
            for job, i in takers:
                self._assign(job, i, part.start, found)
        elif part.is_last:
            for job, i in takers:
                self._lookup(job, i)  # where another has displaced it, the request waits on
        if part.is_last:
            self._release_pixels(takers)
            self._counters.add("draft_encoder_misses")
            self._counters.add("draft_encoder_hits", len(takers) - 1)

    def _release_pixels(self, takers: list[tuple[PrefillJob, int]]) -> None:
        if self._pixels is not None:
            for job, i in takers:
                self._pixels.drop(job.plan.items[i].feature.identifier)

    def _lookup(self, job: PrefillJob, i: int) -> bool:
        item, kept = job.plan.items[i], job.kept[i]
        rows = self.cache.read(item.name, item.num_tokens, None if kept is None else kept.numpy())
        if rows is None and self._target is not None:
            rows = self._target.find(item.feature.identifier, item.num_tokens, kept)
        if rows is None:
            return False
        if kept is None:
            self._assign(job, i, 0, rows)
        else:
            job.media[i] = rows
        return True

    def _assign(self, job: PrefillJob, i: int, start: int, embeddings: torch.Tensor) -> None:
        """Give an item's embeddings `[m, hidden_size]`, from `start` on, to a request, which keeps its choice."""
        try:
            kept, end = job.kept[i], start + len(embeddings)
            if kept is not None:
                low, high = np.searchsorted(kept.numpy(), (start, end))
                embeddings = _rows(embeddings, kept[low:high] - start)
            before = job.gathered.pop(i, (0, []))[1]
            gathered = [*before, embeddings] if start else [embeddings]
            if end < job.plan.items[i].num_tokens:
                job.gathered[i] = end, gathered
                return
            job.media[i] = whole = gathered[0] if len(gathered) == 1 else torch.cat(gathered)
            if job.compares and any(observer.keeps_embeddings for observer in self._observers):
                job.whole[i] = whole.float().cpu()
            if kept is None:
                self._select_tokens(job, i)
        except Exception as error:
            self._fail(job, error)

    def _select_tokens(self, job: PrefillJob, i: int) -> None:
        """Choose what is kept of an item and of all that is pruned with it, once they are all there."""
        assert job.knobs is not None
        unit = next(unit for unit in job.plan.units if i in unit.places)
        seen = [job.media[place] for place in unit.places]
        if any(media is None for media in seen):
            return
        whole = unit.joined(job.media)  # type: ignore[arg-type]  # none of its own is None
        kept = choose_kept(unit, job.knobs, None, whole)
        parts = unit.split(kept)
        media = _rows(whole, kept).split([len(part) for part in parts])
        for place, part, rows in zip(unit.places, parts, media, strict=True):
            job.kept[place], job.media[place] = part, rows


def _rows(embeddings: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the rows of `[m, hidden_size]` embeddings that `[k]` indices on the host name, ascending."""
    is_whole = len(kept) == len(embeddings)
    return embeddings if is_whole else embeddings[async_tensor_h2d(kept, device=embeddings.device)]
