"""Budgets: how many videos fit beside a draft, and what a step's parts take as they were and as they are; plain Python.

Everything is modelled: rooflines of data sheets (`gpus`, `roofline`), sizes of public checkpoints, published lengths.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from vidspec_tools.planning.acceptance import default_agreement
from vidspec_tools.planning.candidates import PARALLEL, TREE, TREE_WIDTHS, WINDOWS
from vidspec_tools.planning.gpus import ASSUMED, GPUS
from vidspec_tools.planning.roofline import Placement, forward_seconds, kv_bytes, weight_bytes
from vidspec_tools.planning.speed import StreamTimes, run_streams, window_of
from vllm_vidspec.config.paths import SPECVLM_PATHS
from vllm_vidspec.planning.pool import PIXEL_SHARE, VISION_SHARE, pool_bytes
from vllm_vidspec.planning.shapes import FP8, INT4, ModelShape

VIDEO_TOKENS, TEXT_TOKENS, PRUNE_RATIO = 25_000, 512, 0.9
CONTEXT = VIDEO_TOKENS + TEXT_TOKENS
SEEN = (1 - PRUNE_RATIO) * VIDEO_TOKENS + TEXT_TOKENS  # tokens in the draft's cache
KEPT = 0.2  # of images, which have the lower ratio by default: what the engine sizes its pool by
BLOCK = 16  # tokens of a KV block
CHAIN_DRAFTS = 5


# ---- how many videos fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """What a card holds of requests of one video.

    Attributes:
        vanilla: Requests without a draft; 0: the target does not start, or holds no request.
        drafted: Requests with one; None: ranks cannot share the draft's heads.
        pool_tokens: That the draft's pool holds, pruned; the longest request that is drafted for.
    """

    vanilla: int
    drafted: int | None
    pool_tokens: int = 0


def fit(target: ModelShape, draft: ModelShape, ranks: int, memory_bytes: float) -> Fit:
    """Return how many requests of a video are in a rank's KV cache at a time.

    KV memory = usable share x card - weights; with a draft less its weights, the cache of vision embeddings and the
    draft's pool, which the engine sizes by the same function. A request takes its tokens' KV in the target's cache.

    Args:
        target: The target.
        draft: The draft.
        ranks: Tensor-parallel ranks of both.
        memory_bytes: Of a card.
    """
    free = ASSUMED.usable_frac * memory_bytes - weight_bytes(target, ranks)
    request = kv_bytes(target, ranks, 1, CONTEXT)
    vanilla = max(0, int(free // request))
    if not draft.is_shared_by(ranks):
        return Fit(vanilla, None)
    free = (1 - VISION_SHARE - PIXEL_SHARE) * (free - weight_bytes(draft, ranks))
    if free <= 0:
        return Fit(vanilla, 0)
    token = kv_bytes(draft, ranks, 1, 1)
    pool = pool_bytes(int(free), kv_bytes(target, ranks, 1, 1), token, KEPT, CONTEXT, BLOCK)
    return Fit(vanilla, max(0, int((free - pool) // request)), int(pool / token) - BLOCK)


# ---- what a step takes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """What the end of a verify step takes; assumed, as a kernel's launch is.

    Attributes:
        logit_bytes: Moved for a logit with sampling parameters: a float32 copy of 16 bits, written and read by a
            penalty and by a temperature, read once more to draw.
        laid_out_bytes: More of a logit where a path is laid out first: zeroed and copied.
        eager_launch_s: Of a kernel that no graph holds, on the host.
        launches: Such kernels of a verify step.
        path_launches: More of them where paths are laid out.
    """

    logit_bytes: float = 2 + 4 + 8 + 8 + 4
    laid_out_bytes: float = 2 + 4
    eager_launch_s: float = 10e-6
    launches: int = 8
    path_launches: int = 60


SAMPLING = Sampling()
MAX_TILE = 128
SMALL_TILE = 64  # at most, where products do not outrun the cache: not on Hopper (docs/kernels.md)
STALE_STEPS = 2  # by which windows were older than what they were verified behind: asynchronous scheduling
TREE_DEPTH = max(map(len, SPECVLM_PATHS))


@dataclass(frozen=True)
class Ways:
    """How a step is done.

    Attributes:
        splits_keys: Chains and the draft's first forward attend through a kernel that splits keys.
        small_tiles: Rows of a tree's group are cut into tiles of SMALL_TILE, on cards where that is faster.
        kernel_penalties: Penalties are applied along a tree's parents, not over laid-out paths.
        stale_steps: See STALE_STEPS.
        quantisation: Of the draft's layers, as `ModelShape.quantised` takes it; "": 16 bits.
    """

    splits_keys: bool
    small_tiles: bool
    kernel_penalties: bool
    stale_steps: int
    quantisation: str


BEFORE = Ways(False, False, False, STALE_STEPS, "")
AFTER = Ways(True, True, True, 0, FP8)


@dataclass(frozen=True)
class Setting:
    """A pair on a card, a request at a time.

    Attributes:
        target: The target.
        draft: The draft.
        gpu: By name.
        ranks: Of target and draft.
    """

    target: ModelShape
    draft: ModelShape
    gpu: str
    ranks: int = 1

    @property
    def place(self) -> Placement:
        """Where both run."""
        return Placement(GPUS[self.gpu], self.ranks)


PARTS = {
    "target: weights": "bytes of its layers and head / ranks / (memory's rate x share)",
    "target: attention": "the longer of KV bytes / rate and 4 x rows in tiles x heads' size x context / products' "
    "rate; unsplit: layers x waves x context x 41 ns",
    "target: launches, all-reduces": "kernels x 1.5 µs; 2 all-reduces a layer",
    "target: sampling": "rows x vocabulary x bytes moved / rate, and launches outside of graphs",
    "draft: weights": "forwards x bytes of its layers and head / ranks / rate",
    "draft: attention": "as the target's, over what it sees; its first forward has two rows",
    "draft: launches, all-reduces": "as the target's, a forward",
    "host": "what no kernel hides",
}


def parts(setting: Setting, shape: str, ways: Ways) -> dict[str, float]:
    """Return the seconds of a step at batch 1, by the names of PARTS.

    Args:
        setting: Pair and card.
        shape: CHAIN, TREE or PARALLEL; in parallel the draft's forwards are another card's.
        ways: How it is done.
    """
    target, place = setting.target, setting.place
    draft = _draft(setting, ways)
    drafts = window(setting, ways) if shape == PARALLEL else len(SPECVLM_PATHS) if shape == TREE else CHAIN_DRAFTS
    found = dict(zip(list(PARTS)[:3], _forward(target, place, drafts + 1, CONTEXT, ways, shape == TREE), strict=True))
    found["target: sampling"] = _sampling(target, place, drafts + 1, ways, shape == TREE)
    forwards: Mapping[int, int] = {}
    if shape != PARALLEL:
        forwards = Counter((2, *TREE_WIDTHS[1:])) if shape == TREE else {2: 1, 1: CHAIN_DRAFTS - 1}
    # The tree's levels have gone through our kernel all along, as a single row has gone through vLLM's.
    drafted = [
        [number * part for part in _forward(draft, place, rows, SEEN, ways, is_tree=rows > 2)]
        for rows, number in forwards.items()
    ]
    for name, column in zip(list(PARTS)[4:7], zip(*drafted, strict=True) if drafted else ((0.0,),) * 3, strict=True):
        found[name] = sum(column)
    found["host"] = place.assumed.step_s + place.assumed.speculation_s
    return found


def _forward(
    shape: ModelShape, place: Placement, rows: int, context: float, ways: Ways, is_tree: bool
) -> tuple[float, float, float]:
    """Return a forward's seconds at batch 1: weights, attention, and the rest of `forward_seconds`."""
    bandwidth = place.gpu.bandwidth * place.assumed.memory_frac
    weights = shape.read_bytes(rows) / place.ranks / bandwidth
    place = replace(place, own_attention=not is_tree and not ways.splits_keys)
    bare = forward_seconds(shape, place, 1, rows, 0)
    attention = forward_seconds(shape, place, 1, rows, context) - bare
    if is_tree:
        attention = max(attention, _tiled_seconds(shape, place, rows, context, ways.small_tiles))
    return weights, attention, bare - weights


def tile_rows(rows: int, group: int, most: int) -> int:
    """Return the rows that a tree's products have: those of a KV head's queries, in tiles of a power of two.

    Args:
        rows: Of the tree, its root included.
        group: Query heads of a KV head.
        most: Rows of a tile.
    """
    wanted = rows * group
    tile = min(most, 1 << max(4, (wanted - 1).bit_length()))
    return -(-wanted // tile) * tile


def _tiled_seconds(shape: ModelShape, place: Placement, rows: int, context: float, small: bool) -> float:
    """Return the seconds of a tree's products in tiles; keys that a second tile reads come from the cache."""
    kv_heads = -(-shape.kv_heads // place.ranks)
    most = SMALL_TILE if small and not place.gpu.splits_keys else MAX_TILE
    products = 4 * shape.layers * kv_heads * shape.head_dim * tile_rows(rows, shape.heads // shape.kv_heads, most)
    return products * context / (place.gpu.flops * place.assumed.flops_frac)


def _sampling(shape: ModelShape, place: Placement, rows: int, ways: Ways, is_tree: bool) -> float:
    """Return what Qwen2.5-VL's default sampling (a repetition penalty) takes of a verify step."""
    one, launches = SAMPLING, SAMPLING.launches
    logit_bytes = one.logit_bytes
    if is_tree and not ways.kernel_penalties:
        rows *= TREE_DEPTH + 1
        logit_bytes += one.laid_out_bytes
        launches += one.path_launches
    moved = rows * shape.vocab * logit_bytes / (place.gpu.bandwidth * place.assumed.memory_frac)
    return moved + launches * one.eager_launch_s


def vanilla_seconds(setting: Setting) -> float:
    """Return a step without drafts: of a row, sampled as a verify step is."""
    place = setting.place
    forward = forward_seconds(setting.target, place, 1, 1, CONTEXT)
    return forward + place.assumed.step_s + _sampling(setting.target, place, 1, AFTER, False)


def tokens(setting: Setting, shape: str, ways: Ways) -> float:
    """Return the tokens of a step."""
    agreement = default_agreement(setting.target.family, PRUNE_RATIO)
    if shape == PARALLEL:
        step, turn = sum(parts(setting, shape, ways).values()), _turn(setting, ways)
        run = run_streams(
            agreement, window(setting, ways), StreamTimes(lambda _: step, turn), answer=20_000, age=ways.stale_steps
        )
        return run.tokens / run.steps
    return agreement.tree_length() if shape == TREE else agreement.chain_length(CHAIN_DRAFTS)


def window(setting: Setting, ways: Ways) -> int:
    """Return the window of parallel drafting, by c* with vanilla's step for the target's."""
    rate = default_agreement(setting.target.family, PRUNE_RATIO).rates[-1]
    return window_of(vanilla_seconds(setting), _turn(setting, ways), rate, WINDOWS[0])


def _turn(setting: Setting, ways: Ways) -> float:
    """Return what a token of the drafter on a card of its own takes."""
    return forward_seconds(_draft(setting, ways), Placement(GPUS[setting.gpu]), 1, 1, SEEN)


def _draft(setting: Setting, ways: Ways) -> ModelShape:
    return setting.draft.quantised(ways.quantisation) if ways.quantisation else setting.draft


def changes() -> Iterator[tuple[str, Ways]]:
    """Yield what was done, one after the other, from BEFORE to AFTER, and what a checkpoint of four bits would do."""
    ways = BEFORE
    for name, changed in (
        ("as it was", {}),
        ("chains split keys", {"splits_keys": True}),
        ("small tiles, penalties in a kernel", {"small_tiles": True, "kernel_penalties": True}),
        ("fresh windows", {"stale_steps": 0}),
        ("fp8 draft", {"quantisation": FP8}),
        ("or a draft of four bits", {"quantisation": INT4}),
    ):
        ways = replace(ways, **changed)  # type: ignore[arg-type]
        yield name, ways
