"""The rows of docs/coexistence.md: a feature of vLLM each, its setting, what is expected, and what runs to find out.

A row runs vanilla vLLM and vidspec under the same setting, on the bundled pairs, and says what was seen. What is
refused is refused while vLLM builds its configuration, hence before any weight loads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine import coexistence_cases as cases
from tests.engine import coexistence_servers as servers
from tests.engine.harness import QWEN
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs

WORKS, OURS, VLLMS, NOT_RUN = "works", "refused by vidspec", "refused by vLLM", "not run here"
VERDICTS = (WORKS, OURS, VLLMS, NOT_RUN)


class Seen(NamedTuple):
    """What came of a row: one of `VERDICTS`, and what was seen, for the page."""

    verdict: str
    detail: str


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        feature: What vLLM calls it.
        setting: As on the command line.
        expected: One of `VERDICTS`.
        says: A regular expression of what is seen.
        run: Finds it out, given an empty folder.
        kind: "engine" in this process, "serve" with servers; "command" by vidspec_tools.pages.measure alone.
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


def configured(
    family: str = QWEN,
    draft: str | None = "draft",
    target: str | None = None,
    overrides: dict | None = None,
    **spec: Any,
) -> Any:
    """Return vLLM's whole configuration, with our plugin; nothing loads."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_vidspec.plugin import register

    register()
    return EngineArgs(
        **pairs.llm_kwargs(family, draft, target=target, overrides=overrides, **spec)
    ).create_engine_config()


def refused(**arguments: Any) -> Callable[[Path], Seen]:
    """Return a row's `run` that must be refused, by whoever is first."""

    def run(folder: Path) -> Seen:
        made = {name: value(folder) if callable(value) else value for name, value in arguments.items()}
        try:
            configured(**made)
        except VidSpecError as error:
            assert "\n" not in str(error)
            return Seen(OURS, str(error))
        except Exception as error:
            return Seen(VLLMS, cases.first_reason(error))
        return Seen(WORKS, "nothing refused it")

    return run


def worked(counted: dict[str, int], more: str = "") -> Seen:
    """Return what is said of answers that were vanilla's."""
    stand = f"{counted['accepted_tokens']} of {counted['draft_tokens']} draft tokens stand"
    return Seen(WORKS, f"answers are vanilla's; {stand}{more}")


def not_run(why: str, check: Callable[[Path], str]) -> Callable[[Path], Seen]:
    """Return a row's `run` that says why nothing ran, and what `check` looked at instead."""
    return lambda folder: Seen(NOT_RUN, f"{why}; checked: {check(folder)}")


def accepted(**arguments: Any) -> Callable[[Path], str]:
    """Return a check: our side and vLLM's accept the configuration."""

    def check(folder: Path) -> str:
        found = configured(**{name: value(folder) if callable(value) else value for name, value in arguments.items()})
        draft = found.speculative_config.draft_model_config
        what = f"target {found.model_config.quantization}, draft {draft.quantization}"
        is_quantised = found.model_config.quantization or draft.quantization
        return f"the configuration is accepted{f' ({what})' if is_quantised else ''}"

    return check


HALF = {"video_pruning_rate": 0.5, "enable_prefix_caching": False}
INT8 = "int8_per_channel_weight_only"
NO_FP8 = "vLLM's CPU build has no kernels of it"
NO_GPU = "needs a GPU"


def _said(function: Callable[[Path], tuple[dict[str, int], str]]) -> Callable[[Path], Seen]:
    return lambda folder: worked(*function(folder))


ROWS: tuple[Row, ...] = (
    Row("EVS", "`--video-pruning-rate 0.5`", WORKS, r"vanilla's; .* all of \d+", _said(cases.evs)),
    Row(
        *("EVS", "`--video-pruning-rate 0.5`, draft `self`", OURS, "cannot be used with .*self"),
        refused(draft="target", overrides=HALF),
    ),
    Row(
        *("EVS", "`--video-pruning-rate 0.5`, Qwen3-VL", OURS, "which tokens of a video a qwen3-vl target keeps"),
        refused(draft=cases.qwen3, target=cases.qwen3, overrides=HALF),
    ),
    Row(
        *("VidCom2", "`--video-pruning-method vidcom2`, Qwen3-VL", OURS, "a qwen3-vl target keeps"),
        refused(draft=cases.qwen3, target=cases.qwen3, overrides=HALF | {"video_pruning_method": "vidcom2"}),
    ),
    Row(
        *("VidCom2", "`--video-pruning-method vidcom2`, Qwen2.5-VL", VLLMS, "'vidcom2' is not supported by Qwen2_5"),
        refused(overrides=HALF | {"video_pruning_method": "vidcom2"}),
    ),
    Row("LoRA", "`--enable-lora`, an unadapted draft", WORKS, "with the adapter", _said(cases.lora)),
    Row(
        *("LoRA", '`--enable-lora`, `"model": "self"`', OURS, "LoRA adapters cannot be used"),
        refused(draft="target", overrides={"enable_lora": True}),
    ),
    Row(
        *(
            "INT8 weights",
            "`--quantization int8_per_channel_weight_only`",
            NOT_RUN,
            "accepted .target int8_per_channel",
        ),
        not_run(
            "vLLM left every layer of these models as it was",
            accepted(overrides={"quantization": INT8, "dtype": "bfloat16"}, pruner="uniform", quantization=INT8),
        ),
    ),
    *(
        Row(
            *(
                kind,
                "target and draft are such checkpoints",
                NOT_RUN,
                rf"accepted \(target \w*{method}, draft \w*{method}\)",
            ),
            not_run(
                "no such checkpoint is bundled",
                accepted(
                    draft=cases.quantised("draft", method),
                    target=cases.quantised("target", method),
                    overrides={"dtype": "bfloat16"},
                    pruner="uniform",
                ),
            ),
        )
        for kind, method in (("AWQ", "awq"), ("GPTQ", "gptq"))
    ),
    Row(
        *("FP8 weights", "`--quantization fp8_per_tensor`, target and draft", NOT_RUN, "accepted .target fp8_per_tens"),
        not_run(
            NO_FP8,
            accepted(
                overrides={"quantization": "fp8_per_tensor", "dtype": "bfloat16"},
                pruner="uniform",
                quantization="fp8_per_tensor",
            ),
        ),
    ),
    Row(
        *("FP8 KV cache", "`--kv-cache-dtype fp8`, pruner `specvlm`", OURS, "attention guidance does not read fp8"),
        refused(overrides={"kv_cache_dtype": "fp8"}),
    ),
    Row(
        *("FP8 KV cache", "`--kv-cache-dtype fp8`, pruner `uv`", NOT_RUN, "configuration is accepted"),
        not_run("vLLM's CPU cache needs AVX-512 for it", accepted(overrides={"kv_cache_dtype": "fp8"}, pruner="uv")),
    ),
    Row("Prefix caching", "on, each prompt twice", WORKS, r"\d+ tokens from the cache", _said(cases.prefix_caching)),
    Row(
        *(
            "KV connector",
            "`ExampleConnector`, an engine prefills, another decodes",
            WORKS,
            r"\d+ tokens from the other",
        ),
        _said(cases.kv_connector),
    ),
    Row(
        *("KV connector", "the decode side has no pixels", WORKS, "unsupported: 3"),
        _said(cases.kv_connector_without_pixels),
    ),
    Row(
        *("KV connector", '`"draft_shape": "tree-static"`', OURS, "KV connectors may take a tree's entries"),
        refused(overrides=cases.transfer("/tmp"), drafting="tree-static"),
    ),
    *(
        Row(
            *("KV connector", f"`{name}`", NOT_RUN, "configuration is accepted"),
            not_run(why, accepted(overrides={"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"}})),
        )
        for name, why in (("OffloadingConnector", f"{NO_GPU}, says vLLM"), ("NixlConnector", "NIXL is not installed"))
    ),
    Row(
        *("Encoder cache sharing", "`ECExampleConnector`, an engine encodes, another answers", WORKS, "none encoded"),
        _said(cases.ec_connector),
    ),
    Row(
        *("Prompt embeddings", "`--enable-prompt-embeds`", WORKS, "unsupported: 1"),
        _said(cases.prompt_embeds),
    ),
    Row(
        *("Media limits", '`--limit-mm-per-prompt \'{"video": 1, "image": 0}\'`', WORKS, "a second video is refused"),
        _said(cases.media_limit),
    ),
    Row(
        *("Sleep mode", "`--enable-sleep-mode`, CPU", VLLMS, "Sleep mode is not supported on current platform"),
        refused(overrides={"enable_sleep_mode": True}),
    ),
    Row(
        *("Pipeline parallelism", "`--pipeline-parallel-size 2`", OURS, r"pipeline parallelism \(2\) is not supported"),
        refused(overrides={"pipeline_parallel_size": 2}),
    ),
    Row(
        *(
            "Decode context parallelism",
            "`--decode-context-parallel-size 2`",
            OURS,
            "decode context parallelism is not",
        ),
        refused(overrides={"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    ),
    Row(
        *(
            "Prefill context parallelism",
            "`--prefill-context-parallel-size 2`",
            OURS,
            "prefill context parallelism is not",
        ),
        refused(overrides={"prefill_context_parallel_size": 2}),
    ),
    Row(
        *("Data parallelism", "`--data-parallel-size 2`", WORKS, r"engine 0: [1-9]\d*, engine 1: [1-9]"),
        *(_said(servers.data_parallel), "serve"),
    ),
    Row(
        *("API servers", "`--api-server-count 2`", WORKS, "every scrape"),
        *(_said(servers.api_servers), "serve"),
    ),
    Row(
        *("Several nodes", "`--nnodes 2 --tensor-parallel-size 2`", WORKS, "two network namespaces"),
        *(_said(servers.nodes), "command"),
    ),
    Row(
        *("Ray", "`--distributed-executor-backend ray`", NOT_RUN, "our worker by its name"),
        not_run("Ray is not installed", cases.ray),
    ),
)
