"""The errors that users see; every one is a single clear line, raised before weights load where possible."""

import difflib
import reprlib
from collections.abc import Sequence
from typing import Any


class VidSpecError(ValueError):
    """A wrong knob, an incompatible pair or an unsupported engine. The message is one line that says what to do."""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint at the known name closest to a wrong one, in whatever letters; "" where none is close."""
    by_letters = {one.lower(): one for one in known}
    match = difflib.get_close_matches(name.strip().lower(), by_letters, n=1)
    return f" (did you mean {by_letters[match[0]]!r}?)" if match else ""


def quoted(value: Any, longest: int = 60) -> str:
    """Return a value from outside in one line of at most `longest` characters, however long or deep it is."""
    short = reprlib.Repr()  # which visits no more of a value than it could show
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = max(6, longest // 16)
    short.maxstring = short.maxother = max(30, longest // 2)
    short.maxlong = max(40, longest // 2)
    try:
        text = repr(value[:longest]) if isinstance(value, str) else short.repr(value)
    except (ValueError, RecursionError):  # Python refuses to print very large integers
        text = f"{type(value).__name__} of too many digits"
    return shortened(text, longest)


def shortened(text: str, longest: int) -> str:
    """Return a text with at most `longest` characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."
