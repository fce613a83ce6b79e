"""The draft's side of an engine without models: real rows, loop, drafter's tables, memory, line, caches and hooks.

The target is a text that anybody can compute; the draft's network writes down what lands in which slot. So whatever a
step looks at can be checked against what was committed.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import PlaceholderRange

from tests.unit.engine.fakes import ALONE, CPU, Counts, make_knobs
from vllm_vidspec.engine.draft.drafter import UNBOUNDED, Drafter
from vllm_vidspec.engine.draft.kv import NULL_BLOCK, DraftKV
from vllm_vidspec.engine.draft.local_backend import LocalBackend
from vllm_vidspec.engine.draft.messages import DraftMessage, Drafts
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.draft.vision_cache import PAGE_ROWS, VisionCache
from vllm_vidspec.engine.failures import DraftFailures
from vllm_vidspec.engine.hooks.protocol import Forward, TargetHooks
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.requests import NewRequest, Phase, RequestRows
from vllm_vidspec.engine.speculator import Speculator

NUM_ROWS, K, BLOCK, MAX_LEN, HIDDEN, VOCAB = 4, 3, 4, 96, 4, 1000
NUM_BLOCKS = 26  # less than two long requests take
CHUNK = 24
VIDEO_FRAMES, FRAME_TOKENS = 2, 4
VIDEO_TOKENS = VIDEO_FRAMES * FRAME_TOKENS + 1


class Network:
    """Stands in for `DraftModel`: an embedding is its token's id; a forward notes what lands in which KV slot."""

    device, dtype = CPU, torch.float32
    max_num_tokens, max_encoder_tokens = 20, FRAME_TOKENS + 1  # a video takes two steps
    block_size, vocab_size, max_model_len, num_positions = BLOCK, VOCAB, MAX_LEN - 10, 4 * MAX_LEN
    is_self_draft, model = False, None
    hf_config = SimpleNamespace(
        model_type="llava_onevision",
        architectures=["LlavaOnevisionForConditionalGeneration"],
        vision_config=SimpleNamespace(image_size=4, patch_size=1),
    )

    def __init__(self) -> None:
        self.fails = ""  # once: "forward", "encode", "draft"
        self.slots: dict[int, Any] = {}  # the token that was written last

    def fail(self, where: str) -> None:
        if self.fails == where:
            self.fails = ""
            raise RuntimeError(f"planted in {where}")

    def full_positions(self, token_ids, features):
        return torch.arange(len(token_ids))[None], 0

    def encode(self, features, frames):
        self.fail("encode")
        sizes = [VIDEO_TOKENS if some is None else len(some) * FRAME_TOKENS + 1 for some in frames]
        return [torch.full((size, HIDDEN), -1.0) for size in sizes]

    def embed(self, token_ids, media, where):
        embeds = token_ids[:, None].float().expand(-1, HIDDEN).clone()
        if media:
            embeds.index_copy_(0, where, torch.cat(media))
        return embeds

    def forward(self, embeds, positions, layout, *, slot_mapping, **_):
        self.fail("forward")
        self.slots.update(zip(slot_mapping.tolist(), embeds[:, 0].int().tolist(), strict=True))


class NotingDrafter(Drafter):
    """The drafter, whose network of a step is a check: what it would attend to is the committed text."""

    def __init__(self, network: Network, knobs: Any, counters: Counts, world: "World"):
        self.model, self.counters, self._knobs, self._world = network, counters, knobs, world
        self._max_model_len, self._num_speculative_tokens = MAX_LEN, K
        self.kv = DraftKV(NUM_BLOCKS, BLOCK, NUM_ROWS, MAX_LEN + K + 1, CPU)
        cache = VisionCache(3 * PAGE_ROWS * HIDDEN * 4, HIDDEN, torch.float32, CPU)
        self.prefills = DraftPrefill(network, knobs, counters, self.kv, cache, ALONE)
        self.trees = {}
        self._capacity_limit = np.full(NUM_ROWS, UNBOUNDED, dtype=np.int64)

    def slot(self, row: int, entry: int) -> int:
        block = int(self.kv.block_tables[row, entry // BLOCK])
        if block == NULL_BLOCK or entry >= self.kv.capacity_np[row]:
            self._world.wrong.append(f"row {row} has no block for entry {entry}")
        return block * BLOCK + entry % BLOCK

    def draft(self, message: DraftMessage) -> Drafts:
        """Check what stands, feed the last two tokens and the drafts but the last; propose what the world says."""
        network, rows = self.model, message.idx_mapping_np.tolist()
        drafts = []
        for row in rows:
            known = self._world.known[row]
            length, dropped = len(known.text), int(self.kv.num_dropped[row])
            first = known.text_from  # what is before it may have been pruned
            for token in range(first, length - 2):
                found = network.slots.get(self.slot(row, token - dropped))
                if found != known.text[token]:
                    self._world.wrong.append(f"row {row} attends to {found} for token {token}, {known.text[token]}")
            drafts.append(known.drafts())
            fed = [*known.text[length - 2 :], *drafts[-1][:-1]]
            for entry, token in enumerate(fed, start=length - 2 - dropped):
                network.slots[self.slot(row, entry)] = token
        told = [True] * len(rows) if message.was_verified is None else message.was_verified.tolist()
        if told != [self._world.known[row].was_drafted for row in rows]:
            self._world.wrong.append(f"of {rows} {told} had drafts, not placeholders")
        network.fail("draft")
        return Drafts(torch.tensor(rows), torch.tensor(drafts, dtype=torch.int64).reshape(len(rows), K))


class Known:
    """A request, as a client and the scheduler know it."""

    def __init__(self, number: int, row: int, prompt_len: int, has_video: bool):
        self.number, self.row, self.has_video = number, row, has_video
        self.text = [self.token(i) for i in range(prompt_len)]
        self.computed = 0
        self.prefill_len = prompt_len
        self.was_drafted = False
        self.proposed: list[int] = []

    @property
    def text_from(self) -> int:
        return VIDEO_TOKENS + 1 if self.has_video else 0

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prefill_len

    def token(self, place: int) -> int:
        """What this request says there: its own, so that another's KV is seen."""
        return (self.number * 131 + place * 7) % (VOCAB - 1) + 1

    def drafts(self) -> list[int]:
        self.proposed = [self.token(len(self.text) + i) for i in range(K)]
        return self.proposed

    def arrival(self) -> NewRequest:
        features = []
        if self.has_video:
            kind = self.number % 5
            name = f"video-{kind}"
            pixels = torch.zeros(VIDEO_FRAMES, 1, 1, 1) if kind < 4 else None  # the last can be encoded whole only
            place = PlaceholderRange(offset=1, length=VIDEO_TOKENS)
            data = {"pixel_values_videos": SimpleNamespace(data=pixels)}
            named = {"identifier": name, "mm_hash": name}
            features = [SimpleNamespace(modality="video", data=data, mm_position=place, **named)]
        sampling = SimpleNamespace(structured_outputs=None)
        return NewRequest(f"request-{self.number}", self.row, list(self.text), features, sampling)


class World:
    """Scheduler, target and model runner of the real draft's side, with hooks and, among them, the guidance or None."""

    agreement, observers = ALONE, ()
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))

    def __init__(self, make_hooks: Callable[[Knobs, Counts], tuple[list, Any]] = lambda *_: ([], None), **knobs: Any):
        self.knobs = make_knobs(num_speculative_tokens=K, **knobs)
        self.requests, self.counters, self.network = RequestRows(NUM_ROWS, CPU), Counts(), Network()
        self.known: dict[int, Known] = {}
        self.wrong: list[str] = []  # what a step should not look at: an exception there would cost drafts alone
        self.length = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.text = torch.full((NUM_ROWS, MAX_LEN + K + 1), 7_777, dtype=torch.int32)
        self.req_states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=self.length),
            all_token_ids=SimpleNamespace(gpu=self.text),
            max_seq_len=np.full(NUM_ROWS, MAX_LEN),
        )
        hooks, self.guidance = make_hooks(self.knobs, self.counters)
        self.hooks = TargetHooks(hooks, self.knobs, ALONE)
        failures = DraftFailures(self.knobs, ALONE, self.requests, self.counters)
        self.backend = LocalBackend(self, self.network, None, None, failures)
        guides = [] if self.guidance is None else [self.guidance]
        self.speculator = Speculator(self.knobs, self.requests, guides, self.counters, failures, self.backend)
        failures.on_failure(self.backend.forget_media)
        for guide in guides:
            failures.on_failure(guide.forget_scores)
        self.drafter = NotingDrafter(self.network, self.knobs, self.counters, self)
        self.backend._drafter = self.drafter
        self.requests.register(self.hooks, self.backend, drafting=[self.backend, *guides])
        self.count = 0

    def add(self, row: int, prompt_len: int, has_video: bool = False, **changes: Any) -> None:
        self.count += 1
        self._enter(Known(self.count, row, prompt_len, has_video), **changes)

    def _enter(self, known: Known, **changes: Any) -> None:
        self.known[known.row] = known
        self.text[known.row, : len(known.text)] = torch.tensor(known.text, dtype=torch.int32)
        self.length[known.row] = len(known.text)
        self.requests.add(dataclasses.replace(known.arrival(), **changes))

    def end(self, row: int) -> Known:
        self.requests.remove(row)
        return self.known.pop(row)

    def preempt(self, row: int, into: int) -> None:
        """Take a request's row, and give it one again: its text so far is its prompt."""
        known = self.end(row)
        known.row, known.computed, known.prefill_len, known.was_drafted = into, 0, len(known.text), False
        self._enter(known)

    def step(self, rows: list[int], accepted: list[int]) -> None:
        """Let the target compute these rows, of whose drafts so many stand, and the draft's side follow."""
        rows = [row for row in rows if row in self.known]
        if not rows:
            return
        known = [self.known[row] for row in rows]
        self._check_draft_batch(np.array(rows), np.array([not one.is_prefilling for one in known]))
        # Of every second request vLLM schedules placeholders where it has no drafts.
        drafts = [K if (one.was_drafted or one.number % 2) and not one.is_prefilling else 0 for one in known]
        counts = [
            min(CHUNK, one.prefill_len - one.computed) if one.is_prefilling else 1 + num
            for one, num in zip(known, drafts, strict=True)
        ]
        batch = self._batch(rows, known, drafts, counts)
        self.hooks.before_forward(batch)
        states = torch.ones(sum(counts), HIDDEN)
        self.hooks.after_forward(Forward(states, [states, states]))
        num_sampled = self._commit(known, drafts, counts, accepted)
        idx_mapping_np = np.array(rows)
        before = self.requests.phase.copy()
        tokens = self.speculator.propose(
            batch, None, None, None, None, torch.tensor(num_sampled, dtype=torch.int32), None,
            self.text[:, :1].long(), None, None, None,
        )  # fmt: skip
        assert not self.wrong, self.wrong[0]
        self._check_proposed(idx_mapping_np, tokens, before)

    def _batch(self, rows: list[int], known: list[Known], drafts: list[int], counts: list[int]) -> Any:
        computed = np.array([one.computed for one in known])
        return SimpleNamespace(
            num_reqs=len(rows),
            req_ids=[f"request-{one.number}" for one in known],
            idx_mapping=torch.tensor(rows),
            idx_mapping_np=np.array(rows),
            is_prefilling_np=np.array([one.is_prefilling for one in known]),
            num_draft_tokens_per_req=np.array(drafts),
            num_computed_tokens_np=computed,
            num_scheduled_tokens=np.array(counts),
            query_start_loc_np=np.cumsum([0, *counts]),
            prefill_len_np=np.array([one.prefill_len for one in known]),
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + np.array(counts)),
        )

    def _commit(self, known: list[Known], drafts: list[int], counts: list[int], accepted: list[int]) -> list[int]:
        sampled = []
        for i, (one, num_drafts, count) in enumerate(zip(known, drafts, counts, strict=True)):
            was_prefilling = one.is_prefilling
            one.computed += count if was_prefilling else 0
            if one.is_prefilling:
                sampled.append(0)
                continue
            stands = min(accepted[i % len(accepted)], num_drafts) if one.was_drafted else 0
            new = 1 + stands
            one.text += [one.token(len(one.text) + j) for j in range(new)]
            one.computed = len(one.text) - 1
            self.text[one.row, : len(one.text)] = torch.tensor(one.text, dtype=torch.int32)
            self.length[one.row] = len(one.text)
            sampled.append(new)
        return sampled

    def _check_draft_batch(self, rows: np.ndarray, is_done: np.ndarray) -> None:
        """What is kept of a batch's rows holds, whatever has happened since."""
        found, is_drafting = self.requests.draft_batch(rows, is_done), self.requests.phase[rows] == Phase.DRAFTING
        assert found.drafted_np.tolist() == rows[is_done & is_drafting].tolist(), "drafts for others"
        assert not is_done.all() or self.requests.draft_batch(rows.copy(), is_done) is found, "looked at anew"

    def _check_proposed(self, rows: np.ndarray, tokens: torch.Tensor, before: np.ndarray) -> None:
        for place, row in enumerate(rows.tolist()):
            known = self.known[row]
            has_draft = bool(self.requests.has_draft_np[row])
            assert has_draft == (self.requests.phase[row] == Phase.DRAFTING) or known.is_prefilling
            assert not (known.is_prefilling and has_draft), "drafts of a prompt that the target has not read"
            assert tokens[place].tolist() == (known.proposed if has_draft else [0] * K), "another request's drafts"
            known.was_drafted = has_draft
            if before[row] == Phase.SKIPPED:
                assert self.requests.phase[row] == Phase.SKIPPED, "skipped is for good"
