"""What target and drafter share while both run (ParallelVLM): tables, streams, windows; numpy.

The two processes never wait for each other. Each writes tables that the other reads when it comes by: the target what
it has committed, the drafter what it thinks comes next. A draft that is torn, late or out of date is a wrong guess,
which the target's own sample refuses as it refuses any other: nothing here can change an answer.
"""

from vllm_vidspec.parallel.streams import Streams
from vllm_vidspec.parallel.tables import Sizes, StreamState, Tables
from vllm_vidspec.parallel.window import WindowRule, running_mean

__all__ = [
    "Sizes",
    "StreamState",
    "Streams",
    "Tables",
    "WindowRule",
    "running_mean",
]
