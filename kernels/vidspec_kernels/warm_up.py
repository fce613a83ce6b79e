"""Prepares every variant of the kernels that an engine's steps can reach: compiled, and loaded onto the device.

Each function calls one wrapper with meta tensors (see `dispatch.launcher`) for all that changes from step to step and
makes another variant of a kernel: how many rows a request has, how long contexts are, which tables are given. What a
configuration fixes (shapes of the model, strides of caches and tables) is taken from its own tensors. Nothing is
launched, no memory of the device is used and nothing waits for it, beside what loading a kernel takes.
"""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

import vidspec_kernels as kernels
from vidspec_kernels.accept.tables import NUM_SUMS
from vidspec_kernels.arrays import as_meta
from vidspec_kernels.float8 import FP8


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def i64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scales_of(keys: Tensor, query: Tensor) -> kernels.Scales:
    """Return the scales of what is float8: a cache has them, and queries only beside such a cache."""
    if keys.dtype != FP8:
        return kernels.NO_SCALES
    one = floats(keys.shape[2])
    return one if query.dtype == FP8 else None, one, one


def warm_tree_attention(
    keys: Tensor, values: Tensor, block_table: Tensor, num_heads: int, is_query_fp8: bool, dtype: torch.dtype,
    max_queries: int, scratch: kernels.TreeAttentionScratch, with_prefix: bool = False,
) -> None:  # fmt: skip
    """Prepare `tree_attention` for 1 to `max_queries` rows a request; one layer's caches, the layers' block table.

    `dtype` is that of outputs, and of queries that are not float8. `with_prefix`: for calls whose prefix is given, in
    the output itself.
    """
    keys, values, block_table, head_size = as_meta(keys), as_meta(values), as_meta(block_table), keys.shape[3]
    scratch = scratch.as_meta()
    for num_queries in range(1, max_queries + 1):
        out = floats(num_queries, num_heads, head_size, dtype=dtype)
        query = out.to(FP8) if is_query_fp8 else out
        kernels.tree_attention(
            query, keys, values, block_table, i64(1), i32(1), i32(1), i32(1), i64(1, num_queries), out, scale=1.0,
            max_queries=num_queries, scratch=scratch, scales=scales_of(keys, query),
            prefix=(out, floats(num_heads, num_queries)) if with_prefix else None,
        )  # fmt: skip


def warm_kv_compact(caches: kernels.CacheList, block_table: Tensor, num_drafts: int) -> None:
    """Prepare `kv_compact` for paths of `num_drafts` + 1 columns, in the requests' order and not."""
    for path_rows in (None, i64(1)):
        kernels.kv_compact(
            caches.as_meta(), as_meta(block_table), i64(1), i32(1), i32(1, num_drafts + 1), i32(1), path_rows
        )


def warm_place_trees(
    depths: Tensor, ancestors: Tensor, places: kernels.TreePlaces, positions: Tensor, out_positions: Tensor | None
) -> None:
    """Prepare `place_trees` for its own tables and these positions, real tensors of any values."""
    out_positions = None if out_positions is None else as_meta(out_positions)
    tables = (as_meta(depths), as_meta(ancestors), as_meta(positions), places.as_meta())
    kernels.place_trees(i64(1), i32(2), i32(1), *tables, size=1, out_positions=out_positions)


def warm_accept(num_drafts: int, max_reqs: int, in_trees: bool, is_loose: bool) -> None:
    """Prepare `accept`: of strict chains, and of trees and by loose rules where there are such.

    Paths are kept where drafts can be trees.
    """
    for tree, loose in itertools.product({False, in_trees}, {False, is_loose}):
        accept_once(num_drafts, max_reqs, tree, loose, keeps=in_trees)


def accept_once(num_drafts: int, max_reqs: int, in_trees: bool, is_loose: bool, keeps: bool = False) -> None:
    rows, trees, looseness = num_drafts + 1, None, None
    if in_trees:
        trees = kernels.TreeShapes(i64(1), i32(max_reqs, rows), i32(max_reqs, rows), i64(max_reqs, rows))
    if is_loose:
        settings = (i64(1), i32(max_reqs), floats(max_reqs), i32(max_reqs))
        looseness = kernels.Looseness(*settings, floats(rows), floats(rows), floats(rows, dtype=torch.bool), 0.5)
    tally = kernels.Tally(i64(1), floats(max_reqs, dtype=torch.bool), i64(NUM_SUMS + num_drafts))
    if keeps:
        tally = tally._replace(path=i32(max_reqs, rows), num_accepted=i32(max_reqs))
    kernels.accept(i64(rows), i32(rows), i32(2), num_drafts, trees, looseness, tally)


def warm_loosen(num_drafts: int, protected: Tensor, dtype: torch.dtype, in_trees: bool, is_measured: bool) -> None:
    """Prepare `loosen`, of drafts that are chains and trees, with relevance and without.

    `protected` is a bit table [max_reqs, num_words] as the engine has it, `dtype` that of the logits.
    """
    rows, (max_reqs, num_words) = num_drafts + 1, protected.shape
    vectors = (i64(rows), i32(rows), floats(rows, 32 * num_words, dtype=dtype), i64(rows), i32(rows), i64(rows))
    tables = kernels.LooseTables(as_meta(protected), as_meta(protected), i32(max_reqs), i64(max_reqs))
    trees, measures = {None, rows if in_trees else None}, {False, is_measured}
    for num_cols, has_scores, is_predicting in itertools.product(trees, measures, (False, True)):
        parents = None if num_cols is None else i32(max_reqs, num_cols)
        kernels.loosen(*vectors, tables, parents, floats(rows) if has_scores else None, is_predicting=is_predicting)


def warm_path_penalties(vocab_size: int, parents: Tensor, tables: kernels.PenaltyTables) -> None:
    """Prepare `path_penalties` for the engine's own tables, real tensors of any values."""
    tables = kernels.PenaltyTables(*map(as_meta, tables))
    kernels.path_penalties(floats(1, vocab_size), i64(1), i32(1), i32(1), as_meta(parents), tables)


def warm_begin_step(tables: kernels.StepTables, out: kernels.StepBuffers, is_greedy: bool) -> None:
    """Prepare `begin_step`: of whole batches and of some requests of one, with verified drafts or without."""
    tables, out = tables.as_meta(), out.as_meta()
    temperature = None if is_greedy else floats(tables.max_reqs)
    for picked, is_verified in itertools.product((None, i64(1)), (None, floats(1, dtype=torch.bool))):
        kernels.begin_step(
            i64(1), picked, i32(1), is_verified, temperature, i64(tables.max_reqs), tables, out,
            size=1, block_size=16, max_position=1, max_drafts=1,
        )  # fmt: skip


def warm_next_level(step: kernels.StepBuffers, out: kernels.LevelBuffers, fed: Tensor, num_cols: int = 0) -> None:
    """Prepare `next_level`: of chains, whose level may lie on the device, and of trees with `num_cols` columns."""
    step, out, fed = step.as_meta(), out.as_meta(), as_meta(fed)
    kinds: list[tuple[int | Tensor, tuple[Tensor, ...]]] = [(1, ()), (i32(1), ())]
    if num_cols:
        kinds.append((1, (i64(1, 1), i64(1, 1), i64(1, num_cols))))
    for level, tree in kinds:
        kernels.next_level(step, out, fed, *tree, size=1, level=level, block_size=16, max_position=1)


def warm_draw(noise: kernels.Noise, scratch: kernels.SampleScratch, dtype: torch.dtype) -> None:
    """Prepare `draw` from logits of a dtype as they are, and from processed ones, float32."""
    scratch, vectors = scratch.as_meta(), (floats(1), i64(1), i64(1))
    for logits_dtype, is_processed in ((dtype, False), (torch.float32, True)):
        logits = floats(1, scratch.vocab_size, dtype=logits_dtype)
        for level in (0, i32(1)):
            kernels.draw(
                logits, *vectors, noise, level=level, out_tokens=i64(1, 1), out_ids=i32(1), scratch=scratch,
                apply_temperature=not is_processed,
            )  # fmt: skip


def warm_candidates(
    noise: kernels.Noise, scratch: kernels.SampleScratch, dtype: torch.dtype, with_log_probs: bool
) -> None:
    """Prepare `candidates` from logits of a dtype as they are, and from processed ones, float32."""
    scratch, num_candidates = scratch.as_meta(), scratch.num_candidates
    for logits_dtype, is_processed in ((dtype, False), (torch.float32, True)):
        kernels.candidates(
            floats(1, scratch.vocab_size, dtype=logits_dtype), floats(1), i64(1), i64(1), noise,
            log_probs=floats(1, num_candidates), ids=i64(1, num_candidates), scratch=scratch,
            with_log_probs=with_log_probs, apply_temperature=not is_processed,
        )  # fmt: skip


def warm_static_trees(tree: kernels.TreeTables, template: kernels.TreeTemplate, num_candidates: int) -> None:
    """Prepare what a step of static trees launches beside its levels' forwards."""
    tree = tree.as_meta()
    kernels.tree_begin(tree, template.as_meta(), 1)
    kernels.tree_place(tree, kernels.PlacedLevel(i64(1), i64(1), i64(1), i64(1, 1)), 1, i64(1, num_candidates))


def warm_adaptive_trees(growth: kernels.TreeGrowBuffers, template: kernels.TreeTemplate, fills: bool) -> None:
    """Prepare what a step of adaptive trees launches beside its levels' forwards; `fills`: trees are filled up."""
    growth = growth.as_meta()
    kernels.tree_begin(growth.tree, template.as_meta(), 1, growth, i64(1), i32(1))
    kernels.tree_plan(growth.plans, i64(1), floats(1, growth.num_candidates))
    for width in range(1, growth.max_frontier + 1):
        grow_once(growth, width)
    finish_once(growth, fills)


def grow_once(buffers: kernels.TreeGrowBuffers, width: int) -> None:
    """Prepare `tree_grow` for levels of `width` nodes a request."""
    buffers, num_candidates = buffers.as_meta(), buffers.num_candidates
    kernels.tree_grow(
        buffers, i64(1), floats(width, num_candidates), i64(width, num_candidates),
        level=0, budget=buffers.tree.num_cols - 1, first_parent=0, num_next=1,
    )  # fmt: skip


def finish_once(growth: kernels.TreeGrowBuffers, fills: bool) -> None:
    growth = growth.as_meta()
    leaves = kernels.Leaves(*(part[:1] for part in growth.leftover)) if fills else None
    kernels.tree_finish(
        growth.tree, 1, next_free=growth.next_free, leaves=leaves, max_nodes=growth.tree.num_cols - 1,
        plans=growth.plans, rows=i64(1),
    )  # fmt: skip


def warm_guidance_scores(
    layers: Iterable[tuple[Tensor, int, bool]], block_table: Tensor, dtype: torch.dtype
) -> None:  # fmt: skip
    """Prepare `guidance_scores` for layers given by their keys, their number of query heads and whether these are
    float8.

    With the layer's own log-sum-exps and without: a backend may return them in one step and not in another.
    """
    columns = block_table.shape[1]
    for keys, num_heads, is_query_fp8 in layers:
        query = floats(1, num_heads, keys.shape[3], dtype=FP8 if is_query_fp8 else dtype)
        for lse in (None, floats(num_heads, 1).T):
            kernels.guidance_scores(
                query, as_meta(keys), i32(1, columns), i32(2), i32(1), floats(1, 1), i64(1), i32(1), 1.0, lse=lse,
                max_queries_per_req=1, scales=scales_of(keys, query),
            )  # fmt: skip


def warm_visual_relevance(
    store: Tensor, block_fill: Tensor, block_table: Tensor, num_blocks: Tensor, dtype: torch.dtype, top_n: int,
    max_queries: int, num_shards: int,
) -> None:  # fmt: skip
    """Prepare `visual_relevance` for videos of any length, and its merge over shards; see their arguments."""
    store, block_fill, block_table, num_blocks = map(as_meta, (store, block_fill, block_table, num_blocks))
    cosines = kernels.visual_relevance(
        floats(1, store.shape[2], dtype=dtype), i32(2), i64(1), store, block_fill, block_table, num_blocks, top_n,
        max_queries, block_table.shape[1],
    )  # fmt: skip
    kernels.merge_relevance(cosines[None].expand(num_shards, -1, -1))


def warm_windows(num_tokens: Tensor, text: Tensor, ring: int, num_drafts: int) -> None:
    """Prepare the operations on draft windows for the engine's own texts, rings of so many tokens and K drafts."""
    streams = i32(len(num_tokens), kernels.NUM_HEADERS + ring)
    texts = (as_meta(num_tokens), as_meta(text))
    kernels.copy_committed_suffix(i64(1), *texts, i32(1, 2 + num_drafts))
    kernels.gather_draft_windows(
        streams, i32(1, kernels.NUM_ASKED), i64(1), *texts, i64(1, num_drafts), i32(1, kernels.WINDOW_INFO_SIZE)
    )
