"""What pipeline stages need of vLLM: a draft that is whole on the last of them."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

from vllm.distributed import parallel_state

_ONE_STAGE = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)


@contextlib.contextmanager
def one_stage() -> Iterator[None]:
    """Build or run a model that has no stages.

    Why: vLLM's model classes ask the process's pipeline group which layers they have, and whether embeddings or another
    stage's states are their input. The target's last stage has few layers and no embeddings, the draft has all of its.
    """
    group = parallel_state._PP
    parallel_state._PP = _ONE_STAGE  # type: ignore[assignment]
    try:
        yield
    finally:
        parallel_state._PP = group
