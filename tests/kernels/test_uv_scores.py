"""uv_scores: two layers and a text sum against the paper's double sum over text tokens and layers."""

import itertools

import pytest
import torch

from vidspec_kernels.uv_scores.api import _CHUNK_ROWS, uv_text_sum, uv_video_scores


def make_states(num_layers, num_video, num_text, size, dtype=torch.float64):
    """Hidden states [layers + 1, n, size] of growing norm, text before and after the video."""
    generator = torch.Generator().manual_seed(0)
    num_before = num_text // 3
    is_video = torch.zeros(num_video + num_text, dtype=torch.bool)
    is_video[num_before : num_before + num_video] = True
    states = torch.randn(num_layers + 1, num_video + num_text, size, generator=generator, dtype=torch.float64)
    states = (states * torch.logspace(0, 2, num_layers + 1)[:, None, None]).to(dtype)
    states[0, [0, -1]] = 0  # what has no direction scores 0
    states[-1, num_before] = 0
    return states, is_video, ~is_video


def double_sum(states, is_video, is_text):
    """Eq. 2-4 as they stand: each pair of a video and a text token, each layer beside the one before it."""
    unit = torch.nn.functional.normalize(states.double(), dim=2)
    cosines = unit[:, is_video] @ unit[:, is_text].mT  # [num_layers + 1, num_video, num_text]
    return cosines.diff(dim=0).sum(dim=(0, 2))


def scores(low, high, is_video, is_text):
    return uv_video_scores(high[is_video], uv_text_sum(high[is_text])) - uv_video_scores(
        low[is_video], uv_text_sum(low[is_text])
    )


@pytest.mark.parametrize("num_layers", [1, 2, 7])
@pytest.mark.parametrize("num_video", [0, 1, 40, _CHUNK_ROWS - 1, _CHUNK_ROWS, _CHUNK_ROWS + 1])
def test_the_double_sum_telescopes(num_layers, num_video):
    """Every layer of eq. 2-4 against the first and the last; rows of video and text normalised one by one."""
    num_text = 12 if num_layers > 1 else _CHUNK_ROWS + 12
    states, is_video, is_text = make_states(num_layers, num_video, num_text, size=24)
    expected = double_sum(states, is_video, is_text)
    got = scores(states[0].float(), states[-1].float(), is_video, is_text)
    assert got.dtype == torch.float32 and got.shape == (num_video,)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)
    if num_video > 1:
        assert expected.abs().max() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states(dtype):
    """Seen to fail: norms and products in half precision."""
    states, is_video, is_text = make_states(1, num_video=50, num_text=30, size=3584, dtype=dtype)
    expected = double_sum(states, is_video, is_text)
    got = scores(states[0], states[1], is_video, is_text)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cuts", [(5,), (1, 30), (0, 52)])
def test_text_sums_of_chunks_add_up(cuts):
    """A prompt in several prefill chunks, some of them without any text, has the sum of its chunks."""
    states, _, is_text = make_states(1, num_video=40, num_text=12, size=16, dtype=torch.float32)
    whole = uv_text_sum(states[1][is_text])
    bounds = [0, *cuts, 52]
    chunks = ((states[1, start:end], is_text[start:end]) for start, end in itertools.pairwise(bounds))
    parts = sum(uv_text_sum(chunk[chosen]) for chunk, chosen in chunks)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
