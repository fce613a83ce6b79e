"""Released checkpoints by their own configurations: every pair that the pages name is accepted, and planned for.

tests/data/released.json has what a checkpoint's config.json says, and where that is known from: by family what its
models share, by model its sizes and what else differs (dotted names).
"""

from dataclasses import replace

import pytest

from tests.released import DATA, MODELS, config_of, write
from vllm_vidspec import doctor, families
from vllm_vidspec.families.base import read_field
from vllm_vidspec.planning import draft_cost
from vllm_vidspec.planning.candidates import Question
from vllm_vidspec.planning.planner import Planner
from vllm_vidspec.planning.pool import pool_bytes
from vllm_vidspec.planning.roofline import gpu_named
from vllm_vidspec.planning.shapes import KNOWN, from_folder, target_shape

REFUSED = [tuple(pair) for data in DATA.values() for pair in data.get("refused", ())]


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_a_model_are_as_many_as_it_goes_by(name, tmp_path):
    """Catches: a field that is read under another name (experts, heads, the language model of an Omni's thinker), or
    written down wrong of a model that is known by name; the "2b" of 72b or 32b, and the "3b" of A3B, taken for a size.
    """
    data, folder = DATA[MODELS[name]], write(name, tmp_path)
    quantised = config_of(name).get("quantization_config")
    weights = draft_cost.stored_weights(doctor._hf_config(folder).to_dict())
    assert weights == draft_cost.stored_weights(config_of(name)), "as transformers has it, and as the planner reads it"
    assert weights.layer_bytes == (0.5 if quantised else 2)
    shape = from_folder(folder)
    assert (shape.linear_bytes < 1) == bool(quantised)
    if not quantised:
        assert shape.family == MODELS[name]
        # Towers are counted roughly.
        assert shape.params / 1e9 == pytest.approx(data["models"][name]["billions"], rel=0.1, abs=0.25)
        if shape.family in {known.family for known in KNOWN}:
            known = target_shape(name)
            assert known.params / 1e9 == pytest.approx(data["models"][name]["billions"], rel=0.01)
            assert replace(shape, name=known.name, vision_params=known.vision_params) == known
    hf_config = doctor._hf_config(folder)
    adapter, settings = families.adapter_for(hf_config), data["processor"]
    assert adapter.name == MODELS[name]
    assert not [field.label for field in adapter.shared if "id" in field.label and not read_field(hf_config, field)]
    if "patch_size" in settings:
        assert read_field(hf_config, adapter.merge) == settings["merge_size"]


@pytest.mark.parametrize(("target", "draft"), [pair for data in DATA.values() for pair in data["pairs"]])
def test_a_pair_is_accepted_and_planned_for(target, draft, tmp_path):
    """Catches: a released pair that the doctor refuses or has no word on; a draft pool that takes the target's room."""
    folder = write(target, tmp_path)
    other = folder if draft == "self" else write(draft, tmp_path)
    found = doctor.check_pair(folder, "self" if draft == "self" else other)
    how = "; its code comes with the checkpoint: vLLM needs --trust-remote-code" * ("auto_map" in config_of(target))
    assert (found.status, found.detail) == ("ok", f"compatible, family {MODELS[target]}{how}")
    assert [check.name for check in doctor._draft_cost(folder, other)] == ["draft cost"]
    families.check_ranks(doctor._hf_config(other), 1)
    shapes = [from_folder(one) for one in (folder, other)]
    ranks = next(number for number in (8, 4, 2, 1) if shapes[0].is_shared_by(number))
    question = Question(shapes[0], shapes[0] if draft == "self" else shapes[1], gpu_named("h200"), ranks, draft_gpus=1)
    assert Planner(question).most_requests() > 0
    bytes_each = [shape.kv_bytes_per_token for shape in shapes]
    pool = pool_bytes(40 << 30, bytes_each[0], bytes_each[1], 0.1, 32_768, 16)
    assert 0 < pool < 20 << 30


@pytest.mark.parametrize(("target", "draft", "line"), REFUSED)
def test_a_pair_that_does_not_fit_is_named(target, draft, line, tmp_path):
    found = doctor.check_pair(write(target, tmp_path), write(draft, tmp_path))
    assert found.status == "fail" and line in found.detail
