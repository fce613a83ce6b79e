"""Sleep: what is lost is forgotten first, and the pools are lost, not kept; test_speculator has who is given up."""

import contextlib

from tests.unit.engine.fakes import Calls
from vllm_vidspec.engine.worker import VidSpecWorker


class Base:
    """What vLLM's worker would do."""

    def __init__(self):
        self.model_runner = Calls()

    def sleep(self, level):
        self.model_runner.append(("slept", level))

    def discard(self, tags):
        self.model_runner.append(("discarded", tags))

    def _maybe_get_memory_pool_context(self, tag):
        return contextlib.nullcontext(tag)

    def init_device(self):
        self.model_runner.append(("built",))


class Worker(VidSpecWorker, Base):
    """Ours above it."""


def test_what_is_lost_is_forgotten_first():
    """Catches: a draft that goes on over KV that is gone; weights that nobody reloads; pools copied to the host."""
    worker = Worker()
    worker.sleep()
    worker.discard(("kv_cache",))
    assert worker.model_runner == [("forget_kv",), ("slept", 1), ("forget_kv",), ("discarded", ("kv_cache",))]
    worker.sleep(2)
    assert worker.model_runner[-2:] == [("forget_kv",), ("slept", 1)]
    worker.init_device()
    with worker.model_runner.kv_allocation() as tag:
        assert tag == "kv_cache"
