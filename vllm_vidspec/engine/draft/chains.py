"""Drafts chains: one token of every request per forward, all of them in one graph where a step allows it."""

import functools

import torch

from vllm_vidspec.engine.draft.forwards import Forwards
from vllm_vidspec.engine.draft.graphs import DraftGraphs, Part, Run, part
from vllm_vidspec.engine.draft.noise import CoupledSampler, Processed
from vllm_vidspec.engine.draft.score_blocks import blocks


class ChainDrafter:
    """Proposes K tokens one after another, and where it `goes_on`, more of them one at a time."""

    def __init__(self, forwards: Forwards, sample: CoupledSampler, graphs: DraftGraphs, goes_on: bool = False):
        self._forwards, self._sample, self._graphs, self._goes_on = forwards, sample, graphs, goes_on
        self._buffers = forwards.buffers
        self._views = functools.cache(self._cut)

    def draft(self, num_reqs: int, num_drafts: int, processed: Processed | None) -> bool:
        """Write `num_drafts` tokens of each request into the buffers; return whether graphs ran all that they can."""
        if processed is None:
            return self._graphs.run(*self._whole(num_reqs, num_drafts))
        return self._chain(num_reqs, num_drafts, processed)

    def go_on(self, num_reqs: int, processed: Processed | None) -> bool:
        """Write one token more of each request, behind the one drawn last, into the first column of `drafts`."""
        if processed is None:
            return self._graphs.run(*self._more(num_reqs))
        return self._feed_and_draw(num_reqs, processed)

    def parts(self, num_reqs: int, num_drafts: int, is_processed: bool) -> dict[Part, Run]:
        """Return the functions that can be captured, for so many requests and drafts, logits processed or not."""
        if is_processed:
            return {self._key(num_reqs, level): self._function(num_reqs, level) for level in (0, 1)}
        more = dict([self._more(num_reqs)]) if self._goes_on else {}
        return dict([self._whole(num_reqs, num_drafts)]) | more

    def _whole(self, num_reqs: int, num_drafts: int) -> tuple[Part, Run]:
        key = part("chain", num_reqs, max_drafts=num_drafts)
        return key, functools.partial(self._chain, num_reqs, num_drafts, None)

    def _more(self, num_reqs: int) -> tuple[Part, Run]:
        return part("more", num_reqs), functools.partial(self._feed_and_draw, num_reqs, None)

    def _feed_and_draw(self, num_reqs: int, processed: Processed | None) -> bool:
        is_graph = self._graphs.run(self._key(num_reqs, 1), self._function(num_reqs, 1))
        self._draw(num_reqs, 1, processed, column=0)
        return is_graph

    def _chain(self, num_reqs: int, num_drafts: int, processed: Processed | None) -> bool:
        is_whole = True
        for level in range(max(num_drafts, 1)):
            is_whole &= self._graphs.run(self._key(num_reqs, level), self._function(num_reqs, level))
            if level < num_drafts:
                self._draw(num_reqs, level, processed)
        return is_whole

    @staticmethod
    def _key(num_reqs: int, level: int) -> Part:
        return part("token" if level else "roots", num_reqs)

    def _function(self, num_reqs: int, level: int) -> Run:
        return functools.partial(self._next if level else self._forwards.roots, num_reqs)

    def _next(self, num_reqs: int) -> None:
        self._buffers.step.level.add_(1)
        self._buffers.place(num_reqs)
        self._forwards.tokens(num_reqs)

    def _draw(self, num_reqs: int, level: int, processed: Processed | None, column: int | None = None) -> None:
        """Draw the next token of each request after the one that was fed last, into that column or the level's."""
        buffers, forwards = self._buffers, self._forwards
        logical_pos, input_ids = forwards.fed(level)
        for block in blocks(num_reqs if processed is None else processed.num_reqs, forwards.model.vocab_size):
            logits = forwards.logits(block)
            if processed is not None:
                logits = processed(logits, block, logical_pos[block], input_ids[block])
            temperature, seeds, pos, drafts, token_ids = self._views(block.start, block.stop, min(level, 1))
            at, is_processed = buffers.step.level if column is None else column, processed is not None
            out = dict(level=at, out_tokens=drafts, out_ids=token_ids)
            self._sample.draw_into(logits, temperature, seeds, pos, **out, is_processed=is_processed)

    def _cut(self, low: int, high: int, level: int) -> tuple[torch.Tensor, ...]:
        buffers, step, (logical_pos, _) = self._buffers, self._buffers.step, self._forwards.fed(level)
        rows = (step.temperature, step.seeds, logical_pos, buffers.drafts, buffers.token_ids)
        return tuple(part[low:high] for part in rows)
