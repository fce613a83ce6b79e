"""Prefilling the draft: how much a step runs of it, what one bad prompt costs, what is looked at once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform

from tests.properties.life import Network
from tests.unit.engine.fakes import ALONE, CPU, HIDDEN, Counts, make_knobs
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.messages import Admission, PrefillMessage, PrefillStep
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.draft.vision_cache import PAGE_ROWS, VisionCache

BUDGET, ENCODER_BUDGET = 64, 100
MAX_LEN = 1024
BLOCK = 16


class NotingModel(Network):
    """Also notes its calls, and at which position a token lands; it cannot read some prompts."""

    max_num_tokens, max_encoder_tokens, block_size = BUDGET, ENCODER_BUDGET, BLOCK

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[list[str]] = []  # identifiers, by call
        self.forwards: list[int] = []  # tokens, by call

    def full_positions(self, token_ids, features):
        if token_ids[0] == 666:
            raise ValueError("of no known shape\nat all")
        return super().full_positions(token_ids, features)

    def encode(self, features, frames):
        self.encoded.append([feature.identifier for feature in features])
        return [feature.shows for feature in features]

    def forward(self, embeds, positions, layout, *, seq_lens, slot_mapping, **_):
        assert len(embeds) == positions.shape[1] == len(slot_mapping) == layout.query_start_loc_np[-1]
        self.forwards.append(len(embeds))
        self.slots.update(
            zip(slot_mapping.tolist(), zip(embeds[:, 0].tolist(), positions[0].tolist(), strict=True), strict=True)
        )


class Line:
    """A `DraftPrefill` over a noting model, and a committed text by row."""

    def __init__(self, cache_bytes: int = 0, model: NotingModel | None = None, **knobs: Any):
        if current_platform.is_cpu():
            import vllm.v1.worker.cpu.shm  # noqa: F401  # buffers that need no pinned memory, as in every CPU engine
        self.model, self.counted = model or NotingModel(), Counts()
        self.kv = DraftKV(200, BLOCK, 8, MAX_LEN + 4, CPU)
        cache = VisionCache(cache_bytes, HIDDEN, torch.float32, CPU)
        chosen = make_knobs(**{"pruner": "uniform", "prune_ratio": 0.5} | knobs)
        self.prefills = DraftPrefill(self.model, chosen, self.counted, self.kv, cache, ALONE, observers=[])
        self.text = torch.full((8, MAX_LEN), 7_777_777, dtype=torch.int32)  # an id outside the vocabulary

    def add(self, row: int, token_ids: list[int], features: Sequence[Any] = (), scores: Any = None) -> Any:
        self.text[row, : len(token_ids)] = torch.tensor(token_ids)
        return self.prefills.add(PrefillMessage(f"r{row}", row, token_ids, list(features), scores))

    def step(self, bounds: dict[int, int]) -> Any:
        self.model.forwards = []
        for row, bound in bounds.items():
            assert self.kv.reserve(np.array([row]), np.array([bound + 3]))[0]
            blocks = self.kv._blocks[row]  # what `apply` does on a device
            self.kv.block_tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return self.prefills.step(PrefillStep(np.array(list(bounds)), np.array(list(bounds.values())), self.text))

    def kv_of(self, row: int, count: int) -> list[tuple[float, int]]:
        """Return (embedding, position) of a row's first KV entries."""
        return [self.model.slots[slot] for slot in self.slots(row, count)]

    def slots(self, row: int, count: int) -> list[int]:
        return [int(self.kv.block_tables[row, i // BLOCK]) * BLOCK + i % BLOCK for i in range(count)]


def item(modality: str, name: str, offset: int, shows: torch.Tensor, **data: Any) -> Any:
    """An image's or video's feature, as the engine would bring it; its embeddings are `shows` `[m, HIDDEN]`."""
    place = SimpleNamespace(offset=offset, length=len(shows), is_embed=None)
    data = {key: SimpleNamespace(data=value) for key, value in data.items()}
    return SimpleNamespace(modality=modality, identifier=name, mm_hash=name, data=data, mm_position=place, shows=shows)


def clip(name: str, offset: int, length: int) -> Any:
    return item("video", name, offset, torch.full((length, HIDDEN), 0.5), pixel_values_videos=None)


def test_pruned_prompts_go_on_where_the_full_one_would():
    """A 40-token clip, half of it kept, between text: original positions, embeddings in the clip's places."""
    line = Line(pruner="uniform:stride")
    prompt = [1] * 10 + [999] * 40 + [2] * 80
    line.add(0, prompt, (clip("a", 10, 40),))
    assert line.step({0: 131}).ready == []
    line.text[0, 130:132] = torch.tensor([5, 6])
    assert line.step({0: 132}).ready == [0]
    held = line.kv_of(0, 111)
    assert [value for value, _ in held] == [1.0] * 10 + [0.5] * 20 + [2.0] * 80 + [5.0]
    positions = [position for _, position in held]
    assert positions[:10] == list(range(10)) and positions[30:] == list(range(50, 131))
    assert positions[10] == 10 and positions[29] == 49


def test_a_step_is_shared_in_the_order_of_arrival_by_its_batch():
    """Who is left out of a step is not read for, and holds nobody up; the budget is of the step, and used up."""
    line = Line()
    for row, length in ((5, 50), (1, 30), (3, 20)):
        line.add(row, [1] * length)
    bounds = {3: 21, 1: 31, 5: 51}
    assert line.step(bounds).ready == [5]
    assert line.model.forwards == [64]
    assert line.step({row: bound + 1 for row, bound in bounds.items() if row != 5}).ready == [1, 3]
    assert line.model.forwards == [16 + 1 + 20 + 1]
    for row in (0, 2):
        line.add(row, [1] * 20)
    assert [line.step({row: 21}).ready for row in (2, 0)] == [[2], [0]]


def test_text_that_is_longer_than_a_step_is_read_at_once_when_its_turn_comes():
    """Catches: a line that stands still for ever; garbage that counts as read."""
    line = Line()
    line.add(0, [1] * 64)
    assert line.step({0: 65}).ready == [0]
    line.add(1, [1] * 64)
    assert line.step({1: 65 + 100}).ready == []
    line.text[1, 64:170] = torch.arange(106)
    assert line.step({1: 65 + 101}).ready == [1]
    assert line.model.forwards == [64, 37]
    assert [value for value, _ in line.kv_of(1, 165)] == [1.0] * 64 + [float(i) for i in range(101)]


def test_nobody_is_looked_at_before_the_language_model_can_read_it():
    """Catches: embeddings of a whole line of requests held at once."""
    line = Line(cache_bytes=2**16)
    line.add(0, [1] * 130)
    line.add(1, [999] * 20 + [1] * 60, (clip("c", 0, 20),))
    for number, expected in enumerate(([], [], [["c"]])):
        line.step({0: 131 + number, 1: 81 + number})
        assert line.model.encoded == expected


def test_a_bad_prompt_stops_an_engine_that_is_to_raise():
    with pytest.raises(ValueError, match="no known shape"):
        Line(on_draft_error="raise").add(0, [666])


def test_a_prompt_that_the_whole_pool_could_not_hold_is_refused_and_one_that_it_could_waits():
    """Catches: a request that waits for good for blocks that there are not; a refusal where others only have them."""
    line = Line()
    del line.kv._free[3:]
    line.kv.num_blocks, longest = 4, 3 * BLOCK - 1 - 3  # a token past the prompt, and K = 3 drafts
    assert line.add(0, [1] * (longest + 1)) == Admission.REFUSED and line.counted["skipped_too_long"] == 1
    assert line.add(1, [1] * longest) == Admission.ADMITTED
    assert line.add(2, [1] * longest) == Admission.FULL
    assert line.prefills.add(PrefillMessage("r2", 2, [1] * longest, []), longest + 2) == Admission.REFUSED
    assert line.counted["skipped_too_long"] == 2 and line.counted["who"] == ["r0", "r2"]


def test_the_cache_drops_what_was_used_longest_ago():
    """Rows come back as they were put in; the bound holds; one item too large displaces nothing."""
    cache = VisionCache(4 * PAGE_ROWS * HIDDEN * 4 + 1, HIDDEN, torch.float32, CPU)
    items = {name: torch.randn(size, HIDDEN) for name, size in (("a", 65), ("b", 64), ("c", 1), ("d", 100))}
    assert cache.num_bytes == 4 * PAGE_ROWS * HIDDEN * 4
    for name in "abc":
        assert cache.extend(name, len(items[name]), 0, items[name])
    assert cache.num_used_bytes == cache.num_bytes
    huge = torch.zeros(4 * PAGE_ROWS + 1, HIDDEN)
    assert not cache.extend("huge", len(huge), 0, huge)
    chosen = np.array([0, 64])
    assert torch.equal(cache.read("a", 65, chosen), items["a"][chosen])
    assert cache.read("a", 64) is None, "another size is another item"
    assert cache.extend("d", len(items["d"]), 0, items["d"])  # needs two pages: b and c go, a was read since
    assert cache.read("b", 64) is None and cache.read("c", 1) is None
    for name in "ad":
        assert torch.equal(cache.read(name, len(items[name])), items[name])
    cache.clear()
    assert cache.read("a", 65) is None and cache.num_used_bytes == 0
