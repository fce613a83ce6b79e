"""Sleep: what is lost is forgotten, and what would not come back is refused."""

import contextlib

from tests.unit.engine.fakes import CPU, NUM_ROWS, Calls
from vllm_vidspec.engine.requests import Phase, RequestRows
from vllm_vidspec.engine.speculator import VidSpecSpeculator
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


def test_running_requests_are_given_up():
    """Catches: rows that keep blocks, or draft on; rows that have not begun and are given up too."""
    requests = RequestRows(NUM_ROWS, CPU)
    requests.phase[:] = [Phase.DRAFTING, Phase.UNSEEN, Phase.SKIPPED, Phase.PREFILLING]
    speculator = object.__new__(VidSpecSpeculator)
    speculator._requests, speculator._arrivals, speculator._waiting = requests, {}, {}
    speculator._drafter, speculator._guidance, speculator._trees = Calls(), Calls(), Calls()
    speculator.give_up_all()
    assert requests.phase.tolist() == [Phase.SKIPPED, Phase.UNSEEN, Phase.SKIPPED, Phase.SKIPPED]
    assert speculator._drafter == [("forget", 0), ("forget", 3), ("forget_media",)]
    assert speculator._guidance == speculator._trees == [("release", 0), ("release", 3)]
