"""Run as a program, without the interpreter: which variants of the kernels are warmed, which ones steps use.

Prints JSON: variants of each kernel that are `warmed`, `used`, and used but `missing`; `ambiguous`, kernels of which a
key of `dispatch.launch` does not settle the variant; `stale`, those of which it does not settle a plan.
"""

import contextlib
import itertools
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))
# Before the first import of Triton, as in `benchmarks/kernels/compiled.py`.
os.environ["TRITON_BACKENDS_IN_TREE"] = "1"
os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.runtime.jit import JITFunction

import vidspec_kernels as kernels
from benchmarks.kernels import compiled
from benchmarks.kernels.launches import BF16, FP8, cache_views, grow_buffers, sampling, step_buffers, template
from vidspec_kernels import dispatch, warm_up
from vidspec_kernels.warm_up import floats, i32, i64

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN = 28, 4, 128, 3584
MAX_REQS, MAX_CONTEXT, NUM_DRAFTS, WIDTH, CANDIDATES, TOP_N = 96, 32_768, 25, 10, 10, 10
NUM_SHARDS = 2
KEYS, VALUES = cache_views(KV_HEADS, HEAD_SIZE, BF16)
# Of a layer in BF16, of one with queries and cache in float8, and of one with a cache alone.
LAYERS = ((KEYS, VALUES, False), *((*cache_views(KV_HEADS, HEAD_SIZE, FP8), is_query) for is_query in (True, False)))
with compiled.pretending(90):
    SCRATCH = kernels.TreeAttentionScratch(HEAD_SIZE, torch.device("meta"))
CACHES = kernels.CacheList([(KEYS, VALUES)])
TABLE = i32(MAX_REQS, MAX_CONTEXT // 16 + 2)
TREES = (i32(MAX_REQS, NUM_DRAFTS + 1), i32(MAX_REQS, NUM_DRAFTS + 1), i64(MAX_REQS, NUM_DRAFTS + 1))
VOCAB, WORDS = 152_000, i32(MAX_REQS, 4_750)
LOOSE = kernels.LooseTables(WORDS, WORDS, i32(MAX_REQS), i64(MAX_REQS))
PENALTIES = kernels.PenaltyTables(*(floats(MAX_REQS) for _ in range(3)), WORDS, i32(MAX_REQS, VOCAB))
KEPT, TOTALS = (i32(MAX_REQS, NUM_DRAFTS + 1), i32(MAX_REQS)), i64(7 + NUM_DRAFTS)
BUFFERS, TEMPLATE = grow_buffers(WIDTH, CANDIDATES, NUM_DRAFTS, MAX_REQS), template(NUM_DRAFTS + 1)
STORE = (floats(64, 64, HIDDEN, dtype=BF16), i32(64), i32(MAX_REQS, 800), i32(MAX_REQS))
TABLES, STEP = step_buffers(path_cols=NUM_DRAFTS + 1, max_batch=MAX_REQS, max_blocks=TABLE.shape[1])
LEVEL = kernels.LevelBuffers.allocate(MAX_REQS, i64(3, MAX_REQS * WIDTH), WIDTH)
VOCAB_SIZE, NOISE = 151_936, sampling()
DRAWS = kernels.SampleScratch(MAX_REQS * WIDTH, VOCAB_SIZE, torch.device("meta"), CANDIDATES)
PLACES = (*TREES[1:], kernels.TreePlaces(*(i32(MAX_REQS) for _ in range(4)), i64(MAX_REQS, NUM_DRAFTS + 1)))
POSITIONS = [(i64(3, 8193), None), (i64(8192), i64(8192))]  # of several axes in place, and of one into a copy

TEXTS, RING = (i32(MAX_REQS), i32(MAX_REQS, MAX_CONTEXT)), 64
STREAMS = i32(MAX_REQS, kernels.NUM_HEADERS + RING)

ACCEPTS: dict = {}  # launches of `accept` that are known
PENALISED: dict = {}  # and of `path_penalties`


def warm() -> None:
    for keys, values, is_query_fp8 in LAYERS:
        warm_up.warm_tree_attention(keys, values, TABLE, HEADS, is_query_fp8, BF16, NUM_DRAFTS + 1, SCRATCH)
    warm_up.warm_kv_compact(CACHES, TABLE, NUM_DRAFTS)
    for positions in POSITIONS:
        warm_up.warm_place_trees(*PLACES, *positions)
    warm_up.warm_accept(NUM_DRAFTS, MAX_REQS, in_trees=True, is_loose=True)
    warm_up.warm_loosen(NUM_DRAFTS, WORDS, torch.float32, in_trees=True, is_measured=True)
    warm_up.warm_path_penalties(VOCAB, TREES[0], PENALTIES)
    warm_up.warm_static_trees(BUFFERS.tree, TEMPLATE, CANDIDATES)
    warm_up.warm_adaptive_trees(BUFFERS, TEMPLATE, fills=True)
    warm_up.warm_begin_step(TABLES, STEP, is_greedy=False)
    warm_up.warm_next_level(STEP, LEVEL, TABLES.fed, NUM_DRAFTS + 1)
    warm_up.warm_draw(NOISE, DRAWS, BF16)
    warm_up.warm_candidates(NOISE, DRAWS, BF16, with_log_probs=True)
    warm_up.warm_guidance_scores([(keys, HEADS, is_fp8) for keys, _, is_fp8 in LAYERS], TABLE, BF16)
    warm_up.warm_windows(*TEXTS, RING, NUM_DRAFTS)
    warm_up.warm_visual_relevance(*STORE, BF16, TOP_N, NUM_DRAFTS + 1, NUM_SHARDS)


def cut(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Return a vector of the same length that begins anywhere in a longer one, as slices of a batch do."""
    offset = rng.choice((0, 1, 2, 3, 5, 16))
    return torch.empty(len(tensor) + offset, dtype=tensor.dtype, device="meta")[offset:]


def step(rng: random.Random) -> None:
    """Make the launches of one step of a random batch, in the forms that the engine makes them."""
    num_reqs, width = rng.randint(1, MAX_REQS), rng.randint(1, WIDTH)
    num_queries, context = rng.randint(1, NUM_DRAFTS + 1), int(MAX_CONTEXT ** rng.random())
    rows = num_reqs * num_queries
    vectors = [cut(vector, rng) for vector in (i64(num_reqs), i32(num_reqs), i32(num_reqs), i32(num_reqs))]
    words = i64(num_reqs + 3, NUM_DRAFTS + 1)[rng.randint(0, 3) :, :num_queries]
    packed = floats(rows, HEADS + 2 * KV_HEADS, HEAD_SIZE, dtype=BF16)
    keys, values, is_query_fp8 = rng.choice(LAYERS)
    scale = cut(floats(KV_HEADS), rng) if rng.random() < 0.5 else floats(1).expand(KV_HEADS)
    packed = packed.to(FP8) if is_query_fp8 else packed
    scales = (scale if is_query_fp8 else None, scale, scale) if keys.dtype == FP8 else kernels.NO_SCALES
    kernels.tree_attention(
        packed[:, :HEADS], keys, values, TABLE[:num_reqs], *vectors, words,
        floats(rows, HEADS, HEAD_SIZE, dtype=BF16), scale=0.1, max_queries=num_queries, scratch=SCRATCH, scales=scales,
    )  # fmt: skip
    kernels.kv_compact(CACHES, TABLE, *vectors[:2], i32(num_reqs, NUM_DRAFTS + 1), vectors[2])
    kernels.kv_compact(CACHES, TABLE, *vectors[:2], KEPT[0], KEPT[1], vectors[0])
    for positions, copy in POSITIONS:
        seen, copy = positions[..., :rows], copy if copy is None else copy[:rows]
        begins, lens = cut(i32(num_reqs + 1), rng), vectors[1]
        kernels.place_trees(
            vectors[0], begins, lens, *PLACES[:2], seen, PLACES[2], size=rng.randint(num_reqs, MAX_REQS),
            out_positions=copy,
        )  # fmt: skip
    tokens = (cut(i64(rows), rng), cut(i32(rows), rng), cut(i32(num_reqs + 1), rng))
    settings = (vectors[0], i32(MAX_REQS), floats(MAX_REQS), i32(MAX_REQS))
    signals = (cut(floats(rows), rng), cut(floats(rows), rng), cut(floats(rows, dtype=torch.bool), rng))
    trees, looseness = kernels.TreeShapes(vectors[0], *TREES), kernels.Looseness(*settings, *signals, rng.random())
    tally = kernels.Tally(vectors[0], floats(MAX_REQS, dtype=torch.bool), TOTALS, *KEPT, ACCEPTS)
    for mode in itertools.product((None, trees), (None, looseness)):
        kernels.accept(*tokens, NUM_DRAFTS, *mode, tally)
    draft_step(rng, num_reqs, width)
    vectors_of_rows = (tokens[0], tokens[1], floats(rows, VOCAB), *(cut(i(rows), rng) for i in (i64, i32, i64)))
    for parents, relevance in itertools.product((None, TREES[0]), (None, signals[0])):
        kernels.loosen(*vectors_of_rows, LOOSE, parents, relevance, is_predicting=rng.random() < 0.5)
    penalised = (floats(rows, VOCAB), *vectors_of_rows[3:5], tokens[1])
    kernels.path_penalties(*penalised, TREES[0], PENALTIES, PENALISED)
    grow_trees(vectors[0], vectors[1], width, rng)
    listening = rng.randint(1, 8)
    kernels.guidance_scores(
        packed[:, :HEADS], keys, i32(listening, TABLE.shape[1]), i32(listening + 1),
        i32(rows), floats(listening, context), i64(listening), i32(listening), 0.1,
        lse=rng.choice((None, floats(HEADS, rows).T)), max_queries_per_req=rng.randint(1, rows),
        scales=scales,
    )  # fmt: skip
    kernels.visual_relevance(
        floats(rows, HIDDEN, dtype=BF16), tokens[2], vectors[0], *STORE, TOP_N, NUM_DRAFTS + 1, rng.randint(1, 800)
    )
    kernels.merge_relevance(floats(NUM_SHARDS, rows, TOP_N))
    # What stays is cut at its beginning alone, and comes from a copy of its own.
    kernels.copy_committed_suffix(vectors[0], *TEXTS, i32(MAX_REQS, NUM_DRAFTS + 2)[:num_reqs])
    told = i32(MAX_REQS, kernels.WINDOW_INFO_SIZE)[:num_reqs]
    asked = cut(i32(num_reqs * kernels.NUM_ASKED), rng).view(num_reqs, kernels.NUM_ASKED)
    kernels.gather_draft_windows(STREAMS, asked, vectors[0], *TEXTS, i64(MAX_REQS, NUM_DRAFTS)[:num_reqs], told)


def grow_trees(rows: torch.Tensor, num_accepted: torch.Tensor, width: int, rng: random.Random) -> None:
    """Make the launches of static and adaptive trees of a step, with a level of some width."""
    num_reqs, budget = len(rows), rng.randint(0, NUM_DRAFTS)
    kernels.tree_begin(BUFFERS.tree, TEMPLATE, num_reqs)
    placed, fed = rng.randint(1, NUM_DRAFTS), rng.randint(0, width)
    level = kernels.PlacedLevel(i64(placed), i64(placed), i64(fed), i64(MAX_REQS, fed))
    kernels.tree_place(BUFFERS.tree, level, num_reqs, i64(num_reqs * width, CANDIDATES))
    kernels.tree_begin(BUFFERS.tree, TEMPLATE, num_reqs, BUFFERS, rows, num_accepted)
    kernels.tree_plan(BUFFERS.plans, rows, floats(num_reqs, CANDIDATES))
    kernels.tree_grow(
        BUFFERS, rows, floats(num_reqs * width, CANDIDATES), i64(num_reqs * width, CANDIDATES),
        level=rng.randint(0, 7), budget=budget, first_parent=rng.randint(0, 60), num_next=rng.randint(1, width),
    )  # fmt: skip
    num_parents = rng.randint(1, BUFFERS.max_parents)
    leaves = kernels.Leaves(*(part[:num_reqs, :num_parents] for part in BUFFERS.leftover))
    kernels.tree_finish(
        BUFFERS.tree, num_reqs, next_free=BUFFERS.next_free, leaves=leaves, max_nodes=budget,
        plans=BUFFERS.plans, rows=rows,
    )  # fmt: skip


def draft_step(rng: random.Random, num_reqs: int, width: int) -> None:
    """Begin a step, place a level of chains and one of trees, and draw after each; some logits are processed."""
    picked, is_verified = cut(i64(num_reqs), rng), cut(floats(num_reqs, dtype=torch.bool), rng)
    kernels.begin_step(
        cut(i64(num_reqs), rng), rng.choice((None, picked)), cut(i32(num_reqs), rng), rng.choice((None, is_verified)),
        floats(TABLES.max_reqs), i64(TABLES.max_reqs), TABLES, STEP, size=rng.randint(num_reqs, MAX_REQS),
        block_size=16, max_position=rng.randint(1, 10**6), max_drafts=rng.randint(0, NUM_DRAFTS),
    )  # fmt: skip
    sizes = {"size": num_reqs, "block_size": 16, "max_position": rng.randint(1, 10**6)}
    nodes = [i64(num_reqs + 1, WIDTH + 1)[rng.randint(0, 1) :, rng.randint(0, 1) :][:, :width] for _ in range(2)]
    kernels.next_level(STEP, LEVEL, TABLES.fed, level=rng.choice((rng.randint(1, 9), STEP.level)), **sizes)
    kernels.next_level(
        STEP, LEVEL, TABLES.fed, *nodes, i64(num_reqs, NUM_DRAFTS + 1), level=rng.randint(1, 9), **sizes
    )  # fmt: skip
    is_processed = rng.random() < 0.5
    logits = floats(num_reqs, VOCAB_SIZE, dtype=torch.float32 if is_processed else BF16)
    vectors = (cut(floats(num_reqs), rng), cut(i64(num_reqs), rng), cut(i64(num_reqs), rng), NOISE)
    options = {"scratch": DRAWS, "apply_temperature": not is_processed}
    kernels.draw(
        logits, *vectors, level=rng.choice((rng.randint(0, 4), STEP.level)), out_ids=cut(i32(num_reqs), rng),
        out_tokens=i64(MAX_REQS, rng.choice((5, NUM_DRAFTS)))[rng.randint(0, MAX_REQS - num_reqs) :], **options,
    )  # fmt: skip
    first = rng.randint(0, MAX_REQS * WIDTH - num_reqs)
    kernels.candidates(
        logits, floats(MAX_REQS), i64(MAX_REQS), *vectors[2:], log_probs=floats(MAX_REQS * WIDTH, CANDIDATES)[first:],
        ids=i64(MAX_REQS * WIDTH, CANDIDATES)[first:], width=WIDTH, first=first, **options,
    )  # fmt: skip


def variants(run) -> set[tuple[str, str]]:
    found = set()

    class Prepared:
        def _init_handles(self) -> None:
            pass

    def compile_nothing(kernel, key, *_):
        found.add((kernel.__name__, kernel.__module__.rpartition(".")[2], str(key)))
        return Prepared()

    with mock.patch.object(JITFunction, "_do_compile", compile_nothing):
        run()
    return found


def ambiguous_plans(run) -> tuple[list[str], list[str]]:
    """Return kernels whose keys of `dispatch.launch` stand for several variants, and those whose plans go stale."""
    found: dict[tuple[str, int, str], set] = {}
    stays: dict[tuple[str, int, str], list] = {}
    stale = set()

    def launch(kernel, grid, device, args, constants, plans, key=None, options=None, changing=None):
        kernel.device_caches.clear()  # so that every launch asks for its variant
        asked = variants(lambda: dispatch.launcher(kernel, grid, device)(*args, **constants, **options or {}))
        plan = (kernel.__name__, id(plans), str(key))
        found.setdefault(plan, set()).update(asked)
        named = zip(kernel.arg_names, args, strict=False)
        kept = [arg for name, arg in named if changing is not None and name not in changing]
        if not same(kept, stays.setdefault(plan, kept)):
            stale.add(kernel.__name__)

    kernel_modules = [module for name, module in sys.modules.items() if name.startswith("vidspec_kernels.")]
    with contextlib.ExitStack() as stack:
        for module in kernel_modules:
            if hasattr(module, "launch"):
                stack.enter_context(mock.patch.object(module, "launch", launch))
        variants(run)  # other launches compile nothing
    assert found and any(stays.values())
    return sorted({name for (name, _, _), several in found.items() if len(several) > 1}), sorted(stale)


def same(values, others) -> bool:
    """Return whether two arguments are the same number, or the same tensor itself; of tuples, all in them."""
    if isinstance(values, list | tuple):
        return len(values) == len(others) and all(map(same, values, others))
    return values is others if isinstance(values, torch.Tensor) else values == others


def main() -> None:
    rng = random.Random(0)
    with compiled.pretending(90):
        warmed = variants(warm)
        used = variants(lambda: [step(rng) for _ in range(150)])
        ambiguous, stale = ambiguous_plans(lambda: [step(rng) for _ in range(20)])
    counts = [Counter(f"{module}.{name}" for name, module, _ in found) for found in (warmed, used)]
    found = dict(warmed=counts[0], used=counts[1], missing=sorted(used - warmed), ambiguous=ambiguous, stale=stale)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
