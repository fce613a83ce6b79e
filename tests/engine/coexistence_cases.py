"""What the rows of `coexistence` run in this process: vanilla and vidspec under one setting, one engine at a time."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from tests.engine import harness
from tests.engine.harness import QWEN, Engine
from vllm_vidspec import metrics
from vllm_vidspec.tools import pairs

RANK = 4
Found = tuple[dict[str, int], str]  # our counters, and what else there is to say


def first_reason(error: Exception) -> str:
    """Return the line of an exception that says why: pydantic puts its own in front."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0]
    return line.removeprefix("Value error, ").split(" [type=")[0]


def compare(
    overrides: dict,
    requests: list[tuple[dict, dict]],
    draft: str = "draft",
    *,
    rounds: int = 1,
    skipped: dict[str, int] | None = None,
    during: Callable[[Engine], contextlib.AbstractContextManager] = contextlib.nullcontext,
    **spec: Any,
) -> tuple[list[Any], dict[str, int]]:
    """Return outputs and counters of the last round: answers are vanilla's, some draft stands or all are skipped."""
    with harness.engine(QWEN, overrides=overrides) as engine:
        expected = [engine.generate(requests) for _ in range(rounds)]
    with harness.engine(QWEN, draft, overrides, **spec) as engine, during(engine):
        found = [engine.measured(requests) for _ in range(rounds)]
        assert engine.used_blocks() == 0
    for answers, (outputs, _) in zip(expected, found, strict=True):
        harness.assert_same_answers(answers, outputs)
    outputs, counted = found[-1]
    assert harness.skipped(counted) == (skipped or {})
    assert (counted["accepted_tokens"] > 0) == (counted["prompts"] > 0)
    return outputs, counted


def evs(_: Path) -> Found:
    """The target prunes half of each video, the draft nine tenths of what is left; then a draft equal to the target,
    which sees through a tower of its own or the target's.
    """
    overrides = {"video_pruning_rate": 0.5, "enable_prefix_caching": False}
    requests = harness.greedy_and_sampled(QWEN, 3, 2)
    _, counted = compare(overrides, requests, pruner="specvlm")
    for vision in ("own", "target"):
        _, equal = compare(overrides, requests, pairs.checkpoint(QWEN, "target"), pruner="none", draft_vision=vision)
        harness.assert_all_stands(equal)
    assert counted["visual_tokens_full"] == 5 * 128, "the target did not prune"
    assert counted["guided_prompts"] == counted["prompts"] == 5
    return counted, f"; with the target's own weights all of {equal['draft_tokens']}"


def quantised(kind: str, cache: str | None = None, dtype: str = "float32") -> Callable[[Path], Found]:
    """Return a case of checkpoints in a format (`quantise.py`); `cache` gives one in float8 its scales."""

    def case(folder: Path) -> Found:
        from tests.engine import quantise

        made = {
            role: str(quantise.quantise(Path(pairs.checkpoint(QWEN, role)), folder / role, kind, cache))
            for role in ("target", "draft")
        }
        overrides = {"model": made["target"], "dtype": dtype}
        requests = harness.greedy_and_sampled(QWEN, 3, 1)
        _, counted = compare(overrides, requests, made["draft"], pruner="specvlm", drafting="tree-static")
        assert counted["guided_prompts"] == counted["prompts"] == 4
        return counted, ""

    return case


scaled_cache = quantised("w8a8", "tensor")


def fp8_cache(_: Path) -> Found:
    requests = harness.mixed_batch(QWEN)[:8]
    _, counted = compare({"kv_cache_dtype": "fp8"}, requests, pruner="specvlm", drafting="tree-adaptive")
    assert counted["guided_prompts"] > 0
    return counted, ""


def fp8_draft_cache(_: Path) -> Found:
    """The draft's alone: a byte a number, and the pool is smaller by as much."""
    from vllm_vidspec.engine.kv_views import attention_layers

    taken: dict[str, int] = {}

    @contextlib.contextmanager
    def measured(engine: Engine) -> Iterator[None]:
        caches = [layer.kv_cache for layer in attention_layers(engine.draft.config).values()]
        taken["pool"] = engine.counters()["draft_pool_bytes"]
        taken["token"] = sum(cache.nbytes for cache in caches) // (caches[0].shape[0] * caches[0].shape[2])
        text = engine.draft.hf_config.text_config
        head_size = text.hidden_size // text.num_attention_heads
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * head_size
        assert taken["token"] == numbers, f"{taken['token']} bytes of {numbers} numbers"
        assert (
            taken["pool"]
            == sum(cache.nbytes for cache in caches)
            == engine.kv.num_blocks * engine.draft.block_size * numbers
        )
        yield

    requests = harness.greedy_and_sampled(QWEN, 3, 1)
    _, counted = compare({}, requests, drafting="tree-static", during=measured, kv_cache_dtype="fp8")
    return counted, f"; {taken['token']} bytes of the draft's a token, a byte a number"


def lora(folder: Path) -> Found:
    """A batch of requests without, with and without an adapter of the target's language model."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, _random_adapter(folder / "adapter"))
    wanted = [None, adapter, None]
    # A place for one adapter more: with one alone vLLM's CPU kernels take no adapter (-1) for the last.
    overrides = {"enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False, "max_loras": 2}
    prompts, params = zip(*harness.videos(QWEN, 3), strict=True)

    def ask(engine: Engine, adapters: list) -> list:
        sampling = [harness._params(**one) for one in params]
        return engine.llm.generate(list(prompts), sampling, use_tqdm=False, lora_request=adapters)

    with harness.engine(QWEN, overrides=overrides) as engine:
        plain, expected = ask(engine, [None] * 3), ask(engine, wanted)
    without, mixed = harness.token_ids(plain), harness.token_ids(expected)
    assert mixed[::2] == without[::2] and mixed[1] != without[1], "the adapter is not the second request's alone"
    with harness.engine(QWEN, "draft", overrides, pruner="uniform") as engine:
        counters = [engine.counters()]
        outputs = ask(engine, wanted)
        counters.append(engine.counters())
        adapted = ask(engine, [adapter] * 3)
        counters.append(engine.counters())
    counted, alone = (metrics.difference(*pair) for pair in itertools.pairwise(counters))
    harness.assert_same_answers(expected, outputs)
    assert harness.token_ids(adapted)[1] == harness.token_ids(expected)[1]
    assert counted["prompts"] == 3 and counted["accepted_tokens"] > 0 and not harness.skipped(counted)
    assert alone["drafts"] > 0
    return counted, f", {alone['accepted_tokens']} of {alone['draft_tokens']} where all run with the adapter"


def _random_adapter(folder: Path) -> str:
    """Write an adapter of random weights, large enough to change every answer."""
    base = pairs.checkpoint(QWEN, "target")
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(Path(base) / "model.safetensors").items():
        if "visual" not in name and name.endswith(("q_proj.weight", "v_proj.weight")):
            stem = "base_model.model." + name.removesuffix(".weight")
            for part, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                weights[f"{stem}.lora_{part}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def prefix_caching(_: Path) -> Found:
    overrides = {"enable_prefix_caching": True, "block_size": 32}
    again, counted = compare(overrides, harness.videos(QWEN, 3), rounds=2, pruner="specvlm")
    assert counted["prompts"] == counted["guided_prompts"] == 3
    num_cached = sum(output.num_cached_tokens for output in again)
    assert num_cached >= 3 * 256
    return counted, f", {num_cached} tokens from the cache"


def transfer(folder: Path | str) -> dict[str, Any]:
    """Return the setting of a KV connector that keeps entries in a folder."""
    extra = {"shared_storage_path": str(folder)}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": connector, "enable_prefix_caching": False}


def _prefill_then_decode(folder: Path, skipped: dict[str, int] | None = None) -> tuple[list, dict[str, int]]:
    """Vanilla prefills in one engine; another of vanilla's and then ours decode from its entries."""
    requests, overrides = harness.videos(QWEN, 3), transfer(folder)
    with harness.engine(QWEN, overrides=overrides) as engine:
        whole = engine.generate(requests)
    outputs, counted = compare(overrides, requests, skipped=skipped, pruner="specvlm")
    assert harness.token_ids(whole) == harness.token_ids(outputs), "the entries did not arrive"
    assert all(output.num_cached_tokens >= 128 for output in outputs)
    return outputs, counted


def kv_connector(folder: Path) -> Found:
    """The usual decode side has the pixels: its API server has read the same request."""
    outputs, counted = _prefill_then_decode(folder)
    return counted, f", {sum(output.num_cached_tokens for output in outputs)} tokens from the other engine"


def kv_connector_without_pixels(folder: Path) -> Found:
    """A decode side whose requests bring token ids and no pixels: no drafts, and a counter that says so."""
    from vllm_vidspec.engine.runner import VidSpecModelRunner

    original = VidSpecModelRunner._new_request

    def blind(self: Any, request: Any) -> Any:
        made = original(self, request)
        for feature in made.features:  # copies: the target's keep theirs
            feature.data = None
        return made

    with mock.patch.object(VidSpecModelRunner, "_new_request", blind):
        _, counted = _prefill_then_decode(folder, {"unsupported": 3})
    return counted, "; runs without speculation, counted (unsupported: 3)"


def ec_connector(folder: Path) -> Found:
    """An engine encodes the videos; another finds them, and its draft still looks for itself."""
    connector = {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    connector["ec_connector_extra_config"] = {"shared_storage_path": str(folder)}

    @contextlib.contextmanager
    def no_looks(engine: Engine) -> Iterator[None]:
        assert len(list(folder.iterdir())) == 3, "nothing was stored"
        tower = engine.runner.model.visual
        with mock.patch.object(tower, "forward", side_effect=tower.forward) as looks:
            yield
        assert not looks.call_count

    overrides = {"ec_transfer_config": connector}
    _, counted = compare(overrides, harness.videos(QWEN, 3), during=no_looks, pruner="specvlm")
    return counted, ", none encoded twice by the target"


def prompt_embeds(_: Path) -> Found:
    """A prompt of embeddings beside videos: it runs without drafts, counted; they with."""
    # vLLM reads as many numbers of a row as the model has, whatever there are: of shorter rows what lies behind them.
    width = json.loads(Path(pairs.checkpoint(QWEN, "target"), "config.json").read_text())["text_config"]["hidden_size"]
    embeds = torch.randn(12, width, generator=torch.Generator().manual_seed(0))
    requests = [*harness.videos(QWEN, 3), ({"prompt_embeds": embeds}, {"temperature": 0.0, "logprobs": 1})]
    overrides = {"enable_prompt_embeds": True}
    outputs, counted = compare(overrides, requests, skipped={"unsupported": 1}, pruner="uniform")
    logprobs = [entry.logprob for token in outputs[-1].outputs[0].logprobs for entry in token.values()]
    assert all(map(math.isfinite, logprobs)), "the prompt of embeddings is none of this model's"
    return counted, "; the prompt of embeddings runs without speculation, counted (unsupported: 1)"


def media_limit(_: Path) -> Found:
    """One video a prompt; two are the client's error, and the engine goes on."""
    from vllm.exceptions import VLLMValidationError

    @contextlib.contextmanager
    def refusing(engine: Engine) -> Iterator[None]:
        try:
            engine.generate([harness.mixed_batch(QWEN)[8]])
        except VLLMValidationError as error:
            assert "At most 1 video" in str(error)
        else:
            raise AssertionError("two videos were answered")
        yield

    requests = harness.greedy_and_sampled(QWEN, 3, 2)
    overrides = {"limit_mm_per_prompt": {"video": 1, "image": 0}}
    _, counted = compare(overrides, requests, during=refusing, pruner="uniform")
    return counted, "; a second video is refused as by vanilla"
