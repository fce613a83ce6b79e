"""ParallelBackend: takes drafts from streams that the drafter's process keeps ahead of the target (ParallelVLM).

    start:   requests whose scores are known are read by the drafter
    prefill: what the drafter refuses, whether it is there, and what this step has sampled, in the shared tables
    propose: the next window of each stream that agrees with the committed text

Nothing here waits for the drafter, or reads streams, as the target's device does: a short one means fewer drafts.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vidspec_kernels import WINDOW_INFO_SIZE, gather_draft_windows, warm_up
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.draft.waiting import MOST_BYTES, pixel_bytes
from vllm_vidspec.engine.draft_backend import DraftBackend, Reading, Step
from vllm_vidspec.engine.hooks.prompts import Guided
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.parallel import messages
from vllm_vidspec.engine.parallel.commits import Commits, SharedStreams
from vllm_vidspec.engine.parallel.supervisor import DrafterSupervisor
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import DraftBatch, NewRequest, Phase, Request, RequestRows
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.streams import Sizes, StreamState, WindowRule

logger = init_logger("vllm.vidspec")

_UNKNOWN, _BEGUN, _REFUSED = range(3)  # what the first rank sends the others of a request


@dataclasses.dataclass(eq=False)
class _Sent:
    """A request that the drafter knows, or is to know when it is there again."""

    new: NewRequest
    epoch: int = -1  # its number in the tables; -1 on every rank but the first
    guided: Guided | None = None
    has_begun: bool = False  # whether the drafter may read it: what guides its pruning is known
    num_bytes: int = 0  # of its pixels, on their way to the drafter's device
    refusal: str | None = None  # why the drafter does not draft for it, until all ranks act on that at once


class ParallelBackend(DraftBackend):
    """See `DraftBackend`. Of its memory, graphs and rollback the target's process has none: they are the drafter's."""

    reads_while_paused = True  # by the drafter, which gets every token

    def __init__(self, runner: Any, is_guided: bool):
        """Take what is the model runner's; `is_guided`: something guides pruning, which a prompt has to wait for."""
        knobs: Knobs = runner.knobs
        supervisor: DrafterSupervisor | None = (
            runner.drafter_supervisor
        )  # None on every tensor-parallel rank but the first
        requests: RequestRows = runner.requests
        counters: Counters = runner.counters
        config, device = knobs.current, runner.device
        self._knobs, self._supervisor, self._requests, self._req_states = knobs, supervisor, requests, runner.req_states
        self._sampler, self._is_guided, self._counters, self._device = runner.sampler, is_guided, counters, device
        self._group = get_tp_group()
        self._most = config.num_speculative_tokens
        num_rows = len(requests.phase)
        self._ring = Sizes(num_rows, 1, 0).ring
        self._sent: dict[int, _Sent] = {}  # by row
        # [max_num_reqs] of `_sent`, for steps: the epochs, and how far the drafter is with a request
        self._epochs = np.full(num_rows, -1, dtype=np.int64)
        self._progress = np.full(num_rows, _UNKNOWN, dtype=np.int64)
        self._last_epoch = 0
        self._num_connects = 0  # of the drafter, after which it got the running requests
        self._rule = WindowRule(self._most)
        self._last_step = (0.0, 0)  # when the last one of pure decoding was committed, and its requests
        self._commits = (
            None if supervisor is None else Commits(supervisor.tables, self._rule, counters, device, self._most)
        )
        self._streams = None if supervisor is None else SharedStreams(supervisor.tables, device, counters)
        # A step's drafts and their window info (`gather_draft_windows`), adjacent: ranks share both at once.
        self._windows = torch.zeros(num_rows * (self._most + 1), dtype=torch.int64, device=device)
        self._outputs = functools.cache(self._views)
        self._asked: tuple[bytes, torch.Tensor] = (b"", self._windows)  # of the last step: uploaded when it changes
        knobs.on_change(self._send_knobs)

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def init_kv(
        self, block_tables: Any, allocation: Callable[[], AbstractContextManager], is_profiling: bool = False
    ) -> None:
        """Wait for the drafter, which has loaded beside the target; a VidSpecError if it has not."""
        if self._supervisor is not None and not is_profiling:
            self._supervisor.wait_ready()
            logger.info("vidspec: the drafter's process is up (%s)", ", ".join(map(str, self._supervisor.pids)))

    def warm_up(self) -> None:
        states = self._req_states
        warm_up.warm_windows(states.total_len.gpu, states.all_token_ids.gpu, self._ring, self._most)
        self._share(self._windows)

    def dummy_run(self, num_reqs: int, is_profile: bool) -> torch.Tensor:
        return self._outputs(num_reqs)[0].zero_()

    # ---- both ends of a request's life -----------------------------------------------------------------------------

    def add(self, request: NewRequest) -> None:
        """Let the drafter know of a request, and read it, if nothing is to guide its pruning."""
        row = request.req_state_idx
        if self._counters.is_paused:
            self._requests.unstarted.pop(row)
        elif not request.is_admitted:
            self._requests.skip(row, "unadmitted")
        elif request.has_embeds or request.sampling is None:
            self._requests.skip(row, "unsupported")
            self._counters.skip("unsupported", request.req_id, "its prompt is one of embeddings, made for the target")
        else:
            self._sent[row] = sent = _Sent(request)
            self._send(sent, np.asarray(request.token_ids, dtype=np.int32))
            if not self._is_guided:
                self._begin(sent)

    def _send(self, sent: _Sent, token_ids: np.ndarray) -> None:
        """Give a row to a request in the tables, and send the drafter a text of `[n]` int32 tokens so far."""
        if self._supervisor is None or not self._has_room(sent):
            return
        new, states, row = sent.new, self._req_states, sent.new.req_state_idx
        self._last_epoch += 1
        self._epochs[row] = sent.epoch = self._last_epoch
        self._supervisor.tables.add(row, sent.epoch, token_ids)
        sampling = new.sampling.clone()
        sampling.seed = int(self._sampler.sampling_states.seeds.np[row])  # vLLM's own, where the request has none
        prompt_len, limit = int(states.prompt_len.np[row]), int(min(states.max_seq_len[row], states.max_model_len))
        text = (row, sent.epoch, token_ids, prompt_len, limit)
        self._supervisor.send(messages.Add(new.req_id, *text, new.features, sampling))

    def _has_room(self, sent: _Sent) -> bool:
        """Return whether a request's pixels may go to the drafter, which holds them in memory until it has read the
        prompt: MOST_BYTES of all requests, or one's. One that may not runs without drafts.
        """
        assert self._supervisor is not None
        if sent.refusal is not None:
            return False
        tables, num_bytes = self._supervisor.tables, pixel_bytes(sent.new.features)
        for row, other in self._sent.items():
            if tables.state[row] == StreamState.STREAMING and tables.stream_epoch[row] == other.epoch:
                other.num_bytes = 0
        held = sum(other.num_bytes for other in self._sent.values() if other is not sent and other.refusal is None)
        if num_bytes and held and held + num_bytes > MOST_BYTES:
            self._refuse(sent, "pixels", f"{held + num_bytes} bytes of pixels would wait for the drafter")
            return False
        sent.num_bytes = num_bytes
        return True

    def _begin(self, sent: _Sent) -> None:
        row = sent.new.req_state_idx
        self._requests.unstarted.pop(row, None)
        sent.has_begun = True
        if sent.refusal is None:
            self._progress[row] = _BEGUN
        if self._supervisor is not None and sent.refusal is None:
            scores, outcome = (None, ()) if sent.guided is None else sent.guided
            self._supervisor.send(messages.Prefill(row, sent.epoch, scores, list(outcome)))

    def remove(self, req_state_idx: int) -> None:
        self._progress[req_state_idx], self._epochs[req_state_idx] = _UNKNOWN, -1
        sent = self._sent.pop(req_state_idx, None)
        if sent is not None and self._supervisor is not None:
            self._supervisor.tables.remove(req_state_idx)
            self._supervisor.send(messages.Remove(req_state_idx, sent.epoch))

    def active_rows(self) -> Iterable[int]:
        return self._sent

    def forget_media(self) -> None:
        if self._supervisor is not None:
            self._supervisor.send(messages.ForgetMedia())

    def _send_knobs(self, _: VidSpecConfig) -> None:
        if self._supervisor is not None:
            self._supervisor.send(messages.Retune(json.dumps(self._knobs.pruning)))

    # ---- a step ----------------------------------------------------------------------------------------------------

    def roll_back(self, step: Step) -> None:
        """Publish what the drafter has counted, before it hears of this step's prompts: a gauge says what was held."""
        if self._commits is not None:
            self._commits.publish_counters()

    def start(self, step: Step, rows: np.ndarray, requests: list[Request]) -> None:
        for request in requests:
            sent = self._sent[request.new.req_state_idx]
            sent.guided = request.guided
            self._begin(sent)

    def prefill(self, step: Step) -> Reading:
        """Commit a step to the shared tables; let requests be where they are by now, the same on every rank."""
        rows = step.batch.idx_mapping_np
        progress = np.zeros(len(rows), dtype=np.int64) if self._supervisor is None else self._commit(step)
        if self._group.world_size > 1:
            group = self._group
            torch.distributed.broadcast(torch.from_numpy(progress), group.ranks[0], group=group.cpu_group)
        for row in rows[progress == _REFUSED].tolist():
            self._requests.skip(row, self._sent[row].refusal or "draft_error")
        has_begun = (progress == _BEGUN) & self._requests.are_in(rows, Phase.UNSEEN)
        if has_begun.any():
            # Whether there is a stream yet, the device sees.
            self._requests.enter(rows[has_begun], Phase.DRAFTING)
        paused = np.full(len(rows), not step.plan.num_tokens) if step.paused is None else step.paused
        for phase, is_new in (
            (Phase.DRAFTING, ~paused & self._requests.are_in(rows, Phase.PAUSED)),
            (Phase.PAUSED, paused & self._requests.are_in(rows, Phase.DRAFTING)),
        ):
            if is_new.any():
                self._requests.enter(rows[is_new], phase)
        return Reading()

    def _commit(self, step: Step) -> np.ndarray:
        """Receive from the drafter and commit a step on the first rank; return `[num_reqs]` int64 `_progress`."""
        supervisor, commits = self._supervisor, self._commits
        assert supervisor is not None and commits is not None
        self._receive(supervisor, commits)
        if supervisor.num_connects > self._num_connects:
            self._num_connects = supervisor.num_connects
            if self._num_connects > 1:  # send it all running requests, as far as they have come
                self._counters.add("drafter_restarts")
                for sent in self._sent.values():
                    sent.num_bytes = 0
                for row, sent in self._sent.items():
                    self._send(sent, supervisor.tables.text[row, : supervisor.tables.committed[row]].copy())
                    if sent.has_begun:
                        self._begin(sent)
        now, num_reqs, is_decoding = time.monotonic(), step.batch.num_reqs, bool(step.is_done.all())
        before, num_before = self._last_step
        if num_before == num_reqs and is_decoding:
            self._rule.observe_step(num_reqs, 1e6 * (now - before))
        self._last_step = (now, num_reqs if is_decoding else 0)
        commits.add(step, self._req_states)
        return self._progress[step.batch.idx_mapping_np]

    def _receive(self, supervisor: DrafterSupervisor, commits: Commits) -> None:
        for refusal in supervisor.poll():
            sent = self._sent.get(refusal.req_state_idx)
            if sent is not None and sent.epoch == refusal.epoch:
                self._refuse(sent, refusal.reason, refusal.detail)
        if failure := commits.take_failure():
            # What was not written down leaves a hole in texts; later requests have none.
            for sent in self._sent.values():
                if sent.refusal is None:
                    self._refuse(sent, "draft_error", f"what was committed did not reach the drafter ({failure})")

    def _refuse(self, sent: _Sent, reason: str, detail: str) -> None:
        sent.refusal, self._progress[sent.new.req_state_idx] = reason, _REFUSED
        self._counters.skip(reason, sent.new.req_id, detail)
        if reason == "draft_error" and self._knobs.current.on_draft_error == "raise":
            raise VidSpecError(detail)

    def propose(self, step: Step, draft_batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch = step.batch
        tokens, info, both = self._outputs(batch.num_reqs)
        if not len(draft_batch.places_np):
            return tokens.zero_(), None
        if self._streams is not None:
            self._cut(batch, draft_batch, step.plan.num_tokens, tokens, info)
        self._share(both)
        if self._commits is not None:
            self._commits.took(batch.idx_mapping_np, draft_batch.is_drafted, info)
        if draft_batch.is_whole:
            return tokens, info[:, 0]
        return tokens, info[async_tensor_h2d(draft_batch.places_np, device=self._device), 0]

    def _cut(self, batch: Any, draft_batch: DraftBatch, most: int, tokens: torch.Tensor, info: torch.Tensor) -> None:
        supervisor, commits, streams, rows = self._supervisor, self._commits, self._streams, batch.idx_mapping_np
        assert supervisor is not None and commits is not None and streams is not None
        # What the draft draws while the target verifies.
        num_streams = int((supervisor.tables.state[rows] == StreamState.STREAMING).sum())
        window = self._rule.window(len(rows), float(supervisor.tables.draft_us[num_streams]))
        wanted = np.minimum(commits.wanted(rows, window), most)
        asked = np.stack((self._epochs[rows], wanted * draft_batch.is_drafted), axis=1).astype(np.int32)
        if (key := asked.tobytes()) != self._asked[0]:
            on_cpu = self._device.type == "cpu"
            self._asked = (key, torch.from_numpy(asked) if on_cpu else async_tensor_h2d(asked, device=self._device))
        texts = (self._req_states.total_len.gpu, self._req_states.all_token_ids.gpu)
        known = streams.for_step(batch.idx_mapping, rows)
        gather_draft_windows(known, self._asked[1], batch.idx_mapping, *texts, tokens, info)

    def _views(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where a step's drafts `[num_reqs, K]` int64 and their window info int32 go, and both as one."""
        both = self._windows[: num_reqs * (self._most + 1)]
        tokens, info = both[: num_reqs * self._most], both[num_reqs * self._most :]
        return tokens.view(num_reqs, self._most), info.view(torch.int32).view(num_reqs, WINDOW_INFO_SIZE), both

    def _share(self, windows: torch.Tensor) -> None:
        if self._group.world_size > 1:
            self._group.broadcast(windows)
