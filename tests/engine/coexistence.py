"""The rows of docs/coexistence.md: a feature of vLLM each, its setting, what is expected, and what runs to find out.

A row runs vanilla vLLM and vidspec under the same setting, on the bundled pairs, and says what was seen. What is
refused is refused while vLLM builds its configuration, hence before any weight loads.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine import coexistence_cases as cases
from tests.engine import coexistence_servers as servers
from tests.engine.harness import QWEN
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs

WORKS, OURS, VLLMS = "works", "refused by vidspec", "refused by vLLM"
ON_NULL_GPU, NOT_RUN = "runs on the null GPU", "not run here"
VERDICTS = (WORKS, OURS, VLLMS, ON_NULL_GPU)


class Seen(NamedTuple):
    """What came of a row: one of `VERDICTS`, and what was seen, for the page."""

    verdict: str
    detail: str


@dataclass(frozen=True)
class Row:
    """A row: what vLLM calls it, its setting on the command line, one of `VERDICTS`, and a pattern of what is seen.

    `run` finds it out, given an empty folder; `kind` is "engine" in this process, or "command" with servers, by
    benchmarks.pages.measure alone.
    """

    feature: str
    setting: str
    expected: str
    says: str
    run: Callable[[Path], Seen]
    kind: str = "engine"

    @property
    def name(self) -> str:
        """What tests and the command call it."""
        return f"{self.feature}: {self.setting}".replace("`", "")


def configured(folder: Path, draft: Any = "draft", target: Any = None, overrides: dict | None = None, **spec: Any):
    """Return vLLM's whole configuration, with our plugin; nothing loads. A model may be made in the folder."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_vidspec.plugin import register

    register()
    draft, target = (model(folder) if callable(model) else model for model in (draft, target))
    return EngineArgs(
        **pairs.llm_kwargs(QWEN, draft, target=target, overrides=overrides, **spec)
    ).create_engine_config()


def works(feature: str, setting: str, says: str, case: Callable[[Path], tuple[dict, str]]) -> Row:
    """Return a row of answers that are vanilla's."""

    def run(folder: Path) -> Seen:
        counted, more = case(folder)
        stand = f"{counted['accepted_tokens']} of {counted['draft_tokens']} draft tokens are accepted"
        return Seen(WORKS, f"answers are vanilla's; {stand}{more}")

    kind = "engine" if case.__module__ == cases.__name__ else "command"
    return Row(feature, setting, WORKS, says, run, kind)


def refused(expected: str, feature: str, setting: str, says: str, **arguments: Any) -> Row:
    """Return a row of a configuration that must be refused, by whoever is first."""

    def run(folder: Path) -> Seen:
        try:
            configured(folder, **arguments)
        except VidSpecError as error:
            assert "\n" not in str(error)
            return Seen(OURS, str(error))
        except Exception as error:
            return Seen(VLLMS, cases.first_reason(error))
        return Seen(WORKS, "nothing refused it")

    return Row(feature, setting, expected, says, run)


ours, vllms = functools.partial(refused, OURS), functools.partial(refused, VLLMS)


HALF = {"video_pruning_rate": 0.5, "enable_prefix_caching": False}
# Written by `NULL_GPU_RESULTS=… make test-cuda-host PYTEST_ARGS=…`; see docs/coexistence.md.
NULL_GPU = Path(__file__).resolve().parents[2] / "docs" / "results" / "null-gpu-cuda-only.json"


def _cuda(feature: str, setting: str, case: str) -> Row:
    """Return a row of what has CUDA kernels alone: what was seen of a case on the null GPU, without numbers."""

    def run(folder: Path) -> Seen:
        seen = json.loads(NULL_GPU.read_text())["ran"].get(case)
        if seen is None or seen["faults"] or seen["skipped"] or not seen["accepted"]:
            return Seen(NOT_RUN, f"only CUDA has kernels of it; the null GPU has a case, {case!r}: {seen}")
        did = f"captures {seen['graphs']} graphs of {seen['kernels']:,} kernels"
        return Seen(ON_NULL_GPU, f"{case!r} starts, {did}, decodes with drafts; none skipped; no numbers")

    return Row(feature, setting, ON_NULL_GPU, "decodes with drafts", run)


def _parallel(kind: str, **overrides: Any) -> Row:
    setting = f"`--{kind.lower().replace(' ', '-')}-parallel-size 2`"
    says = rf"{kind.lower()} parallelism( \(2\))? is not supported"
    return ours(f"{kind} parallelism", setting, says, overrides=overrides)


_QWEN3 = dict.fromkeys(("draft", "target"), pairs.checkpoint("qwen3-vl", "target"))
_BOTH, _EVS, _VIDCOM2 = "target and draft", "`--video-pruning-rate 0.5`", "`--video-pruning-method vidcom2`"
_BF16, _quantised_bf16 = "`--dtype bfloat16`", functools.partial(cases.quantised, dtype="bfloat16")
_ONE_VIDEO = """`--limit-mm-per-prompt '{"video": 1, "image": 0}'`"""
_APART, _SHARED = "an engine prefills, another decodes", "an engine encodes, another answers"
_PP, _LORA, _ENGINES = "Pipeline parallelism", {"enable_lora": True}, r"engine 0: [1-9]\d*, engine 1: [1-9]"
_TREES, _STATIC = '`"draft_shape": "tree-static"`', {"drafting": "tree-static"}
_BY_VIDCOM2, _STAGES = HALF | {"video_pruning_method": "vidcom2"}, {"pipeline_parallel_size": 2}

ROWS: tuple[Row, ...] = (
    works("EVS", _EVS, r"vanilla's; .* all of \d+", cases.evs),
    ours("EVS", f"{_EVS}, draft `self`", "cannot be used with .*self", draft="target", overrides=HALF),
    ours("EVS", f"{_EVS}, Qwen3-VL", "tokens of a video a qwen3-vl target", **_QWEN3, overrides=HALF),
    ours("VidCom2", f"{_VIDCOM2}, Qwen3-VL", "qwen3-vl target keeps", **_QWEN3, overrides=_BY_VIDCOM2),
    vllms("VidCom2", f"{_VIDCOM2}, Qwen2.5-VL", "'vidcom2' is not supp", overrides=_BY_VIDCOM2),
    works("LoRA", "`--enable-lora`, an unadapted draft", "with the adapter", cases.lora),
    ours("LoRA", '`--enable-lora`, `"model": "self"`', "LoRA adapters", draft="target", overrides=_LORA),
    works("INT8 weights", f"W8A8 of compressed-tensors, {_BOTH}", "vanilla's", cases.quantised("w8a8")),
    works("INT4 weights", f"W4A16 of compressed-tensors, {_BOTH}, {_BF16}", "vanilla's", _quantised_bf16("w4a16")),
    works("AWQ", f"{_BOTH}, {_BF16}", "vanilla's", _quantised_bf16("awq")),
    works("GPTQ", f"{_BOTH}, {_BF16}", "vanilla's", _quantised_bf16("gptq")),
    *(_cuda(name.upper(), f"{_BOTH}, Machete", f"chain {name} weights") for name in ("awq", "gptq")),
    _cuda("FP8 weights", f"such checkpoints, {_BOTH}", "chain fp8 weights"),
    _cuda("FP8 weights", f"`--quantization fp8_per_tensor`, {_BOTH}", "chain fp8 as it loads"),
    works("FP8 KV cache", "`--kv-cache-dtype fp8`, adaptive trees, pruner `specvlm`", "vanilla's", cases.fp8_cache),
    works(
        "FP8 KV cache", "a scale of each tensor in the checkpoints, trees, `specvlm`", "vanilla's", cases.scaled_cache
    ),
    works("FP8 KV cache", '`"kv_cache_dtype": "fp8"`, of the draft', "a byte a number", cases.fp8_draft_cache),
    _cuda("FP8 KV cache", "FlashAttention 3, queries in FP8 too, static trees", "static fp8 cache"),
    _cuda("FlashInfer", "`--attention-backend FLASHINFER --kv-cache-dtype fp8`, `specvlm`", "chain FlashInfer"),
    works("Prefix caching", "on, each prompt twice", r"\d+ tokens from the cache", cases.prefix_caching),
    works("KV connector", f"`ExampleConnector`, {_APART}", r"\d+ tokens from the other", cases.kv_connector),
    works("KV connector", "the decode side has no pixels", "unsupported: 3", cases.kv_connector_without_pixels),
    ours(
        "KV connector", _TREES, "KV connectors may take a tree's entries", overrides=cases.transfer("/tmp"), **_STATIC
    ),
    _cuda("KV connector", "`OffloadingConnector`", "chain offloads"),
    works("KV connector", "`NixlConnector`, a server prefills, another decodes", "kB of entries", servers.nixl),
    works("Encoder cache sharing", f"`ECExampleConnector`, {_SHARED}", "none encoded", cases.ec_connector),
    works("Prompt embeddings", "`--enable-prompt-embeds`", "unsupported: 1", cases.prompt_embeds),
    works("Media limits", _ONE_VIDEO, "a second video is refused", cases.media_limit),
    vllms("Sleep mode", "`--enable-sleep-mode`, CPU", "Sleep mode is not", overrides={"enable_sleep_mode": True}),
    works(_PP, "`--pipeline-parallel-size 2`", "two stages", servers.stages),
    ours(_PP, _TREES, "vLLM sends earlier stages the tokens of a draft", overrides=_STAGES, **_STATIC),
    ours(_PP, "pruner `uv`", "the pruner uv compares the target's embeddings", overrides=_STAGES, pruner="uv"),
    _parallel("Decode context", tensor_parallel_size=2, decode_context_parallel_size=2),
    _parallel("Prefill context", prefill_context_parallel_size=2),
    works("Data parallelism", "`--data-parallel-size 2`", _ENGINES, servers.data_parallel),
    works("API servers", "`--api-server-count 2`", "every scrape", servers.api_servers),
    works("Several nodes", "`--nnodes 2 --tensor-parallel-size 2`", "two network namespaces", servers.nodes),
    works("Several nodes", "`--nnodes 2 --pipeline-parallel-size 2`", "a stage in each", servers.stages_on_nodes),
    works("Ray", "`--distributed-executor-backend ray`, two ranks", "Ray's actors", servers.ray),
)
