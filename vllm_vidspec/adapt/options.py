"""Option: what a step may draft; Decision: what it does draft, and for whom."""

from typing import NamedTuple


class Option(NamedTuple):
    """What a step may draft for those of its requests that do not rest.

    Attributes:
        shape: As in `config.Plan`; "none" with 0 tokens.
        num_tokens: Draft tokens of each request.
        num_levels: Forwards of the draft, one after another; 0 where they run elsewhere, at the same time.
        is_prefix: Whether fewer tokens are the first of these, as of a chain: acceptance is then known by position.
    """

    shape: str
    num_tokens: int
    num_levels: int
    is_prefix: bool


REST = Option("none", 0, 0, True)


class Decision(NamedTuple):
    """What the requests of a step get.

    Attributes:
        option: What is drafted, at most.
        resting: Requests that get nothing.
        number: Of the decision; steps of one number are alike.
        pads: Whether those that get nothing have as many rows as the others.
    """

    option: Option
    resting: frozenset[str]
    number: int
    pads: bool
