"""What an operator of a GPU is told at start-up: where CUDA graphs end, and that a draft's weights are dear."""

from types import SimpleNamespace
from unittest import mock

import pytest
from vllm.config.compilation import CUDAGraphMode

from tests.released import config_of
from tests.unit.engine.fakes import make_knobs
from vllm_vidspec.engine import hints
from vllm_vidspec.engine.hints import graph_ceiling, say_hints

STATIC = {"draft_shape": "tree-static", "num_speculative_tokens": 25}
ADAPTIVE = {"draft_shape": "tree-adaptive", "num_speculative_tokens": 64}
CHAIN = {"num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("knobs", "max_num_seqs", "ends"),
    [
        (CHAIN, 1024, ["a target step of 86 requests has 516 rows", "a draft forward of 257 more"]),
        (CHAIN, 85, []),
        (CHAIN, 86, ["a target step of 86 requests has 516 rows"]),
        (STATIC, 1024, ["a target step of 20 requests has 520 rows", "a draft forward of 129 more"]),
        (ADAPTIVE, 1024, ["a target step of 8 requests has 520 rows", "a draft forward of 52 more"]),
        # Who drafts less at many requests, or nothing, gets further.
        (CHAIN | {"num_speculative_tokens_per_batch_size": [[1, 64, 5], [65, 2048, 0]]}, 1024, []),
        (CHAIN | {"parallel": {"device": "cuda:1"}}, 1024, ["a target step of 86 requests has 516 rows"]),
    ],
)
def test_where_graphs_end_is_said(knobs, max_num_seqs, ends):
    """By hand, for vLLM's 512 tokens. Catches: steps that run eagerly without a word; a line where none do."""
    (line,) = list(graph_ceiling(make_knobs(**knobs).current, max_num_seqs, 512)) or ("",)
    assert bool(line) == bool(ends) and "\n" not in line
    assert all(end in line for end in ends)
    assert line.count("a draft forward") == sum("draft forward" in end for end in ends)


@pytest.mark.parametrize(("group", "fits"), [(4, 31), (5, 24), (7, 17), (8, 15)])
def test_the_tree_that_fits_a_tile_is_said(group, fits):
    """Catches: a root that is not counted; a line where all is well."""
    assert not [*hints.tile_hint(fits, group)]
    (line,) = hints.tile_hint(fits + 1, group)
    assert line.endswith(f"num_speculative_tokens {fits} would fit")


def model(size: str, quantization: str | None = None, stored: dict | None = None) -> SimpleNamespace:
    config = config_of(f"Qwen/Qwen2.5-VL-{size}-Instruct") | {"quantization_config": stored}
    return SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config), quantization=quantization)


def said(target: SimpleNamespace, draft: SimpleNamespace, **knobs) -> list[str]:
    engine = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=512
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=target,
        speculative_config=SimpleNamespace(draft_model_config=draft),
    )
    lines: list[str] = []
    with mock.patch.object(hints.logger, "info", lambda line, *values: lines.append(line % values)):
        say_hints(engine, make_knobs(**knobs | CHAIN).current)
    assert all(line.startswith("vidspec: ") and "\n" not in line for line in lines)
    return lines


def test_a_dear_draft_is_named_with_what_would_help():
    """Five forwards of a 7B in bf16 read more than a 32B; no hint where it has four bits, elsewhere, or unknown."""
    (line,) = said(model("32B"), model("7B"))
    assert line.startswith("vidspec: the draft's weights are dear: a draft step of 5 forwards reads 111 % of the")
    assert "in four bits 35 % (RedHatAI/Qwen2.5-VL-7B-Instruct-quantized.w4a16)" in line
    assert '"quantization": "fp8_per_tensor" 60 % (modelled)' in line
    (line,) = said(model("32B"), model("7B", "fp8_per_tensor"))
    assert "in four bits 35 %" in line and "fp8_per_tensor" not in line
    assert not said(model("32B"), model("7B", stored={"quant_method": "awq", "bits": 4}))
    assert not said(model("32B"), model("7B", "unheard-of"))
    assert not said(model("32B"), model("7B"), model="self")
    assert not said(model("32B"), model("7B"), parallel={"device": "cuda:1"})
    # A target of four bits makes a 16-bit draft four times as dear.
    groups = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    (line,) = said(model("32B", stored=groups), model("7B"))
    assert "reads 412 %" in line
