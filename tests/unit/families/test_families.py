"""Families: token grids at true geometry, fallbacks, and which pairs are refused; on real HF configs."""

import contextlib
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers

from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.families import adapter_for, check_pair, check_ranks, check_tokens, known_families
from vllm_vidspec.pruning import TokenGrid

PINPOINTS = [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]


def changed(config, **changes):
    """Return the config with other values at some paths, in which __ is a dot."""
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        holder = config
        for parent in parents:
            holder = getattr(holder, parent)
        vars(holder)[leaf] = value  # past Hugging Face's own checks
    return config


def made(kind, **usual):
    """Return what makes a config of one of transformers' kinds, as one of vLLM's architectures."""

    def make(**fields):
        config = getattr(transformers, f"{kind}Config")(**usual | fields)
        return changed(config, architectures=[f"{kind}ForConditionalGeneration"])

    return make


def qwen(**text):
    text_config = {"vocab_size": 152064, "rope_parameters": None} | text
    return made("Qwen2_5_VL", vision_config={"tokens_per_second": 2})(text_config=text_config)


llava = made("LlavaOnevision")
glm, glm_moe, ocr, internvl, next_video = map(made, ("Glm4v", "Glm4vMoe", "GlmOcr", "InternVL", "LlavaNextVideo"))
omni, omni_moe = map(made, ("Qwen2_5Omni", "Qwen3OmniMoe"))


def clova():
    return changed(transformers.HyperCLOVAXVisionV2Config(), architectures=["HCXVisionV2ForCausalLM"])


def minicpm():
    """Return MiniCPM-V's configuration, whose class comes with a checkpoint."""
    fields = {"query_num": 64, "version": 4.5, "image_size": 448, "slice_config": SimpleNamespace(max_slice_nums=9)}
    vision = SimpleNamespace(patch_size=14, num_attention_heads=16)
    return SimpleNamespace(architectures=["MiniCPMV"], model_type="minicpmv", vision_config=vision, **fields)


# vLLM shows it videos, and it has no adapter.
unknown = made("Exaone4_5_")
NAMES = {
    qwen: "qwen2.5-vl",
    llava: "llava-onevision",
    glm: "glm-v",
    glm_moe: "glm-v",
    ocr: "glm-v",
    internvl: "internvl",
    next_video: "llava-next-video",
    omni: "qwen2.5-omni",
    omni_moe: "qwen3-omni",
    minicpm: "minicpm-v",
    clova: "hyperclovax",
}


@pytest.mark.parametrize(("make", "name"), NAMES.items())
def test_adapter_for(make, name):
    """Catches: an architecture or model type that is not recognised, from configs with and without architectures."""
    assert adapter_for(make()).name == adapter_for(changed(make(), architectures=None)).name == name


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama"), "LlamaForCausalLM"),
        (SimpleNamespace(architectures=None, model_type="llama"), "'llama'"),
        (SimpleNamespace(), "None"),
        # The architecture decides: a derived model with a known model type is another model.
        (SimpleNamespace(architectures=["OtherModel"], model_type="qwen2_5_vl"), "OtherModel"),
    ],
)
def test_unknown_family(config, shown):
    """Catches: a text model or a neighbour family taken for ours; an error that does not say what is supported."""
    with pytest.raises(VidSpecError, match=f"unsupported model family: .*{shown}") as caught:
        adapter_for(config)
    assert all(adapter.name in str(caught.value) for adapter in known_families())
    assert "\n" not in str(caught.value)


def test_a_model_without_an_adapter_is_known_by_its_architecture():
    """Catches: a derived model taken for the one whose type it has; one architecture that drafts for another."""
    config = unknown()
    assert adapter_for(config).name == "Exaone4_5_ForConditionalGeneration"
    assert adapter_for(config).frames("video", frames(3), config) is None
    assert check_pair(config, unknown()).embeds_by_itself
    derived = changed(qwen(), architectures=["OtherModel"])
    assert adapter_for(derived).name == "OtherModel"
    with pytest.raises(VidSpecError, match=r"different families: the target is qwen2\.5-vl, the draft OtherModel"):
        check_pair(qwen(), derived)


def video(*thw):
    return {"video_grid_thw": torch.tensor(thw)}


def frames(num_frames):
    return {"pixel_values_videos": torch.empty(num_frames, 3, 4, 4)}


IMAGE = {"image_grid_thw": torch.tensor([1, 4, 4])}
POOLED = {"vision_config": SimpleNamespace(image_size=112, patch_size=14)}
# Which configs and with what changes, the modality, its data and number of tokens, and the grid.
GRIDS = [
    # Catches: an unmerged grid, height and width exchanged.
    (qwen, {}, "video", video(8, 16, 20), 640, TokenGrid(8, 8, 10)),
    (qwen, {}, "video", {"video_grid_thw": [4, 4, 6]}, 24, TokenGrid(4, 2, 3)),
    (qwen, {}, "image", {"image_grid_thw": torch.tensor([1, 36, 52])}, 468, TokenGrid(1, 18, 26)),
    # Does not multiply out (a pruned target, a broken item): one row. Catches: an odd item that fails a request.
    (qwen, {}, "video", video(8, 16, 20), 639, TokenGrid(1, 1, 639)),
    (qwen, {}, "video", video(8, 16), 32, TokenGrid(1, 1, 32)),
    (qwen, {}, "video", {"video_grid_thw": "nonsense"}, 5, TokenGrid(1, 1, 5)),
    *((qwen, {}, "video", {"video_grid_thw": None}, size, TokenGrid(1, 1, size)) for size in (0, 5)),
    # Catches: the other modality's grid taken; a missing key or merge size that raises.
    (qwen, {}, "video", IMAGE, 4, TokenGrid(1, 1, 4)),
    (qwen, {"vision_config__spatial_merge_size": None}, "image", IMAGE, 4, TokenGrid(1, 1, 4)),
    # 384 // 14 = 27 patches a side, pooled to 14.
    # Catches: floor instead of ceil in the pooling (13), a forgotten newline, a trailing token in a flat row.
    (llava, {}, "video", {}, 64 * 196 + 1, TokenGrid(64, 14, 14, 1)),
    (llava, {}, "video", frames(2), 393, TokenGrid(2, 14, 14, 1)),
    (llava, {}, "video", frames(3), 393, TokenGrid(1, 1, 393)),  # frames contradict
    *((llava, {}, "video", {}, size, TokenGrid(1, 1, size)) for size in (0, 1, 392)),
    # Catches: a hard-wired 14 x 14 or stride 2; a config without a vision part that raises.
    (llava, POOLED, "video", {}, 8 * 16 + 1, TokenGrid(8, 4, 4, 1)),
    (llava, {**POOLED, "spatial_pool_stride": 4}, "video", {}, 8 * 4 + 1, TokenGrid(8, 2, 2, 1)),
    (llava, {"vision_config": None}, "video", {}, 129, TokenGrid(1, 1, 129)),
    # A frame is a tile of 448 // 14 * 0.5 = 16 tokens a side; an image is several, one of them a thumbnail.
    (internvl, {}, "video", frames(3), 768, TokenGrid(3, 16, 16)),
    (internvl, {}, "image", {"pixel_values": torch.empty(3, 3, 4, 4)}, 768, TokenGrid(1, 1, 768)),
    (internvl, {"vision_config__image_size": 224}, "video", {}, 128, TokenGrid(2, 8, 8)),
    (internvl, {"downsample_ratio": None}, "video", {}, 768, TokenGrid(1, 1, 768)),
    # 336 // 14 = 24 patches a side, pooled to 12. Catches: LLaVA-OneVision's newline.
    (next_video, {}, "video", frames(4), 576, TokenGrid(4, 12, 12)),
    *((make, {}, "video", video(8, 16, 20), 640, TokenGrid(8, 8, 10)) for make in (glm, glm_moe, ocr)),
    *((make, {}, "video", video(8, 16, 20), 640, TokenGrid(8, 8, 10)) for make in (omni, omni_moe, clova)),
    *(
        (minicpm, {}, "video", {"video_pixel_values": [torch.empty(3, 14, 28)] * 5}, size, grid)
        for size, grid in ((320, TokenGrid(5, 1, 64)), (321, TokenGrid(1, 1, 321)))
    ),
    (omni, {}, "audio", {"audio_feature_lengths": torch.tensor(160)}, 40, TokenGrid(1, 1, 40)),
    (unknown, {}, "video", video(8, 16, 20), 640, TokenGrid(1, 1, 640)),
    # Catches: an anyres image, whose newlines are interleaved, cut like a video (here even the count would fit).
    (llava, {}, "image", {}, 393, TokenGrid(1, 1, 393)),
]


@pytest.mark.parametrize(("make", "changes", "modality", "data", "num_tokens", "grid"), GRIDS)
def test_grids(make, changes, modality, data, num_tokens, grid):
    """Catches what the comment above each case says."""
    config = changed(make(), **changes)
    assert adapter_for(config).item_grid(modality, data, num_tokens, config) == grid


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        # Catches: a model that may not draft for itself.
        *((make(), make()) for make in NAMES),
        # A dense draft of a target with experts.
        (glm_moe(), changed(glm(), image_token_id=151363, video_token_id=151364)),
        # Catches: a comparison of what a smaller draft is meant to differ in.
        (qwen(hidden_size=5120, num_hidden_layers=64), qwen(hidden_size=3584)),
        # Catches: vocabularies refused that are padded to other sizes, as every released pair's are.
        (qwen(), changed(qwen(), text_config__vocab_size=151936)),
        # Catches: two spellings of the same pinpoints refused.
        (llava(), changed(llava(), image_grid_pinpoints=tuple(map(tuple, PINPOINTS)))),
        # Catches: sub-configs that are plain dicts read as missing.
        (
            qwen(),
            changed(qwen(), text_config=qwen().text_config.to_dict(), vision_config=qwen().vision_config.to_dict()),
        ),
    ],
)
def test_pairs_that_fit(target, draft):
    """Catches what the comment above each case says."""
    assert adapter_for(draft).check_pair(target, draft) == []
    assert check_pair(target, draft).name == adapter_for(target).name


# Which config, which of its values becomes which, what it is called, and how the target's value is shown.
DIFFERENCES = [
    (qwen, "vision_config__patch_size", 16, "patch size", "14"),
    (qwen, "vision_config__spatial_merge_size", 4, "spatial merge size", "2"),
    (qwen, "vision_config__temporal_patch_size", 1, "temporal patch size", "2"),
    (qwen, "vision_config__in_channels", 1, "number of pixel channels", "3"),
    (qwen, "vision_config__tokens_per_second", 4, "tokens per second", "2"),
    (qwen, "image_token_id", 7, "image token id", "151655"),
    (qwen, "video_token_id", 7, "video token id", "151656"),
    (qwen, "vision_start_token_id", 7, "vision start token id", "151652"),
    (qwen, "vision_end_token_id", None, "vision end token id", "151653"),
    (llava, "vision_config__image_size", 336, "frame size in pixels", "384"),
    (llava, "vision_config__patch_size", 16, "patch size", "14"),
    (llava, "vision_config__num_channels", 1, "number of pixel channels", "3"),
    (llava, "spatial_pool_stride", 4, "spatial pooling stride", "2"),
    (llava, "vision_config__model_type", "clip_vision_model", "vision tower type", "'siglip_vision_model'"),
    (llava, "vision_feature_select_strategy", "default", "vision feature select strategy", "'full'"),
    (llava, "image_token_index", 7, "image token id", "151646"),
    (llava, "video_token_index", 7, "video token id", "151647"),
    (llava, "vision_aspect_ratio", "anyres_max_4", "vision aspect ratio", "'anyres_max_9'"),
    (glm, "vision_config__spatial_merge_size", 4, "spatial merge size", "2"),
    (glm_moe, "vision_config__temporal_patch_size", 1, "temporal patch size", "2"),
    (glm, "video_start_token_id", 7, "video start token id", "151341"),
    (glm, "image_end_token_id", 7, "image end token id", "151340"),
    (internvl, "vision_config__image_size", [224, 224], "tile size in pixels", "[448, 448]"),
    (internvl, "downsample_ratio", 0.25, "downsample ratio", "0.5"),
    (internvl, "image_token_id", 7, "image token id", "151667"),
    (next_video, "spatial_pool_stride", 4, "spatial pooling stride", "2"),
    (next_video, "spatial_pool_mode", "max", "spatial pooling mode", "'average'"),
    (minicpm, "query_num", 32, "queries of an image", "64"),
    (minicpm, "version", 4.0, "version", "4.5"),
    (minicpm, "slice_config__max_slice_nums", 1, "slices of an image", "9"),
    (clova, "vision_config__spatial_merge_size", 4, "spatial merge size", "2"),
    (clova, "video_token_id", 7, "video token id", "128061"),
    (omni, "thinker_config__vision_config__spatial_merge_size", 4, "spatial merge size", "2"),
    (omni, "thinker_config__vision_config__tokens_per_second", 2, "tokens per second", "25"),
    (omni, "thinker_config__image_token_index", 7, "image token id", "151655"),
    (omni_moe, "thinker_config__position_id_per_seconds", 13, "positions per second", "25"),
    (omni_moe, "thinker_config__video_token_id", 7, "video token id", "151656"),
    (omni_moe, "thinker_config__audio_token_id", 7, "audio token id", "151646"),
    # Without an adapter a difference has the name that the config gives it.
    (unknown, "vision_config__patch_size", 16, "vision_config.patch_size", "14"),
    (unknown, "image_token_id", 7, "image_token_id", "67"),
    (llava, "image_grid_pinpoints", [[384, 384]], "image grid pinpoints", f"{str(PINPOINTS)[:60]}... (36 entries)"),
]


@pytest.mark.parametrize(("make", "path", "value", "label", "shown"), DIFFERENCES)
def test_each_difference_is_named(make, path, value, label, shown):
    """Catches: a property that is not compared, or reported with the two values exchanged."""
    target, draft = make(), changed(make(), **{path: value})
    sentence = f"{label} is {shown} in the target but {'missing' if value is None else repr(value)} in the draft"
    assert adapter_for(target).check_pair(target, draft) == [sentence]
    assert len(sentence) < 200
    with pytest.raises(VidSpecError, match="the draft does not fit the target") as caught:
        check_pair(target, draft)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_all_differences_are_named_in_one_line():
    """Catches: a check that stops at the first problem."""
    draft = changed(qwen(), image_token_id=7, vision_config__spatial_merge_size=4)
    with pytest.raises(VidSpecError) as caught:
        check_pair(qwen(), draft)
    message = str(caught.value)
    assert "image token id is 151655" in message and "spatial merge size is 2" in message and "\n" not in message


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
    """Catches: sizes that vLLM refuses late, heads that ranks cannot share, a message about the wrong model."""
    text_config = SimpleNamespace(num_attention_heads=text[0], num_key_value_heads=text[1])
    vision_config = SimpleNamespace(num_heads=vision_heads)
    draft = SimpleNamespace(
        architectures=["Glm4vForConditionalGeneration"],
        vision_config=vision_config,
        get_text_config=lambda: text_config,
    )
    with pytest.raises(VidSpecError, match=message) if message else contextlib.nullcontext():
        check_ranks(draft, num_ranks)


@pytest.mark.parametrize(("inputs", "num_ranks", "sizes"), [(11_008, 2, None), (11_008, 4, "1, 2"), (18_944, 4, None)])
@pytest.mark.parametrize("where", ["awq", "compressed-tensors"])
def test_ranks_share_whole_groups_of_a_draft_in_few_bits(where, inputs, num_ranks, sizes):
    """3B and 7B of Qwen2.5-VL. Catches: a layer for which vLLM finds no kernel, once the target has loaded."""
    stored: dict = {"quant_method": where, "group_size": 128}
    if where == "compressed-tensors":
        stored = {"config_groups": {"group_0": {"weights": {"group_size": 128}, "input_activations": None}}}
    text = SimpleNamespace(num_attention_heads=28, num_key_value_heads=4, intermediate_size=inputs)
    draft = SimpleNamespace(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        vision_config=SimpleNamespace(num_heads=16),
        quantization_config=stored,
        get_text_config=lambda: text,
    )
    message = f"MLPs have {inputs} inputs in groups of 128 weights, which {num_ranks} .*-size {sizes} would do"
    with pytest.raises(VidSpecError, match=message) if sizes else contextlib.nullcontext():
        check_ranks(draft, num_ranks)
    draft.quantization_config = {"group_size": -1}
    check_ranks(draft, num_ranks)


@pytest.mark.parametrize(
    ("target", "draft", "problem"),
    [
        ({"a": 0, "b": 1, "<tool>": 2}, {"a": 0, "b": 1}, None),  # Catches: a draft refused that knows fewer markers,
        ({"a": 0}, {"a": 0, "<tool>": 2}, None),  # or more.
        # Catches: vocabularies of equal size taken for equal.
        ({"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1, "b": 2}, "token 1 is 'b' in the target but 'c' in the draft"),
    ],
)
def test_tokens_have_to_agree(tmp_path, target, draft, problem):
    """Catches: added tokens that are not compared; a checkpoint without `tokenizer.json` refused."""
    for name, words in (("target", target), ("draft", draft)):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
        tokenizer.add_tokens(sorted(set(words) - {"a"}, key=words.get))
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    check_tokens(str(tmp_path / "target"), str(tmp_path))
    with pytest.raises(VidSpecError, match=problem) if problem else contextlib.nullcontext():
        check_tokens(str(tmp_path / "target"), str(tmp_path / "draft"))


def test_only_deepstack_makes_more_of_a_token_than_its_embedding():
    """Catches: features of deeper layers dropped, or looked for where there are none."""
    deep = made("Qwen3VL")(vision_config={"deepstack_visual_indexes": [8, 16, 24]})
    moe = changed(made("Qwen3VLMoe")(vision_config={"deepstack_visual_indexes": [5, 11]}), architectures=[])
    for config, levels in ((deep, 4), (moe, 3), (omni_moe(), 4), (omni(), 1), (qwen(), 1), (llava(), 1)):
        assert adapter_for(config).num_media_levels(config) == levels
