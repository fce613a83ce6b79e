"""What becomes of drafts between the drafter and the scheduler where one of them has moved on."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.outputs import DraftTokenIds

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.parallel.client import DrafterClient
from vllm_vidspec.engine.parallel.messages import Failed
from vllm_vidspec.engine.runner import VidSpecModelRunner
from vllm_vidspec.errors import VidSpecError


def test_drafts_of_a_request_that_has_left_are_nobodys():
    """A scheduler that runs ahead asks, for a grammar's sake, when the next step has let go of who has ended. Catches:
    an engine that dies of it, drafts of the request that has the row by now."""
    runner = VidSpecModelRunner.__new__(VidSpecModelRunner)
    drafts = DraftTokenIds(["here", "gone", "cut"], [[1, 2], [3, 4], [5, 6]])
    runner.draft_tokens_handler = SimpleNamespace(get_draft_tokens=lambda: drafts)
    runner.num_speculative_steps, runner._was_at_rest = 2, False
    runner.requests = SimpleNamespace(num_drafts=lambda most: np.array([1, most]))
    runner.req_states = SimpleNamespace(req_id_to_index={"here": 1, "cut": 0})
    assert runner.take_draft_token_ids().draft_token_ids == [[1, 2], [], [5]]


@pytest.mark.parametrize(
    ("choice", "is_up", "raises"), [("raise", True, True), ("skip", True, False), ("raise", False, False)]
)
def test_errors_that_are_to_raise_do_so_in_the_drafters_process_too(choice, is_up, raises):
    """Catches: a drafter that ends by an error time and again, while requests go on without drafts and nobody is told.
    One that has not come up yet is refused as the engine starts."""
    client = DrafterClient.__new__(DrafterClient)
    client._config = VidSpecConfig(model="x", num_speculative_tokens=5, on_draft_error=choice)
    client._channel = SimpleNamespace(flush=lambda: None, receive=lambda: [Failed("RuntimeError: no")], is_closed=False)
    client._processes, client.is_up = [], is_up
    if raises:
        with pytest.raises(VidSpecError, match="the drafter failed: RuntimeError: no"):
            list(client._receive())
    else:
        assert list(client._receive()) == []
        assert client._reason == "RuntimeError: no"
