"""What the kernels should take on a GPU, from bytes, products and compile data: a model, nothing is measured.

python benchmarks/compile_report.py --json --archs 80,90 --cases "$(python benchmarks/kernel_model.py)" > COMPILED.json
python benchmarks/kernel_model.py COMPILED.json            # print the sections
python benchmarks/kernel_model.py COMPILED.json PAGE.md    # and write them between the page's marks

Without arguments it prints which cases it needs. Tiles and grids are the wrappers' own: the model calls the
functions that they launch by. A kernel's floor is the larger of two times: what it must move at the memory's peak, and
what it must multiply at the tensor cores' peak. The model adds what a launch takes on top: waves of programs, copies
under way, second reads through L2, padded rows, dependent loads, and the launch itself.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernel_model_tree_attention as attention_model
import torch

from vidspec_kernels.guidance_scores import api as guidance
from vidspec_kernels.limits import DeviceLimits
from vidspec_kernels.visual_relevance import tiles as relevance
from vidspec_kernels.visual_relevance.api import _MERGE_ENTRIES

# The package exports functions of the modules' names.


@dataclass(frozen=True)
class Device:
    """A card; times in seconds, rates per second.

    Attributes:
        memory: Bytes from memory, peak.
        tensor: Operations of dense bf16 products, peak.
        l2: Bytes from L2, achievable.
        clock: Cycles.
        limits: What the wrappers ask of it.
    """

    name: str
    memory: float
    tensor: float
    l2: float
    clock: float
    limits: DeviceLimits

    @property
    def num_sms(self) -> int:
        """Multiprocessors."""
        return self.limits.num_sms


def _device(name: str, arch: int) -> Device:
    card, clock = attention_model.CARDS[arch], attention_model.ARCHITECTURES[arch].clock
    return Device(name, card.memory, card.products, card.cache, clock, card.limits)


H100, A100 = _device("H100 SXM", 90), _device("A100 SXM 80 GB", 80)

# Assumptions, all of them: shares of the peaks that good kernels reach, and latencies.
MEMORY_SHARE, TENSOR_SHARE = attention_model.MEMORY_REACHED, attention_model.PRODUCTS_REACHED
ISSUE_SHARE = 0.80  # of one instruction a scheduler and cycle
LATENCY = 0.8e-6  # of a load from memory under load
LAUNCH = attention_model.LAUNCH  # from the end of one kernel to the start of the next, in a graph
SCHEDULERS = 4


@dataclass(frozen=True)
class Launch:
    """One kernel of a call: sums over its programs, which are alike.

    Attributes:
        programs: Of the grid, that have work.
        per_sm: Programs that a multiprocessor holds.
        memory_bytes: Moved between memory and the chip.
        l2_bytes: Moved between L2 and multiprocessors.
        operations: Of products, padded rows included.
        in_flight: Bytes of copies that one program has under way.
        instructions: Issued by warps.
        rounds: Loads that wait for each other, before the first and after the last tile.
        tail: Seconds after the last tile that nothing overlaps.
    """

    programs: int
    per_sm: int
    memory_bytes: float = 0
    l2_bytes: float = 0
    operations: float = 0
    in_flight: float = math.inf
    instructions: float = 0
    rounds: int = 0
    tail: float = 0


@dataclass(frozen=True)
class Call:
    """One call of a wrapper: what it must move and multiply at the least, and what it launches."""

    memory_bytes: float
    operations: float
    launches: tuple[Launch, ...]

    @property
    def programs(self) -> int:
        """Of the first launch."""
        return self.launches[0].programs


def floor(call: Call, device: Device) -> tuple[float, str]:
    """Return the floor in seconds, and which of both it is: "M"emory or "T"ensor cores."""
    times = {"M": call.memory_bytes / device.memory, "T": call.operations / device.tensor}
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def waves(launch: Launch, device: Device) -> list[int]:
    """Return how many programs run in each wave."""
    full, rest = divmod(launch.programs, launch.per_sm * device.num_sms)
    return [launch.per_sm * device.num_sms] * full + [rest] * bool(rest)


def seconds(launch: Launch, device: Device) -> float:
    """Return what one launch takes by the model."""
    total = LAUNCH + launch.rounds * LATENCY + launch.tail
    for programs in waves(launch, device):
        share = programs / launch.programs
        bandwidth = min(MEMORY_SHARE * device.memory, programs * launch.in_flight / LATENCY)
        # Of programs that do not fill a wave the busiest multiprocessor has one more than others.
        on_one_sm = -(-programs // device.num_sms) / launch.programs
        total += max(
            share * launch.memory_bytes / bandwidth,
            share * launch.l2_bytes / device.l2,
            on_one_sm * launch.operations / (TENSOR_SHARE * device.tensor / device.num_sms),
            on_one_sm * launch.instructions / (ISSUE_SHARE * SCHEDULERS * device.clock),
        )
    return total


def modelled(call: Call, device: Device) -> float:
    """Return what a call takes by the model, in seconds."""
    return sum(seconds(launch, device) for launch in call.launches)


# Cases of the compile report that the model needs.
CASES = (
    r"^(28/4|14/2 d64) Q(9|26|65)$|^3584 Q(11|26|65) 25k top 10$|merge of 4|^(28/4|14/2 d64) nq32 25k|tree K64, axes 3|"
    r"K25, axes 3|ring 64$|152k torch.bfloat16$|adaptive K64|F10 C10|(strict chain|loose tree) K64$|d128 16 bits$"
)


class Compiled:
    """Compile data by kernel, case and architecture: rows of compile_report.py."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows
        self._found = {(row["kernel"], row["case"], row["arch"]): row for row in rows}

    def per_sm(self, kernel: str, case: str, device: Device) -> int:
        """Return how many programs of a compiled kernel a multiprocessor holds."""
        return self._found[kernel, case, device.limits.capability]["programs_per_sm"]


# ---- tree_attention --------------------------------------------------------------------------------------------------

SHAPES = {"28/4": (28, 4, 128), "14/2 d64": (14, 2, 64)}
CONTEXTS, BATCHES, QUERIES = (1_000, 8_000, 25_000, 100_000), (1, 8, 32), (6, 26, 65)


def tree_attention(device: Device, shape: str, queries: int, batch: int, context: int) -> str:
    """Return the cell of one layer of a decode step, by the model of its own decomposition."""
    found = attention_model.predict(context, batch, queries, *SHAPES[shape], device.limits.capability)
    bound = found["floor_by"][0].upper()
    return figures(found["programs"], found["floor_us"], found["predicted_us"], bound)


# Query heads on KV heads of released models, by their group: 26 rows of a static tree, 25 of one with 24 nodes.
GROUPS = {
    "Qwen3-VL 8B": (32, 8, 128),
    "Qwen2.5-VL 32B": (40, 8, 128),
    "Qwen2.5-VL 7B": (28, 4, 128),
    "Qwen2.5-VL 72B": (64, 8, 128),
    "Qwen3-VL 235B": (64, 4, 128),
}


def tiles_table() -> str:
    """Return what one layer takes with row tiles of up to 128 rows and with those that launches take, by group."""
    rows = []
    for name, (heads, kv_heads, head_size) in GROUPS.items():
        group, cells = heads // kv_heads, []
        for device in (H100, A100):
            limits = dataclasses.replace(device.limits, capability=H100.limits.capability)
            wide = attention_model.tile_shape(26 * group, head_size, False, True, limits)
            for queries, tile in ((26, wide), (26, None), (25, None)):
                found = attention_model.predict(
                    25_000, 8, queries, heads, kv_heads, head_size, device.limits.capability, tile
                )
                block = int(found["tile"].split("x")[0])
                cells.append(f"{-(-queries * group // block)} x {block}: {found['predicted_us']:.0f}")
        rows.append([name, str(group), str(26 * group), *cells])
    heads_of = [f"{device.name.split()[0]}: {what}" for device in (H100, A100) for what in ("128", "now", "24 nodes")]
    return table(["model", "group", "rows", *heads_of], rows)


# ---- visual_relevance ------------------------------------------------------------------------------------------------

HIDDEN, TOP_N = 3584, 10
# Of a warp, to select the largest of 512 products: from the assembler's listing (sm_90), and cycles each.
SELECT_INSTRUCTIONS, SELECT_CYCLES = 1500, 2


def relevance_case(queries: int) -> str:
    """Return the case of the compile report that has the tiles of so many queries."""
    return f"3584 Q{11 if queries <= 16 else queries} 25k top 10"


def visual_relevance(device: Device, compiled: Compiled, queries: int, batch: int, tokens: int) -> Call:
    """Model one step's relevance of bf16 states of a 7B target, and its merge."""
    bf16, log_top = torch.bfloat16, (TOP_N - 1).bit_length()
    tile = relevance._tile(bf16, bf16, queries, log_top, device.limits, False)
    case = relevance_case(queries)
    per_sm = min(compiled.per_sm("visual_relevance", case, device), tile.programs_per_sm)
    splits = relevance._num_splits(batch, tokens, tile.programs_per_sm * device.num_sms)
    share = max(-(-tokens // splits), relevance._LEAST_SHARE)
    programs = batch * -(-tokens // share)
    keys, dims = 2 ** tile.constants["LOG_KEYS"], tile.constants["BLOCK_DIM"]
    padded = 2 ** tile.constants["LOG_QUERIES"] + sum(2**log for log in [tile.constants["LOG_MORE"]] if log is not None)
    tiles = programs * -(-share // keys)
    line = 2 * HIDDEN
    entries = programs * queries * 2**log_top * 4
    select = SELECT_INSTRUCTIONS * SELECT_CYCLES * (padded * keys / 512 / tile.options["num_warps"]) / device.clock
    stages = tile.options["num_stages"] - 1
    main = Launch(
        programs=programs,
        per_sm=per_sm,
        memory_bytes=batch * tokens * line + entries,
        l2_bytes=(batch * tokens + tiles * padded) * line,
        operations=2 * tiles * keys * padded * HIDDEN,
        in_flight=stages * keys * dims * 2,
        rounds=4,  # bounds, number of blocks, table, fill; then rows
        tail=select,
    )
    merged = _MERGE_ENTRIES
    passes = -(-splits * 2**log_top // merged)
    merge_us = passes * SELECT_INSTRUCTIONS * SELECT_CYCLES * (merged / 512 / 8) / device.clock
    per_merge = compiled.per_sm("merge_splits", case, device)
    merge = Launch(batch * queries, per_merge, memory_bytes=entries, rounds=4, tail=merge_us)
    return Call(batch * tokens * line, 2 * batch * queries * tokens * HIDDEN, (main, merge))


# ---- guidance_scores -------------------------------------------------------------------------------------------------

# Instructions of one warp for a tile of 64 rows and 64 keys of 128, from the assembler's listings (sm_90): of the pass
# that finds the statistics, and of the one that sums, by them or by log-sum-exps.
STATS_INSTRUCTIONS, SUMS_INSTRUCTIONS, LSE_INSTRUCTIONS, WARPS = 720, 690, 600, 4
TEXT_QUERIES = 32


def guidance_scores(device: Device, compiled: Compiled, shape: str, has_lse: bool, batch: int, context: int) -> Call:
    """Model one layer of a prefill chunk that ends with 32 text queries of each request."""
    heads, kv_heads, head_size = SHAPES[shape]
    keys_bytes = batch * context * kv_heads * 2 * head_size
    rows = TEXT_QUERIES * heads // kv_heads
    row_tiles, key_tiles = -(-rows // guidance._BLOCK_ROWS), -(-context // guidance._BLOCK_KEYS)
    tiles = batch * kv_heads * row_tiles * key_tiles
    case = f"{shape} nq32 25k"
    work = {
        "memory_bytes": keys_bytes,
        "operations": 2 * tiles * guidance._BLOCK_ROWS * guidance._BLOCK_KEYS * head_size,
        "rounds": 4,
    }
    splits = min(-(-context // guidance._KEYS_PER_SPLIT), guidance._MAX_SPLITS)
    stats = Launch(
        batch * row_tiles * kv_heads * splits, compiled.per_sm("row_stats", case, device),
        l2_bytes=row_tiles * keys_bytes, instructions=tiles * STATS_INSTRUCTIONS * WARPS, **work,
    )  # fmt: skip
    # What torch makes of the splits' statistics: six small operations.
    between = (Launch(1, 1, rounds=1),) * 6
    case += ", LSE given" if has_lse else ""
    instructions = tiles * WARPS * (LSE_INSTRUCTIONS if has_lse else SUMS_INSTRUCTIONS)
    sums = Launch(
        batch * key_tiles, compiled.per_sm("guidance_scores", case, device), l2_bytes=keys_bytes,
        instructions=instructions, **work,
    )  # fmt: skip
    launches = (sums,) if has_lse else (stats, *between, sums)
    return Call(keys_bytes, 2 * batch * TEXT_QUERIES * heads * context * head_size, launches)


def alternatives(device: Device, compiled: Compiled) -> list[tuple[str, float]]:
    """Return the alternatives for the rows' log-sum-exps for one layer of 28/4 over 25k keys, and their seconds."""
    heads, kv_heads, head_size = SHAPES["28/4"]
    without, given = (guidance_scores(device, compiled, "28/4", lse, 1, 25_000) for lse in (False, True))
    both = 2 * 25_000 * kv_heads * 2 * head_size  # keys and values
    operations = 4 * TEXT_QUERIES * heads * 25_000 * head_size
    again = Launch(device.num_sms, 1, memory_bytes=both, l2_bytes=2 * both, operations=2 * operations, rounds=4)
    return [
        ("a pass of our own, and six operations of torch", modelled(without, device) - modelled(given, device)),
        (
            "FlashAttention once more over the text's rows",
            seconds(again, device) + seconds(Launch(1, 1, rounds=1), device),
        ),
        ("what the layer's own call has computed", 0.0),
    ]


# ---- small kernels ---------------------------------------------------------------------------------------------------

VOCAB, NUM_DRAFTS, LAYERS = 152_064, 64, 28


@dataclass(frozen=True)
class Small:
    """A kernel that waits for loads more than it moves: its case, programs and bytes by requests, dependent loads."""

    kernel: str
    case: str
    programs: Callable[[int], int]
    bytes_of: Callable[[int], float]
    rounds: int


def small_kernels() -> list[Small]:
    """Return the kernels of a step beside the three big ones, of trees of 64 nodes over 25k entries."""
    rows = 8 * NUM_DRAFTS  # bytes of an int64 table's row
    blocks = -(-VOCAB // 1024)
    table = 25_000 // 16 * 4
    moved = 4 * LAYERS * 4 * 128 * 2 * 2 * 2  # nodes, layers, KV heads, head size, K and V, bytes, read and written
    return [
        Small("begin_step", "tree K64, axes 3", lambda n: n * 8, lambda n: n * (2 * table + 3 * rows), 4),
        Small("next_level", "tree K25, axes 3", lambda n: n, lambda n: n * 3 * rows, 3),
        Small("draw", "152k torch.bfloat16", lambda n: n * blocks, lambda n: n * VOCAB * 2, 2),
        Small("choose_draw", "152k torch.bfloat16", lambda n: n, lambda n: n * blocks * 8, 2),
        Small("candidates", "C10 152k torch.bfloat16", lambda n: 8 * n * blocks, lambda n: 8 * n * VOCAB * 2, 2),
        Small("merge_candidates", "C10 152k torch.bfloat16", lambda n: 8 * n, lambda n: 8 * n * blocks * 136, 2),
        Small("tree_begin", "adaptive K64", lambda n: n, lambda n: n * 4 * rows, 3),
        Small("tree_grow", "F10 C10", lambda n: n, lambda n: n * 6 * rows, 6),
        Small("tree_finish", "fill F10 C10 K64", lambda n: n, lambda n: n * 5 * rows, 5),
        Small("place_trees", "K25, axes 3", lambda n: n, lambda n: n * 3 * rows, 3),
        Small("accept", "strict chain K64", lambda n: n, lambda n: n * 3 * rows, 3),
        Small("accept", "loose tree K64", lambda n: n, lambda n: n * 6 * rows, 5),
        Small("path_penalties", "K64 152k tokens", lambda n: 65 * n * 19, lambda n: n * VOCAB * (65 * 8 + 4), 12),
        Small("kv_compact", "K64 4 heads d128 16 bits", lambda n: n * LAYERS * 4, lambda n: n * moved, 4),
        Small("copy_committed_suffix", "K10, ring 64", lambda n: n, lambda n: n * 11 * 8, 3),
        Small("gather_draft_windows", "K10, ring 64", lambda n: n, lambda n: n * (2 * 64 * 4 + 11 * 8), 3),
        Small("merge_relevance", "merge of 4 ranks, top 10", lambda n: 26 * n, lambda n: 26 * n * 164, 1),
    ]


# ---- sections --------------------------------------------------------------------------------------------------------


def cell(call: Call, device: Device) -> str:
    """Return a call's programs, floor, model, share and bound."""
    least, bound = floor(call, device)
    return figures(call.programs, 1e6 * least, 1e6 * modelled(call, device), bound)


def figures(programs: int, least: float, time: float, bound: str) -> str:
    """Return a cell: programs, floor and model in microseconds, share and bound."""
    return f"{programs}: {least:.1f} → {time:.1f} ({100 * least / time:.0f} % {bound})"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    heads = list(heads)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def big_tables(device: Device, compiled: Compiled) -> str:
    """Return the tables of the three big kernels on a device."""
    contexts = [f"{context // 1000}k" for context in CONTEXTS]
    attend = [
        [shape, str(queries), str(batch)]
        + [str(compiled.per_sm("tree_attention", f"{shape} Q{9 if queries == 6 else queries}", device))]
        + [tree_attention(device, shape, queries, batch, context) for context in CONTEXTS]
        for shape in SHAPES
        for queries in QUERIES
        for batch in BATCHES
    ]
    relate = [
        [str(queries), str(batch), str(compiled.per_sm("visual_relevance", relevance_case(queries), device))]
        + [cell(visual_relevance(device, compiled, queries, batch, context), device) for context in CONTEXTS]
        for queries in QUERIES
        for batch in BATCHES
    ]
    guide = [
        [shape, "given" if has_lse else "found", str(batch)]
        + [cell(guidance_scores(device, compiled, shape, has_lse, batch, context), device) for context in CONTEXTS]
        for shape in SHAPES
        for has_lse in (True, False)
        for batch in BATCHES
    ]
    return "\n\n".join(
        [
            f"**{device.name}, `tree_attention`**, one layer (MODELLED)",
            table(["heads", "Q", "batch", "programs an SM", *contexts], attend),
            f"**{device.name}, `visual_relevance`** and its merge, rows of {HIDDEN}, top {TOP_N} (MODELLED)",
            table(["Q", "batch", "programs an SM", *contexts], relate),
            f"**{device.name}, `guidance_scores`**, one layer, {TEXT_QUERIES} text queries a request (MODELLED)",
            table(["heads", "LSE", "batch", *contexts], guide),
        ]
    )


def small_table(device: Device, compiled: Compiled) -> str:
    """Return the table of the small kernels on a device."""
    rows = []
    for small in small_kernels():
        per_sm = compiled.per_sm(small.kernel, small.case, device)
        cells = []
        for batch in BATCHES:
            size = small.bytes_of(batch)
            launch = Launch(small.programs(batch), per_sm, memory_bytes=size, rounds=small.rounds)
            call = Call(size, 0, (launch,))
            num_waves = len(waves(launch, device))
            time, least = seconds(launch, device), floor(call, device)[0]
            cells.append(f"{launch.programs} in {num_waves}: {1e6 * least:.2f} → {1e6 * time:.1f}")
        rows.append([f"`{small.kernel}`, {small.case}", str(small.rounds), str(per_sm), *cells])
    states = 25_000 * HIDDEN * 2
    least = 2 * states / device.memory
    # A chunk is widened, multiplied with itself, summed, and multiplied: each reads and most write float32.
    time = 2 * states * (1 + 2 + 2 + 2) / (MEMORY_SHARE * device.memory) + 2 * 25 * 5 * LAUNCH
    rows.append(
        ["`uv_scores` (torch), 25k states, two layers", "-", "-", f"{1e6 * least:.0f} → {1e6 * time:.0f}", "", ""]
    )
    heads = ["kernel, case", "dependent loads", "programs an SM", *(f"batch {batch}" for batch in BATCHES)]
    return f"**{device.name}, the small kernels** (MODELLED)\n\n{table(heads, rows)}"


def sections(data: dict[str, Any]) -> dict[str, str]:
    """Return the text between each pair of the page's marks."""
    import compile_report  # it chooses the compiler for the whole process

    compiled = Compiled(data["rows"])
    ways = table(
        ["log-sum-exps from", "µs more a layer, H100"],
        ([name, f"{1e6 * time:.0f}"] for name, time in alternatives(H100, compiled)),
    )
    big = "\n\n".join(big_tables(device, compiled) for device in (H100, A100))
    return {
        "kernels-modelled": big,
        "kernels-tiles": tiles_table(),
        "kernels-lse": ways,
        "kernels-small": small_table(H100, compiled),
        "kernels-compiled": f"Triton {data['triton']}. {compile_report.markdown(compiled.rows)}",
    }


def main() -> None:
    """Print the sections, and with a page write them there; without compile data, the cases that are needed."""
    if not sys.argv[1:]:
        print(CASES)
        return
    found = sections(json.loads(Path(sys.argv[1]).read_text()))
    for name, text in found.items():
        print(f"<!-- {name} -->\n{text}\n<!-- /{name} -->\n")
    if sys.argv[2:]:
        page = Path(sys.argv[2])
        text = page.read_text()
        for name, section in found.items():
            marked = f"<!-- {name} -->\n{section}\n<!-- /{name} -->"
            text = re.sub(f"<!-- {name} -->.*?<!-- /{name} -->", lambda _, new=marked: new, text, flags=re.DOTALL)
        page.write_text(text)


if __name__ == "__main__":
    main()
