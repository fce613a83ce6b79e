"""Checkpoints whose vocabulary is padded further: what families do to a round number of rows, in small."""

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_TABLES = ("embed_tokens.weight", "lm_head.weight")


def pad(checkpoint: str, num_rows: int, scale: float, folder: Path) -> str:
    """Write a copy of a checkpoint with more rows than tokens; return its directory.

    Args:
        checkpoint: The original.
        num_rows: To append to the embeddings and the head.
        scale: What they are, as multiples of the rows of its first tokens: 0 for padding as it is released, more than 1
            for padding that wins over every token.
        folder: To write to.
    """
    original = Path(checkpoint)
    for path in original.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            os.symlink(path.resolve(), folder / path.name)
    config = json.loads((original / "config.json").read_text())
    config["text_config"]["vocab_size"] += num_rows
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(original / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, table in tensors.items():
        if name.endswith(_TABLES):
            tensors[name] = torch.cat((table, scale * table[torch.arange(num_rows) % len(table)]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
