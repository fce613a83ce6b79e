"""Whether the same token ids mean the same to two checkpoints; reads `tokenizer.json`, no weights, no vLLM.

Checkpoints of one family share their tokenizer, and pad their embeddings to different numbers of rows.
"""

from collections.abc import Mapping
from pathlib import Path

from vllm_vidspec.errors import VidSpecError

_FILE = "tokenizer.json"


def check_tokens(
    target: str, draft: str, *, target_revision: str | None = None, draft_revision: str | None = None
) -> None:
    """Refuse a draft whose token ids mean something else than the target's; both are directories or Hugging Face names.

    The VidSpecError has the first id whose token differs. A token that one of them lacks, such as a later release's
    marker, is harmless: it is never drafted. Without a `tokenizer.json` in both there is nothing to compare.
    """
    paths = _find(target, target_revision), _find(draft, draft_revision)
    if paths[0] is None or paths[1] is None or paths[0].read_bytes() == paths[1].read_bytes():
        return
    if problem := difference(_tokens(paths[0]), _tokens(paths[1])):
        raise VidSpecError(f"the draft's tokenizer is not the target's: {problem}")


def difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """Return both meanings of the first id on which the vocabularies disagree, None if there is none."""
    meant = {i: token for token, i in target.items()}
    differing = [i for token, i in draft.items() if meant.get(i, token) != token]
    if not differing:
        return None
    first, other = min(differing), {i: token for token, i in draft.items()}
    return f"token {first} is {meant[first]!r} in the target but {other[first]!r} in the draft"


def _find(model: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    try:
        found = cached_file(model, _FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError:  # neither a directory nor a name: loading its configuration reports that
        return None
    return None if found is None else Path(found)


def _tokens(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
