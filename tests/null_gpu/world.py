"""The engine's own decode loop around two networks of integers, on the CPU or on the null GPU.

The networks keep keys and values in paged caches as the engine does, and their logits depend on every entry that a
token attends to: a wrong slot, position or mask changes the text. vLLM's own kernels (attention, sampling, commits) are
one launch each.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode

from null_gpu import networks
from null_gpu.emulate import Graph, emulating, launched, to_device, to_host
from null_gpu.networks import BLOCK_SIZE, MAX_LEN, MAX_REQS, NUM_BLOCKS, VOCAB
from tests.unit.engine import fakes
from vidspec_kernels import candidates_reference, draw_reference
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine import parts, speculator, tree_attention
from vllm_vidspec.engine.agreement import Agreement
from vllm_vidspec.engine.draft import drafter, local_backend, noise
from vllm_vidspec.engine.draft import kv as kv_pool
from vllm_vidspec.engine.draft import prefill as draft_prefill
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.graphs import DraftGraphs
from vllm_vidspec.engine.draft.memory import DraftMemory
from vllm_vidspec.engine.hooks.protocol import Forward
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.engine.report import counters
from vllm_vidspec.engine.requests import NewRequest, Phase, RequestRows
from vllm_vidspec.engine.verify import loose_tables
from vllm_vidspec.engine.verify.step import VerifyStep
from vllm_vidspec.metrics import MetricsFile


class World:
    """The model runner's side, from which the engine builds its parts: rows, batches, the target, commits.

    `launch` makes a kernel of a function of host tensors; `temperature` is every other request's.
    """

    max_num_reqs, vocab_size, model, recorder, observers = MAX_REQS, VOCAB, None, None, ()
    agreement = Agreement(SimpleNamespace(rank_in_group=0, world_size=1))
    kv_cache_config = SimpleNamespace(kv_cache_groups=[None])

    def __init__(
        self,
        device: torch.device,
        launch: Callable,
        config: VidSpecConfig,
        temperature: float = 0.0,
        fills_trees: bool = True,
    ):
        self.device, self.launch = device, launch
        self.knobs, self.requests = Knobs(config), RequestRows(MAX_REQS, device)
        self.K = self.num_speculative_steps = config.num_speculative_tokens
        self.max_num_tokens = MAX_REQS * (self.K + 1)
        self.text = self.zeros(MAX_REQS, MAX_LEN, dtype=torch.int32)
        self.total_len = self.zeros(MAX_REQS, dtype=torch.int32)
        self.last_sampled = self.zeros(MAX_REQS, 1, dtype=torch.int64)
        self.lengths = np.zeros(MAX_REQS, dtype=np.int64)  # what `total_len` holds
        self.num_drafts = np.zeros(MAX_REQS, dtype=np.int32)  # scheduled for the next step
        self.drafts = self.zeros(MAX_REQS, self.K, dtype=torch.int64)
        blocks = NUM_BLOCKS // MAX_REQS
        self.target_table = self.put(np.arange(MAX_REQS * blocks, dtype=np.int32).reshape(MAX_REQS, blocks))
        self.target_cache = self.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 2, dtype=torch.int64)
        self.sampler = networks.FakeSampler(self, temperature)
        self.req_states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=self.total_len),
            all_token_ids=SimpleNamespace(gpu=self.text),
            last_sampled_tokens=self.last_sampled,
        )
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS, async_scheduling=fills_trees),
            model_config=SimpleNamespace(max_model_len=MAX_LEN, multimodal_config=None),
            observability_config=SimpleNamespace(per_request_spec_decode_metrics="basic"),
            device_config=SimpleNamespace(device=device),
            cache=self.target_cache,
        )
        self.speculative_config = SimpleNamespace(
            num_speculative_tokens=self.K, enable_adaptive_verification=False, rejection_sample_method="standard"
        )
        self.model_state = fakes.model_state()
        self.encoder_cache = self.block_tables = None  # nobody shows it a video, and its draft has a cache of its own
        self.counters = counters.Counters(self.vllm_config, device, self.K, self.requests)
        made = parts.RunnerParts(self)
        self.trees, self.rules, self.verifier, self.hooks = made.trees, made.rules, made.verifier, made.hooks
        self.target_trees = made.target_trees
        self.speculator, self.draft = made.speculator, made.speculator.backend.draft_model
        self.hooks.init_kv(self)
        self.graphs = self.speculator.backend._graphs = PaddedGraphs() if device.type == "cpu" else StepGraphs()
        self.speculator.backend._memory = DraftMemory(pool_bytes=0, vision_bytes=1)
        self.speculator.backend.init_kv(self.block_tables, contextlib.nullcontext)
        self.draft.attention = self.speculator.backend.drafter.attention
        self.log: list[Any] = []

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def put(self, values: np.ndarray) -> torch.Tensor:
        """Return a host array on the device, as vLLM does; not counted."""
        tensor = torch.from_numpy(np.array(values))
        return tensor if self.device.type == "cpu" else to_device(tensor)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, row: int, prompt: np.ndarray, num_dropped: int) -> None:
        """Add a request whose prompt is in both KV caches, in the draft's without its first `num_dropped` tokens."""
        tokens = np.append(prompt, 3)
        self.lengths[row], self.num_drafts[row] = len(tokens), 0
        at = to_host(self.text)[row]
        at[: len(tokens)] = torch.from_numpy(tokens.astype(np.int32))
        to_host(self.total_len)[row] = len(tokens)
        to_host(self.last_sampled)[row] = 3
        here = self.drafter
        here.kv.add(row, num_dropped, 0)
        assert here.kv.reserve(np.array([row]), np.array([len(tokens) - num_dropped + self.K]))[0]
        here.kv.apply()
        here.enter(row)
        kept, positions = prompt[num_dropped:], np.arange(num_dropped, len(prompt))
        self._fill(self.draft.cache, here.kv.block_tables, row, kept, positions)
        self._fill(self.target_cache, self.target_table, row, prompt, np.arange(len(prompt)))
        asked = {} if row % 2 else {"vidspec_scorer": "strict"}
        wishes = SimpleNamespace(
            extra_args=asked, all_stop_token_ids={row}, structured_outputs=None, logprobs=None,
            logprob_token_ids=None, stop=None,
        )  # fmt: skip
        arrival = NewRequest(str(row), row, [], [], wishes)
        self.counters.begin_request(arrival)
        self.requests.add(arrival)
        if self.rules is not None and self.rules.needs_relevance(row):
            self.rules.ready(row)
        self.requests.enter(row, Phase.DRAFTING)

    @staticmethod
    def _fill(cache: torch.Tensor, table: torch.Tensor, row: int, tokens: np.ndarray, positions: np.ndarray) -> None:
        entry = np.arange(len(tokens))
        slots = to_host(table)[row].numpy()[entry // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + entry % BLOCK_SIZE
        to_host(cache).numpy().reshape(-1, 2)[slots] = np.stack((tokens, positions), axis=1)

    def end(self, row: int) -> None:
        self.requests.remove(row)
        self.counters.end_requests([str(row)], lambda req_id: False)

    # ---- the drafter -----------------------------------------------------------------------------------------------

    @property
    def drafter(self) -> Drafter:
        return self.speculator.backend.drafter

    def capture(self, mostly_processed: bool) -> None:
        """Capture the parts of draft steps, if the loop runs on the GPU."""
        if isinstance(self.graphs, StepGraphs):
            self.graphs._mostly_processed = mostly_processed
            self.speculator.backend.capture()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def batch(self, rows: list[int]) -> SimpleNamespace:
        rows_np = np.array(rows, dtype=np.int32)
        drafts, before = self.num_drafts[rows_np], self.lengths[rows_np]
        counts = drafts + 1
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        local = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        return SimpleNamespace(
            req_ids=[str(row) for row in rows],
            num_reqs=len(rows),
            num_reqs_after_padding=len(rows),
            num_tokens=int(starts[-1]),
            idx_mapping=self.put(rows_np.astype(np.int64)),
            idx_mapping_np=rows_np,
            num_computed_tokens_np=before - 1,
            num_scheduled_tokens=counts,
            num_draft_tokens_per_req=drafts,
            prefill_len_np=np.ones(len(rows), dtype=np.int64),
            is_prefilling_np=np.zeros(len(rows), dtype=bool),
            seq_lens_cpu_upper_bound=torch.from_numpy(before + drafts),
            seq_lens=self.put((before + drafts).astype(np.int32)),
            query_start_loc=self.put(starts),
            query_start_loc_np=starts,
            positions=self.put(np.repeat(before - 1, counts) + local),
            cu_num_logits=self.put(starts),
            cu_num_logits_np=starts,
            local=self.put(local.astype(np.int32)),
            by_token=self.put(np.repeat(rows_np.astype(np.int64), counts)),
        )

    def step(self, rows: list[int], max_drafts: int | None = None) -> None:
        """Run the target over the scheduled drafts of these rows, verify and commit them, and draft again."""
        batch = self.batch(rows)
        logits, tokens = self._forward(batch)
        sampled, num_sampled = self._verify(batch, logits, tokens)
        self.counters.flush()
        self._commit(batch, sampled, num_sampled)
        propose = speculator.Speculator.propose.__wrapped__  # inference mode would hide operators
        drafts = propose(
            self.speculator, batch, None, None, None, None, num_sampled, None, self.last_sampled, None, None, None,
            num_speculative_tokens=max_drafts,
        )  # fmt: skip
        self._schedule(batch, drafts, max_drafts)
        self.log.append([to_host(tensor).tolist() for tensor in (sampled, num_sampled, drafts)])
        if self.trees is not None:
            tables = (self.trees.parents, self.trees.depths, self.trees.ancestors, self.trees.path)
            self.log.append([to_host(table)[:MAX_REQS].tolist() for table in tables])  # the last row is of padding

    def _forward(self, batch: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        positions, step = batch.positions, None
        self.hooks.before_forward(batch)
        if self.target_trees is not None:
            positions = self.target_trees._adjust(batch, positions.repeat(3, 1))[0]
        block_table = self.launch(lambda table, rows: table[rows])(self.target_table, batch.idx_mapping)
        self.model_state.prepare_attn(batch, None, [block_table], None, None, None)
        if self.target_trees is not None:
            step = networks.as_dict(self.target_trees.attention.step)

        def run(drafts, last, cache, table, rows, positions, entries, local, seq_lens, step):
            tokens = torch.where(local == 0, last[rows, 0], drafts[rows, (local - 1).clamp(min=0)])
            table_of_token = table.repeat_interleave(torch.from_numpy(np.diff(batch.query_start_loc_np)), dim=0)
            block = table_of_token.gather(1, (entries // BLOCK_SIZE)[:, None]).long()[:, 0]
            slots = block * BLOCK_SIZE + entries % BLOCK_SIZE
            starts = batch.query_start_loc_np
            hidden = networks.attend(cache, tokens, positions, starts, seq_lens, table, slots, step)
            return networks.target_logits(hidden), tokens

        forward = self.launch(run)
        out = forward(
            self.drafts, self.last_sampled, self.target_cache, block_table, batch.by_token, positions, batch.positions,
            batch.local, batch.seq_lens, step,
        )  # fmt: skip
        self.hooks.after_forward(Forward(None, None))
        return out

    def _verify(
        self, batch: SimpleNamespace, logits: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        verifier, rows_np = self.verifier, batch.idx_mapping_np
        step, relevance = VerifyStep(), None
        if self.rules is not None and self.rules.any_by_relevance(rows_np):
            hashed = networks.hashed
            measure = self.launch(lambda rows, at: torch.from_numpy((hashed(rows, at) % 97).astype(np.float32)))
            relevance = measure(batch.by_token, batch.positions)
        step.open(batch.cu_num_logits_np, relevance)
        verifier.begin(step)
        invalid = self.launch(lambda local, tokens: torch.where(local == 0, -1, tokens).int())
        _, sampled, num_sampled = verifier._verify(
            logits, None, tokens, batch.positions, batch.cu_num_logits, batch.idx_mapping, rows_np, batch.by_token,
            batch.local, batch.seq_lens_cpu_upper_bound.numpy(), invalid(batch.local, tokens),
        )  # fmt: skip
        if self.trees is not None:
            self.trees.compact()
        return sampled, num_sampled

    def _commit(self, batch: SimpleNamespace, sampled: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Stand in for vLLM's post-update kernel."""
        rows = batch.idx_mapping_np
        emitted, counts = to_host(sampled).numpy(), to_host(num_sampled).numpy()
        text = to_host(self.text).numpy()
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            text[row, self.lengths[row] : self.lengths[row] + count] = emitted[i, :count]
            self.lengths[row] += count
            to_host(self.last_sampled)[row] = int(emitted[i, count - 1])
        to_host(self.total_len).numpy()[rows] = self.lengths[rows]

    def _schedule(self, batch: SimpleNamespace, drafts: torch.Tensor, max_drafts: int | None) -> None:
        """Stand in for vLLM's asynchronous scheduler: K drafts where there are drafts, up to the context's end."""
        rows = batch.idx_mapping_np
        to_host(self.drafts).numpy()[rows] = to_host(drafts).numpy()
        live = self.requests.phase[rows] == Phase.DRAFTING
        most = np.minimum(self.K if max_drafts is None else max_drafts, MAX_LEN - 1 - self.lengths[rows])
        self.num_drafts[rows] = np.where(live, most, 0)


class PaddedGraphs:
    """Stands in for `DraftGraphs` on the CPU: steps are padded as if they had graphs, and run as functions."""

    is_on = is_wanted = True

    def size_for(self, num_reqs: int, _width: int, _is_processed: bool) -> int:
        return num_reqs + num_reqs % 2

    def run(self, _key: Any, function: Callable[[], None]) -> bool:
        function()
        return False


class StepGraphs(DraftGraphs):
    """The product's, with graphs of the null GPU; vLLM's manager captures where parallel groups are initialised."""

    sizes, max_tokens, is_wanted = (1, 2, MAX_REQS), 512, True
    _is_capturing = _mostly_processed = False

    def __init__(self) -> None:
        self.graphs: dict[Any, Graph] = {}
        self.num_eager = 0  # parts that ran without a graph
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, create_forward_fn: Callable, progress_bar_desc: str = "") -> None:
        for key in self._capture_descs[CUDAGraphMode.FULL]:
            create_forward_fn(key, True)(CUDAGraphMode.NONE)
            run, self.graphs[key] = create_forward_fn(key, False), Graph()
            with self.graphs[key].capture(self._pool):
                run(CUDAGraphMode.NONE)

    def run(self, key: Any, function: Callable[[], object]) -> bool:
        is_graph = super().run(key, function)
        self.num_eager += not (is_graph or self._is_capturing)
        return is_graph

    def run_fullgraph(self, desc: Any) -> None:
        self.graphs[desc].replay()


@contextlib.contextmanager
def world(
    device: torch.device, folder: Path, config: VidSpecConfig, splits_keys: bool = True, **more: Any
) -> Iterator[World]:
    """Build a decode loop on the null GPU, or on the CPU; with `splits_keys` chains need no tree attention."""
    on_gpu = device.type == "cuda"
    launch = launched if on_gpu else lambda kernel: kernel

    def sampling_kernel(reference: Callable) -> Callable:
        return lambda *args, scratch, **more: launch(reference)(*args, **more)

    with contextlib.ExitStack() as stack:
        for module, name, stand_in in (
            (counters.Counters, "_open", staticmethod(lambda _: MetricsFile.create(folder / f"{device.type}.i64"))),
            (parts, "DraftModel", lambda _config, device, *_: networks.FakeDraft(device, launch)),
            (parts, "make_guides", lambda *_: []),
            (parts, "VisualStates", lambda *_: None),  # `_verify` makes up relevance
            *((module, "kv_bytes_per_token", lambda _: 0) for module in (local_backend, drafter)),
            (draft_prefill, "adapter_for", lambda *_: None),
            *(
                (module, "attention_layers", lambda config: {"layer": config.cache})
                for module in (local_backend, parts)
            ),
            (tree_attention, "TreeAttention", networks.FakeAttention),
            (tree_attention.backends, "splits_keys", lambda *_: splits_keys),
            (tree_attention, "_obstacles", lambda *_: iter(())),
            *(() if on_gpu else ((kv_pool, "StagedWriteTensor", fakes.StagedWrites),)),
            (loose_tables, "protected_ids", lambda *_: {0, 9}),
            (noise, "draw", sampling_kernel(draw_reference)),
            (noise, "candidates", sampling_kernel(candidates_reference)),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        if on_gpu:
            stack.enter_context(emulating())
        yield World(device, launch, config, **more)
