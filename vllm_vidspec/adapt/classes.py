"""RequestClass: what requests of one kind (by video tokens, by sampling) have in common; whether the class rests."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from vllm_vidspec.names import CLASS_SIZES

# Visual tokens up to which a request is of each of CLASS_SIZES but the last.
_LENGTHS = (300, 600, 1200, 2400, 4800, 9600, 19200)
_NEW_ANSWER = 0.1  # share of a new answer in the means of its class


def class_label(num_video: int, num_image: int) -> int:
    """Return the place in CLASS_LABELS of a request with so many video and image tokens."""
    if not num_video and not num_image:
        return 0
    size = bisect_left(_LENGTHS, num_video + num_image)
    return 1 + (len(CLASS_SIZES) if num_video else 0) + size


class Ended(NamedTuple):
    """A request that has ended: place of its class in CLASS_LABELS, its verify steps and the tokens that they gave."""

    label: int
    verify_steps: int
    verify_tokens: int


@dataclass
class RequestClass:
    """What is known of a class."""

    label: int  # Its place in CLASS_LABELS
    answer_tokens: float = 128.0  # Mean length of an answer,
    num_answers: int = 0  # and of how many
    start_s: float = 0.0  # What it takes until the draft has read a prompt; 0: not known
    rests: bool = False  # Whether its requests are not drafted for, but for a probe now and then
    since_probe: int = 0  # Requests that came since the last probe,
    probe_every: int = 0  # and that come before the next one, at least
    to_show: int = 0  # Requests that are yet to be shown, one after another, to measure anew what drafts take
    gain: float = 0.0  # Time of whole answers without drafts over that with them,
    hope: float = 0.0  # the same as it may be by now,
    probe_s: float = 0.0  # what those of one request cost a step,
    gain_at: int = -1  # and the step up to which these hold

    def learn(self, answer_tokens: int, start_s: float) -> None:
        """Take in an answer; 0 of either: not known."""
        if answer_tokens:
            self.num_answers += 1
            share = max(_NEW_ANSWER, 1 / self.num_answers)
            self.answer_tokens += share * (answer_tokens - self.answer_tokens)
        if start_s:
            self.start_s += (start_s - self.start_s) * (_NEW_ANSWER if self.start_s else 1.0)
