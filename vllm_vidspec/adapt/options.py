"""Option: what a step may draft; Decision: what it does draft, and for whom."""

from typing import NamedTuple

import numpy as np


class Option(NamedTuple):
    """What a step may draft for those of its requests that do not rest."""

    shape: str  # As in `config.Plan`; "none" with 0 tokens
    num_tokens: int  # Draft tokens of each request
    num_levels: int  # Forwards of the draft, one after another; 0 where they run elsewhere, at the same time
    is_prefix: bool  # Whether fewer tokens are the first of these, as of a chain: acceptance is then known by position


REST = Option("none", 0, 0, True)


class Decision(NamedTuple):
    """What the requests of a step get."""

    option: Option  # What is drafted, at most
    resting: frozenset[str]  # Requests that get nothing
    number: int  # Of the decision; steps of one number are alike
    pads: bool  # Whether those that get nothing have as many rows as the others


class StepKind(NamedTuple):
    """What the controller is told of a step; steps that follow one another and are alike share one."""

    decision: Decision  # What it drafted by, for the step after it
    req_ids: list[str]  # Its requests
    drafted: np.ndarray  # `[n]` draft tokens that it verified of each, placeholders included; 0 where there was none
    is_chain: bool = True  # Whether the verified drafts were chains
    is_steady: bool = True  # Whether the step before drafted by the same decision, so that it verified what that says
    reading: frozenset[str] = frozenset()  # Requests of which the draft has read a part: prompt, or text after a rest
    reading_s: float = 0.0  # Host time of that
    is_real: np.ndarray | bool = True  # `[n]` or of all: whose draft tokens were more than placeholders
