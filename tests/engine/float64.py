"""Guidance and loose verification in float64, by the Hugging Face model that reads the emitted text back."""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from vllm_vidspec.tools import pairs

TEMPORAL_STEP = 2  # tokens_per_second * seconds of a temporal step, at the bundled videos' 2 frames per second


@functools.cache
def _load(family: str) -> tuple[Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    path = pairs.checkpoint(family, "target")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    return AutoProcessor.from_pretrained(path), model.eval()


@torch.no_grad()
def run(family: str, prompt_ids: list[int], videos: list[np.ndarray]) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """Run the target over one prompt, as vLLM expanded it, with videos uint8 `[num_frames, height, width, 3]`.

    Returns the model's output with attentions `[1, num_heads, n, n]` per layer, bool `[n]` where visual tokens are, and
    the input of the decoder's layer i and the output of the last one, float64 `[n, hidden_size]` each.
    """
    processor, model = _load(family)
    config, ids = model.config, torch.tensor([prompt_ids])
    if family == "llava-onevision":
        videos = [video[np.linspace(0, len(video) - 1, 16, dtype=int)] for video in videos]
    frames = [torch.from_numpy(video).permute(0, 3, 1, 2) for video in videos]
    pixels = processor.video_processor(videos=frames, return_tensors="pt", do_sample_frames=False)
    arguments: dict[str, Any] = {"pixel_values_videos": pixels["pixel_values_videos"].double()}
    is_visual = ids[0] == config.video_token_id
    if family == "qwen2.5-vl":
        arguments["video_grid_thw"] = pixels["video_grid_thw"]
        # Given, not derived: this transformers resumes the text at another position than vLLM and Qwen's own code.
        arguments["position_ids"] = _mrope_positions(is_visual, pixels["video_grid_thw"])[:, None]
    if family == "qwen3-vl":
        arguments["video_grid_thw"] = pixels["video_grid_thw"]
        arguments["mm_token_type_ids"] = 2 * is_visual[None].int()
    states: list[torch.Tensor] = []
    decoder = model.model.language_model
    hooks = [
        layer.register_forward_pre_hook(
            lambda _module, args, kwargs: states.append((args[0] if args else kwargs["hidden_states"])[0]),
            with_kwargs=True,
        )
        for layer in decoder.layers
    ]
    hooks.append(
        decoder.layers[-1].register_forward_hook(
            lambda _m, _a, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
    )
    try:
        output = model(input_ids=ids, output_attentions=True, **arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return output, is_visual, [state.reshape(len(prompt_ids), -1) for state in states]


def _mrope_positions(is_visual: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Qwen2.5-VL's rope positions `[3, n]`: videos span (t * step, y, x); text goes on behind the largest of them."""
    parts, at, start = [], 0, 0
    grids = grids.tolist()
    while at < len(is_visual):
        if is_visual[at]:
            t, height, width = grids.pop(0)
            axes = (torch.arange(t) * TEMPORAL_STEP, torch.arange(height // 2), torch.arange(width // 2))
            part = torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1) + start
        else:
            part = torch.full((3, 1), start)
        parts.append(part)
        at, start = at + part.shape[1], int(part.max()) + 1
    return torch.cat(parts, 1)


def attention_scores(output: Any, is_visual: torch.Tensor, layers: tuple[int, ...] | None = None) -> torch.Tensor:
    """SpecVLM eq. 5, `[m]`: mean weight over the tokens after the last visual one, over heads and over layers."""
    first = int(is_visual.nonzero()[-1]) + 1
    chosen = [output.attentions[i] for i in layers] if layers is not None else output.attentions
    return torch.stack([weights[0, :, first:].mean((0, 1)) for weights in chosen]).mean(0)[is_visual]


def uv_scores(states: list[torch.Tensor], is_visual: torch.Tensor, layer: int) -> torch.Tensor:
    """ParallelVLM eq. 2-4, `[m]`, by the literal double sum over text tokens and layers."""
    total = torch.zeros(int(is_visual.sum()), dtype=torch.float64)
    for below, above in itertools.pairwise(states[: layer + 1]):
        for state, sign in ((above, 1), (below, -1)):
            unit = state / state.norm(dim=-1, keepdim=True)
            total += sign * (unit[is_visual] @ unit[~is_visual].T).sum(1)
    return total


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest error of any token, relative to that token's own score."""
    return float(((ours.double() - reference).abs() / reference.abs()).max())


def guidance_error(
    scores: torch.Tensor, family: str, prompt_ids: list[int], videos: list[np.ndarray], layer: int | None = None
) -> float:
    """Return the largest error of guidance by attention (every layer), or by hidden states up to a layer."""
    output, is_visual, states = run(family, prompt_ids, videos)
    if layer is None:
        return relative_error(scores, attention_scores(output, is_visual))
    expected = uv_scores(states, is_visual, layer)
    # A difference of two sums: relative to the sums' own size, not to what is left of them.
    return float((scores - expected).abs().max() / expected.abs().mean())


def read_back(
    family: str, prompt_ids: list[int], token_ids: list[int], videos: list[np.ndarray], top_n: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's most likely token in each emitted one's place `[n]`, and each relevance (LVSpec eq. 8)."""
    output, is_visual, states = run(family, [*prompt_ids, *token_ids], videos)
    _, model = _load(family)
    with torch.no_grad():
        final = model.model.language_model.norm(states[-1])
    unit = final / final.norm(dim=-1, keepdim=True)
    cosines = unit[len(prompt_ids) :] @ unit[is_visual].T
    likely = output.logits[0, len(prompt_ids) - 1 : -1].argmax(-1)
    return likely, cosines.topk(top_n).values.mean(-1)


def check_loose(
    family: str, outputs: list[Any], videos: list[list[np.ndarray]], records: list[dict], max_unmeasured: int = 1
) -> int:
    """All tokens but those said to be loosened or shifted are the target's own; return how many these were."""
    by_req = {record["req_id"].split("-")[0]: record for record in records}
    num_loosened = 0
    for output, shown in zip(outputs, videos, strict=True):
        record, tokens = by_req[output.request_id.split("-")[0]], list(output.outputs[0].token_ids)
        # A step may have verified drafts past the end of the text.
        assert record["tokens"][: len(tokens)] == tokens
        likely, relevance = read_back(family, list(output.prompt_token_ids), tokens, shown)
        kinds = torch.tensor(record["kinds"][: len(tokens)])
        is_own = likely == torch.tensor(tokens)
        assert torch.equal(is_own, kinds < 2), [i for i in range(len(tokens)) if bool(is_own[i]) != (kinds[i] < 2)]
        measured = [(i, value) for i, value in enumerate(record["relevance"][: len(tokens)]) if value is not None]
        assert len(measured) >= len(tokens) - max_unmeasured
        ours = torch.tensor([value for _, value in measured], dtype=torch.float64)
        error = float((ours - relevance[[i for i, _ in measured]]).abs().max())
        assert error <= 1e-4, error
        num_loosened += int((~is_own).sum())
    return num_loosened
