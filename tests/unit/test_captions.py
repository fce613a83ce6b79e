"""What a caption gets right of a video, and what its words are about; by hand."""

import pytest

from vllm_vidspec.shapeworld import world
from vllm_vidspec.shapeworld.captions import accuracies, auc, count_right, kind_shares, relevance_auc, retention

FACTS = (
    world.SceneFact(
        "navy",
        "plain",
        (
            world.ObjectFact("left", "small", "red", "ring", "upwards", "turns", "blue"),
            world.ObjectFact("right", "large", "green", "cross", "sideways", "remains"),
        ),
    ),
)
WORDS = (
    "the video shows a plain navy background , on the left there is a small red ring that goes upwards and then turns "
    "blue , on the right there is a large green cross that goes sideways and then remains . in total the clip has one "
    "scenes ."
)


def test_accuracy_by_hand():
    """One scene of two objects: 4 attributes of scenes, 6 of each object, and what one of them turns into."""
    right = count_right([WORDS], [FACTS])
    assert sum(total for _, total in right.values()) == 4 + 6 + 6 + 1
    assert accuracies(right)["accuracy"] == 1.0
    wrong = WORDS.replace("turns blue", "turns red").replace("cross", "ring").replace("navy", "teal")
    found = accuracies(count_right([wrong], [FACTS]))
    assert found["accuracy"] == 14 / 17
    # color: both colours, what one turns into, the background; shape: two shapes, two sizes, the pattern.
    assert found["group"] == {"color": 2 / 4, "shape": 4 / 5, "motion": 1.0, "order": 1.0}
    assert found["attribute"]["new_color"] == 0.0
    both = accuracies(count_right([WORDS, wrong], [FACTS, FACTS]))
    assert both["accuracy"] == 31 / 34, "pooled over captions, not averaged"
    empty = accuracies(count_right([], []))
    assert empty["accuracy"] is empty["group"]["color"] is empty["attribute"]["motion"] is None
    assert accuracies(count_right([""], [FACTS]))["accuracy"] == 0.0


def test_retention_and_shares_by_hand():
    assert retention(0.49, 0.5) == pytest.approx(0.98)
    assert retention(0.6, 0.5) == pytest.approx(1.2)
    assert retention(0.5, 0.0) is retention(None, 0.5) is None
    shares = kind_shares([[0, 1, 1, 2], [1, 3, 0]])
    assert shares == {"exact_frac": 3 / 5, "loosened_frac": 1 / 5, "shifted_frac": 1 / 5}
    assert set(kind_shares([[0, 0], []]).values()) == {None}


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"),
    [
        ([3, 4], [1, 2], 1.0),
        ([1, 2], [3, 4], 0.0),
        ([1, 3], [2], 0.5),
        ([2], [2, 2], 0.5),
        ([1, 2, 3], [2, 0], (1 + 1.5 + 2) / 6),
        ([], [1], None),
        ([1], [], None),
    ],
)
def test_auc_by_hand(positives, negatives, expected):
    assert auc(positives, negatives) == (None if expected is None else pytest.approx(expected))


def test_relevance_is_compared_over_all_captions():
    words = [[" red", " the", "<|im_end|>"], ["ring", " .", " a"]]
    assert relevance_auc(words, [[0.9, 0.5, 1.0], [0.4, None, 0.4]]) == pytest.approx((2 + 0.5) / 4)
    assert relevance_auc(words, [[None] * 3] * 2) is None
    with pytest.raises(ValueError):
        relevance_auc(words, [[0.9], [0.4, 0.4, 0.4]])
