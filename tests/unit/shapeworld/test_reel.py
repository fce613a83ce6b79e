"""How answers about reels are scored; the generator itself is held by what is trained on it."""

import pytest

from benchmarks import reel


@pytest.mark.parametrize("index", range(len(reel.KINDS)))
def test_a_true_answer_has_every_fact(index):
    """Catches: an opening's scene taken for the one told, a second colour taken for the first, scenes out of step."""
    _, question, scenes = reel.held_out(index, 1024)
    counts = reel.score_answer(question.answer, question, scenes)
    assert all(right == total for right, total in counts.values())
    told = sum(total for name, (_, total) in counts.items() if name != "new_color")
    assert told == len(question.scenes) * (1 if question.kind == "which" else len(reel.FACTS) - 1)
    assert sum(right for right, _ in reel.score_answer("", question, scenes).values()) == 0


def test_what_is_wrong_counts_where_it_is():
    """Catches: words compared by their place, so that one more or less makes all that follow wrong."""
    _, question, scenes = reel.held_out(1, 1024)
    assert question.kind == "look"
    scene = scenes[question.scenes[0]]
    other = next(shape for shape in reel.SHAPES if shape != scene.shape)
    answer = question.answer.replace("that", "that that", 1).replace(f" {scene.shape} ", f" {other} ", 1)
    counts = reel.score_answer(answer, question, scenes)
    assert {name for name, (right, total) in counts.items() if right < total} == {"shape"}
    assert counts["shape"][0] == counts["shape"][1] - 1


def test_facts_are_words_of_the_vocabulary():
    """Catches: an oracle that protects a word which the tokenizer cuts otherwise, or not at all."""
    assert reel.fact_words() < set(reel.vocabulary())
