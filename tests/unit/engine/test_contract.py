"""What vLLM does as it runs that the engine room relies on; names and signatures are test_vllm_contracts.py's."""

import ast
import copy
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer import has_kv_transfer_group, kv_transfer_state
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_vidspec.engine.compat import contract
from vllm_vidspec.engine.compat import model as compat
from vllm_vidspec.engine.compat.contract import MARK, expect_parameters
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.plugin import register


def test_pixels_stay_with_us_when_vllm_lets_go_of_its_own():
    """From 0.33 on vLLM drops an item's pixels once the target has seen it; the runner's copy keeps them."""
    cache = EncoderCache()
    outputs = cache.encoder_outputs
    cache.reset_encoder_cache()
    assert cache.encoder_outputs is outputs, "the draft shares it"
    item = MultiModalFeatureSpec("pixels", "video", "an id", PlaceholderRange(0, 4))
    given = [item]
    cache.add_request("r", given)
    ours = [copy.copy(feature) for feature in given]
    if hasattr(cache, "update_encoder_inputs"):
        cache.update_encoder_inputs("r", {0: None})
        assert cache.mm_features["r"][0].data is None
    assert ours[0].data == given[0].data == "pixels"


def test_a_renamed_parameter_is_one_clear_line():
    with pytest.raises(VidSpecError, match=r"no longer takes \(path, nothing\); vllm_vidspec needs vLLM 0.32 or 0.33"):
        expect_parameters(lambda path: None, "path", "nothing")


def test_patches_are_applied_once():
    register()
    first = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is first
    assert not hasattr(getattr(first, MARK), MARK)


def patches():
    """Yield the outermost function or class around every patch of vLLM, by name."""
    for path in sorted(Path(contract.__file__).parent.glob("*.py")):
        if path.name == "contract.py":
            continue
        for node in ast.parse(path.read_text()).body:
            calls = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
            if any(isinstance(func, ast.Name) and func.id in ("wrap", "replace") for func in calls):
                yield pytest.param(ast.get_docstring(node) or "", id=f"{path.stem}.{node.name}")


@pytest.mark.parametrize("docstring", list(patches()))
def test_every_patch_says_why_and_until_when(docstring):
    assert "Why: " in docstring and "Until: " in docstring


def test_kv_connectors_do_not_see_drafts(monkeypatch):
    """Catches: a draft's layers offered to the connector, under the target's names where it drafts for itself."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", "a connector")
    with pytest.raises(ValueError, match="of the draft"), compat.without_kv_connector():
        assert not has_kv_transfer_group()
        raise ValueError("of the draft")
    assert kv_transfer_state.get_kv_transfer_group() == "a connector"


def test_the_sampler_keeps_to_its_own_noise():
    """Catches: FlashInfer's sampler, with noise of its own, for batches with top-p and no seed; a renamed switch."""
    assert "self.use_flashinfer" in inspect.getsource(Sampler.sample)
    sampler = SimpleNamespace(use_flashinfer=True)
    compat.keep_shared_noise(sampler)
    assert not sampler.use_flashinfer
    with pytest.raises(VidSpecError, match="no longer says use_flashinfer"):
        compat.keep_shared_noise(SimpleNamespace())
