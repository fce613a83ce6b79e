"""Reels: what is asked about them, and that a long pair knows the words."""

import json

import numpy as np
import pytest

from benchmarks import reel
from vllm_vidspec import assets


@pytest.mark.parametrize("family", assets.LONG_PAIRS)
def test_questions_and_answers_are_words_of_the_pairs(family):
    """Catches: a word that no long pair was trained on; frames or a question that change from call to call."""
    known = json.loads((assets.checkpoint(family, "target") / "tokenizer.json").read_text())["model"]["vocab"]
    kinds = set()
    for i in range(2 * len(reel.KINDS)):
        frames, question = reel.held_out(i, 1024)
        again, same = reel.held_out(i, 1024)
        assert len(frames) * reel.TOKENS_PER_PAIR == 2 * 1024
        assert {*question.text.split(), *question.answer.split()} <= known.keys()
        assert np.array_equal(frames, again) and question == same
        kinds.add(question.kind)
    assert kinds == set(reel.KINDS)
