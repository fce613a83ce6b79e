"""Inflated checkpoints without an engine: their files, names, sizes and configuration."""

import json
import shutil

import pytest

from benchmarks import inflation
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.tools import pairs

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
PREFIXES = {
    "qwen2.5-vl": "model.layers.",
    "llava-onevision": "language_model.model.layers.",
    "qwen3-vl": "model.language_model.layers.",
}


def tensors(folder):
    """All tensors of a checkpoint as a loader finds them: through the index where there is one."""
    index = folder / inflation.INDEX
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {inflation.WEIGHTS}
    return {name: tensor for file in names for name, tensor in safetensors.load_file(folder / file).items()}


@pytest.fixture
def original(tmp_path):
    return shutil.copytree(pairs.checkpoint("llava-onevision", "target"), tmp_path / "original")


@pytest.mark.parametrize("family", pairs.FAMILIES)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_appended_layers_cost_and_say_nothing(tmp_path, family, role):
    """Catches: outputs that are not zero, weights that are, layers under a wrong number, too few bytes."""
    original = pairs.checkpoint(family, role)
    count = inflation.num_layers(original)
    copy = inflation.inflate(original, 5, tmp_path)
    before, after = tensors(inflation.Path(original)), tensors(copy)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    new = {name: tensor for name, tensor in after.items() if name not in before}
    per_layer = [name for name in before if name.startswith(f"{PREFIXES[family]}0.")]
    numbers = range(count, count + 5)
    assert set(new) == {name.replace("layers.0.", f"layers.{number}.") for number in numbers for name in per_layer}
    for name, tensor in new.items():
        is_output = name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))
        assert bool(tensor.any()) is not is_output, name
        number = int(name.removeprefix(PREFIXES[family]).split(".")[0])
        twin = before[name.replace(f"layers.{number}.", f"layers.{(number - count) % count}.")]
        assert tensor.shape == twin.shape and tensor.dtype == twin.dtype
        assert is_output or torch.equal(tensor, twin)


@pytest.mark.parametrize("family", pairs.FAMILIES)
def test_configuration_has_more_layers_and_nothing_else(tmp_path, family):
    original = inflation.Path(pairs.checkpoint(family, "target"))
    before, copy = json.loads((original / "config.json").read_text()), inflation.inflate(original, 90, tmp_path)
    after = json.loads((copy / "config.json").read_text())
    text, old = after.pop("text_config"), before.pop("text_config")
    assert after == before
    assert text.pop("num_hidden_layers") == 94 and old.pop("num_hidden_layers") == 4
    if family != "qwen3-vl":  # whose layers are all of one kind
        assert text.pop("layer_types") == 94 * ["full_attention"] and len(old.pop("layer_types")) == 4
        assert text.pop("max_window_layers") == 94 and old.pop("max_window_layers") in (28, 80)
    assert text == old
    others = {path.name for path in original.iterdir()} - {"config.json"}
    assert {path.name for path in copy.iterdir()} == others | {"config.json", inflation.INDEX, inflation.APPENDED}


def test_windows_stay_where_they_were():
    """A layer that had a sliding window keeps it; a configuration of before `text_config` is one, too."""
    old = {"num_hidden_layers": 4, "max_window_layers": 2}
    assert inflation.with_layers(old, 3) == {"num_hidden_layers": 7, "max_window_layers": 2}
    assert inflation.with_layers({"num_hidden_layers": 4, "max_window_layers": 4}, 3)["max_window_layers"] == 7
    assert old == {"num_hidden_layers": 4, "max_window_layers": 2}, "a copy is changed"


def test_a_copy_is_made_once_and_whole(original, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    copy = inflation.inflate(original, 2, cache)
    monkeypatch.setattr(inflation, "_write", lambda *_: pytest.fail("made again"))
    assert inflation.inflate(original, 2, cache) == copy
    assert inflation.inflate(original, 0, cache) == original, "nothing to append"
    monkeypatch.undo()
    (original / "config.json").write_text(json.dumps(json.loads((original / "config.json").read_text()) | {"a": 1}))
    assert inflation.inflate(original, 2, cache) != copy, "another checkpoint"

    def interrupted(original, folder, *_):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(inflation, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inflation.inflate(original, 3, cache)
    assert len(list(cache.iterdir())) == 2, "nothing half made is left"


def test_guidance_looks_at_the_originals_layers():
    target = pairs.checkpoint("llava-onevision", "target")
    assert inflation.guidance_knobs(target, {}) == {"guidance_layers": [0, 1, 2, 3], "uv_layer": 3}
    given = {"guidance_layers": [3], "uv_layer": 2, "lambda_r": 0.5}
    assert inflation.guidance_knobs(target, given) == given


def test_what_cannot_be_inflated_is_one_line(original, tmp_path):
    def refused(words):
        with pytest.raises(VidSpecError, match=words) as caught:
            inflation.inflate(original, 1, tmp_path / "cache")
        assert "\n" not in str(caught.value)

    weights = safetensors.load_file(original / inflation.WEIGHTS)
    name = next(name for name in weights if ".layers.0.mlp.up_proj" in name)
    weights[name][..., 0] = float("inf")
    safetensors.save_file(weights, original / inflation.WEIGHTS)
    refused("holds numbers that are not finite")
    config = json.loads((original / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 5
    (original / "config.json").write_text(json.dumps(config))
    refused("config.json says 5 layers, the weights have 4")
    others = {name: tensor for name, tensor in weights.items() if "o_proj" not in name}
    safetensors.save_file(others, original / inflation.WEIGHTS)
    refused("cannot append layers: the weights have 0 stacks")
    (original / inflation.WEIGHTS).unlink()
    refused("has no model.safetensors")
    (original / "config.json").unlink()
    refused("has no config.json")
