"""Every pruner by its name in the configuration: grid, scores or features -> kept_indices. Pure torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_vidspec.config import PRUNERS, PruneKnobs
from vllm_vidspec.errors import VidSpecError, nearest
from vllm_vidspec.pruning.base import PruneInputs, Pruner, SelectFn
from vllm_vidspec.pruning.grid import TokenGrid

_COLUMNS = 128  # features widened to float64 at a time: 25,000 tokens need some 150 MB instead of some 4 GB
_SAME = 1e-12  # below the precision of any feature; makes an unchanged token's novelty 0 on every device
_GROUP = 4  # frames of a DyCoke group
# Of a lattice over columns, rows and frames, in 2 ** -32: 1 / g, 1 / g^2 and 1 / g^3 for the real g with g^4 = g + 1,
# the generalised golden ratio whose multiples fill a cube most evenly (Roberts 2018, the R3 sequence).
_LATTICE = (3518319155, 2882110345, 2360945575)


def get_pruner(name: str) -> Pruner:
    """Return the pruner of that name; a VidSpecError names the nearest one and all known ones."""
    if name not in ALL_PRUNERS:
        raise VidSpecError(f"unknown pruner {name!r}{nearest(name, PRUNERS)}; known: {', '.join(PRUNERS)}")
    return ALL_PRUNERS[name]


def needs_of(knobs: PruneKnobs) -> frozenset[str]:
    """Return what must be measured for the pruners that knobs choose from: one, or with `auto` several."""
    return frozenset().union(*(get_pruner(variant.pruner).needs for variant in knobs.variants))


# ---- choices of indices ----------------------------------------------------------------------------------------------


def linspace_indices(num_candidates: int, num_keep: int, device: torch.device | str = "cpu") -> Tensor:
    """Return indices at regular intervals over n = `num_candidates`, both ends included: int64 [num_keep], ascending.

    SpecVLM eq. 7 as its code has it, integer linspace(0, n - 1, k), in exact integers: index i is i (n - 1) // (k - 1).
    One index alone is 0. n must be at least k.
    """
    steps = torch.arange(num_keep, dtype=torch.int64, device=device)
    return steps * (num_candidates - 1) // max(num_keep - 1, 1)


def lattice_ranks(grid: TokenGrid, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 [num_tokens]: the tokens of the k lowest ranks are spread evenly over columns, rows and frames.

    A token at (x, y, t) ranks by the fraction of x a + y b + t c with a, b, c of `_LATTICE`, in exact integers: the
    tokens under any threshold are a lattice of low discrepancy, for every k. A stride in raster order is not: at a
    tenth of a grid that is 10, 20 or 30 wide it returns to few columns. Trailing tokens continue the raster.
    """
    index = torch.arange(grid.num_tokens, dtype=torch.int64, device=device)
    x, y, t = index % max(grid.width, 1), index // max(grid.width, 1), index // max(grid.tokens_per_frame, 1)
    y = y % max(grid.height, 1)
    return (x * _LATTICE[0] + y * _LATTICE[1] + t * _LATTICE[2]) % 2**32


SpreadFn = Callable[[PruneInputs, Tensor, int], Tensor]  # of int64 tokens [n], ascending, some: int64 [num_keep]


def by_lattice(inputs: PruneInputs, tokens: Tensor, num_keep: int) -> Tensor:
    """Return the tokens of the lowest `lattice_ranks`, of equal ones the lower token first."""
    ranks = lattice_ranks(inputs.grid, inputs.device)[tokens]
    return tokens[ranks.sort(stable=True).indices[:num_keep]]


def by_stride(inputs: PruneInputs, tokens: Tensor, num_keep: int) -> Tensor:
    """Return tokens at regular intervals in raster order, both ends included, as the code of SpecVLM's authors does."""
    return tokens[linspace_indices(len(tokens), num_keep, inputs.device)]


def descending_order(scores: Tensor) -> Tensor:
    """Return int64 [n] that sorts float [n] scores without NaN, highest first, of equal ones the lower index first."""
    # + 0.0 turns -0.0 into 0.0: a radix sort on the bits may tell them apart.
    return (scores + 0.0).sort(descending=True, stable=True).indices


def top_k_indices(scores: Tensor, num_keep: int) -> Tensor:
    """Return the indices of the `num_keep` highest scores, as `descending_order` ranks: int64 [num_keep], ascending."""
    return descending_order(scores)[:num_keep].sort().values


def top_p_size(ordered_scores: Tensor, lambda_r: float) -> int:
    """Return the size of the smallest prefix whose sum reaches `lambda_r` times the total (SpecVLM eq. 6).

    Summed in float64, and on the CPU, because CUDA's floating point prefix sum may differ from rank to rank. The scores
    are float32 [n], descending, finite, >= 0. The size is 0 for `lambda_r` 0 or a total of 0, for 1 the positive ones'.
    """
    ordered_scores = ordered_scores.cpu()
    if lambda_r == 1.0:  # exactly, even where a tiny score no longer changes the float64 sum
        return int((ordered_scores > 0).sum())
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), ordered_scores.double().cumsum(0)))  # [n + 1]
    return int((sums < lambda_r * sums[-1]).sum())


# ---- pruners that follow the target ----------------------------------------------------------------------------------


def default_uv_layer(num_layers: int) -> int:
    """Return the paper's Lmax, 20 of 28 layers and more, or as far into a shallower model."""
    return max(1, min(20, round(0.7 * num_layers)))


def _select_top_k(inputs: PruneInputs) -> Tensor:
    return top_k_indices(inputs.scores, inputs.num_keep)


def _specvlm(spread: SpreadFn) -> SelectFn:
    """Return SpecVLM: the top tokens that hold `lambda_r` of the score, and as many others as fit, evenly spread.

    Eq. 6 (stage I, Top-P retention), then eq. 7 (stage II, spatially uniform reduction), which as printed adds (1 - r)
    of all tokens: as in the authors' code it fills the budget that stage I leaves, and stage I alone is cut to the
    budget, the highest scores first. Of equal scores the lower index ranks higher. Without any score, and at
    `lambda_r` 0, stage I is empty and the choice is that of `uniform`. `spread` is stage II.
    """

    def select(inputs: PruneInputs) -> Tensor:
        scores, num_tokens = inputs.scores, inputs.grid.num_tokens
        assert scores is not None  # checked
        order = descending_order(scores)  # [num_tokens]
        retained = order[: min(top_p_size(scores[order], inputs.lambda_r), inputs.num_keep)]
        is_rest = torch.ones(num_tokens, dtype=torch.bool, device=inputs.device)
        is_rest[retained] = False
        rest = is_rest.nonzero()[:, 0]  # [num_tokens - |V_R|], in sequence order
        return torch.cat((retained, spread(inputs, rest, inputs.num_keep - len(retained)))).sort().values

    return select


# ---- pruners that need nothing but the grid --------------------------------------------------------------------------


def _select_none(inputs: PruneInputs) -> Tensor:
    # Keeps everything whatever the (positive) budget: PruneKnobs.ratio_for gives this pruner ratio 0.
    return torch.arange(inputs.grid.num_tokens, dtype=torch.int64, device=inputs.device)


def _uniform(spread: SpreadFn) -> SelectFn:
    def select(inputs: PruneInputs) -> Tensor:
        tokens = torch.arange(inputs.grid.num_tokens, dtype=torch.int64, device=inputs.device)
        return spread(inputs, tokens, inputs.num_keep).sort().values

    return select


_select_uniform = _uniform(by_lattice)


def _select_random(inputs: PruneInputs) -> Tensor:
    # Drawn on the CPU on every device, so that one seed is one choice on every machine and rank.
    generator = torch.Generator(device="cpu").manual_seed(inputs.seed)
    drawn = torch.randperm(inputs.grid.num_tokens, generator=generator, dtype=torch.int64)[: inputs.num_keep]
    return drawn.sort().values.to(inputs.device)


def _window(halves_before: int) -> SelectFn:
    def select(inputs: PruneInputs) -> Tensor:
        start = (inputs.grid.num_tokens - inputs.num_keep) * halves_before // 2
        return torch.arange(start, start + inputs.num_keep, dtype=torch.int64, device=inputs.device)

    return select


def _select_frame(inputs: PruneInputs) -> Tensor:
    """Keep whole frames at regular intervals. What exceeds the budget is cut from the end of the last chosen frame.

    As few frames as can hold the budget, first and last included (a single one is frame 0). The trailing tokens are
    the end of the last frame, hence the first to go.
    """
    grid, num_keep, device = inputs.grid, inputs.num_keep, inputs.device
    per_frame = grid.tokens_per_frame
    if per_frame == 0 or grid.num_frames == 0:
        return torch.arange(num_keep, dtype=torch.int64, device=device)
    if num_keep <= per_frame or grid.num_frames == 1:
        num_chosen = 1
    else:
        num_chosen = max(2, -(-(num_keep - grid.num_trailing) // per_frame))
    frames = linspace_indices(grid.num_frames, num_chosen, device)
    # [num_chosen * per_frame + num_trailing]; where the last frame is not chosen the cut removes the trailing ones.
    within = torch.arange(per_frame, dtype=torch.int64, device=device)
    tokens = (frames[:, None] * per_frame + within).flatten()
    trailing = torch.arange(grid.num_frames * per_frame, grid.num_tokens, dtype=torch.int64, device=device)
    return torch.cat((tokens, trailing))[:num_keep]


# ---- pruners that compare a frame with an earlier one ----------------------------------------------------------------


def novelty(features: Tensor, tokens: Tensor, references: Tensor) -> Tensor:
    """Return 1 - cosine between each token and its reference.

    As half the squared distance of the unit vectors, which is exact where they are equal and precise where they nearly
    are. A zero vector has cosine 0 with any other, and 1 with another zero vector: nothing changed. Tokens and
    references are int64 [n] rows of `features` [num_tokens, dim]; the result is float64 [n], in [0, 2] up to rounding.
    """
    squares = torch.zeros(len(features), dtype=torch.float64, device=features.device)
    for columns in features.split(_COLUMNS, dim=1):
        squares += columns.double().square().sum(1)
    is_zero = squares == 0
    scale = torch.where(is_zero, 0.0, squares.rsqrt())  # [num_tokens]
    distance = torch.zeros(len(tokens), dtype=torch.float64, device=features.device)
    for columns in features.split(_COLUMNS, dim=1):
        unit = columns * scale[:, None]  # float64 [num_tokens, <= _COLUMNS]
        distance += (unit[tokens] - unit[references]).square().sum(1)
    distance = torch.where(distance < _SAME, 0.0, distance / 2)
    return torch.where(is_zero[tokens] != is_zero[references], 1.0, distance)


def _select_fastvid(inputs: PruneInputs) -> Tensor:
    """Keep the frames that differ most from the one before them, whole.

    SpecVLM's SD-FastVID drops the later frame of the most similar consecutive ones. Ours ranks: frame 0 first, then by
    the mean over positions of `novelty` against the same position in the previous frame (kept or not), of equal ones
    the earlier. Whole frames are kept in that order; the one that no longer fits fills the budget with its own tokens
    at regular intervals. The trailing tokens are the end of the last frame. One frame, or tokens without frames, are
    pruned like `uniform`.
    """
    grid, num_keep, per_frame = inputs.grid, inputs.num_keep, inputs.grid.tokens_per_frame
    if grid.num_frames <= 1 or per_frame == 0:
        return _select_uniform(inputs)
    later = torch.arange(per_frame, grid.num_frames * per_frame, dtype=torch.int64, device=inputs.device)
    change = novelty(inputs.features, later, later - per_frame).view(-1, per_frame).mean(1)  # [num_frames - 1]
    # From here on a few numbers per frame: on the CPU, where the sizes are needed anyway.
    order = torch.cat((torch.zeros(1, dtype=torch.int64), descending_order(change.cpu()) + 1))  # [num_frames]
    sizes = torch.full((grid.num_frames,), per_frame, dtype=torch.int64)
    sizes[-1] += grid.num_trailing
    filled = sizes[order].cumsum(0)  # [num_frames]
    num_whole = int((filled <= num_keep).sum())
    is_whole = torch.zeros(grid.num_frames, dtype=torch.bool)
    is_whole[order[:num_whole]] = True
    is_kept = is_whole.repeat_interleave(sizes)  # [num_tokens]
    num_left = num_keep - (int(filled[num_whole - 1]) if num_whole else 0)
    if num_left:
        frame = int(order[num_whole])
        is_kept[frame * per_frame + linspace_indices(int(sizes[frame]), num_left)] = True
    return is_kept.nonzero()[:, 0].to(inputs.device)


def _select_dycoke(inputs: PruneInputs) -> Tensor:
    """Keep the first frame of every group of four, then the tokens that differ most from their reference.

    SpecVLM's SD-DyCoke: frames 2, 3 and 4 of a group are compared with its frames 1, 1 and 3, position by position.
    Its code keeps every first frame, about 30 % at ratio 0.9; ours keeps the budget: all tokens of first frames, then
    by `novelty`, of equal ones the lower index, then the trailing tokens (they have no reference). A budget below the
    first frames' tokens, as any below a quarter, takes these at regular intervals, and similarity has no say. Tokens
    without frames are pruned like `uniform`.
    """
    grid, num_keep, per_frame = inputs.grid, inputs.num_keep, inputs.grid.tokens_per_frame
    num_framed = grid.num_frames * per_frame
    if num_framed == 0:
        return _select_uniform(inputs)
    tokens = torch.arange(grid.num_tokens, dtype=torch.int64, device=inputs.device)
    phase = tokens[:num_framed] // per_frame % _GROUP
    first = (phase == 0).nonzero()[:, 0]
    if num_keep <= len(first):
        return first[linspace_indices(len(first), num_keep, inputs.device)]
    other = (phase != 0).nonzero()[:, 0]
    frames_back = torch.where(phase[other] == 2, 2, 1)  # 2 -> 1, 3 -> 1, 4 -> 3; phases count from 0
    ranked = other[descending_order(novelty(inputs.features, other, other - frames_back * per_frame))]
    return torch.cat((first, ranked, tokens[num_framed:]))[:num_keep].sort().values


ALL_PRUNERS = {
    pruner.name: pruner
    for pruner in (
        Pruner("none", _select_none),
        # `attention` and `uv` are one rule: SpecVLM's guidance without stage II, and UV-Prune, which may be negative.
        Pruner("specvlm", _specvlm(by_lattice), needs=frozenset({"attention"}), refuses_negative=True),
        Pruner("specvlm:stride", _specvlm(by_stride), needs=frozenset({"attention"}), refuses_negative=True),
        Pruner("attention", _select_top_k, needs=frozenset({"attention"})),
        Pruner("uv", _select_top_k, needs=frozenset({"uv"})),
        Pruner("uniform", _select_uniform),
        Pruner("uniform:stride", _uniform(by_stride)),
        Pruner("random", _select_random),
        Pruner("window:front", _window(0)),
        Pruner("window:middle", _window(1)),
        Pruner("window:end", _window(2)),
        Pruner("frame", _select_frame),
        Pruner("fastvid", _select_fastvid, needs=frozenset({"features"})),
        Pruner("dycoke", _select_dycoke, needs=frozenset({"features"})),
    )
}
