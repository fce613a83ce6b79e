"""How the draft is built: its modules' names, the buffer that compiled code sees, its pools, how far it reaches."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from tests.unit.engine.fakes import CPU
from vllm_vidspec.engine.draft import model as draft_model
from vllm_vidspec.engine.draft.model import DraftModel, rope_positions

LM = {"get_language_model": lambda: None}


@pytest.fixture
def built(monkeypatch):
    """Return the draft model that `load` built, and the arguments that it gave to vLLM's loader."""
    given = {}
    monkeypatch.setattr(draft_model, "get_model", lambda **arguments: given.update(arguments) or SimpleNamespace(**LM))
    monkeypatch.setattr(draft_model, "rope_positions", lambda language_model, max_model_len: max_model_len)
    scheduler = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=48, max_num_encoder_input_tokens=64)
    config = SimpleNamespace(
        scheduler_config=scheduler, model_config=SimpleNamespace(uses_mrope=True, mrope_num_dims=3, max_model_len=128)
    )
    monkeypatch.setattr(draft_model, "draft_config", lambda *_: config)
    model = DraftModel(config, CPU, is_self_draft=False, agreement=None)
    model.load(torch.nn.Module())
    return model, given


def test_what_a_checkpoint_leaves_unquantised_is_found_by_name(built):
    """Catches: a prefix of ours in front of the modules' names, with which no exact entry of an ignore list agrees."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    _, given = built
    name = "visual.blocks.0.attn.proj"
    full_name = f"{given['prefix']}.{name}" if given.get("prefix") else name
    layer = object.__new__(LinearBase)
    config = Fp8Config(is_checkpoint_fp8_serialized=True, ignored_layers=[name])
    assert isinstance(config.get_quant_method(layer, full_name), UnquantizedLinearMethod)


def test_positions_have_the_stride_of_vllms_buffer(built):
    """Catches: a self-draft whose compiled code, the target's, meets another stride where requests are many."""
    model, _ = built
    assert model._positions.stride() == (65, 1)


@pytest.mark.parametrize(("supported", "mode", "warmed"), [(True, "relax", 1), (False, "relax", 0), (True, "skip", 0)])
def test_deep_gemm_is_compiled_for_the_drafts_shapes(monkeypatch, supported, mode, warmed):
    """Catches: a block-FP8 draft, whose shapes vLLM's own warm-up does not know, that compiles at the first video."""
    import vllm.model_executor.warmup.deep_gemm_warmup as vllms
    import vllm.utils.deep_gemm as support

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
