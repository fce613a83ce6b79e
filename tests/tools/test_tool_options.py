"""Wrong options of the commands that ask engines: one line, exit status 2, and no engine has started."""

import pytest

from tools.common import ROOT, refuses

COSTS = "calibrate --costs"
COMMANDS = ("calibrate", COSTS, "show-pruning", "show-relevance")
OF_ALL = (
    ("--family llava", "unknown family 'llava'"),
    ("--target some/model", "--target needs --draft"),
    ("--target /no/such/model --draft self", "--target: no such checkpoint: /no/such/model"),
    ("--prune-ratio 1.5", "prune_ratio"),
    ("--engine-args []", "--engine-args: '[]' is not a JSON object"),
    ('--engine-args {"model":"x"}', "--engine-args: model"),
    ('--dtype auto --engine-args {"dtype":"auto"}', "dtype is given by --dtype, too"),
    ("--out /no/such/folder/file", "no such folder"),
    ("--out /tmp", "it is a folder"),
)
OF_ONE = {
    "calibrate": (
        ("--pruner uniform", "'uniform' has nothing to calibrate"),
        ("--prune-ratio 1", "nothing to choose"),
        ("--num-speculative-tokens 0", "num_speculative_tokens"),
        ("--video /no/such.mp4", "no such video: /no/such.mp4"),
        ("--plot plot.jpeg", "--plot"),
    ),
    COSTS: (
        ("--plot plot.png", "nothing to plot"),
        ('--engine-args {"max_num_seqs":0}', "max_num_seqs"),
        ("--video /no/such.mp4", "no such video: /no/such.mp4"),
        ("--out pyproject.toml", "is not a file of `vidspec calibrate`"),
    ),
    "show-pruning": (
        ("--pruner uniform,specvml", "did you mean 'specvlm'?"),
        ("--pruner ,", "--pruner"),
        ("--calibration /no/such.json", "calibration"),
        ("--out p.jpg", "must end in .png"),
        ("/no/such.mp4", "no such video: /no/such.mp4"),
    ),
    "show-relevance": (
        ("--lambda 1.5", "lambda_loose"),
        ("--top-n 0", "top_n"),
        ("--relevance-rows both", "relevance_rows"),
        ("--num-speculative-tokens 0", "num_speculative_tokens"),
        ("--temperature -1", "--temperature"),
        ("--out r.pdf", "must end in .html or .png"),
        ("/no/such.mp4", "no such video: /no/such.mp4"),
    ),
}


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [(command, *case) for command in COMMANDS for case in (*OF_ALL, *OF_ONE[command])],
)
def test_wrong_options_are_one_line_and_exit_2(fake_engines, monkeypatch, command, options, words):
    sessions = fake_engines(lambda *_: None)
    monkeypatch.chdir(ROOT)
    refuses(words, *command.split(), *options.split())
    assert not sessions, "no engine starts before every value is checked"
