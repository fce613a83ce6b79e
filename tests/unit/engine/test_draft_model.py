"""How the draft is built: names, buffers, how far it reaches; which sizes have graphs, and what is padded to them."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import vllm.model_executor.warmup.deep_gemm_warmup as vllms
import vllm.utils.deep_gemm as support
from vllm.config import CompilationConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from tests.unit.engine.fakes import CPU, make_knobs
from vllm_vidspec.engine.compat import linear
from vllm_vidspec.engine.draft import model as draft_model
from vllm_vidspec.engine.draft import model_config
from vllm_vidspec.engine.draft.graphs import DraftGraphs, batch_sizes, mode_of_draft
from vllm_vidspec.engine.draft.model import DraftModel, rope_positions
from vllm_vidspec.errors import VidSpecError


def test_a_draft_is_built_as_its_target_is(monkeypatch):
    """Catches: a prefix of ours in front of the modules' names, with which no exact entry of an ignore list agrees; a
    self-draft whose compiled code, the target's, meets another stride where requests are many.
    """
    given, language = {}, mock.Mock(spec=["get_language_model"])
    monkeypatch.setattr(draft_model, "get_model", lambda **arguments: given.update(arguments) or language)
    monkeypatch.setattr(draft_model, "rope_positions", lambda language_model, max_model_len: max_model_len)
    scheduler = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=48, max_num_encoder_input_tokens=64)
    config = SimpleNamespace(
        scheduler_config=scheduler, model_config=SimpleNamespace(uses_mrope=True, mrope_num_dims=3, max_model_len=128)
    )
    monkeypatch.setattr(draft_model, "draft_config", lambda *_: config)
    model = DraftModel(config, CPU, is_self_draft=False, agreement=None)
    model.load(None, make_knobs().current)
    name = "visual.blocks.0.attn.proj"
    full_name = f"{given['prefix']}.{name}" if given.get("prefix") else name
    layer = object.__new__(LinearBase)
    quantisation = Fp8Config(is_checkpoint_fp8_serialized=True, ignored_layers=[name])
    assert isinstance(quantisation.get_quant_method(layer, full_name), UnquantizedLinearMethod)
    assert model._positions.stride() == (65, 1)


class Config(SimpleNamespace):
    """Stands for a `VllmConfig` while a model is built."""


def test_a_drafts_kernels_are_chosen_by_its_own_configuration(monkeypatch):
    """And its head's by vLLM, whatever its layers have. Catches: the target's backend for the draft, or the draft's
    for the target; a choice that is made outside of the draft's configuration, or stays after it.
    """
    seen = []
    base = Config(
        kernel_config=SimpleNamespace(linear_backend="cutlass", linear_backend_per_quant=None),
        compilation_config=CompilationConfig(),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2, max_num_encoder_input_tokens=8),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=None,
        speculative_config=SimpleNamespace(
            kv_cache_dtype=None,
            draft_model_config=SimpleNamespace(uses_mrope=False, max_model_len=128, is_moe=False),
            draft_parallel_config=SimpleNamespace(rank=0),
        ),
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(rank=1),
    )
    language, draft = torch.nn.Module(), mock.Mock()
    language.lm_head = head = torch.nn.Module()
    draft.get_language_model = lambda: language

    def note(*_: object, **__: object):
        config = get_current_vllm_config().kernel_config
        seen.append((config.linear_backend, config.linear_backend_per_quant))
        return draft

    copied = torch.nn.Module()
    helper = SimpleNamespace(quantized_lm_head_copy=lambda *given: note() and copied, _SOURCES={copied: head})
    monkeypatch.setattr(linear, "_head_quantisation", lambda: helper)
    monkeypatch.setattr(draft_model, "get_model", note)
    monkeypatch.setattr(model_config, "get_draft_load_config", lambda config: None)
    monkeypatch.setattr(model_config, "get_pp_safe_draft_load_config", lambda config: None)
    monkeypatch.setattr(model_config.VllmConfig, "get_quantization_config", lambda *_: None)
    backends = {"fp8_w8a8": "marlin"}
    model = DraftModel(base, CPU, is_self_draft=False, agreement=None)
    model.load(None, make_knobs(linear_backend_per_quant=backends, draft_lm_head_quantization="fp8").current)
    assert seen == [("cutlass", backends), ("auto", None)]
    assert language.lm_head is copied and helper._SOURCES == {}, "the head of 16 bits is nobody's any more"
    assert base.kernel_config.linear_backend_per_quant is None and get_current_vllm_config_or_none() is None
    model.load(None, make_knobs().current)
    assert seen[2:] == [("cutlass", None)]
    for wrong, line in (
        (ValueError("of 16 bits"), "draft_lm_head_quantization: of 16 bits"),
        (None, "has no output head"),
    ):
        helper.quantized_lm_head_copy = mock.Mock(side_effect=wrong)
        language.lm_head = None if wrong is None else head
        with pytest.raises(VidSpecError, match=line):
            linear.quantise_head(draft, "fp8")


@pytest.mark.parametrize(("supported", "mode", "warmed"), [(True, "relax", 1), (False, "relax", 0), (True, "skip", 0)])
def test_deep_gemm_is_compiled_for_the_drafts_shapes(monkeypatch, supported, mode, warmed):
    """Catches: a block-FP8 draft, whose shapes vLLM's own warm-up does not know, that compiles at the first video."""
    calls = []
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", mode)
    monkeypatch.setattr(vllms, "deep_gemm_warmup", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(support, "is_deep_gemm_supported", lambda: supported)
    model = object.__new__(DraftModel)
    model.model, model.max_num_tokens = torch.nn.Module(), 8192
    model.warm_up()
    assert calls == [(model.model, 8192)] * warmed


@pytest.mark.parametrize(
    ("updates", "support", "expected"),
    [
        ([True, True], AttentionCGSupport.ALWAYS, ""),
        ([True, True], AttentionCGSupport.UNIFORM_BATCH, ""),
        ([True, False], AttentionCGSupport.ALWAYS, "on the host"),
        ([True, True], AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "FLASHINFER captures no"),
        ([True, True], AttentionCGSupport.NEVER, "FLASHINFER captures no"),
    ],
)
def test_graphs_are_the_drafts_own_backends_matter(updates, support, expected):
    """Catches: forwards of two tokens captured by a backend that plans those on the host, under capture."""
    model = object.__new__(DraftModel)
    builders = [SimpleNamespace(supports_draft_decode_metadata_update=updated) for updated in updates]
    model._attn_groups = [[SimpleNamespace(metadata_builders=builders)]]
    model._graph_support = SimpleNamespace(min_cg_support=support, min_cg_attn_backend="FLASHINFER")
    why = model.why_no_graphs
    assert why == expected if not expected else expected in why


def test_positions_are_the_rows_of_the_smallest_table():
    """Catches: positions counted in tokens, a table of another layer overlooked."""

    def with_table(num_rows: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("cos_sin_cache", torch.zeros(num_rows, 4))
        return module

    language_model = torch.nn.Sequential(with_table(4096), torch.nn.Sequential(with_table(1024), torch.nn.Module()))
    assert rope_positions(language_model, 256) == 1024 and rope_positions(torch.nn.Module(), 256) == 256


@pytest.mark.parametrize(
    ("sizes", "max_num_reqs", "expected"),
    [
        ([1, 2, 4, 8, 16], 8, [1, 2, 4, 8]),
        ([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)], 200, [1, 2, 4, 8, 16, 24, 32, 48, 64, 88, 120, 160, 200]),
        ([16, 8, 1], 5, [1, 5]),  # the size above holds the rest, and no more than there can be
        ([1, 2, 4], 64, [1, 2, 4]),  # larger steps have no graph
        ([], 8, []),
    ],
)
def test_sizes_are_vllms_up_to_all_requests(sizes, max_num_reqs, expected):
    assert batch_sizes(sizes, max_num_reqs) == expected


def graphs_of(mode=CUDAGraphMode.FULL_AND_PIECEWISE, sizes=(1, 2, 4), max_num_reqs=4, mostly_processed=False):
    """Return a draft's graphs, without vLLM's manager."""
    compilation = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))

    def init(self, *_args, **_more):
        self.compilation_config, self.graphs = compilation, {}

    with mock.patch.object(CudaGraphManager, "__init__", init):
        return DraftGraphs(None, CPU, mode, max_num_reqs, mostly_processed)


@pytest.mark.parametrize("mode", [mode for mode in CUDAGraphMode if mode])
def test_a_target_in_pieces_leaves_its_draft_whole(mode):
    """Catches: K eager forwards a step under `-O1`, `cudagraph_mode=PIECEWISE` or a KV connector by layers."""
    assert mode_of_draft(mode) == CUDAGraphMode.FULL_DECODE_ONLY
    graphs = graphs_of(mode)
    assert graphs.is_on and graphs.size_for(3, 1) == 4
    graphs.give_up("its backend cannot")
    assert not graphs.is_on and graphs.is_wanted and graphs.size_for(3, 1) == 3


@pytest.mark.parametrize("mostly_processed", [False, True])
def test_the_kind_that_nobody_asks_for_by_default_has_few_sizes(mostly_processed):
    """Catches: the two kinds mistaken for each other; a step padded to a size of the other kind."""
    sizes = [1, 2, 4, *range(8, 256, 8), 256]
    graphs = graphs_of(sizes=sizes, max_num_reqs=200, mostly_processed=mostly_processed)
    usual, other = (graphs.sizes_of(2, is_processed) for is_processed in (mostly_processed, not mostly_processed))
    assert usual == [1, 2, 4, 8, 16, 24, 32, 48, 64, 88, 120] and other == [1, 4, 16, 64, 120]
    assert [graphs.size_for(n, 2, not mostly_processed) for n in (1, 2, 5, 17, 65, 121)] == [1, 4, 16, 64, 120, 121]
    assert graphs.size_for(5, 2, mostly_processed) == 8
