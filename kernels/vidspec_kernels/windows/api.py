"""windows: what parallel drafting does on the target's device in a step, one launch each.

`copy_committed_suffix` copies the ends of the committed texts, which are sent to the drafter. `gather_draft_windows`
takes the next window out of each draft stream: its tokens behind the committed text, if it agrees with that
(ParallelVLM, section 4: post-verify). The host depends on no window's content: no host-device synchronisation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vidspec_kernels.arrays import check, check_contiguous
from vidspec_kernels.dispatch import Impl, launcher, on_host, use_triton

NUM_HEADERS = 4  # of a stream: its generation, its request's number, `checked`, `end`; its ring lies behind them
NUM_ASKED = 2  # for a window: the request's number, the most tokens
WINDOW_INFO_SIZE = 2  # of a window: its tokens; 0 where the stream agrees, or one of these two
STALE, NO_STREAM = 1, 2


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _copy_committed_suffix_kernel(
    rows_ptr,  # [n]
    num_tokens_ptr,  # [max_reqs]
    text_ptr, text_stride,  # [max_reqs, max_len]
    out_ptr,  # [n, 1 + num_last]
    num_last,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i)
    length = tl.load(num_tokens_ptr + row)
    out_ptr += i * (1 + num_last)
    tl.store(out_ptr, length)
    j = tl.arange(0, BLOCK)
    tokens = tl.load(text_ptr + row * text_stride + tl.maximum(length - num_last + j, 0), mask=j < num_last)
    tl.store(out_ptr + 1 + j, tokens, mask=j < num_last)


def copy_committed_suffix(rows: Tensor, num_tokens: Tensor, text: Tensor, out: Tensor, *, impl: Impl = "auto") -> None:
    """Write how long the committed texts are, and their last tokens.

    Args:
        rows: int64 [n], persistent rows.
        num_tokens: int32 [max_reqs], lengths of the texts.
        text: int32 [max_reqs, max_len], unit stride along a text.
        out: Out, int32 [n, 1 + t], contiguous: the length, then the last t tokens; of a shorter text its first token
            stands for what is not there.
    """
    num_last, device = out.shape[1] - 1, rows.device
    check(
        device, rows=(rows, torch.int64, 0), num_tokens=(num_tokens, torch.int32, 0),
        text=(text, torch.int32, len(num_tokens), 0),
    )  # fmt: skip
    check_contiguous(device, out=(out, torch.int32, [len(rows)], 2))
    if len(rows) == 0:
        return
    if not use_triton(impl, rows.device):
        on_host(impl, rows.device, "copy_committed_suffix")(rows, num_tokens, text, out)
        return
    launcher(_copy_committed_suffix_kernel, (len(rows),), rows.device)(
        rows, num_tokens, text, text.stride(0), out, num_last, BLOCK=triton.next_power_of_2(num_last)
    )


@triton.jit(do_not_specialize_on_alignment=["asked_ptr", "rows_ptr", "info_ptr"])
def _gather_draft_windows_kernel(
    streams_ptr,  # [max_reqs, NUM_HEADERS + RING], which another process writes meanwhile
    asked_ptr,  # [n, NUM_ASKED]
    rows_ptr,  # [n]
    num_tokens_ptr,  # [max_reqs]
    text_ptr, text_stride,  # [max_reqs, max_len]
    max_len,
    tokens_ptr,  # [n, num_drafts]
    num_drafts,
    info_ptr,  # [n, WINDOW_INFO_SIZE]
    NUM_HEADERS: tl.constexpr, NUM_ASKED: tl.constexpr, WINDOW_INFO_SIZE: tl.constexpr, STALE: tl.constexpr,
    NO_STREAM: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request. Loads of a stream are volatile, so that no cache answers, and each waits for the ones before it,
    because its mask is made of them: the generation, the header, the ring, and the generation once more.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i)
    length = tl.load(num_tokens_ptr + row)
    epoch, wanted = tl.load(asked_ptr + i * NUM_ASKED), tl.load(asked_ptr + i * NUM_ASKED + 1)
    stream_ptr = streams_ptr + row * (NUM_HEADERS + RING)
    ring_ptr = stream_ptr + NUM_HEADERS

    generation = tl.load(stream_ptr, volatile=True)
    is_settled = generation & 1 == 0
    owner = tl.load(stream_ptr + 1, mask=is_settled, other=0, volatile=True)
    checked = tl.load(stream_ptr + 2, mask=is_settled, other=0, volatile=True)
    end = tl.load(stream_ptr + 3, mask=is_settled, other=0, volatile=True)
    has_stream = is_settled & (owner == epoch) & (end > 0)

    since = checked + tl.arange(0, RING)
    is_open = since < tl.where(has_stream, length, 0)
    drafted = tl.load(ring_ptr + (since & (RING - 1)), mask=is_open, other=0, volatile=True)
    committed = tl.load(text_ptr + row * text_stride + tl.minimum(since, max_len - 1), mask=is_open, other=0)
    differs = tl.max((drafted != committed).to(tl.int32), axis=0)
    is_stale = (differs > 0) | (length - checked > RING)
    count = tl.where(has_stream, tl.where(is_stale, 0, tl.minimum(tl.maximum(end - length, 0), wanted)), 0)
    k = tl.arange(0, BLOCK)
    window = tl.load(ring_ptr + ((length + k) & (RING - 1)), mask=k < count, other=0, volatile=True)

    # No token is negative; the compiler cannot know, and must wait for all of them.
    least = tl.minimum(tl.min(drafted, axis=0), tl.min(window, axis=0))
    again = tl.load(stream_ptr, mask=least >= 0, other=-1, volatile=True)
    is_torn = again != generation
    count = tl.where(is_torn, 0, count)
    tl.store(tokens_ptr + i * num_drafts + k, tl.where(k < count, window, 0).to(tl.int64), mask=k < num_drafts)
    is_stale = (is_stale & (end > length)) | is_torn
    tl.store(info_ptr + i * WINDOW_INFO_SIZE, count)
    tl.store(info_ptr + i * WINDOW_INFO_SIZE + 1, tl.where(has_stream, tl.where(is_stale, STALE, 0), NO_STREAM))


def gather_draft_windows(
    streams: Tensor, asked: Tensor, rows: Tensor, num_tokens: Tensor, text: Tensor, tokens: Tensor,
    window_info: Tensor, *, impl: Impl = "auto",
) -> None:  # fmt: skip
    """Cut the next window out of each stream: the tokens behind the committed text, if the stream agrees with it.

    It agrees up to `checked`, which the drafter has seen to. The tokens from there to the committed length are compared
    here; what lies further back than the ring reaches is unknown, and the stream counts as stale.

    `streams` may be memory that another process writes while this runs, host memory that the device reads included. A
    stream's generation is odd while its writer cuts it, or gives its row to another request, and grows by two each
    time; one that is odd, or another one afterwards, gives no window. Tokens that are appended before `end` grows need
    none of that.

    Args:
        streams: int32 [max_reqs, NUM_HEADERS + R], contiguous, R a power of two. The generation; the number of the
            request that has the row; `checked`; `end`, the length of committed text and stream, 0 before there is one;
            then the ring: the stream's token of logical position p at p % R.
        asked: int32 [n, NUM_ASKED], contiguous: the number of the request whose stream is meant, and how many tokens
            its window may have, at most K.
        rows: int64 [n], persistent rows.
        num_tokens: int32 [max_reqs], lengths of the committed texts.
        text: int32 [max_reqs, max_len], unit stride along a text.
        tokens: Out, int64 [n, K], contiguous: the windows, zeros behind each.
        window_info: Out, int32 [n, WINDOW_INFO_SIZE], contiguous: tokens of the window; 0, STALE where the stream has
            diverged from the committed text, or was cut while it was read, or NO_STREAM.
    """
    num_reqs, ring, max_reqs, device = len(rows), streams.shape[1] - NUM_HEADERS, len(num_tokens), rows.device
    check(
        device, rows=(rows, torch.int64, 0), num_tokens=(num_tokens, torch.int32, 0),
        text=(text, torch.int32, max_reqs, 0),
    )  # fmt: skip
    check_contiguous(
        device, streams=(streams, torch.int32, [max_reqs], 0), tokens=(tokens, torch.int64, [num_reqs], 0),
        asked=(asked, torch.int32, [num_reqs], [NUM_ASKED]),
        window_info=(window_info, torch.int32, [num_reqs], [WINDOW_INFO_SIZE]),
    )  # fmt: skip
    assert ring > 0 and ring & (ring - 1) == 0, f"streams: rings of {ring} tokens"
    if num_reqs == 0:
        return
    if not use_triton(impl, rows.device):
        loop = on_host(impl, rows.device, "gather_draft_windows")
        loop(streams, asked, rows, num_tokens, text, tokens, window_info, NUM_HEADERS, STALE, NO_STREAM)
        return
    num_drafts = tokens.shape[1]
    launcher(_gather_draft_windows_kernel, (num_reqs,), rows.device)(
        streams, asked, rows, num_tokens, text, text.stride(0), text.shape[1], tokens, num_drafts, window_info,
        NUM_HEADERS=NUM_HEADERS, NUM_ASKED=NUM_ASKED, WINDOW_INFO_SIZE=WINDOW_INFO_SIZE, STALE=STALE,
        NO_STREAM=NO_STREAM, RING=ring, BLOCK=triton.next_power_of_2(num_drafts),
    )  # fmt: skip
