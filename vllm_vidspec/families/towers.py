"""Which vision tower a checkpoint has: a fingerprint of its weights, from safetensors files; no weight is loaded."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

_LANGUAGE = re.compile(r"(model\.)?(language_model|llm|layers|embed_tokens|norm)\.|lm_head\.")
# Rows between frames, trained with the language model: the towers of a pair may be one for all that.
_SEPARATORS = re.compile(r"(model\.)?(image_newline|view_seperator)$")
_SAMPLE = 1 << 16  # bytes of each tensor that are read: training moves every one of them


def tower_of(model: str, revision: str | None = None) -> str | None:
    """Return `tower_fingerprint` of a folder or a Hugging Face name; None where its weights are not on this machine."""
    if Path(model).is_dir():
        return tower_fingerprint(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return tower_fingerprint(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def tower_fingerprint(folder: str | Path) -> str | None:
    """Return a digest of the vision tower and projector of a checkpoint's folder: names, shapes, types and the first
    64 KiB of each tensor; None where there are no safetensors of one.
    """
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in _files(Path(folder)):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__" and not _LANGUAGE.match(name) and not _SEPARATORS.match(name):
                found[name.removeprefix("model.")] = path, 8 + size, entry
    if not found:
        return None
    digest = hashlib.sha256()
    for name, (path, start, entry) in sorted(found.items()):
        begin, end = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        with path.open("rb") as file:
            file.seek(start + begin)
            digest.update(file.read(min(end - begin, _SAMPLE)))
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Return a checkpoint's own files, and none that lies beside them."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
