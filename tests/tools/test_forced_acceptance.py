"""scripts/forced_acceptance.py: coins decide which drafts are accepted, at the published acceptance length."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from tools.common import ROOT, load
from vidspec_kernels import TreeShapes, accept

forced = load("scripts/forced_acceptance.py")


@pytest.mark.parametrize("length,depth", [(1.0, 5), (2.76, 5), (4.18, 5), (6.0, 5), (1.5, 1)])
def test_the_rate_gives_the_length_exactly(length, depth):
    """Catches: a length that counts without the target's own token, a rate that is good for another depth."""
    rate = forced.rate_for(length, depth)
    # By all ways that the coins of a step may fall, not by the formula that the rate was found with.
    mean = 0.0
    for fall in range(2**depth):
        coins = [bool(fall >> i & 1) for i in range(depth)]
        accepted = next((i for i, coin in enumerate(coins) if not coin), depth)
        mean += (1 + accepted) * math.prod(rate if coin else 1 - rate for coin in coins)
    assert mean == pytest.approx(length, abs=1e-9)
    assert forced.unconditional_rates(rate, depth) == pytest.approx([rate**k for k in range(1, depth + 1)])


@pytest.mark.parametrize("length", [0.99, 6.01])
def test_lengths_that_no_rate_gives_are_refused(length):
    """Catches: a table of 6.8 tokens a step where a window has five drafts."""
    with pytest.raises(ValueError, match="give 1 to 6 tokens"):
        forced.rate_for(length, 5)


class Verifier:
    """Stands for `CoupledVerifier`: its `_judge` is what the real one asks of the accept kernel."""

    def __init__(self, num_drafts):
        self.num_drafts, self.seen = num_drafts, []

    def _judge(self, part, target_tokens, logits):
        found = accept(target_tokens, part.drafts, part.cu_num_logits, self.num_drafts, part.shapes)
        self.seen.append(found)
        return found


class Part(SimpleNamespace):
    def _replace(self, **changes):
        return Part(**vars(self) | changes)


def part_of(num_reqs, parents, drafts=None):
    """A verify step of alike drafts: node i + 1 hangs on `parents[i]`; a chain where that is the node before."""
    num_rows, num_drafts = len(parents) + 1, len(parents)
    every = torch.arange(num_reqs)
    depths, above = [0], [0]
    for node, parent in enumerate(parents, 1):
        depths.append(depths[parent] + 1)
        above.append(above[parent] | 1 << (node - 1))
    tables = (torch.tensor([-1, *parents]).int(), torch.tensor(depths).int(), torch.tensor(above))
    tables = [table.repeat(num_reqs, 1) for table in tables]
    is_chain = list(parents) == list(range(num_drafts))
    if drafts is None:
        drafts = torch.arange(100, 100 + num_reqs * num_rows, dtype=torch.int32)
    return Part(
        drafts=drafts,
        nodes=torch.arange(num_rows).repeat(num_reqs),
        expanded_idx_mapping=every.repeat_interleave(num_rows),
        cu_num_logits=torch.arange(0, num_reqs * num_rows + 1, num_rows, dtype=torch.int32),
        shapes=None if is_chain else TreeShapes(every, *tables),
    )


# The greedy path first, as every tree of ours has it; then siblings on every level.
TREE = (0, 1, 2, 3, 4, 0, 0, 1, 2, 6)
VOCAB = 50_000


def play(parents, rate, num_reqs=64, num_steps=1, **more):
    """Force some steps; return drafts, what the scorer returned, and how many tokens each request gets."""
    verifier = Verifier(len(parents))
    forced.ForcedAcceptance(verifier, torch.ones(num_reqs, dtype=torch.bool), rate, **more)
    part, logits = part_of(num_reqs, parents), torch.empty(num_reqs * (len(parents) + 1), VOCAB, device="meta")
    own = torch.zeros(len(logits), dtype=torch.int64)
    found = [verifier._judge(part, own, logits) for _ in range(num_steps)]
    return part, found


@pytest.mark.parametrize("parents", [(0, 1, 2, 3, 4), TREE], ids=["chain", "tree"])
def test_the_length_comes_out_of_the_scorer_as_wanted(parents):
    """Through the real accept rule. Catches: siblings accepted in place of a rejected draft, coins used twice."""
    wanted = 4.18
    rate = forced.rate_for(wanted, 5)
    _, found = play(parents, rate, num_reqs=256, num_steps=80)
    counts = torch.cat([sampled[1] for sampled in found]).double()
    error = counts.std() / len(counts) ** 0.5
    assert float((counts.mean() - wanted).abs()) < 4 * float(error) < 0.06
    # Each depth by its own rate, not the mean alone.
    for k in range(1, 6):
        assert float((counts > k).double().mean()) == pytest.approx(rate**k, abs=0.02)


@pytest.mark.parametrize("parents", [(0, 1, 2, 3, 4), TREE], ids=["chain", "tree"])
def test_the_emitted_tokens_are_the_path_and_one_more(parents):
    """Catches: a count that is off by the target's own token; a token after a rejection that is the draft's."""
    rate = 0.7
    part, ((sampled, num_sampled, *_),) = play(parents, rate)
    coins = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) < rate
    width = len(parents) + 1
    for req_idx in range(len(num_sampled)):
        path = coins[req_idx * width + 1 : req_idx * width + 6].tolist()
        accepted = next((i for i, coin in enumerate(path) if not coin), 5)
        assert num_sampled[req_idx] == accepted + 1
        drafts = part.drafts[req_idx * width + 1 :][:5].tolist()
        assert sampled[req_idx, :accepted].tolist() == drafts[:accepted]
        if accepted < 5:
            assert int(sampled[req_idx, accepted]) == (drafts[accepted] + 1) % VOCAB
        assert not sampled[req_idx, accepted + 1 :].any()


def test_a_sibling_never_stands_in_for_the_first():
    """Catches: a draft that happens to be the target's forced token after it has rejected another."""
    verifier = Verifier(2)
    forced.ForcedAcceptance(verifier, torch.ones(200, dtype=torch.bool), 0.5)
    drafts = torch.tensor([9, 5, 6], dtype=torch.int32).repeat(200)
    logits = torch.empty(600, VOCAB, device="meta")
    _, num_sampled, *_ = verifier._judge(part_of(200, (0, 0), drafts), torch.full((600,), 3), logits)
    coins = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(num_sampled == 2, coins[1:600:3])


def test_what_is_no_draft_never_stands():
    """Catches: padding of a window, or of a request without drafts, that counts as accepted."""
    verifier = Verifier(3)
    has_draft = torch.tensor([True, False, True])
    forced.ForcedAcceptance(verifier, has_draft, 1.0, least_token=1)
    drafts = torch.tensor([9, 5, 6, 7, 9, 5, 6, 7, 9, 5, 0, 0], dtype=torch.int32)
    own = torch.full((12,), 3)
    _, num_sampled, *_ = verifier._judge(part_of(3, (0, 1, 2), drafts), own, torch.empty(12, VOCAB, device="meta"))
    assert num_sampled.tolist() == [4, 1, 2]
    assert verifier.seen[0][0][:, 0].tolist() == [5, 3, 5], "without a draft it is the target's own"


def test_the_same_coins_for_every_engine_and_none_twice():
    """Catches: figures that differ by luck, a step that is decided like the one before."""
    first, second = (play((0, 1, 2, 3, 4), 0.5, num_steps=3)[1] for _ in range(2))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0][1], first[1][1])


def test_the_package_cannot_fake_acceptance():
    """Catches: the hook, or a knob for it, on its way into what is installed."""
    from vllm_vidspec.config import VidSpecConfig

    assert not [name for name in VidSpecConfig.model_fields if re.search("forc|fake|synthetic", name)]
    sources = [*(ROOT / "vllm_vidspec").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    assert not [path for path in sources if re.search("forced_acceptance|ForcedAcceptance", path.read_text())]


def test_what_is_hooked_is_there():
    """Catches: a verifier whose `_judge` has moved, before a GPU shows it."""
    pytest.importorskip("vllm")
    import inspect

    from vllm_vidspec.engine.verify.step import VerifySlice
    from vllm_vidspec.engine.verify.verifier import CoupledVerifier

    assert list(inspect.signature(CoupledVerifier._judge).parameters) == ["self", "part", "target_tokens", "logits"]
    assert {"drafts", "nodes", "expanded_idx_mapping", "shapes"} <= set(VerifySlice._fields)
    assert "self._judge(" in inspect.getsource(CoupledVerifier._verify)
