"""VidSpecConfig and parse_config: defaults, ranges, groups, aliases, unknown keys, and one line for every error."""

import json

import pytest
from pydantic import ValidationError

from vllm_vidspec.config import GROUPS, PASS_THROUGH_KEYS, VidSpecConfig, fields, parse_config, spelling
from vllm_vidspec.errors import VidSpecError

GOOD = {"method": "vidspec", "model": "draft", "num_speculative_tokens": 5}
FLAT = parse_config(GOOD)[0].flat()
PLACES = {flat: (group, own) for group, knobs in GROUPS.items() for own, flat in knobs.flat_names().items()}


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
        message = refused(parallel={"device": "cpu"}, draft=shape, num_speculative_tokens=number)
        assert "parallel drafting streams a chain" in message and "\n" not in message


def test_a_change_is_a_checked_copy():
    """Catches: a configuration that changes after its validation; a change that is not checked, or is misnamed."""
    with pytest.raises(ValidationError):
        parsed().prune.ratio = 0.1
    with pytest.raises(VidSpecError, match=r"^speculative config: prune\.ratio: .* got 2"):
        parsed().changed({"prune": {"ratio": 2}})


def test_names_for_the_same():
    """Catches: "self" taken for a path; an alias lost, or one beside the name itself, with a say."""
    assert parsed(model="self").is_self_draft
    assert parsed(pruner="window").prune.pruner == "window:middle"
    for name in ("draft", "drafting"):
        assert parsed(num_speculative_tokens=25, **{name: "tree-static"}).draft_shape == "tree-static"
        assert f"draft_shape and {name} are aliases" in refused(**{"draft_shape": "chain", name: "chain"})


NEAREST = {
    "prune_ration": "prune_ratio",
    "pruning_ratio": "prune_ratio",
    "num_spec_tokens": "num_speculative_tokens",
    "scorrer": "scorer",
    "quantisation": "quantization",  # a pass-through key is known too
    "prunes": "prune",
}
TABLE = [[1, 4, "tree-static", 25], [5, 16, "chain", 5]]
SCHEDULE = "num_speculative_tokens_per_batch_size"
TWO_TREES = [[1, 4, "tree-static", 5], [5, 16, "tree-adaptive", 5]]
STATIC = {"draft": "tree-static"}
# Changes, and what the message says of them.
REFUSED = [
    # Catches: an ignored unknown key, an error without a hint.
    *(({key: 1}, f"unknown key {key!r} (did you mean {nearest!r}?)") for key, nearest in NEAREST.items()),
    # Catches: a made-up hint; a second unknown key left out.
    ({"zzz": 1, "qqqq": 2}, "'zzz'", "'qqqq'"),
    # Catches: an ignored key of a group, a hint at another group's; what is no group at all.
    ({"tree": {"dept_max": 3}}, "unknown key 'tree.dept_max' (did you mean 'tree.depth_max'?)"),
    ({"prune": {"ration": 1}, "zz": 1}, "unknown key 'prune.ration' (did you mean 'prune.ratio'?); 'zz'"),
    ({"pool": 3}, "pool: expected an object of fields, got 3"),
    # Catches: a name in the error's line that the user never wrote.
    ({"tree": {"depth-max": 65}}, "tree.depth_max: Input should be less than or equal to 64, got 65"),
    ({"tree_depth_max": 65}, "tree_depth_max: Input"),
    # Catches: a default for what only the user can know.
    *(({key: ...}, f"speculative config: {key}: Field required") for key in ("model", "num_speculative_tokens")),
    # Catches: only the first problem shown, or a multi-line pydantic dump.
    ({"prune_ratio": 1.5, "num_speculative_tokens": 0}, "prune_ratio: ", "got 1.5", "num_speculative_tokens: "),
    # Catches: an unknown name without hint or list.
    (
        {"pruner": "unifrom"},
        "unknown pruner 'unifrom' (did you mean 'uniform'?)",
        f"known: {', '.join(fields.PRUNERS)}",
    ),
    # Catches: a name in other letters, or a group's value without its group, that is not recognised.
    ({"pruner": "SpecVLM"}, "unknown pruner 'SpecVLM' (did you mean 'specvlm'?)"),
    ({"Prune_Ratio": 1}, "unknown key 'Prune_Ratio' (did you mean 'prune_ratio'?)"),
    ({"model": "Self"}, "model: 'Self' (did you mean 'self'?)"),
    ({"model": " self "}, "model: ' self ' (did you mean 'self'?)"),
    ({"model": ""}, 'model: a name, a path or "self" is missing'),
    ({"parallel": "cuda:1"}, 'parallel: expected an object of fields, such as {"device": "cuda:1"}, got'),
    ({"prune": "uv"}, 'prune: expected an object of fields, such as {"pruner": "uv"}, got'),
    ({"score": "loose"}, 'score: expected an object of fields, such as {"scorer": "loose"}, got'),
    ({"parallel": {"device": "gpu1"}}, "parallel.device: expected cpu or cuda:N, such as cuda:1, got 'gpu1'"),
    ({"parallel_cpu_cores": "2 to 5"}, "parallel_cpu_cores: expected numbers and ranges, such as 2-5,8, got '2 to 5'"),
    # Catches: the first of several wrong keys alone, so that a start is needed for each.
    (
        {"prune_ratio": 2, "pruner": "x", "scorer": "y", "foo": 1, "pool": 3, "draft": "chain", "draft_shape": "chain"},
        *("'foo'", "prune_ratio: ", "unknown pruner 'x'", "scorer: ", "pool: expected", "draft and draft_shape are"),
    ),
    (
        {"tree": {"depth_max": 65, "qqqqqqqq": 1}, "prune_ratio": float("nan"), "lambda_r": 3},
        "'tree.qqqqqqqq'",
        "prune_ratio: ",
    ),
    # Catches: what has no effect, and is accepted.
    ({"draft_table": [[1, 4, "chain", 5]]}, 'draft_table needs "draft_shape": "auto", this is \'chain\''),
    (
        {**STATIC, SCHEDULE: None, "draft_table": TABLE},
        'draft_table needs "draft_shape": "auto", this is \'tree-static\'',
    ),
    *(
        ({"model": "self", key: "fp8"}, f'{key} is a draft model\'s, and with "model": "self" there is none')
        for key in sorted(PASS_THROUGH_KEYS)
    ),
    # Catches: one of two that contradict each other silently dropped.
    ({"draft_kv_fraction": 0.1, "pool": {"kv_bytes": 1024}}, "draft_kv_fraction or draft_kv_bytes, not both"),
    ({"request_scorers": ["fly"], "scorer": "loose"}, "leaves out the server's own scorer, 'loose'"),
    # Catches: a tree that is cut, slots that are wasted.
    (STATIC, "num_speculative_tokens must be 25, not 5"),
    ({**STATIC, "tree_paths": [[0], [1], [0, 0]]}, "num_speculative_tokens must be 3, not 5"),
    ({**STATIC, "tree_paths": [[0], [2]]}, "without its better sibling"),
    ({"draft": "tree-adaptive", "tree_depth_min": 6}, "at least tree_depth_min, 6"),
    ({"tree": {"depth_min": 9}}, "tree_depth_min 9 is more than tree_depth_max 8"),
    ({"tree_width_min": 11}, "tree_width_min 11 is more than tree_width_max 10"),
    ({"tree_history_low": 4.0}, "tree_history_low 4.0 is more than tree_history_high 3.0"),
    # Catches: a batch size without a row.
    ({"draft": "auto", "adaptive_tokens": False}, "needs draft_table"),
    ({"draft": "auto", "draft_table": [[2, 4, "chain", 5]]}, "must follow each other"),
    ({"draft": "auto", "draft_table": TABLE}, "num_speculative_tokens is 5"),
    ({"draft": "auto", "draft_table": TWO_TREES}, "one tree shape"),
    # Catches: a row that drafts nothing in some shape, or something in none.
    *(
        ({"draft": "auto", "draft_table": [[1, 4, *row]]}, f"got {row[0]} with {row[1]}")
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
    knobs = {flat: GROUPS[group].model_fields[own] for flat, (group, own) in PLACES.items()}
    patterns = {key for key, field in knobs.items() if any(getattr(rule, "pattern", None) for rule in field.metadata)}
    assert patterns == set(spelling.FORMS) == {"parallel_device", "parallel_cpu_cores"}
    assert all("expected" in refused(**{key: "?"}) and "pattern" not in refused(**{key: "?"}) for key in patterns)


SCHEMAS = {
    flat: GROUPS[group].model_json_schema()["properties"][own] for flat, (group, own) in PLACES.items()
} | VidSpecConfig.model_json_schema()["properties"]
# Values of knobs that have no words or bounds of their own, or whose bounds are another knob's.
TAKEN = {
    "model": "some/path",
    "parallel_device": "cuda:3",
    "parallel_cpu_cores": "2-5,8",
    "draft_shape": "auto",
    "draft_table": ((1, 4, "chain", 5),),
    SCHEDULE: ((1, 4, 5), (5, 8, 0)),
    "pruner": "auto",
    "auto_pruners": ("uniform", "uv"),
    "auto_ratios": (0.0, 0.9),
    "auto_file": "some/file",
    "guidance_layers": (0, 2),
    "tree_paths": ((0,), (1,)),
    "tree_depth_max": 64,
    "tree_width_max": 32,
    "tree_history_high": 8.0,
    "request_scorers": ("loose", "strict"),
    "protected_tokens": ("no",),
    **dict.fromkeys(("failure_window_s", "cooldown_s", "draft_kv_fraction"), 0.5),
}


def taken(key: str):
    """Return a value of a knob that is not its default."""
    if key in TAKEN:
        return TAKEN[key]
    parts = [SCHEMAS[key], *SCHEMAS[key].get("anyOf", [])]
    bounds = (part[bound] for part in parts for bound in ("minimum", "maximum") if bound in part)
    values = [*bounds, *(word for part in parts for word in part.get("enum", [])), False, True]
    return next(value for value in values if value != FLAT[key])


@pytest.mark.parametrize("key", [key for key in FLAT if key != "calibration"])
def test_every_spelling_reaches_its_knob(key):
    """Catches: a knob that a spelling does not reach, or two at once, or that a worker or a change does not get."""
    value = taken(key)
    beside = {"draft_shape": "auto"} if key == "draft_table" else {}
    config = parsed(**{key: value}, **beside)
    assert config.flat()[key] == value
    assert VidSpecConfig(**config.model_dump()) == parsed().changed({key: value} | beside) == config
    if key in PLACES:
        group, own = PLACES[key]
        assert getattr(getattr(config, group), own) == value
        assert parsed(**{group: {own.replace("_", "-"): value}}) == config
        assert f"{group}.{own} are aliases" in refused(**{key: value, group: {own: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 3), ("parallel_device", "tpu"), ("parallel_device", "cuda:x"), ("parallel_cpu_cores", "1-"),
        ("num_speculative_tokens", 1.5), ("draft_table", "odd"), (SCHEDULE, [[0, 4, 5]]), ("prune_ratio", float("nan")),
        ("frames_as_video", True), ("auto_pruners", []), ("auto_pruners", ["auto"]), ("auto_ratios", [1.1]),
        ("failure_window_s", float("inf")), ("cooldown_s", float("nan")), ("guidance_layers", []),
        ("guidance_layers", [-1]), ("tree_paths", [[0.5]]), ("request_scorers", ["lax"]), ("adaptive_tokens", "so"),
        ("on_draft_error", "shrug"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(key, value):
    """Catches: a message that does not name key and value."""
    message = refused(**{key: value})
    assert f"{key}: " in message or f"{key}." in message
    assert repr(value) in message or isinstance(value, list)


def test_keys_as_they_come():
    """Catches: command-line spellings refused, for our keys or for vLLM's; a key of vLLM's swallowed or refused."""
    raw = {"model": "draft", "num-speculative-tokens": 3, "prune-ratio": 0.5, "code-revision": "v2"}
    config, passed = parse_config(raw)
    assert (config.num_speculative_tokens, config.prune.ratio, passed) == (3, 0.5, {"code_revision": "v2"})
    assert "prune-ratio" in raw  # the caller's dict is left alone
    extra = {key: f"value of {key}" for key in PASS_THROUGH_KEYS}
    assert parse_config({**GOOD, **extra})[1] == extra and not set(extra) & set(FLAT)


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
    assert (config.prune.ratio_for("video"), config.prune.ratio_for("image")) == (video, image)


def test_calibration_replaces_defaults_only(tmp_path):
    """Catches: a calibration that overrules what the user wrote, or that is read again in a worker without the file."""
    path = str(tmp_path / "c.json")
    calibrated = {"lambda_r": 0.7, "guidance_layers": [3, 1]}
    (tmp_path / "c.json").write_text(json.dumps({"config": calibrated, "measurements": []}))
    config = parsed(calibration=path)
    assert (config.prune.lambda_r, config.prune.guidance_layers, config.calibration) == (0.7, (1, 3), path)
    for given in ({"lambda_r": 0.2}, {"prune": {"lambda_r": 0.2}}):
        config = parsed(calibration=path, **given)
        assert (config.prune.lambda_r, config.prune.guidance_layers) == (0.2, (1, 3))
    (tmp_path / "c.json").unlink()
    assert VidSpecConfig(**config.model_dump()) == config == config.changed({})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("not json", "not a file of `vidspec calibrate`"),
        ('{"lambda_r": 0.5}', "not a file of `vidspec calibrate`"),
        ('{"config": {"top_n": 5}}', "'top_n', which is not calibrated"),
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
    assert config.tree.static_paths == ((0,), (1,), (0, 0)) and config.max_path == 2
    config = parsed(num_speculative_tokens=25, draft="auto", draft_table=TABLE)
    tree, chain, none = ("tree-static", 25), ("chain", 5), ("none", 0)
    assert [config.plan_for(n) for n in (1, 4, 5, 16, 99)] == [tree] * 2 + [chain] * 3
    assert config.shapes == {"tree-static", "chain"} and config.max_path == 5
    config = parsed(num_speculative_tokens=25, draft="auto", draft_table=[*TABLE, [17, 20, *none]])
    assert [config.plan_for(n) for n in (4, 16, 17, 20, 99)] == [tree, chain] + [none] * 3
    assert config.shapes == {"tree-static", "chain"} and config.max_path == 5
    idle = parsed(draft="auto", draft_table=[[1, 16, *none]])
    assert idle.shapes == {"chain"} and idle.max_path == 1 and idle.plan_for(1) == idle.plan_for(99) == none


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({}, [(4, "chain", 5), (10, "chain", 2), (99, "none", 0)]),
        ({"num_speculative_tokens": 3}, [(4, "chain", 3), (10, "chain", 2), (99, "none", 0)]),
        ({"num_speculative_tokens": 25, "draft": "auto",
          "draft_table": [[1, 2, "tree-static", 25], [3, 9, "chain", 3]]},
         [(2, "tree-static", 5), (4, "chain", 3), (10, "chain", 2), (99, "none", 0)]),
        ({"draft": "auto", "draft_table": [[1, 6, "chain", 1], [7, 20, "none", 0]]},
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
