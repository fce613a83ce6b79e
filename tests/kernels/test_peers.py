"""What tree_attention is measured beside: every peer that runs here computes the same attention, exactly enough."""

import importlib
from pathlib import Path

import pytest
import torch

# Context, requests, nodes, heads, KV heads, head size.
CASES = [(40, 2, 5, 4, 2, 32), (130, 3, 1, 2, 2, 16), (200, 1, 64, 6, 2, 32)]
TOLERANCE = 3e-2 if torch.cuda.is_available() else 1e-5
OPTIONAL = {"xformers": "xformers' tree attention needs xformers and a GPU"}


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("kernel_cases.tree_attention")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["ours", "flash_and_nodes", "sdpa", "flex", "xformers"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_peer_computes_what_ours_does(attention, name, case):
    """In one run, against float64. Catches: a peer that leaves out nodes or the prefix, or mixes up heads."""
    inputs = attention.Inputs(*case)
    if name in OPTIONAL and name in attention.bind(inputs)[1]:
        pytest.skip(OPTIONAL[name])
    call, tokens = getattr(attention, name)(inputs)
    found, exact = tokens(call()).double(), inputs.exact()
    assert found.shape == exact.shape == inputs.query.shape
    assert (found - exact).abs().max() < TOLERANCE
    inputs.words[-1], inputs.seen[-1] = 0, inputs.seen[0]  # the last node sees no node: the result is another
    assert (found - inputs.exact()).abs().max() > 0.01


def test_what_cannot_run_says_why(attention, monkeypatch):
    """Catches: a benchmark that ends with a peer; one of ours that fails and is left out."""

    def broken(_):
        raise RuntimeError("planted\nand more")

    inputs = attention.Inputs(*CASES[0])
    monkeypatch.setitem(attention.PEERS, "sdpa", broken)
    bound, notes = attention.bind(inputs)
    assert notes["sdpa"] == "RuntimeError: planted" and len(bound) + len(notes) == len(attention.PEERS)
    assert next(iter(bound)) in ("triton", "torch")
    monkeypatch.setattr(attention, "ours", broken)
    monkeypatch.setitem(attention.PEERS, next(iter(bound)), broken)
    with pytest.raises(RuntimeError, match="planted"):
        attention.bind(inputs)
