"""Which checkpoints have the same vision tower, by fingerprints of their files."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from vllm_vidspec import assets
from vllm_vidspec.families import tower_fingerprint, tower_of


def copy_of(folder, tmp_path, change=lambda tensors: tensors, name="copy"):
    path = shutil.copytree(folder, tmp_path / name)
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_pairs_with_towers_of_their_own_and_pairs_with_one():
    """Each bundled pair's towers differ; a file's order and what lies beside it do not matter."""
    for family in ("qwen2.5-vl", "llava-onevision", "qwen3-vl"):
        target, draft = (tower_fingerprint(assets.checkpoint(family, role)) for role in ("target", "draft"))
        assert target is not None and draft is not None and target != draft


def test_a_tower_is_its_weights_and_nothing_of_the_language_model(tmp_path):
    """Catches: one changed number of a tower that is not seen; a fine-tuned language model that is."""
    original = assets.checkpoint("llava-onevision", "target")
    names = load_file(original / "model.safetensors")
    language = next(name for name in names if "language_model" in name)
    tower = next(name for name in names if "vision_tower" in name)

    def changed(which):
        return lambda tensors: {name: it + (name == which) * 0.5 for name, it in tensors.items()}

    assert tower_fingerprint(copy_of(original, tmp_path, changed(language), "language")) == tower_of(str(original))
    assert tower_fingerprint(copy_of(original, tmp_path, changed(tower), "tower")) != tower_of(str(original))
    newline = copy_of(original, tmp_path, changed("model.image_newline"), "newline")
    assert tower_fingerprint(newline) == tower_of(str(original))


def test_shards_are_read_by_their_index_and_other_files_are_not(tmp_path):
    """Catches: a visual map that lies in the checkpoint's folder and changes its fingerprint."""
    original = assets.checkpoint("qwen2.5-vl", "draft")
    path = copy_of(original, tmp_path)
    save_file({"levels.0.linear.weight": torch.ones(2, 2)}, path / "calibration.safetensors")
    assert tower_fingerprint(path) == tower_fingerprint(original)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(tensors):
        shard = f"model-0000{i % 2 + 1}-of-00002.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        save_file({name: it for name, it in tensors.items() if weight_map[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert tower_fingerprint(path) == tower_fingerprint(original)


def test_weights_that_are_not_here_have_none(tmp_path):
    assert tower_of("nobody/has-this") is None and tower_fingerprint(tmp_path) is None
