"""What a row of the matrix does to engines: starts one, runs batches on it, and lets vanilla read the answers back."""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.sampler import Sampler

from benchmarks import watching
from tests.engine import harness, random_models
from tests.engine.conftest import QUESTION
from tests.engine.harness import QWEN, Engine
from tests.engine.matrix import LOSSY, SEVERAL, UNTRAINED_FAMILIES, Batch, Cell
from tests.engine.test_parallel import PARALLEL, let_drafts_come
from vllm_vidspec import metrics
from vllm_vidspec.config import VidSpecConfig, parse_config
from vllm_vidspec.engine import preflight
from vllm_vidspec.engine.knobs import Knobs
from vllm_vidspec.metrics import Kind
from vllm_vidspec.scoring.choices import choose
from vllm_vidspec.tools import pairs

MAX_TOKENS = 20
# Tokens on their way may end a preempted request, which then never begins again: there must be more left than that.
PREEMPTED_MAX_TOKENS = 60
NUM_FRAMES = 6  # that are sent as images
CHUNK = 32  # tokens
# Blocks of 32 tokens, so that the shortest prompt here fills one: prefix hits.
BLOCK_SIZE = 32
OVERRIDES = {"limit_mm_per_prompt": {"video": 2, "image": NUM_FRAMES}, "block_size": BLOCK_SIZE}
SHAPES: dict[str, dict[str, Any]] = {"tree-adaptive": {"num_speculative_tokens": 16}}
OBSERVES = {"attention": {"pruner": "specvlm"}, "uv": {"pruner": "uv"}, "both": {"pruner": "auto"}}
# A target that is never sure, and one match after a mismatch: as loose as can be.
ALLOWS: dict[str, dict[str, Any]] = {
    "strict": {},
    "all": {"request_scorers": ["strict", *LOSSY], "fly_entropy": 0.001},
}


class Checkpoints:
    """The models of the matrix, made where there is no bundled one; see `Cell`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.target = functools.cache(self._target)

    def _target(self, family: str) -> str:
        if family in UNTRAINED_FAMILIES:
            return random_models.build(family, self._folder / f"{family}-target")
        return pairs.checkpoint(family, "target")

    def draft(self, cell: Cell) -> str:
        family = cell["family"]
        if cell["draft"] == "self":
            return "target"
        if cell["draft"] == "twin":
            return self.target(family)
        if family not in UNTRAINED_FAMILIES:
            return "far"
        # A target with experts has a dense draft.
        return random_models.build(family.removesuffix("-moe"), self._folder / f"{family}-draft", seed=1)


def prompts_of(family: str) -> str:
    """Return the bundled family whose prompts a family takes."""
    return QWEN if family in UNTRAINED_FAMILIES else family


def spec_of(cell: Cell) -> dict[str, Any]:
    spec = {"drafting": cell["shape"], "guidance_layers": "all"}
    spec |= SHAPES.get(cell["shape"], {}) | OBSERVES[cell["observes"]] | ALLOWS[cell["allows"]]
    return spec | ({"parallel": PARALLEL} if cell["drafting"] == "parallel" else {})


@contextlib.contextmanager
def started(cell: Cell, models: Checkpoints) -> Iterator[Engine]:
    family, is_ahead = cell["family"], cell["scheduler"] == "ahead"
    overrides = OVERRIDES | {"model": models.target(family)}
    with (
        mock.patch.object(VidSpecConfig, "fly_window", 1),
        harness.engine(prompts_of(family), models.draft(cell), overrides, is_ahead, **spec_of(cell)) as run,
        let_drafts_come(run) if cell["drafting"] == "parallel" else contextlib.nullcontext(),
    ):
        yield run


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "truncated": {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "banned": {
        "temperature": 1.0,
        "bad_words": ["left", "moves", "in the middle"],
        "logit_bias": dict.fromkeys([3, 5, 8, 13, 21, 34], 2.0),
    },
    "logprobs": {"temperature": 1.0, "logprobs": 2},
    # The bundled tokenizer is word level, so a grammar sees words without the spaces between them.
    "grammar": {"temperature": 0.0},
}


def request(cell: Cell, seed: int) -> tuple[dict, dict]:
    """Return the prompt and the SamplingParams arguments of a cell; `seed` also chooses what is shown."""
    family = prompts_of(cell["family"])
    first, second = harness.shown(5)[seed % SEVERAL : seed % SEVERAL + 2]
    shown: dict[str, Any] = {
        "video": {"videos": [first]},
        "videos": {"videos": [first, second]},
        "images": {"images": [first[0], second[0]]},
        "frames": {"images": list(first[:: len(first) // NUM_FRAMES][:NUM_FRAMES])},
        "text": {},
    }[cell["input"]]
    prompt = pairs.media_prompt(family, pairs.DEFAULT_QUESTION if shown else f"{QUESTION} {QUESTION}", **shown)
    max_tokens = PREEMPTED_MAX_TOKENS if cell["prefill"] == "preempted" else MAX_TOKENS
    sampling = {"seed": seed, "max_tokens": max_tokens, **SAMPLING[cell["sampling"]]}
    if cell["sampling"] == "grammar":
        regex = f"(blue|circle|vertically){{{max_tokens - 12},{max_tokens - 8}}}"
        sampling["structured_outputs"] = StructuredOutputsParams(regex=regex)
    else:
        sampling["ignore_eos"] = True
    if cell["allows"] == "all":
        sampling["extra_args"] = {"vidspec_scorer": cell["scorer"]}
    return prompt, sampling


@dataclasses.dataclass(frozen=True)
class Answered:
    """What became of a batch, cell by cell."""

    batch: Batch
    seeds: list[int]
    outputs: list[Any]  # vLLM's
    kinds: list[list[int]]  # of each token
    num_drafts: list[int]  # steps that had a draft of it
    num_runs: list[int]  # once, and again after each preemption
    num_visual: list[int]  # tokens of its prompt
    num_planned: int  # K
    counted: dict[str, int]  # by our counters, of all cells


def run(engine: Engine, batch: Batch, first_seed: int) -> Answered:
    settings, llm = batch[0], engine.llm
    seeds = [first_seed + i for i in range(len(batch))]
    requests = [request(cell, seed) for cell, seed in zip(batch, seeds, strict=True)]
    engine.retune(pruner=settings.get("blind", settings["pruner"]))
    engine.idle()  # vLLM tells of the end of a request with its next step
    assert settings["drafting"] == "parallel" or engine.kv.num_used_blocks == 0, "an earlier batch has kept blocks"
    assert llm.reset_prefix_cache()
    if settings["prefill"] == "prefix-hit":
        # Two tokens: who ends with its first is drafted for by nobody, and its scores are not remembered.
        engine.generate([(prompt, {**sampling, "max_tokens": 2}) for prompt, sampling in requests])
        engine.idle()
    ids = [str(llm.request_counter.counter + i) for i in range(len(requests))]
    before, outputs = engine.counters(), {}
    with (
        engine.watched(watching.scores) as records,
        _drafted(engine) as drafted,
        _chunks(engine, len(ids)) if settings["prefill"] == "chunked" else contextlib.nullcontext() as chunks,
        engine.preemptions() as preempted,
    ):
        engine.begin(requests)
        if settings["prefill"] == "preempted":
            _go(engine, outputs, lambda: all(one.num_output_tokens > 1 for one in engine.scheduler.requests.values()))
            with mock.patch.object(engine.scheduler.kv_cache_manager, "allocate_slots", return_value=None):
                _go(engine, outputs, lambda: len(preempted) > 0)
        _go(engine, outputs, lambda: False)
    told = [outputs[one] for one in ids]
    lengths = {one: len(output.prompt_token_ids) for one, output in zip(ids, told, strict=True)}
    assert chunks is None or chunks == {one for one in ids if lengths[one] > CHUNK} != set(), lengths
    assert settings["prefill"] != "prefix-hit" or all(one.num_cached_tokens for one in told), lengths
    by_id = {record["req_id"].split("-")[0]: record["kinds"] for record in records}
    kinds = []
    for one, output in zip(ids, told, strict=True):
        # A step may have verified drafts past the end; what a step without drafts puts out at the end, nobody sees.
        length = len(output.outputs[0].token_ids)
        kinds.append((by_id.get(one, []) + [int(Kind.OWN)] * length)[:length])
    visual = [getattr(engine.runner.model_config.hf_config, f"{kind}_token_id") for kind in ("image", "video")]
    began = Counter(ids + [call.args[0].request_id.split("-")[0] for call in preempted])
    return Answered(
        batch,
        seeds,
        told,
        kinds,
        [drafted[one] for one in ids],
        [began[one] for one in ids],
        [sum(token in visual for token in output.prompt_token_ids) for output in told],
        engine.runner.num_speculative_steps,
        metrics.difference(before, engine.counters()),
    )


def _go(engine: Engine, outputs: dict[str, Any], is_enough: Callable[[], bool]) -> None:
    while engine.core.has_unfinished_requests() and not is_enough():
        outputs.update({output.request_id: output for output in engine.core.step() if output.finished})


@contextlib.contextmanager
def _drafted(engine: Engine) -> Iterator[Counter]:
    """Yield a counter of the steps in which each request was drafted for, by its id. A stream may say nothing then."""
    found: Counter = Counter()
    rows, states = engine.runner.requests, engine.runner.req_states
    publish = rows.publish

    def noting(idx_mapping: Any, req_ids: Any, draft_batch: Any, num_nodes: Any) -> None:
        found.update(states.index_to_req_id[row].split("-")[0] for row in draft_batch.drafted_np.tolist())
        publish(idx_mapping, req_ids, draft_batch, num_nodes)

    with mock.patch.object(rows, "publish", noting):
        yield found


@contextlib.contextmanager
def _chunks(engine: Engine, num_requests: int) -> Iterator[set[str]]:
    """Let prompts be prefilled in chunks; yield a set that gains the ids of those that are."""
    chunked: set[str] = set()
    scheduler = engine.scheduler
    schedule = scheduler.schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        planned = schedule(*args, **kwargs)
        for new in planned.scheduled_new_reqs:
            if planned.num_scheduled_tokens[new.req_id] < len(new.prompt_token_ids):
                chunked.add(new.req_id.split("-")[0])
        return planned

    with (
        # Of several requests each; a single one may have all of a step.
        mock.patch.object(scheduler.scheduler_config, "long_prefill_token_threshold", CHUNK),
        mock.patch.object(scheduler, "max_num_scheduled_tokens", CHUNK * num_requests),
        mock.patch.object(scheduler, "schedule", noting),
    ):
        yield chunked


def read_back(
    models: Checkpoints, family: str, answered: list[Answered]
) -> Iterator[tuple[Cell, Any, Any, list[bool]]]:
    """Let vanilla sample each token by its own noise in the cell's text; yield cell, outputs, and what is own."""
    cells = [
        (cell, request(cell, seed), output)
        for one in answered
        for cell, seed, output in zip(one.batch, one.seeds, one.outputs, strict=True)
    ]
    overrides = OVERRIDES | {"model": models.target(family), "max_num_seqs": 32}
    with harness.engine(prompts_of(family), overrides=overrides) as engine:
        first = engine.llm.request_counter.counter
        texts = {str(first + i): list(output.outputs[0].token_ids) for i, (_, _, output) in enumerate(cells)}
        with _saying(texts) as own:
            said = engine.generate([(prompt, {**args, "extra_args": None}) for _, (prompt, args), _ in cells])
    for (cell, _, output), vanilla, (req_id, text) in zip(cells, said, texts.items(), strict=True):
        yield cell, output, vanilla, [own[req_id].get(place) == token for place, token in enumerate(text)]


@contextlib.contextmanager
def _saying(texts: dict[str, list[int]]) -> Iterator[dict[str, dict[int, int]]]:
    """Let requests say given token ids; yield what they would have said instead, by request and place."""
    own: dict[str, dict[int, int]] = {req_id: {} for req_id in texts}
    original = Sampler.__call__

    def sample(self: Sampler, logits: torch.Tensor, batch: Any) -> Any:
        output = original(self, logits, batch)
        ends = (batch.positions[batch.logits_indices] + 1).tolist()
        for i, (req_id, row) in enumerate(zip(batch.req_ids, batch.idx_mapping_np.tolist(), strict=True)):
            req_id, place = req_id.split("-")[0], ends[i] - int(self.req_states.prompt_len.np[row])
            if req_id in texts and 0 <= place < len(texts[req_id]):
                own[req_id][place] = int(output.sampled_token_ids[i, 0])
                output.sampled_token_ids[i, 0] = texts[req_id][place]
        return output

    with mock.patch.object(Sampler, "__call__", sample):
        yield own


def _ask_engine(cell: Cell) -> None:
    family = cell.get("family", QWEN)
    defaults = {"allows": "strict", "observes": "attention", "drafting": "sequential", "shape": "chain"}
    draft = "target" if cell.get("draft") == "self" else "draft"
    kwargs = pairs.llm_kwargs(prompts_of(family), draft, **spec_of(defaults | cell))
    preflight.translate(EngineArgs(**kwargs))


def _ask_request(cell: Cell) -> None:
    config, _ = parse_config({"model": "x", "num_speculative_tokens": 5, **ALLOWS[cell["allows"]]})
    choose({"vidspec_scorer": cell["scorer"]}, config)


def _ask_retune(cell: Cell) -> None:
    model, observed = cell.get("draft", "x"), OBSERVES[cell.get("observes", "attention")]
    config, _ = parse_config({"model": model, "num_speculative_tokens": 5, **observed})
    Knobs(config).retune({"pruner": cell["pruner"]})


ASKED = {"engine": _ask_engine, "request": _ask_request, "retune": _ask_retune}
