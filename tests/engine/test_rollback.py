"""A draft after rejections and full acceptances: its text, its KV and its logits are what the target's would be.

The check needs no second implementation of ours. With the target's twin drafting greedily at T = 1, the draft must
propose exactly the most likely tokens along the true text; vanilla vLLM's own top-1 logprobs say which those are, so
the number of verify steps and of accepted tokens follow from vanilla's output alone. And its logits must be the
target's, at every position whose text both have seen. Rejections are frequent there, so every step after one depends
on the rollback, and every full acceptance on the re-fed token.
"""

import contextlib
import dataclasses

import pytest
import torch

from tests.engine import harness
from tests.engine.conftest import SCENARIOS
from tests.engine.harness import LLAVA, QWEN, in_place_of
from vllm_vidspec.engine.draft import drafter
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.verify.verifier import CoupledVerifier
from vllm_vidspec.tools import pairs

pytestmark = pytest.mark.engine

K = 5
MAX_TOKENS = 32  # and K + 1 more in vanilla's answers


def requests(family: str) -> list:
    """Six held-out videos at T = 1 that never stop early; each with vanilla's most likely token beside the sampled."""
    return [
        (prompt, {**arguments, "max_tokens": MAX_TOKENS}) for prompt, arguments in SCENARIOS["endless sampled"](family)
    ]


def expected_chain(outputs: list) -> tuple[int, int]:
    """Return (verify steps, accepted drafts) of a greedy chain along vanilla's sampled text.

    The first token comes from the prefill. A step after t tokens drafts the most likely tokens at t, t + 1, ... and
    accepts while they are what was sampled. `outputs` are K + 1 tokens longer than what the engine under test
    generates, so that the last step's acceptance is known too.
    """
    steps = accepted = 0
    for output in outputs:
        completion = output.outputs[0]
        hits = [
            position[token].rank == 1 for token, position in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        done = 1
        while done < MAX_TOKENS:
            run = hits[done : done + K].index(False) if False in hits[done : done + K] else K
            steps, accepted, done = steps + 1, accepted + run, done + run + 1
    return steps, accepted


@pytest.fixture(scope="module", params=[QWEN, pytest.param(LLAVA, marks=pytest.mark.slow)])
def drafted(request, reference):
    """A greedy twin of the target on the whole video, and what vanilla says it must achieve."""
    family, vanilla = request.param, reference(request.param, "endless sampled")
    twin = pairs.checkpoint(family, "target")
    with harness.engine(family, twin, pruner="none", draft_noise="greedy", num_speculative_tokens=K) as engine:
        yield engine, vanilla


@contextlib.contextmanager
def logits_compared():
    """Yield a list of the largest difference of draft and target logits at each position whose text both have seen."""
    differences: list[float] = []
    proposed: dict[int, list[torch.Tensor]] = {}  # persistent row -> the draft's logits by level
    order: list[int] = []  # persistent rows whose logits come next, round after round
    with pytest.MonkeyPatch.context() as patch:

        @in_place_of(patch, Drafter, "draft")
        def recording_draft(draft, self, message):
            proposed.update({int(row): [] for row in message.idx_mapping_np})
            order[:] = message.idx_mapping_np.tolist()
            return draft(self, message)

        @in_place_of(patch, CoupledSampler, "draw_into")
        def recording_sample(sample, self, logits, *args, **kwargs):
            for row_logits in logits:
                row = order.pop(0)
                proposed[row].append(row_logits.clone())
                order.append(row)
            return sample(self, logits, *args, **kwargs)

        @in_place_of(patch, CoupledVerifier, "_verify")
        def comparing_verify(verify, self, logits, draft_logits, draft_sampled, pos, bounds, idx_mapping, *rest):
            raw = logits.clone()
            result = verify(self, logits, draft_logits, draft_sampled, pos, bounds, idx_mapping, *rest)
            for req_idx, (row, num_sampled) in enumerate(zip(idx_mapping.tolist(), result[2].tolist(), strict=True)):
                seen = raw[bounds[req_idx] : bounds[req_idx + 1]][:num_sampled]
                of_row = zip(seen, proposed.get(row, []), strict=False)
                differences.extend((a - b).abs().max().item() for a, b in of_row)
            return result

        yield differences


def check(drafted) -> None:
    """The drafts are the target's most likely tokens, no more and no fewer of them accepted; the text is vanilla's."""
    engine, vanilla = drafted
    with logits_compared() as differences:
        outputs, counted = engine.measured(requests(engine.family))
    assert len(differences) > 100
    assert max(differences) < 1e-3
    assert harness.token_ids(outputs) == [[ids[0][:MAX_TOKENS]] for ids in harness.token_ids(vanilla)]
    assert (counted["drafts"], counted["accepted_tokens"]) == expected_chain(vanilla)


def test_the_draft_proposes_what_the_target_finds_most_likely(drafted):
    """Catches: every mutation below; a position, a feature or a token that is not the target's."""
    check(drafted)


def skip_rollback(monkeypatch) -> None:
    """KV entries of rejected drafts stay: new tokens are appended after them."""
    stale = {}

    @in_place_of(monkeypatch, drafter, "begin_step")
    def appending(original, batch_rows, picked, num_sampled, is_verified, temperature, seeds, tables, out, **kwargs):
        num_dropped = tables.num_dropped.clone()
        rows = batch_rows if picked is None else batch_rows[picked]
        told = torch.ones(len(rows), dtype=torch.bool) if is_verified is None else is_verified
        for row, sampled, is_true in zip(rows.tolist(), num_sampled.tolist(), told.tolist(), strict=False):
            stale[row] = stale.get(row, 0) + (K + 1 - sampled) * is_true
            num_dropped[row] -= stale[row]
        tables = dataclasses.replace(tables, num_dropped=num_dropped)
        original(batch_rows, picked, num_sampled, is_verified, temperature, seeds, tables, out, **kwargs)


def skip_refeed(monkeypatch) -> None:
    """The last draft token of a fully accepted chain never gets its KV entry."""

    @in_place_of(monkeypatch, Drafter, "draft")
    def forgetful(original, self, message):
        drafts = original(self, message)
        self.kv.fed[drafts.rows] = (1 << K) - 1
        return drafts


@pytest.mark.parametrize("mutation", [skip_rollback, skip_refeed])
def test_planted_bug_is_caught(drafted, monkeypatch, mutation):
    """Each changes the drafts, though never the text."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="assert"):
        check(drafted)
