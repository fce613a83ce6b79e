"""VidSpecConfig and parse_config: defaults, ranges, aliases, unknown keys, and one line for every error."""

import json

import pytest
from pydantic import ValidationError

from vllm_vidspec.config import PASS_THROUGH_KEYS, PRUNERS, VidSpecConfig, parse_config
from vllm_vidspec.errors import VidSpecError

GOOD = {"method": "vidspec", "model": "draft", "num_speculative_tokens": 5}


def refused(**changes) -> str:
    """The message for a config with these changes; asserts that it is one line that says where it comes from."""
    with pytest.raises(VidSpecError) as caught:
        parse_config({**GOOD, **changes})
    message = str(caught.value)
    assert message.startswith("speculative config: ") and "\n" not in message
    return message


def test_defaults():
    """Catches: a changed default (they are documented)."""
    config, passed = parse_config(GOOD)
    assert passed == {}
    assert config.model_dump() == {
        "model": "draft",
        "num_speculative_tokens": 5,
        "prune_ratio": 0.9,
        "image_prune_ratio": None,
        "pruner": "specvlm",
        "lambda_r": 0.4,
        "guidance_layers": "all",
        "uv_layer": None,
        "guidance_bytes": None,
        "calibration": None,
        "prune_seed": 0,
        "draft": "chain",
        "draft_table": None,
        "tree_paths": None,
        "tree_depth_min": 3,
        "tree_depth_max": 8,
        "tree_width_min": 2,
        "tree_width_max": 10,
        "tree_entropy_top_k": 10,
        "tree_threshold": 0.1,
        "tree_history": 10,
        "tree_history_low": 2.0,
        "tree_history_high": 3.0,
        "tree_lookahead": True,
        "tree_fill": None,
        "scorer": "strict",
        "request_scorers": None,
        "lambda_loose": 0.7,
        "lambda_max": None,
        "top_n": 10,
        "position_shift": True,
        "relevance_rows": "token",
        "relevance_dtype": "auto",
        "relevance_bytes": None,
        "fly_entropy": 0.2,
        "fly_window": 4,
        "fly_top_k": 0,
        "protected_tokens": None,
        "draft_noise": "shared",
        "draft_positions": "original",
        "draft_kv_fraction": None,
        "draft_kv_bytes": None,
        "draft_encoder_bytes": None,
        "max_draft_len": None,
        "on_draft_error": "skip",
    }
    assert not config.is_self_draft


def test_self_draft():
    """Catches: "self" taken for a path."""
    assert parse_config({**GOOD, "model": "self"})[0].is_self_draft


def test_every_knob_is_documented():
    """Catches: a knob without a description (the reference page is generated from them)."""
    assert all(field.description for field in VidSpecConfig.model_fields.values())


def test_frozen():
    """Catches: a configuration that changes after its validation."""
    with pytest.raises(ValidationError):
        parse_config(GOOD)[0].prune_ratio = 0.1


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("prune_ration", "prune_ratio"),
        ("pruning_ratio", "prune_ratio"),
        ("num_spec_tokens", "num_speculative_tokens"),
        ("scorrer", "scorer"),
        ("quantisation", "quantization"),  # a pass-through key is known too
    ],
)
def test_unknown_key_names_the_nearest(key, nearest):
    """Catches: an ignored unknown key, an error without a hint."""
    assert f"unknown key {key!r} (did you mean {nearest!r}?)" in refused(**{key: 1})


def test_unknown_keys_without_a_neighbour():
    """Catches: a made-up hint; a second unknown key left out."""
    message = refused(zzz=1, qqqq=2)
    assert "'zzz'" in message and "'qqqq'" in message and "did you mean" not in message


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("num_speculative_tokens", (0, -1, 65, "many", 1.5), (1, 64)),
        ("prune_ratio", (-0.01, 1.01, 1.5, float("nan"), "much"), (0.0, 1.0, 0.35)),
        ("image_prune_ratio", (-0.01, 1.5), (0.0, 1.0, None)),
        ("prune_seed", (-1,), (0, 2**40)),
        ("draft_kv_fraction", (0.0, 1.0, -0.5), (0.01, 0.99)),
        ("draft_kv_bytes", (0, -5), (1,)),
        ("max_draft_len", (0,), (1,)),
        ("draft", ("forest",), ("chain",)),
        ("tree_depth_min", (0, 65), (1, 8)),
        ("tree_depth_max", (0, 65), (3, 64)),
        ("tree_width_min", (0, 33), (1, 10)),
        ("tree_width_max", (0, 33), (2, 32)),
        ("tree_entropy_top_k", (1, 33), (2, 32)),
        ("tree_threshold", (-0.1, 1.0), (0.0, 0.5)),
        ("tree_history", (-1,), (0, 100)),
        ("tree_history_low", (-0.5,), (0.0, 3.0)),
        ("tree_history_high", (-1.0,), (2.0, 8.0)),
        ("tree_lookahead", ("perhaps",), (False,)),
        ("tree_fill", ("perhaps",), (False, True)),
        ("scorer", ("lax",), ("strict",)),
        ("draft_noise", ("loud",), ("shared", "independent", "greedy")),
        ("draft_positions", ("odd",), ("original", "compacted")),
        ("on_draft_error", ("shrug",), ("skip", "raise")),
        ("model", (None, 3), ("some/path",)),
    ],
)
def test_ranges(key, bad, good):
    """Catches: a bound moved by one, or open where it is closed; a message that does not name key and value."""
    for value in good:
        assert getattr(parse_config({**GOOD, key: value})[0], key) == value
    for value in bad:
        message = refused(**{key: value})
        assert f"{key}: " in message and repr(value) in message


@pytest.mark.parametrize("key", ["model", "num_speculative_tokens"])
def test_missing_key(key):
    """Catches: a default for what only the user can know."""
    with pytest.raises(VidSpecError, match=f"speculative config: {key}: Field required"):
        parse_config({name: value for name, value in GOOD.items() if name != key})


def test_two_wrong_values_make_one_line():
    """Catches: only the first problem shown, or a multi-line pydantic dump."""
    message = refused(prune_ratio=1.5, num_speculative_tokens=0)
    assert "prune_ratio: " in message and "got 1.5" in message and "num_speculative_tokens: " in message


def test_pruner_names():
    """Catches: a known name refused, the alias lost, an unknown name without hint or list."""
    for name in PRUNERS:
        assert parse_config({**GOOD, "pruner": name})[0].pruner == name
    assert parse_config({**GOOD, "pruner": "window"})[0].pruner == "window:middle"
    message = refused(pruner="unifrom")
    assert "unknown pruner 'unifrom' (did you mean 'uniform'?)" in message
    assert "known: " + ", ".join(PRUNERS) in message


def test_both_pool_sizes():
    """Catches: one of two contradicting pool sizes silently dropped."""
    assert "draft_kv_fraction or draft_kv_bytes, not both" in refused(draft_kv_fraction=0.1, draft_kv_bytes=1024)


def test_dashes_count_as_underscores():
    """Catches: command-line spellings refused, for our keys or for vLLM's."""
    raw = {"model": "draft", "num-speculative-tokens": 3, "prune-ratio": 0.5, "code-revision": "v2"}
    config, passed = parse_config(raw)
    assert (config.num_speculative_tokens, config.prune_ratio, passed) == (3, 0.5, {"code_revision": "v2"})
    assert "prune-ratio" in raw  # the caller's dict is left alone


def test_pass_through():
    """Catches: a key of vLLM's swallowed or refused."""
    extra = {key: f"value of {key}" for key in PASS_THROUGH_KEYS}
    config, passed = parse_config({**GOOD, **extra})
    assert passed == extra
    assert not set(extra) & set(config.model_dump())


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
    config, _ = parse_config({**GOOD, **changes})
    assert (config.ratio_for("video"), config.ratio_for("image")) == (video, image)


def test_summary():
    """Catches: a start-up line that breaks, or leaves out a value that is set, or shows one that is not."""
    summary = parse_config({**GOOD, "draft_kv_bytes": 4096})[0].summary()
    assert "\n" not in summary
    for part in ("model=draft", "num_speculative_tokens=5", "prune_ratio=0.9", "pruner=specvlm", "draft_kv_bytes=4096"):
        assert part in summary.split()
    assert "None" not in summary and "draft_kv_fraction" not in summary


def write_calibration(path, config) -> str:
    path.write_text(json.dumps({"config": config, "measurements": []}))
    return str(path)


def test_calibration_replaces_defaults_only(tmp_path):
    """Catches: a calibration that overrules what the user wrote, or that is read again in a worker without the file."""
    path = write_calibration(tmp_path / "c.json", {"lambda_r": 0.7, "guidance_layers": [3, 1]})
    config, _ = parse_config({**GOOD, "calibration": path})
    assert (config.lambda_r, config.guidance_layers, config.calibration) == (0.7, (1, 3), path)
    config, _ = parse_config({**GOOD, "calibration": path, "lambda_r": 0.2})
    assert (config.lambda_r, config.guidance_layers) == (0.2, (1, 3))
    (tmp_path / "c.json").unlink()
    assert VidSpecConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("not json", "not a file of `vidspec calibrate`"),
        ('{"lambda_r": 0.5}', "not a file of `vidspec calibrate`"),
        ('{"config": {"prune_ratio": 0.5}}', "'prune_ratio', which is not calibrated"),
        ('{"config": {"lambda_r": 2}}', "lambda_r"),
    ],
)
def test_a_wrong_calibration_is_refused(tmp_path, content, words):
    """Catches: a file that is ignored, or that sets what no calibration measures."""
    path = tmp_path / "c.json"
    if content is not None:
        path.write_text(content)
    assert words in refused(calibration=str(path))


@pytest.mark.parametrize("layers", [[], [-1], "some", [0.5]])
def test_wrong_guidance_layers_are_refused(layers):
    """Catches: an empty choice that would divide by zero layers, or a negative index that wraps around."""
    assert "guidance_layers" in refused(guidance_layers=layers)


def test_a_static_tree_says_how_many_tokens_it_takes():
    """Catches: a tree that is cut, or slots that are wasted, without a word."""
    assert "num_speculative_tokens must be 25, not 5" in refused(draft="tree-static")
    tree = {"draft": "tree-static", "tree_paths": [[0], [1], [0, 0]]}
    assert "num_speculative_tokens must be 3, not 5" in refused(**tree)
    config, _ = parse_config({**GOOD, **tree, "num_speculative_tokens": 3})
    assert config.static_paths == ((0,), (1,), (0, 0)) and config.max_path == 2
    assert "without its better sibling" in refused(draft="tree-static", tree_paths=[[0], [2]])
    assert "at least tree_depth_min, 6" in refused(draft="tree-adaptive", tree_depth_min=6)
    assert "tree_width_min 11 is more than tree_width_max 10" in refused(tree_width_min=11)
    assert "tree_history_low 4.0 is more than tree_history_high 3.0" in refused(tree_history_low=4.0)


def test_auto_needs_a_whole_table():
    """Catches: a batch size without a row, two trees at once, a shape that never gets its tokens."""
    table = [[1, 4, "tree-static", 25], [5, 16, "chain", 5]]
    given = {**GOOD, "num_speculative_tokens": 25}
    config, _ = parse_config({**given, "draft": "auto", "draft_table": table})
    assert [config.shape_for(n) for n in (1, 4, 5, 16, 99)] == ["tree-static"] * 2 + ["chain"] * 3
    assert config.shapes == {"tree-static", "chain"} and config.max_path == 5
    assert parse_config({**given, "drafting": "auto", "draft_table": table})[0] == config  # the knob's other name
    assert "needs draft_table" in refused(draft="auto")
    assert "must follow each other" in refused(draft="auto", draft_table=[[2, 4, "chain", 5]])
    assert "num_speculative_tokens is 5" in refused(draft="auto", draft_table=table)
    two = [[1, 4, "tree-static", 5], [5, 16, "tree-adaptive", 5]]
    assert "one tree shape" in refused(draft="auto", draft_table=two)
