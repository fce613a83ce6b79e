"""ParallelSpeculator: takes drafts from streams that the drafter's process keeps ahead of the target (ParallelVLM).

    hear:    what the drafter refuses; whether it is there; requests whose scores are known begin
    commit:  what this step has sampled goes into the shared tables
    take:    of each stream that agrees with it, the next window
    publish: the target verifies the windows in its next step

Nothing here waits for the drafter: a stream that is short or out of date means fewer drafts. Nor does anything here
look at streams: the target's device does, when it comes to it.
"""

import dataclasses
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
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vidspec_kernels import WINDOW_INFO_SIZE, gather_draft_windows, warm_up
from vllm_vidspec.adapt import Decision
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.listen.prompts import Guidance, PendingScores
from vllm_vidspec.engine.parallel import messages as said
from vllm_vidspec.engine.parallel.client import DrafterClient
from vllm_vidspec.engine.parallel.commits import Commits
from vllm_vidspec.engine.parallel.shared import SharedStreams
from vllm_vidspec.engine.parallel.timeline import drafter_events
from vllm_vidspec.engine.report.counters import Counters
from vllm_vidspec.engine.requests import Arrival, Cohort, Phase, RequestRows
from vllm_vidspec.engine.target_step import Step
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.parallel import Sizes, StreamState, WindowRule

logger = init_logger("vllm.vidspec")

_UNKNOWN, _BEGUN, _REFUSED = range(3)  # what the first rank tells the others of a request


def sizes_of(config: VidSpecConfig, max_num_reqs: int, max_model_len: int, num_counters: int) -> Sizes:
    """Return the sizes of the shared tables."""
    return Sizes(max_num_reqs, max_model_len, config.parallel.max_ahead, num_counters)


@dataclasses.dataclass(eq=False)
class _Known:
    """A request that the drafter knows, or is to know when it is there again.

    Attributes:
        arrival: The request.
        scores: What guides its pruning, once that is known.
        has_begun: Whether it is.
    """

    arrival: Arrival
    scores: Any = None
    has_begun: bool = False


class ParallelSpeculator(BaseSpeculator):
    """Stands where `VidSpecSpeculator` does, which drafts in the target's process. A `RowTable`.

    Args:
        knobs: The configuration.
        client: The drafter's process; None on every tensor-parallel rank but the first.
        requests: What each row is doing.
        req_states: The runner's tables of committed text.
        sampler: The target's, for each request's seed.
        guidance: Scores visual tokens for the pruner; None where the pruner needs none.
        counters: Told what is drafted and what is not.
        device: Of the target.
    """

    supports_mm_inputs = False
    draft_logits = None
    num_extra_query_per_req = 0
    model = None  # the draft's weights are another process's
    graphs = None

    def __init__(
        self,
        knobs: Knobs,
        client: DrafterClient | None,
        requests: RequestRows,
        req_states: Any,
        sampler: Any,
        guidance: Guidance | None,
        counters: Counters,
        device: torch.device,
    ):
        config = knobs.now
        self._knobs, self._client, self._requests, self._req_states = knobs, client, requests, req_states
        self._sampler, self._guidance, self._counters, self._device = sampler, guidance, counters, device
        self._group = get_tp_group()
        self._most = config.num_speculative_tokens
        num_rows = len(requests.phase)
        self._ring = sizes_of(config, num_rows, 1, 0).ring
        self.decision: Decision | None = None  # of the step that runs
        self.reading: frozenset[str] = frozenset()  # prompts are read elsewhere
        self.reading_s = 0.0
        self._known: dict[int, _Known] = {}  # by row
        self._waiting: dict[int, PendingScores] = {}  # by row, scores on their way to the host
        self._refused: dict[int, str] = {}  # by row, heard and not yet acted on, as all ranks do at once
        self._epochs = np.full(num_rows, -1, dtype=np.int64)
        self._has_begun = np.zeros(num_rows, dtype=bool)
        self._last_epoch = 0
        self._num_ups = 0  # of the drafter, that it was told of running requests after
        self._rule = WindowRule(self._most)
        self._last_step = (0.0, 0)  # when the last one of pure decoding was committed, and its requests
        self._commits = None if client is None else Commits(client.tables, self._rule, counters, device, self._most)
        self._streams = None if client is None else SharedStreams(client.tables, device, counters)
        # A step's drafts and their window info (`gather_draft_windows`), adjacent: ranks share both at once.
        self._windows = torch.zeros(num_rows * (self._most + 1), dtype=torch.int64, device=device)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # by number of requests
        self._asked: tuple[bytes, torch.Tensor] = (b"", self._windows)  # of the last step: uploaded when it changes
        knobs.on_change(self._tell)

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def reserve(self, available_bytes: int) -> int:
        """Return how many bytes of this rank's KV memory the draft takes: none."""
        return 0

    def init_kv(
        self, encoder_cache: Any, allocation: Callable[[], AbstractContextManager], is_profiling: bool = False
    ) -> None:
        """Wait for the drafter, which has loaded beside the target.

        Raises:
            VidSpecError: It has not.
        """
        if self._client is not None and not is_profiling:
            self._client.wait_ready()
            logger.info("vidspec: the drafter's process is up (%s)", ", ".join(map(str, self._client.pids)))

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """Have no graphs: the draft's are the drafter's."""

    def capture(self) -> None:
        """Capture nothing."""

    def warm_up(self) -> None:
        """Compile and load what every step launches of its own, on CUDA."""
        states = self._req_states
        warm_up.warm_windows(states.total_len.gpu, states.all_token_ids.gpu, self._ring, self._most)
        self._share(self._windows)

    # ---- both ends of a request's life -----------------------------------------------------------------------------

    def admit(self, arrival: Arrival) -> None:
        """Let the drafter know of a request, and begin, if nothing is to guide its pruning."""
        if self._counters.is_paused:
            return
        row = arrival.req_state_idx
        if not arrival.is_shown:
            self._requests.skip(row, "unshown")
            return
        if arrival.has_embeds or arrival.sampling is None:
            self._requests.skip(row, "unsupported")
            self._counters.skip("unsupported", arrival.req_id, "its prompt is one of embeddings, made for the target")
            return
        self._known[row] = known = _Known(arrival, has_begun=self._guidance is None)
        if self._client is not None:
            self._arrive(row, known, np.asarray(arrival.token_ids, dtype=np.int32))
        if known.has_begun:
            self._begin(row, known)

    def _arrive(self, row: int, known: _Known, token_ids: np.ndarray) -> None:
        """Give a row to a request in the tables, and tell the drafter, of a text of `[n]` int32 tokens so far."""
        assert self._client is not None
        self._last_epoch += 1
        self._epochs[row] = self._last_epoch
        self._client.tables.begin(row, self._last_epoch, token_ids)
        arrival, states = known.arrival, self._req_states
        sampling = arrival.sampling.clone()
        sampling.seed = int(self._sampler.sampling_states.seeds.np[row])  # vLLM's own, where the request has none
        self._client.send(
            said.Arrive(
                arrival.req_id,
                row,
                self._last_epoch,
                token_ids,
                int(states.prompt_len.np[row]),
                int(min(states.max_seq_len[row], states.max_model_len)),
                arrival.features,
                sampling,
            )
        )

    def _begin(self, row: int, known: _Known) -> None:
        """Let the drafter read a prompt."""
        known.has_begun = self._has_begun[row] = True
        if self._client is not None:
            scores, outcome = known.scores if known.scores is not None else (None, ())
            self._client.send(said.Begin(row, int(self._epochs[row]), scores, list(outcome)))

    def forget(self, req_state_idx: int) -> None:
        """Take a row from its request, here and in the drafter."""
        self._waiting.pop(req_state_idx, None)
        self._refused.pop(req_state_idx, None)
        self._has_begun[req_state_idx] = False
        if self._known.pop(req_state_idx, None) is not None and self._client is not None:
            self._client.tables.finish(req_state_idx)
            self._client.send(said.Release(req_state_idx, int(self._epochs[req_state_idx])))
            self._epochs[req_state_idx] = -1

    def held(self) -> Iterable[int]:
        """Return the rows whose requests the drafter is to know."""
        return (*self._known, *self._waiting, *self._refused)

    def give_up_all(self) -> None:
        """Do nothing: the draft's memory is not the engine's that sleeps."""

    def forget_media(self) -> None:
        """Let the drafter drop its vision embeddings."""
        if self._client is not None:
            self._client.send(said.ForgetMedia())

    def _tell(self, _: VidSpecConfig) -> None:
        if self._client is not None:
            self._client.send(said.Retune(json.dumps(self._knobs.pruning)))

    # ---- a step ----------------------------------------------------------------------------------------------------

    is_at_rest = False  # the drafter is told of every token

    @torch.inference_mode()
    def propose(
        self,
        input_batch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled,
        num_rejected,
        last_sampled,
        next_prefill_tokens,
        temperature,
        seeds,
        dp_sync_state=None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs=None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Return `[num_reqs, K]` int64 draft tokens; zeros behind each stream's window. See `VidSpecSpeculator`."""
        num_reqs = input_batch.num_reqs
        if dummy_run:
            return self._outputs(num_reqs)[0].zero_()
        plan = self._knobs.now.plan_for(num_reqs)
        step = Step.of(input_batch, num_sampled, plan, self.decision, num_speculative_tokens)
        most = step.plan.num_tokens
        if self._guidance is not None:
            self._begin_guided(step, self._guidance)
        cohort = self._follow(step, self._exchange(step))
        tokens, counts = self._take(step, cohort, most)
        self._requests.publish(input_batch.idx_mapping, input_batch.req_ids, cohort, counts)
        return tokens

    def _begin_guided(self, step: Step, guidance: Guidance) -> None:
        """Let the drafter read the prompts whose scores have come."""
        unseen = step.is_done & self._requests.are_in(step.batch.idx_mapping_np, Phase.UNSEEN)
        for row in step.batch.idx_mapping_np[unseen].tolist():
            known = self._known.get(row)
            if known is None:
                continue
            pending = self._waiting.pop(row, None)
            if pending is None:
                pending = guidance.take(row)
                if pending is not None and not pending.is_here:
                    self._waiting[row] = pending
                    continue
            known.scores = None if pending is None else tuple(pending.wait())
            self._begin(row, known)

    def _exchange(self, step: Step) -> np.ndarray:
        """Commit a step; return `[num_reqs]` int64 how far each request is, the same on every rank."""
        doing = np.zeros(step.batch.num_reqs, dtype=np.int64) if self._client is None else self._commit(step)
        if self._group.world_size > 1:
            group = self._group
            torch.distributed.broadcast(torch.from_numpy(doing), group.ranks[0], group=group.cpu_group)
        return doing

    def _commit(self, step: Step) -> np.ndarray:
        """Hear the drafter and commit a step on the first rank; return how far requests are."""
        client, commits, rows = self._client, self._commits, step.batch.idx_mapping_np
        assert client is not None and commits is not None
        self._hear(client)
        if client.num_ups > self._num_ups:
            self._num_ups = client.num_ups
            if self._num_ups > 1:
                self._counters.add("drafter_restarts")
                self._arrive_again(client)
        self._time(step)
        commits.add(step, self._req_states)
        doing = np.where(self._has_begun[rows], _BEGUN, _UNKNOWN)
        if self._refused:
            # A refusal is acted on once its reason is here, by all ranks in one step.
            doing[[row in self._refused for row in rows.tolist()]] = _REFUSED
        return doing

    def _hear(self, client: DrafterClient) -> None:
        for refusal in client.poll():
            row = refusal.req_state_idx
            if self._epochs[row] == refusal.epoch:
                self._refuse(row, refusal.reason, refusal.detail)
        commits = self._commits
        assert commits is not None
        if failure := commits.take_failure():
            # What was not written down leaves a hole in texts; whoever comes later has none.
            for row in self._known:
                if row not in self._refused and self._requests.skip_reason[row] is None:
                    self._refuse(row, "draft_error", f"what was committed did not reach the drafter ({failure})")
        commits.publish_counters()

    def _refuse(self, row: int, reason: str, detail: str) -> None:
        """Note that a request is not drafted for, and why.

        Raises:
            VidSpecError: It is for an error, and errors are not to pass.
        """
        self._refused[row] = reason
        self._counters.skip(reason, self._known[row].arrival.req_id, detail)
        if reason == "draft_error" and self._knobs.now.on_draft_error == "raise":
            raise VidSpecError(detail)

    def _arrive_again(self, client: DrafterClient) -> None:
        """Tell a drafter that has just come up of all running requests, as far as they have come."""
        tables = client.tables
        for row, known in self._known.items():
            token_ids = tables.text[row, : tables.committed[row]].copy()
            self._arrive(row, known, token_ids)
            if known.has_begun:
                self._begin(row, known)

    def _time(self, step: Step) -> None:
        now, num_reqs = time.monotonic(), step.batch.num_reqs
        before, num_before = self._last_step
        if num_before == num_reqs and step.is_done.all():
            self._rule.hear_step(num_reqs, 1e6 * (now - before))
        self._last_step = (now, num_reqs if step.is_done.all() else 0)

    def _window(self, client: DrafterClient, rows: np.ndarray) -> int:
        """Return the window of a step: what the draft draws while the target verifies."""
        num_streams = int((client.tables.state[rows] == StreamState.STREAMING).sum())
        return self._rule.window(len(rows), float(client.tables.draft_us[num_streams]))

    def _follow(self, step: Step, doing: np.ndarray) -> Cohort:
        """Let requests be where they are by now; return those that are drafted for."""
        rows = step.batch.idx_mapping_np
        for i in np.flatnonzero(doing == _REFUSED).tolist():
            self._requests.skip(int(rows[i]), self._refused.pop(int(rows[i]), "draft_error"))
        is_new = (doing == _BEGUN) & self._requests.are_in(rows, Phase.UNSEEN)
        if is_new.any():
            # Whether there is a stream yet, the device sees.
            self._requests.enter(rows[is_new], Phase.DRAFTING)
        rests = np.full(len(rows), not step.plan.num_tokens) if step.rests is None else step.rests
        for phase, is_new in (
            (Phase.DRAFTING, ~rests & self._requests.are_in(rows, Phase.PREFILLING)),
            (Phase.PREFILLING, rests & self._requests.are_in(rows, Phase.DRAFTING)),
        ):
            if is_new.any():
                self._requests.enter(rows[is_new], phase)
        return self._requests.cohort(rows, step.is_done)

    def _take(self, step: Step, cohort: Cohort, most: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `[num_reqs, K]` drafts and `[num_drafted]` how many of them mean something."""
        batch = step.batch
        tokens, told, both = self._outputs(batch.num_reqs)
        if not len(cohort.places_np):
            return tokens.zero_(), None
        if self._streams is not None:
            self._cut(batch, cohort, most, tokens, told)
        self._share(both)
        if self._commits is not None:
            self._commits.took(batch.idx_mapping_np, cohort.is_drafted, told)
        if cohort.is_whole:
            return tokens, told[:, 0]
        return tokens, told[async_tensor_h2d(cohort.places_np, device=self._device), 0]

    def _cut(self, batch: Any, cohort: Cohort, most: int, tokens: torch.Tensor, told: torch.Tensor) -> None:
        """Let the device cut windows; see `gather_draft_windows`."""
        client, commits, streams, rows = self._client, self._commits, self._streams, batch.idx_mapping_np
        assert client is not None and commits is not None and streams is not None
        wanted = np.minimum(commits.wanted(rows, self._window(client, rows)), most)
        if self._knobs.now.parallel.wait_us:
            commits.wait_for(rows, self._epochs[rows], wanted, self._knobs.now.parallel.wait_us)
        asked = np.stack((self._epochs[rows], wanted * cohort.is_drafted), axis=1).astype(np.int32)
        if (key := asked.tobytes()) != self._asked[0]:
            on_cpu = self._device.type == "cpu"
            self._asked = (key, torch.from_numpy(asked) if on_cpu else async_tensor_h2d(asked, device=self._device))
        states = self._req_states
        texts = (states.total_len.gpu, states.all_token_ids.gpu)
        stream_rows = streams.for_step(batch.idx_mapping, rows)
        gather_draft_windows(stream_rows, self._asked[1], batch.idx_mapping, *texts, tokens, told)

    def _outputs(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where a step's drafts `[num_reqs, K]` int64 and their window info int32 go, and both as one."""
        if num_reqs not in self._views:
            both = self._windows[: num_reqs * (self._most + 1)]
            tokens, told = both[: num_reqs * self._most], both[num_reqs * self._most :]
            told = told.view(torch.int32).view(num_reqs, WINDOW_INFO_SIZE)
            self._views[num_reqs] = (tokens.view(num_reqs, self._most), told, both)
        return self._views[num_reqs]

    def _share(self, windows: torch.Tensor) -> None:
        """Let all ranks have what the first one has cut, in the order of the device's work."""
        if self._group.world_size > 1:
            self._group.broadcast(windows)

    # ---- tools -----------------------------------------------------------------------------------------------------

    def watch_timeline(self, on: bool) -> list[dict[str, Any]]:
        """Return the drafter's events since watching began, and go on watching or not."""
        if self._client is None:
            return []
        tables = self._client.tables
        events = drafter_events(tables) if tables.watching[0] else []
        tables.watching[0] = 0
        tables.num_events[0] = 0
        tables.watching[0] = int(on)
        return events
