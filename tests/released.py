"""Released checkpoints' configurations, from tests/data/released.json, as files in a folder. Standard library only."""

import copy
import json
from pathlib import Path
from typing import Any

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "released.json").read_text())
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
MODELS = {name: family for family, data in DATA.items() for name in data["models"]}


def config_of(name: str) -> dict[str, Any]:
    """Return a model's config.json, of the fields that we or vLLM read."""
    data = DATA[MODELS[name]]
    config, model = copy.deepcopy(data["config"]), data["models"][name]
    sizes = {f"{data['sizes_in']}.{key}".lstrip("."): size for key, size in zip(SIZES, model["sizes"], strict=True)}
    for path, value in (sizes | {key: model[key] for key in model.keys() - {"sizes", "billions"}}).items():
        *parents, leaf = path.split(".")
        holder = config
        for parent in parents:
            holder = holder[parent]
        holder[leaf] = value
    return config


def write(name: str, folder: Path) -> str:
    folder = folder / name.split("/")[1]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    return str(folder)
