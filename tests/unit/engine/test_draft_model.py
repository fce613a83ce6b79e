"""How the draft is built: the names of its modules, and the buffer that compiled code sees."""

from types import SimpleNamespace

import pytest
import torch

from vllm_vidspec.engine.draft import model as draft_model
from vllm_vidspec.engine.draft.model import DraftModel

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
    monkeypatch.setattr(DraftModel, "_draft_config", lambda self: config)
    model = DraftModel(config, torch.device("cpu"), is_self_draft=False, agreement=None)
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
