"""What the runner and the worker do beside the loop."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from vllm.v1.outputs import DraftTokenIds

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.draft_backend import Reading
from vllm_vidspec.engine.parallel.messages import Failed
from vllm_vidspec.engine.parallel.supervisor import DrafterSupervisor
from vllm_vidspec.engine.requests import Phase
from vllm_vidspec.engine.runner import VidSpecModelRunner
from vllm_vidspec.engine.worker import VidSpecWorker
from vllm_vidspec.errors import VidSpecError


@pytest.mark.parametrize(("has_stages", "expected"), [(False, {"other"}), (True, {"drafted"})])
def test_the_drafts_that_a_step_verifies(has_stages, expected):
    """With pipeline stages two batches are under way. Catches: the policy told of the drafts of the other one."""
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    batch = SimpleNamespace(req_ids=["plain", "drafted"], idx_mapping_np=np.array([2, 0]))
    runner.use_pp, runner.execute_model_state = has_stages, SimpleNamespace(input_batch=batch)
    runner.requests = SimpleNamespace(in_flight=frozenset({"other"}), has_draft_np=np.array([True, True, False]))
    assert runner._verified() == expected


@pytest.mark.parametrize(("num_skips", "expected"), [(2, None), (3, ("skipped",))])
def test_what_the_policy_learns_of_a_step(num_skips, expected):
    """Catches: requests without speculation that nobody beside the scheduler hears of, or hears of twice."""
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    runner.speculator = SimpleNamespace(reading=Reading())
    runner.requests = SimpleNamespace(num_skips=num_skips, phase=np.array([Phase.SKIPPED]))
    runner.req_states = SimpleNamespace(req_id_to_index={"skipped": 0})
    runner._num_told_skips = 2
    report = runner._report(frozenset())
    assert (None if report is None else report.skipped) == expected and runner._report(frozenset()) is None


def test_drafts_of_a_request_that_has_left_are_nobodys():
    """A scheduler that runs ahead asks for them after the request has ended: no error, no other's drafts."""
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    drafts = DraftTokenIds(["here", "gone", "cut"], [[1, 2], [3, 4], [5, 6]])
    runner.draft_tokens_handler = SimpleNamespace(get_draft_tokens=lambda: drafts)
    runner.num_speculative_steps = 2
    in_flight = frozenset({"here", "cut"})
    runner.requests = SimpleNamespace(num_drafts=lambda most: np.array([1, most]), in_flight=in_flight)
    runner.req_states = SimpleNamespace(req_id_to_index={"here": 1, "cut": 0})
    assert runner.take_draft_token_ids().draft_token_ids == [[1, 2], [], [5]]
    runner.requests.in_flight, runner.use_pp = frozenset(), False
    assert runner.take_draft_token_ids() is None


@pytest.mark.parametrize(
    ("choice", "is_up", "raises"), [("raise", True, True), ("skip", True, False), ("raise", False, False)]
)
def test_errors_that_are_to_raise_do_so_in_the_drafters_process_too(choice, is_up, raises):
    """Catches: a drafter that dies again and again untold; one that has not come up is refused at the start."""
    supervisor = DrafterSupervisor.__new__(DrafterSupervisor)
    supervisor._config = VidSpecConfig(model="x", num_speculative_tokens=5, on_draft_error=choice)
    supervisor._channel = SimpleNamespace(
        flush=lambda: None, receive=lambda: [Failed("RuntimeError: no")], is_closed=False
    )
    supervisor._processes, supervisor.is_up = [], is_up
    if raises:
        with pytest.raises(VidSpecError, match="the drafter failed: RuntimeError: no"):
            list(supervisor._receive())
    else:
        assert list(supervisor._receive()) == []
        assert supervisor._reason == "RuntimeError: no"


def test_what_is_lost_is_forgotten_first():
    """Catches: a draft that goes on over KV that is gone; weights that nobody reloads; pools copied to the host."""
    vllms = mock.Mock()

    class Base:
        model_runner, sleep, discard, init_device = vllms, vllms.sleep, vllms.discard, vllms.init_device
        _maybe_get_memory_pool_context = staticmethod(lambda tag: contextlib.nullcontext(tag))

    worker = type("Worker", (VidSpecWorker, Base), {})()
    worker.sleep()
    worker.discard(("kv_cache",))
    worker.sleep(2)
    forget, sleep = mock.call.forget_kv(), mock.call.sleep(1)
    assert vllms.mock_calls == [forget, sleep, forget, mock.call.discard(("kv_cache",)), forget, sleep]
    worker.init_device()
    with vllms.kv_allocation() as tag:
        assert tag == "kv_cache"
