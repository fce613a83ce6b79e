"""Sleep: what is lost is forgotten, what would not come back is refused, and the pools are lost, not kept."""

import contextlib

import torch

from vllm_vidspec.engine.draft import model as draft_model
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.requests import Phase, RequestRows
from vllm_vidspec.engine.speculator import VidSpecSpeculator
from vllm_vidspec.engine.worker import VidSpecWorker


class Calls(list):
    """Remembers the names of the methods that were called on it, with their arguments."""

    def __getattr__(self, name):
        return lambda *arguments: self.append((name, *arguments))


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


def test_the_pools_are_allocated_where_the_worker_says(monkeypatch):
    """Catches: a draft's pool among what sleep mode keeps."""
    taken = []
    model = object.__new__(DraftModel)
    model._agreement, model.device = None, torch.device("cpu")
    model.config = draft_model.VllmConfig()
    model.config.compilation_config.static_forward_context = {}
    monkeypatch.setattr(DraftModel, "bytes_per_block", 16)
    monkeypatch.setattr(DraftModel, "_kv_groups", lambda self: [])
    monkeypatch.setattr(draft_model, "get_tp_group", lambda: type("Group", (), {"world_size": 1}))
    layout = type("Layout", (), {"num_blocks": 4})
    monkeypatch.setattr(draft_model, "get_kv_cache_config_from_groups", lambda *_: layout)
    monkeypatch.setattr(draft_model, "init_attn_backend", lambda *_: ([], None, [16]))
    monkeypatch.setattr(draft_model, "init_kv_cache", lambda *_, **named: taken.append(named))
    context = contextlib.nullcontext()
    assert model.init_kv(64, context) == 4
    assert taken[0]["kv_cache_allocation_context"] is context


def test_running_requests_are_given_up():
    """Catches: rows that keep blocks, or draft on; rows that have not begun and are given up too."""
    requests = RequestRows(4, torch.device("cpu"))
    requests.phase[:] = [Phase.DRAFTING, Phase.UNSEEN, Phase.SKIPPED, Phase.PREFILLING]
    speculator = object.__new__(VidSpecSpeculator)
    speculator._requests, speculator._arrivals, speculator._waiting = requests, {}, {}
    speculator._drafter, speculator._guidance, speculator._trees = Calls(), Calls(), Calls()
    speculator.give_up_all()
    assert requests.phase.tolist() == [Phase.SKIPPED, Phase.UNSEEN, Phase.SKIPPED, Phase.SKIPPED]
    assert speculator._drafter == [("forget", 0), ("forget", 3), ("forget_media",)]
    assert speculator._guidance == speculator._trees == [("release", 0), ("release", 3)]
