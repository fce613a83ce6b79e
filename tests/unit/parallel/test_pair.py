"""Streams and windows on a target and a drafter whose every token is known, in any order of events.

Whatever happens, a window is what the drafter says after exactly the committed text. Planted bugs are seen: a window
that is out of date, KV that is rolled back to the wrong place, a lost commit, the stream of a row's last request.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.unit.parallel import pair as pairs
from tests.unit.parallel.pair import MAX_LEN, MAX_REQS, MOST, Pair
from vllm_vidspec.streams import Streams, Tables

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def run(pair: Pair, steps: int, turns: int) -> None:
    """Let the target make steps, and the drafter so many turns within each."""
    for _ in range(steps):
        pair.turn(turns)
        pair.step()


def test_a_drafter_that_never_errs_is_never_cut():
    """Every token that it draws is emitted: the accepted stream grows without bound, far past two windows."""
    pair = Pair(errs=0)
    pair.add(0, PROMPT)
    run(pair, 10, turns=MOST + 1)
    assert pair.num_accepted == pair.num_verified == 9 * MOST
    assert len(pair.requests[0].text) == len(PROMPT) + pair.num_accepted + pair.num_steps
    streams = pair.lead.streams
    assert streams.text[0, : len(pair.requests[0].text)].tolist() == pair.requests[0].text


def test_a_stream_goes_on_until_something_else_is_said():
    """A draw follows the last one on the device, until a stream is cut, or others draw: then it begins once more."""
    pair = Pair(errs=0)
    pair.add(0, PROMPT)
    run(pair, 3, turns=4)
    rank = pair.rank
    assert (rank.num_draws, rank.num_more) == (12, 11)
    pair.errs = rank.errs = 1  # whatever it draws is wrong from here on
    pair.turn(2)
    pair.errs = rank.errs = 0
    run(pair, 3, turns=4)
    assert rank.num_draws - rank.num_more == 2
    pair.add(1, PROMPT)
    pair.turn(3)
    assert rank.num_draws - rank.num_more == 3


def test_who_reads_a_stream_that_is_cut_can_tell():
    """Catches: a cut, or another request in the row, that leaves the generation as it was; an append that does not."""
    pair = Pair(errs=0)
    pair.add(0, PROMPT)
    pair.turn(3)
    generation = int(pair.tables.generation[0])
    run(pair, 3, turns=4)
    assert pair.tables.generation[0] == generation and generation % 2 == 0
    pair.rank.errs = pair.errs = 1
    run(pair, 2, turns=4)
    assert pair.tables.generation[0] > generation and pair.tables.generation[0] % 2 == 0
    generation = int(pair.tables.generation[0])
    pair.end(0)
    pair.turn()
    assert pair.tables.generation[0] == generation + 2
    pair.tables.generation[1] = 7  # of a drafter that was killed at it
    pair.restart()
    assert not (pair.tables.generation % 2).any() and pair.tables.generation[1] > 7


def test_a_text_ends_where_its_limit_is():
    """Nothing is drawn past the longest text that a request can have."""
    pair = Pair(errs=0)
    pair.add(0, list(np.arange(MAX_LEN - 4) % pairs.VOCAB))
    pair.turn(60)
    assert pair.lead.streams.length[0] == MAX_LEN


class Events(RuleBasedStateMachine):
    """Requests come, run, go and come back; the drafter turns when it likes, stops and is started again."""

    @initialize(errs=st.sampled_from([0, 2, 3, 9]))
    def begin(self, errs):
        self.pair = Pair(errs)

    @precondition(lambda self: len(self.pair.requests) < MAX_REQS)
    @rule(text=st.lists(st.integers(0, pairs.VOCAB - 1), min_size=2, max_size=20), place=st.integers(0, MAX_REQS - 1))
    def add(self, text, place):
        free = [row for row in range(MAX_REQS) if row not in self.pair.requests]
        self.pair.add(free[place % len(free)], text)

    @rule(wanted=st.integers(0, MOST))
    def step(self, wanted):
        for row, request in list(self.pair.requests.items()):
            if len(request.text) + MOST + 1 >= MAX_LEN:
                self.pair.end(row)
        self.pair.step(wanted)

    @rule(count=st.integers(1, 9))
    def turn(self, count):
        self.pair.turn(count)

    @precondition(lambda self: self.pair.requests)
    @rule(place=st.integers(0, MAX_REQS - 1), comes_back=st.booleans())
    def end(self, place, comes_back):
        rows = sorted(self.pair.requests)
        request = self.pair.end(rows[place % len(rows)])
        if comes_back:  # preempted: its text so far is its prompt
            self.pair.add(request.row, request.text)

    @rule()
    def restart(self):
        self.pair.restart()


TestEvents = Events.TestCase
TestEvents.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def _scenario() -> None:
    """Two requests, one of which gives its row to another, with a drafter that now runs and now does not."""
    pair = Pair(errs=3)
    pair.add(0, PROMPT)
    pair.add(1, PROMPT[::-1])
    for turns in (4, 1, 6, 0, 0, 9, 2, 7, 1, 5):
        run(pair, 1, turns)
    pair.end(0)
    pair.add(0, PROMPT[2:])
    pair.step()  # the drafter has not observed
    pair.turn(2)
    for turns in (1, 3, 8, 2, 0, 6, 6):
        run(pair, 1, turns)
    assert pair.num_accepted > 15


def _never_stale(streams, asked, rows, num_tokens, *texts):
    """Skip the comparison with what was committed."""
    fresh = streams.clone()
    fresh[rows, 2] = num_tokens[rows]
    pairs_take(fresh, asked, rows, num_tokens, *texts)


def _anybodys(streams, asked, rows, *texts):
    """Take the stream of whoever has the row."""
    pairs_take(streams, torch.stack((streams[rows, 1], asked[:, 1]), dim=1), rows, *texts)


pairs_take = pairs.gather_draft_windows


def _later_rollback(self):
    self.fed[_observe(self)] += 1


def _never_cut(self):
    drawn = self._drawn
    observed = _observe(self)
    self._drawn = drawn
    return observed


_observe, _commit = Streams.observe, Tables.commit


def _lost_commit(self, rows, lengths, tails):
    """Lose every fourth commit's tokens."""
    self.lost = getattr(self, "lost", 0) + 1
    if self.lost % 4 == 0:
        tails = np.zeros_like(tails)
    _commit(self, rows, lengths, tails)


BUGS = {
    "a stale window after a rejection": (pairs, "gather_draft_windows", _never_stale),
    "a rollback off by one": (Streams, "observe", _later_rollback),
    "a stream that goes on after a cut": (Streams, "observe", _never_cut),
    "a draw that goes on from another batch": (np, "array_equal", lambda *arrays: True),
    "a lost commit": (Tables, "commit", _lost_commit),
    "the row's last request": (pairs, "gather_draft_windows", _anybodys),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_seen(name):
    _scenario()
    with mock.patch.object(*BUGS[name]), pytest.raises(AssertionError):
        _scenario()
