"""Families: token grids at true geometry, fallbacks, and which pairs are refused; namespaces and real HF configs."""

import copy
from types import SimpleNamespace

import pytest
import torch

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.families import adapter_for, check_pair, check_ranks, families, register_family
from vllm_vidspec.pruning import TokenGrid

transformers = pytest.importorskip("transformers")


def qwen():
    """The attributes of Qwen2.5-VL-7B that matter."""
    return SimpleNamespace(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        model_type="qwen2_5_vl",
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        text_config=SimpleNamespace(vocab_size=152064, hidden_size=3584),
        vision_config=SimpleNamespace(
            patch_size=14, spatial_merge_size=2, temporal_patch_size=2, in_channels=3, tokens_per_second=2
        ),
    )


def llava():
    """The attributes of LLaVA-OneVision-7B that matter."""
    return SimpleNamespace(
        architectures=["LlavaOnevisionForConditionalGeneration"],
        model_type="llava_onevision",
        image_token_index=151646,
        video_token_index=151647,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        image_grid_pinpoints=[[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)],
        text_config=SimpleNamespace(vocab_size=152128, hidden_size=3584),
        vision_config=SimpleNamespace(model_type="siglip_vision_model", image_size=384, patch_size=14, num_channels=3),
    )


def real_qwen(**text):
    config = transformers.Qwen2_5_VLConfig(text_config={"vocab_size": 152064, "rope_parameters": None} | text)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def real_llava():
    config = transformers.LlavaOnevisionConfig()
    config.architectures = ["LlavaOnevisionForConditionalGeneration"]
    return config


MAKERS = [qwen, llava, real_qwen, real_llava]


# --- which adapter ---


@pytest.mark.parametrize(
    ("make", "name"),
    [(qwen, "qwen2.5-vl"), (real_qwen, "qwen2.5-vl"), (llava, "llava-onevision"), (real_llava, "llava-onevision")],
)
def test_adapter_for(make, name):
    """Catches: an architecture or model type that is not recognised, from configs with and without architectures."""
    config = make()
    assert adapter_for(config).name == name
    config.architectures = None
    assert adapter_for(config).name == name


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (SimpleNamespace(architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl"), "Qwen2VL"),
        (SimpleNamespace(architectures=None, model_type="llama"), "'llama'"),
        (SimpleNamespace(), "None"),
        # The architecture decides: a derived model with a known model type is another model.
        (SimpleNamespace(architectures=["OtherModel"], model_type="qwen2_5_vl"), "OtherModel"),
    ],
)
def test_unknown_family(config, shown):
    """Catches: a neighbour family taken for ours; an error that does not say what is supported."""
    with pytest.raises(VidSpecError, match=f"unsupported model family: .*{shown}") as caught:
        adapter_for(config)
    assert "supported: qwen2.5-vl, llava-onevision" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_registry():
    """Catches: an adapter lost or silently replaced."""
    assert [adapter.name for adapter in families()] == ["qwen2.5-vl", "llava-onevision"]
    with pytest.raises(ValueError, match="registered twice"):
        register_family(families()[0])


# --- grids ---


@pytest.mark.parametrize("make", [qwen, real_qwen])
@pytest.mark.parametrize(
    ("modality", "thw", "num_tokens", "grid"),
    [
        ("video", torch.tensor([8, 16, 20]), 640, TokenGrid(8, 8, 10)),
        ("video", torch.tensor([[8, 16, 20]]), 640, TokenGrid(8, 8, 10)),
        ("video", [4, 4, 6], 24, TokenGrid(4, 2, 3)),
        ("image", torch.tensor([1, 36, 52]), 468, TokenGrid(1, 18, 26)),
        # Does not multiply out (a pruned target, a broken item): one row.
        ("video", torch.tensor([8, 16, 20]), 639, TokenGrid(1, 1, 639)),
        ("video", torch.tensor([8, 16]), 32, TokenGrid(1, 1, 32)),
        ("video", torch.tensor([-8, -16, 20]), 640, TokenGrid(1, 1, 640)),
        ("video", torch.tensor([], dtype=torch.int64), 5, TokenGrid(1, 1, 5)),
        ("video", "nonsense", 5, TokenGrid(1, 1, 5)),
        ("video", None, 5, TokenGrid(1, 1, 5)),
        ("video", None, 0, TokenGrid(1, 1, 0)),
    ],
)
def test_qwen_grid(make, modality, thw, num_tokens, grid):
    """Catches: an unmerged grid, height and width exchanged, an odd item that fails a request."""
    config = make()
    assert adapter_for(config).item_grid(modality, {f"{modality}_grid_thw": thw}, num_tokens, config) == grid


def test_qwen_grid_without_data():
    """Catches: the other modality's grid taken; a missing key or merge size that raises."""
    config = qwen()
    adapter = adapter_for(config)
    thw = torch.tensor([1, 4, 4])
    assert adapter.item_grid("video", {"image_grid_thw": thw}, 4, config) == TokenGrid(1, 1, 4)
    del config.vision_config.spatial_merge_size
    assert adapter.item_grid("image", {"image_grid_thw": thw}, 4, config) == TokenGrid(1, 1, 4)


@pytest.mark.parametrize("make", [llava, real_llava])
@pytest.mark.parametrize(
    ("data", "num_tokens", "grid"),
    [
        ({}, 64 * 196 + 1, TokenGrid(64, 14, 14, 1)),  # 384 // 14 = 27 patches a side, pooled to 14
        ({"pixel_values_videos": torch.empty(2, 3, 4, 4)}, 393, TokenGrid(2, 14, 14, 1)),
        ({"pixel_values_videos": torch.empty(3, 3, 4, 4)}, 393, TokenGrid(1, 1, 393)),  # frames contradict
        ({}, 392, TokenGrid(1, 1, 392)),
        ({}, 1, TokenGrid(1, 1, 1)),
        ({}, 0, TokenGrid(1, 1, 0)),
    ],
)
def test_llava_video_grid(make, data, num_tokens, grid):
    """Catches: floor instead of ceil in the pooling (13), a forgotten newline, a trailing token in a flat row."""
    config = make()
    assert adapter_for(config).item_grid("video", data, num_tokens, config) == grid


def test_llava_other_geometry():
    """Catches: a hard-wired 14 x 14 or stride 2; a config without a vision part that raises."""
    config = llava()
    config.vision_config = SimpleNamespace(image_size=112, patch_size=14)
    adapter = adapter_for(config)
    assert adapter.item_grid("video", {}, 8 * 16 + 1, config) == TokenGrid(8, 4, 4, 1)
    config.spatial_pool_stride = 4
    assert adapter.item_grid("video", {}, 8 * 4 + 1, config) == TokenGrid(8, 2, 2, 1)
    config.vision_config = None
    assert adapter.item_grid("video", {}, 129, config) == TokenGrid(1, 1, 129)


def test_llava_image_is_one_row():
    """Catches: an anyres image, whose newlines are interleaved, cut like a video (here even the count would fit)."""
    assert adapter_for(llava()).item_grid("image", {}, 393, llava()) == TokenGrid(1, 1, 393)


# --- pairs ---


@pytest.mark.parametrize("make", MAKERS)
def test_equal_configs_fit(make):
    """Catches: a model that may not draft for itself."""
    assert adapter_for(make()).check_pair(make(), make()) == []
    assert check_pair(make(), make()).name == adapter_for(make()).name


def test_sizes_may_differ():
    """Catches: a comparison of what a smaller draft is meant to differ in."""
    assert (
        check_pair(real_qwen(hidden_size=5120, num_hidden_layers=64), real_qwen(hidden_size=3584)).name == "qwen2.5-vl"
    )


@pytest.mark.parametrize(
    ("make", "path", "value", "sentence"),
    [
        (qwen, "text_config.vocab_size", 151936, "vocabulary size is 152064 in the target but 151936 in the draft"),
        (qwen, "vision_config.patch_size", 16, "patch size is 14 in the target but 16 in the draft"),
        (qwen, "vision_config.spatial_merge_size", 4, "spatial merge size is 2 in the target but 4 in the draft"),
        (qwen, "vision_config.temporal_patch_size", 1, "temporal patch size is 2 in the target but 1 in the draft"),
        (qwen, "vision_config.in_channels", 1, "number of pixel channels is 3 in the target but 1 in the draft"),
        (qwen, "vision_config.tokens_per_second", 4, "tokens per second is 2 in the target but 4 in the draft"),
        (qwen, "image_token_id", 7, "image token id is 151655 in the target but 7 in the draft"),
        (qwen, "video_token_id", 7, "video token id is 151656 in the target but 7 in the draft"),
        (qwen, "vision_start_token_id", 7, "vision start token id is 151652 in the target but 7 in the draft"),
        (qwen, "vision_end_token_id", None, "vision end token id is 151653 in the target but missing in the draft"),
        (llava, "text_config.vocab_size", 152000, "vocabulary size is 152128 in the target but 152000 in the draft"),
        (llava, "vision_config.image_size", 336, "frame size in pixels is 384 in the target but 336 in the draft"),
        (llava, "vision_config.patch_size", 16, "patch size is 14 in the target but 16 in the draft"),
        (llava, "vision_config.num_channels", 1, "number of pixel channels is 3 in the target but 1 in the draft"),
        (llava, "spatial_pool_stride", 4, "spatial pooling stride is 2 in the target but 4 in the draft"),
        (
            llava,
            "vision_config.model_type",
            "clip_vision_model",
            "vision tower type is 'siglip_vision_model' in the target but 'clip_vision_model' in the draft",
        ),
        (
            llava,
            "vision_feature_select_strategy",
            "default",
            "vision feature select strategy is 'full' in the target but 'default' in the draft",
        ),
        (llava, "image_token_index", 7, "image token id is 151646 in the target but 7 in the draft"),
        (llava, "video_token_index", 7, "video token id is 151647 in the target but 7 in the draft"),
        (
            llava,
            "vision_aspect_ratio",
            "anyres_max_4",
            "vision aspect ratio is 'anyres_max_9' in the target but 'anyres_max_4' in the draft",
        ),
        (llava, "image_grid_pinpoints", [[384, 384]], "but [[384, 384]] in the draft"),
    ],
)
def test_each_difference_is_named(make, path, value, sentence):
    """Catches: a property that is not compared, or reported with the two values exchanged."""
    target, draft = make(), make()
    holder = draft
    *parents, leaf = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    setattr(holder, leaf, value)
    problems = adapter_for(target).check_pair(target, draft)
    assert len(problems) == 1 and problems[0].endswith(sentence)
    assert len(problems[0]) < 200
    with pytest.raises(VidSpecError, match="the draft does not fit the target") as caught:
        check_pair(target, draft)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_all_differences_are_listed():
    """Catches: a check that stops at the first problem."""
    draft = copy.deepcopy(qwen())
    draft.text_config.vocab_size, draft.vision_config.patch_size, draft.video_token_id = 100, 16, 7
    with pytest.raises(VidSpecError) as caught:
        check_pair(qwen(), draft)
    for part in ("vocabulary size is 152064", "patch size is 14", "video token id is 151656"):
        assert part in str(caught.value)


def test_real_configs_differ():
    """Catches: attribute paths that hold for our namespaces only."""
    draft = real_qwen(vocab_size=151936)
    draft.vision_config.spatial_merge_size = 4
    assert len(adapter_for(draft).check_pair(real_qwen(), draft)) == 2
    small = transformers.LlavaOnevisionConfig(
        image_token_index=5, vision_config={"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    )
    problems = adapter_for(small).check_pair(real_llava(), small)
    assert any("image token id is 151646" in problem for problem in problems)
    assert any("frame size in pixels is 384 in the target but 56" in problem for problem in problems)


def test_tuples_equal_lists():
    """Catches: two spellings of the same pinpoints refused."""
    draft = llava()
    draft.image_grid_pinpoints = tuple(tuple(point) for point in draft.image_grid_pinpoints)
    assert adapter_for(draft).check_pair(llava(), draft) == []


def test_dict_sub_configs():
    """Catches: sub-configs that are plain dicts read as missing."""
    draft = qwen()
    draft.text_config, draft.vision_config = vars(draft.text_config), vars(draft.vision_config)
    assert adapter_for(draft).check_pair(qwen(), draft) == []


@pytest.mark.parametrize(("target", "draft"), [(qwen, llava), (llava, qwen)])
def test_different_families(target, draft):
    """Catches: a pair across families compared property by property, or let through."""
    with pytest.raises(VidSpecError) as caught:
        check_pair(target(), draft())
    message = str(caught.value)
    assert "different families" in message and "\n" not in message
    assert f"the target is {adapter_for(target()).name}, the draft {adapter_for(draft()).name}" in message


@pytest.mark.parametrize(
    ("text", "vision_heads", "num_ranks", "message"),
    [
        ((28, 4), 4, 2, None),
        ((28, 4), 4, 4, None),
        ((28, 4), 4, 8, "tower has 4 heads, which 8 tensor-parallel ranks cannot share evenly; .*-size 1, 2, 4 would"),
        ((28, 4), 4, 6, "vision tower has 4 heads, which 6 tensor-parallel ranks cannot"),
        ((24, 6), 16, 4, r"language model \(keys and values\) has 6 heads, which 4 "),
        ((14, 2), 16, 4, "language model has 14 heads, which 4 .* --tensor-parallel-size 1, 2 would"),
    ],
)
def test_the_sizes_that_a_draft_works_at_are_named(text, vision_heads, num_ranks, message):
    """Catches: sizes that vLLM refuses after minutes, in its terms; KV heads that ranks could not have copies of; a
    message about the vision tower, or none, where the language model is at fault.
    """
    text_config = SimpleNamespace(num_attention_heads=text[0], num_key_value_heads=text[1])
    vision_config = SimpleNamespace(num_heads=vision_heads)
    draft = SimpleNamespace(vision_config=vision_config, get_text_config=lambda: text_config)
    if message is None:
        check_ranks(draft, num_ranks)
        return
    with pytest.raises(VidSpecError, match=message) as caught:
        check_ranks(draft, num_ranks)
    assert "\n" not in str(caught.value)
