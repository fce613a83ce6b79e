"""Values of clients and files: JSON of every type, size and depth, NaN and infinities included."""

from typing import Any

from hypothesis import strategies as st

NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30]),
    st.sampled_from([400, 4500]).map(lambda digits: 10**digits),  # Python writes no more than 4300 of them
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e308]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\n", "a\nb", "\0", "\u2028", "\ud800", "../../etc/passwd", "0-99999999999"]),
    st.sampled_from([1000, 100_000]).map("x".__mul__),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)


def nested(depth: int, kind: str, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf] if kind == "list" else {"a": leaf}
    return leaf


DEEP = st.builds(nested, st.sampled_from([5, 60, 400, 900]), st.sampled_from(["list", "object"]), SCALARS)
JSON = st.one_of(
    SCALARS,
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
        max_leaves=8,
    ),
    DEEP,
    st.just(20_000).map(range).map(list),
)


@st.composite
def damaged(draw: Any, whole: bytes, most_changed: int, within: int | None = None) -> bytes:
    """Draw what is left of a file: cut, with bytes changed (in its beginning), or garbage."""
    kind = draw(st.sampled_from(["cut", "changed", "garbage"]))
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole) - 1))]
    if kind == "garbage":
        return draw(st.binary(max_size=4096))
    changed = bytearray(whole)
    for _ in range(draw(st.integers(1, most_changed))):
        changed[draw(st.integers(0, (within or len(whole)) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)
