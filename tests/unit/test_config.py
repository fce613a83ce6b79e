"""VidSpecConfig and parse_config: defaults, ranges, unknown keys, and one line for every error."""

import json

import pytest
from pydantic import ValidationError

from vllm_vidspec.config import PASS_THROUGH_KEYS, SHELVES, VidSpecConfig, fields, parse_config, spelling
from vllm_vidspec.errors import VidSpecError

GOOD = {"method": "vidspec", "model": "draft", "num_speculative_tokens": 5}


def parsed(**changes) -> VidSpecConfig:
    return parse_config({**GOOD, **changes})[0]


def refused(**changes) -> str:
    """The message for a config with these changes, `...` for no value; asserts that it is one line with its origin."""
    with pytest.raises(VidSpecError) as caught:
        parse_config({key: value for key, value in {**GOOD, **changes}.items() if value is not ...})
    message = str(caught.value)
    assert message.startswith("speculative config: ") and "\n" not in message
    return message


def test_parallel_drafting_is_of_chains():
    """Catches: a tree that is accepted and then streamed; cores that are read off by one."""
    config = parsed(parallel={"device": "cuda:2", "cpu_cores": "1,4-6"})
    assert config.is_parallel and config.parallel.cores == (1, 4, 5, 6)
    for shape, number in (("tree-static", 25), ("tree-adaptive", 64)):
        message = refused(parallel={"device": "cpu"}, draft_shape=shape, num_speculative_tokens=number)
        assert "parallel drafting streams a chain" in message and "\n" not in message


def test_a_change_is_a_checked_copy():
    """Catches: a configuration that changes after its validation; a change that is not checked, or is misnamed."""
    with pytest.raises(ValidationError):
        parsed().prune_ratio = 0.1
    with pytest.raises(VidSpecError, match=r"^speculative config: prune_ratio: .* got 2"):
        parsed().changed({"prune_ratio": 2})


def test_names_for_the_same():
    """Catches: "self" taken for a path; a short name of a pruner lost."""
    assert parsed(model="self").is_self_draft
    assert parsed(pruner="window").pruner == "window:middle"


NEAREST = {
    "prune_ration": "prune_ratio",
    "pruning_ratio": "prune_ratio",
    "num_spec_tokens": "num_speculative_tokens",
    "scorrer": "scorer",
    "quantisation": "quantization",  # a pass-through key is known too
    "prune": "pruner",
}
TABLE = [[1, 4, "tree-static", 25], [5, 16, "chain", 5]]
SCHEDULE = "num_speculative_tokens_per_batch_size"
STATIC = {"draft_shape": "tree-static"}
# Changes, and what the message says of them.
REFUSED = [
    # Catches: an ignored unknown key, an error without a hint.
    *(({key: 1}, f"unknown key {key!r} (did you mean {nearest!r}?)") for key, nearest in NEAREST.items()),
    # Catches: a made-up hint; a second unknown key left out.
    ({"zzz": 1, "qqqq": 2}, "'zzz'", "'qqqq'"),
    # Catches: an ignored key of the drafter's, one without its device, what is no drafter at all.
    ({"parallel": {"cpu-core": "1"}}, "unknown key 'parallel.cpu_core' (did you mean 'parallel.cpu_cores'?)"),
    ({"parallel": {"tensor-parallel-size": 2}}, "parallel: device is missing"),
    ({"parallel": 3}, 'parallel: expected an object, such as {"device": "cuda:1"}, got 3'),
    # Catches: a name in the error's line that the user never wrote.
    (
        {"parallel": {"device": "cpu", "tensor-parallel-size": 65}},
        "parallel.tensor_parallel_size: Input should be less than or equal to 64, got 65",
    ),
    ({"guidance_layers": [-1]}, "; guidance_layers.0: Input should be greater than or equal to 0, got -1"),
    # Catches: a number that no other process could be told.
    ({"draft_kv_bytes": 1 << 63}, "draft_kv_bytes: expected a 64-bit number, got 9223372036854775808"),
    # Catches: a default for what only the user can know.
    *(({key: ...}, f"speculative config: {key}: Field required") for key in ("model", "num_speculative_tokens")),
    # Catches: an unknown name without hint or list.
    (
        {"pruner": "unifrom"},
        "unknown pruner 'unifrom' (did you mean 'uniform'?)",
        f"known: {', '.join(fields.PRUNERS)}",
    ),
    # Catches: a name in other letters, or a drafter's device alone, that is not recognised.
    ({"pruner": "SpecVLM"}, "unknown pruner 'SpecVLM' (did you mean 'specvlm'?)"),
    ({"Prune_Ratio": 1}, "unknown key 'Prune_Ratio' (did you mean 'prune_ratio'?)"),
    ({"model": "Self"}, "model: 'Self' (did you mean 'self'?)"),
    ({"model": " self "}, "model: ' self ' (did you mean 'self'?)"),
    ({"model": ""}, 'model: a name, a path or "self" is missing'),
    ({"parallel": "cuda:2"}, 'parallel: expected an object, such as {"device": "cuda:2"}, got'),
    ({"parallel": {"device": "gpu1"}}, "parallel.device: expected cpu or cuda:N, such as cuda:1, got 'gpu1'"),
    (
        {"parallel": {"device": "cpu", "cpu_cores": "2 to 5"}},
        "parallel.cpu_cores: expected numbers and ranges, such as 2-5,8, got '2 to 5'",
    ),
    # Catches: the first of several wrong keys alone, so that a start is needed for each.
    (
        {"prune_ratio": 2, "pruner": "x", "scorer": "y", "foo": 1, "parallel": 3, "draft_table": []},
        *("'foo'", "prune_ratio: ", "unknown pruner 'x'", "scorer: ", "parallel: expected", "draft_table needs"),
    ),
    (
        {"request_scorers": ["fly"], "scorer": "loose", **STATIC, "parallel": {"device": "cpu"}},
        *("leaves out the server's own scorer", "parallel drafting streams a chain", "must be 25, not 5"),
    ),
    ({"qqqqqqqq": 1, "prune_ratio": float("nan"), "lambda_r": 3}, "'qqqqqqqq'", "prune_ratio: ", "lambda_r: "),
    # Catches: a pruner named as known where it is none.
    ({"auto_pruners": ["auto"]}, "auto_pruners: unknown pruner 'auto'; known: none, "),
    # Catches: what has no effect, and is accepted.
    ({"draft_table": [[1, 4, "chain", 5]]}, 'draft_table needs "draft_shape": "auto", this is \'chain\''),
    (
        {**STATIC, SCHEDULE: None, "draft_table": TABLE},
        'draft_table needs "draft_shape": "auto", this is \'tree-static\'',
    ),
    *(
        ({"model": "self", key: "fp8"}, f'{key} is a draft model\'s, and with "model": "self" there is none')
        for key in (*sorted(PASS_THROUGH_KEYS), "draft_lm_head_quantization")
    ),
    (
        {"model": "self", "linear_backend_per_quant": {"fp8_w8a8": "marlin"}},
        'linear_backend_per_quant is a draft model\'s, and with "model": "self" there is none',
    ),
    # Catches: one of two that contradict each other silently dropped.
    ({"request_scorers": ["fly"], "scorer": "loose"}, "leaves out the server's own scorer, 'loose'"),
    # Catches: a tree that is cut, slots that are wasted.
    (STATIC, "num_speculative_tokens must be 25, not 5"),
    ({**STATIC, "tree_paths": [[0], [1], [0, 0]]}, "num_speculative_tokens must be 3, not 5"),
    ({**STATIC, "tree_paths": [[0], [2]]}, "without its better sibling"),
    ({"draft_shape": "tree-adaptive", "num_speculative_tokens": 2}, "num_speculative_tokens of at least 3, got 2"),
    # Catches: a batch size without a row.
    ({"draft_shape": "auto", "adaptive_tokens": False}, "needs draft_table"),
    ({"draft_shape": "auto", "draft_table": [[2, 4, "chain", 5]]}, "must follow each other"),
    ({"draft_shape": "auto", "draft_table": TABLE}, "num_speculative_tokens is 5"),
    # Catches: a row that drafts nothing in some shape, or something in none.
    *(
        ({"draft_shape": "auto", "draft_table": [[1, 4, *row]]}, f"got {row[0]} with {row[1]}")
        for row in (("chain", 0), ("none", 3))
    ),
    # Catches: a batch size for which vLLM and the draft would look in different rows.
    *(
        ({SCHEDULE: rows}, f"{SCHEDULE}: batch sizes must {message}")
        for rows, message in (
            ([], "begin at 1"),
            ([[2, 4, 5]], "begin at 1"),
            ([[1, 4, 5], [4, 8, 2]], "ascend, each in one row: 1 to 4"),
            ([[1, 2, 5], [4, 3, 2]], "ascend, each in one row: 4 to 3"),
        )
    ),
]


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    """Catches what the comment above each case says."""
    changes, *words = case
    message = refused(**changes)
    assert all(word in message for word in words)
    assert ("did you mean" in message) == ("did you mean" in "".join(words))


def test_every_pattern_has_words():
    """Catches: a regular expression as what a user is told to write."""
    patterns = {
        f"parallel.{name}"
        for name, field in fields.ParallelKnobs.model_fields.items()
        if any(getattr(rule, "pattern", None) for rule in field.metadata)
    }
    assert patterns == set(spelling.FORMS) == {"parallel.device", "parallel.cpu_cores"}


def test_every_field_is_on_a_shelf():
    """Catches: a field that no table of the reference page has; a page that tells a newcomer more than four keys."""
    schemas = (model.model_json_schema()["properties"] for model in (VidSpecConfig, fields.ParallelKnobs))
    shelves = {name: of["shelf"] for schema in schemas for name, of in schema.items()}
    assert set(shelves.values()) == set(SHELVES)
    first = {"model", "num_speculative_tokens", "draft_shape", "prune_ratio"}
    assert {name for name, shelf in shelves.items() if shelf == "first"} == first


# Values that are not the defaults, of every kind that is not a plain word, number or truth value.
ELABORATE = {
    "parallel": {"device": "cuda:3", "tensor_parallel_size": 2, "cpu_cores": "2-5,8"},
    "draft_shape": "auto",
    "draft_table": ((1, 4, "chain", 5),),
    SCHEDULE: ((1, 4, 5), (5, 8, 0)),
    "auto_pruners": ("uniform", "uv"),
    "guidance_layers": (0, 2),
    "tree_paths": ((0,), (1,)),
    "request_scorers": ("loose", "strict"),
    "protected_tokens": ("no",),
    "linear_backend_per_quant": {"fp8_w8a8": "marlin"},
}


def test_a_worker_gets_what_was_configured():
    """Catches: a knob that its key does not reach, with dashes or not, or that a worker or a change does not get."""
    config = parsed(**{key.replace("_", "-"): value for key, value in ELABORATE.items()})
    assert {key: config.model_dump()[key] for key in ELABORATE} == ELABORATE
    assert VidSpecConfig(**config.model_dump()) == parsed().changed(ELABORATE) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 3), ("parallel.device", "tpu"), ("parallel.device", "cuda:x"), ("parallel.cpu_cores", "1-"),
        ("num_speculative_tokens", 1.5), ("draft_table", "odd"), (SCHEDULE, [[0, 4, 5]]), ("prune_ratio", float("nan")),
        ("frames_as_video", True), ("auto_pruners", []), ("auto_pruners", ["auto"]),
        ("fly_entropy", float("inf")), ("lambda_r", float("nan")), ("guidance_layers", []),
        ("guidance_layers", [-1]), ("tree_paths", [[0.5]]), ("request_scorers", ["lax"]), ("adaptive_tokens", "so"),
        ("on_draft_error", "shrug"), ("draft_lm_head_quantization", "int4"), ("linear_backend_per_quant", "marlin"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(key, value):
    """Catches: a message that does not name key and value."""
    group, _, own = key.partition(".")
    message = refused(**{group: {"device": "cpu", own: value} if own else value})
    assert f"{key}: " in message or f"{key}." in message
    assert repr(value) in message or isinstance(value, list)


def test_keys_as_they_come():
    """Catches: command-line spellings refused, for our keys or for vLLM's; a key of vLLM's swallowed or refused."""
    raw = {"model": "draft", "num-speculative-tokens": 3, "prune-ratio": 0.5, "code-revision": "v2"}
    config, passed = parse_config(raw)
    assert (config.num_speculative_tokens, config.prune_ratio, passed) == (3, 0.5, {"code_revision": "v2"})
    assert "prune-ratio" in raw  # the caller's dict is left alone
    extra = {key: f"value of {key}" for key in PASS_THROUGH_KEYS}
    assert parse_config({**GOOD, **extra})[1] == extra and not extra.keys() & VidSpecConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("changes", "video", "image"),
    [
        ({}, 0.9, 0.8),
        ({"prune_ratio": 0.5}, 0.5, 0.5),
        ({"prune_ratio": 0.99}, 0.99, 0.8),
        ({"prune_ratio": 1.0}, 1.0, 1.0),
        ({"prune_ratio": 1.0, "image_prune_ratio": 0.5}, 1.0, 0.5),
        ({"image_prune_ratio": 0.0}, 0.9, 0.0),
        ({"image_prune_ratio": 1.0, "prune_ratio": 0.0}, 0.0, 1.0),
        ({"pruner": "none", "image_prune_ratio": 0.7}, 0.0, 0.0),
    ],
)
def test_ratio_for(changes, video, image):
    """Catches: an image ratio of 0.0 taken for unset, image and video exchanged, `none` that prunes."""
    config = parsed(**changes)
    assert (config.ratio_for("video"), config.ratio_for("image")) == (video, image)


def test_calibration_replaces_defaults_only(tmp_path):
    """Catches: a calibration that overrules what the user wrote, or that is read again in a worker without the file."""
    path = str(tmp_path / "c.json")
    calibrated = {"lambda_r": 0.7, "guidance_layers": [3, 1]}
    (tmp_path / "c.json").write_text(json.dumps({"config": calibrated, "measurements": []}))
    config = parsed(calibration=path)
    assert (config.lambda_r, config.guidance_layers, config.calibration) == (0.7, (1, 3), path)
    config = parsed(calibration=path, lambda_r=0.2)
    assert (config.lambda_r, config.guidance_layers) == (0.2, (1, 3))
    (tmp_path / "c.json").unlink()
    assert VidSpecConfig(**config.model_dump()) == config == config.changed({})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("not json", "not a file of `vidspec calibrate`"),
        ('{"lambda_r": 0.5}', "not a file of `vidspec calibrate`"),
        ('{"config": {"fly_entropy": 5}}', "'fly_entropy', which is not calibrated"),
        ('{"config": {"lambda_r": 2}}', "lambda_r"),
    ],
)
def test_a_wrong_calibration_is_refused(tmp_path, content, words):
    """Catches: a file that is ignored, or that sets what no calibration measures."""
    path = tmp_path / "c.json"
    if content is not None:
        path.write_text(content)
    assert words in refused(calibration=str(path))


def test_the_shapes_of_a_draft():
    """Catches: a user's tree that is not the one drafted; a table's row taken for another's, or off by one."""
    config = parsed(draft_shape="tree-static", tree_paths=[[0], [1], [0, 0]], num_speculative_tokens=3)
    assert config.paths_of("tree-static") == ((0,), (1,), (0, 0)) and config.max_path == 2
    config = parsed(num_speculative_tokens=25, draft_shape="auto", draft_table=TABLE)
    tree, chain, none = ("tree-static", 25), ("chain", 5), ("none", 0)
    assert [config.plan_for(n) for n in (1, 4, 5, 16, 99)] == [tree] * 2 + [chain] * 3
    assert config.shapes == {"tree-static", "chain"} and config.max_path == 5
    config = parsed(num_speculative_tokens=25, draft_shape="auto", draft_table=[*TABLE, [17, 20, *none]])
    assert [config.plan_for(n) for n in (4, 16, 17, 20, 99)] == [tree, chain] + [none] * 3
    assert config.shapes == {"tree-static", "chain"} and config.max_path == 5
    idle = parsed(draft_shape="auto", draft_table=[[1, 16, *none]])
    assert idle.shapes == {"chain"} and idle.max_path == 1 and idle.plan_for(1) == idle.plan_for(99) == none


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({}, [(4, "chain", 5), (10, "chain", 2), (99, "none", 0)]),
        ({"num_speculative_tokens": 3}, [(4, "chain", 3), (10, "chain", 2), (99, "none", 0)]),
        ({"num_speculative_tokens": 25, "draft_shape": "auto",
          "draft_table": [[1, 2, "tree-static", 25], [3, 9, "chain", 3]]},
         [(2, "tree-static", 5), (4, "chain", 3), (10, "chain", 2), (99, "none", 0)]),
        ({"draft_shape": "auto", "draft_table": [[1, 6, "chain", 1], [7, 20, "none", 0]]},
         [(6, "chain", 1), (99, "none", 0)]),
    ],
)  # fmt: skip
def test_vllms_schedule_caps_what_is_drafted(changes, schedule):
    """Its rows out of order and with a gap: every batch size has the smaller number of the two."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    given = [[9, 10, 2], [11, 12, 0], [1, 4, 5], [5, 6, 2]]
    config = parsed(**{SCHEDULE: given}, **changes)
    assert config.has_schedule and not parsed().has_schedule
    assert not parsed(adaptive_tokens=False).changes_with_load
    expected = [next(row[1:] for row in schedule if size <= row[0]) for size in range(1, 21)]
    assert [config.plan_for(size) for size in range(1, 21)] == expected
    theirs = [(row.first, row.last, row.plan.num_tokens) for row in config.plans]
    assert build_dynamic_sd_schedule_lookup(theirs, 20, config.num_speculative_tokens)[1:] == [k for _, k in expected]
    if not changes:  # and alone vLLM reads the same in it
        assert build_dynamic_sd_schedule_lookup(given, 20, 5)[1:] == [k for _, k in expected]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, {"embeddings": 1200, "relevance": 857, "guidance": 857}),
        ({"scorer": "loose"}, {"embeddings": 342, "relevance": 857}),
        ({"request_scorers": ["loose"], "pruner": "uv"}, {"embeddings": 200, "relevance": 500, "guidance": 500}),
        ({"pruner": "auto"}, {"embeddings": 342, "guidance": 857}),
        ({"state_bytes": None, "scorer": "loose"}, dict.fromkeys(("embeddings", "relevance", "guidance"))),
    ],
)
def test_state_bytes_are_one_budget(changes, parts):
    """Catches: parts that add up to more, room kept for what is not, a default that is taken for none."""
    config = parsed(**{"state_bytes": 1200} | changes)
    assert {what: config.state_bytes_for(what) for what in parts} == parts
