"""Log lines: none of ours is longer than an operator can read, whatever a client, a file or an exception puts in."""

import logging

from vllm_vidspec.errors import shortened

MAX_LINE = 4096  # characters


def bound_log_lines() -> None:
    """Cut every line that this process logs as ours; a second call changes nothing."""
    logging.getLogger("vllm.vidspec").addFilter(_cut)


def _cut(record: logging.LogRecord) -> bool:
    if len(text := record.getMessage()) > MAX_LINE:
        record.msg, record.args = shortened(text, MAX_LINE), ()
    return True
