"""Option: what a step may draft; Decision: what it does draft, and for whom."""

from typing import NamedTuple


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
