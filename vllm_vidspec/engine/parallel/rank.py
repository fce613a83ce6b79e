"""DrafterRank: the draft network and its memory, on every rank of the drafter; it does what the first rank decides."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_vidspec.engine.draft.drafter import Drafter, no_room_for, without_room
from vllm_vidspec.engine.draft.messages import Admission, DraftMessage, Drafts, PrefillMessage, PrefillStep
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.parallel import messages
from vllm_vidspec.metrics.counts import Counts
from vllm_vidspec.scoring.choices import prune_variant_of


class Progress(NamedTuple):
    """What came of reading: rows that can be drafted for, and those that will not be, each with a reason and a line."""

    ready: list[int]
    refused: list[tuple[int, str, str]]


class DrafterCounters(Counts):
    """Stands in the place of `Counters`: the first rank counts in the shared tables, and the target publishes it."""

    def __init__(self, values: np.ndarray | None):
        super().__init__(values)
        self._reasons: dict[str, tuple[str, str]] = {}  # by request id

    def skip(self, reason: str, req_id: str, detail: str) -> None:
        """Note why a request is not drafted for; the target's process counts it."""
        self._reasons[req_id] = (reason, detail)

    def reason_for(self, req_id: str) -> tuple[str, str]:
        """Return why a request is not drafted for, and what to say of it."""
        return self._reasons.pop(req_id, ("draft_error", "the draft failed"))


class TargetMirror:
    """The target's sampling parameters and committed text, by the same persistent rows, on the draft's device."""

    def __init__(self, vllm_config: Any, max_num_reqs: int, vocab_size: int, device: torch.device):
        model, max_tokens = vllm_config.model_config, vllm_config.scheduler_config.max_num_batched_tokens
        # One token is drawn at a time.
        self.states = RequestState(max_num_reqs, model.max_model_len, max_tokens, 1, vocab_size, device)
        options = dict(num_speculative_tokens=1, use_fp64_gumbel=model.use_fp64_gumbel)
        self.sampler = Sampler(vllm_config, max_num_reqs, vocab_size, device, self.states, **options)
        # The text's own, as `RequestState` may keep its on the host.
        self.text = torch.zeros(max_num_reqs, model.max_model_len, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._staged: set[int] = set()  # rows whose requests are not on the device yet
        self._applied = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # the last upload

    def add(self, message: messages.Add) -> None:
        """Take a request in; `apply` uploads it."""
        states, row, token_ids = self.states, message.req_state_idx, message.token_ids.tolist()
        if row in self._staged:  # two writes of a row would be in no order
            self.apply()
        self._staged.add(row)
        states.free_indices = [row]
        states.add_request(message.req_id, message.prompt_len, token_ids, 0, message.limit - message.prompt_len)
        self.sampler.add_request(row, message.sampling)
        self.append(row, 0, message.token_ids)

    def apply(self) -> None:
        """Upload the requests that have come since: all of them at once, before anything is drawn or read."""
        if not self._staged:
            return
        self._staged.clear()
        if self._applied is not None:
            self._applied.synchronize()  # vLLM stages what it writes in two buffers that take turns
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        if self._applied is not None:
            self._applied.record()

    def remove(self, req_state_idx: int) -> None:
        self.states.remove_request(self.states.index_to_req_id.get(req_state_idx, ""))

    def append(self, row: int, start: int, tokens: np.ndarray) -> None:
        """Write `[m]` int32 tokens of a row's text, from position `start` on."""
        self.text[row, start : start + len(tokens)] = async_tensor_h2d(tokens.copy(), device=self.text.device)

    def place(self, message: messages.Draw) -> torch.Tensor:
        """Write where texts end and their last two tokens; return the `[n]` int64 rows on the device."""
        packed = np.concatenate((message.rows[:, None], message.lengths[:, None], message.last), axis=1).T
        rows, lengths, before, last = async_tensor_h2d(np.ascontiguousarray(packed), device=self.text.device)
        self.num_tokens[rows] = lengths.int()
        self.text[rows, lengths - 2] = before.int()
        self.text[rows, lengths - 1] = last.int()
        self.states.last_sampled_tokens[rows, 0] = last
        return rows


class DrafterRank:
    """Carries out commands."""

    def __init__(self, drafter: Drafter, mirror: TargetMirror, knobs: Knobs, counters: DrafterCounters):
        self.drafter, self._mirror, self._knobs, self._counters = drafter, mirror, knobs, counters
        self._arrived: dict[int, messages.Add] = {}  # by row, until they begin
        self._ones = torch.ones(mirror.states.max_num_reqs, dtype=torch.int32, device=mirror.text.device)

    def add(self, message: messages.Add) -> None:
        self._arrived[message.req_state_idx] = message
        self._mirror.add(message)

    def encode(self, message: messages.Encode) -> bool:
        """Encode a bounded part of what a request brings, before its prompt; return whether there is more."""
        arrived = self._arrived.get(message.req_state_idx)
        return arrived is not None and self.drafter.prefills.encode_ahead(self._prompt(arrived))

    def prefill(self, message: messages.Prefill) -> tuple[str, str] | None:
        arrived = self._arrived.pop(message.req_state_idx)
        prompt = self._prompt(arrived, message.scores, tuple(message.outcome))
        outcome = self.drafter.add(prompt)
        if outcome == Admission.FULL:
            return "pool_full", no_room_for(prompt)
        return None if outcome == Admission.ADMITTED else self._counters.reason_for(arrived.req_id)

    @staticmethod
    def _prompt(
        arrived: messages.Add, scores: list[torch.Tensor] | None = None, outcome: tuple[str, ...] = ()
    ) -> PrefillMessage:
        row, token_ids, variant = arrived.req_state_idx, arrived.token_ids.tolist(), prune_variant_of(arrived.sampling)
        return PrefillMessage(arrived.req_id, row, token_ids, arrived.features, scores, outcome, prune_variant=variant)

    def remove(self, message: messages.Remove) -> None:
        self._arrived.pop(message.req_state_idx, None)
        self._mirror.remove(message.req_state_idx)
        self.drafter.remove(message.req_state_idx)

    def forget_media(self, _: messages.ForgetMedia) -> None:
        self.drafter.forget_media()

    def retune(self, message: messages.Retune) -> None:
        self._knobs.change(self._knobs.current.changed(json.loads(message.knobs)))

    def requeue(self, message: messages.Requeue) -> None:
        self.drafter.prefills.requeue(message.rows, message.num_fed)

    def read(self, message: messages.Read) -> Progress:
        self._mirror.apply()
        for row, (start, tokens) in zip(message.rows.tolist(), message.new_text, strict=True):
            if len(tokens):
                self._mirror.append(row, start, tokens)
        refused, keeps = self._reserve(message.rows, message.lengths)
        done = self.drafter.prefill(PrefillStep(message.rows[keeps], message.lengths[keeps], self._mirror.text))
        names = self._mirror.states.index_to_req_id
        return Progress(done.ready, refused + [(row, *self._counters.reason_for(names[row])) for row in done.failed])

    def draw(self, message: messages.Draw) -> tuple[np.ndarray, list[tuple[int, str, str]]]:
        """Draw a token of each row; return `[m]` int64 of the rows that are not refused, and those that are."""
        self._mirror.apply()
        if message.goes_on and self.drafter.can_go_on(message.rows, message.lengths):
            return self._first(self.drafter.go_on()), []
        refused, keeps = self._reserve(message.rows, message.lengths)
        if refused:
            whole = (message.rows, message.lengths, message.last, message.missing)
            message = messages.Draw(*(field[keeps] for field in whole))
            if not len(message.rows):
                return np.zeros(0, dtype=np.int64), refused
        rows = self._mirror.place(message)
        # As if the target had accepted the token before the root, which `begin_step` feeds; `fed` forgets that one.
        if message.missing.any():
            num_sampled = async_tensor_h2d(1 + message.missing.astype(np.int32), device=rows.device)
            self.drafter.kv.fed[rows] = 0
        else:
            num_sampled = self._ones[: len(rows)]
        drafts = self.drafter.draft(DraftMessage(rows, None, message.rows, num_sampled, None, 1, "chain"))
        return self._first(drafts), refused

    def _first(self, drafts: Drafts) -> np.ndarray:
        """Return the `[n]` int64 tokens that were drawn, on the host."""
        self._counters.add("stream_tokens", len(drafts.rows))
        return drafts.tokens[:, 0].cpu().numpy()

    def _reserve(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[list[tuple[int, str, str]], np.ndarray]:
        """Make room for `[n]` rows and a token each; return those without, why and a line, and `[n]` bool: with."""
        without = list(without_room(self.drafter, rows, lengths))
        keeps = np.ones(len(rows), dtype=bool)
        keeps[[i for i, *_ in without]] = False
        return [(int(rows[i]), reason, detail) for i, reason, detail in without], keeps


class Ranks:
    """Hands commands to the other ranks; a single one hands on nothing."""

    def __init__(self, rank: DrafterRank):
        self._group = get_tp_group()
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(messages.ToRanks)
        self._methods: dict[Any, Callable[[Any], Any]] = {
            messages.Add: rank.add,
            messages.Prefill: rank.prefill,
            messages.Remove: rank.remove,
            messages.ForgetMedia: rank.forget_media,
            messages.Retune: rank.retune,
            messages.Encode: rank.encode,
            messages.Read: rank.read,
            messages.Requeue: rank.requeue,
            messages.Draw: rank.draw,
            messages.Stop: lambda _: None,
        }

    def do(self, command: Any) -> Any:
        """Carry a command out on every rank; return what it returns here."""
        if self._group.world_size > 1:
            self._send(command)
        return self._methods[type(command)](command)

    def follow(self) -> None:
        while not isinstance(command := self._receive(), messages.Stop):
            self._methods[type(command)](command)

    def _send(self, command: Any) -> None:
        buffers = [memoryview(buffer).cast("B") for buffer in self._encoder.encode(command)]
        self._broadcast(torch.tensor([len(buffers)]))
        self._broadcast(torch.tensor([buffer.nbytes for buffer in buffers]))
        self._broadcast(torch.frombuffer(bytearray().join(buffers), dtype=torch.uint8))

    def _receive(self) -> Any:
        (count,) = self._broadcast(torch.zeros(1, dtype=torch.int64)).tolist()
        sizes = self._broadcast(torch.zeros(count, dtype=torch.int64)).tolist()
        data = memoryview(self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8)).numpy())
        starts = [sum(sizes[:i]) for i in range(count)]
        return self._decoder.decode([data[start : start + size] for start, size in zip(starts, sizes, strict=True)])

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.broadcast(tensor, self._group.ranks[0], group=self._group.cpu_group)
        return tensor
