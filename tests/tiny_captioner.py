"""Plain-torch forward of the bundled models, with vLLM's positions: what was trained, and no engine.

It reads the weights of a Hugging Face model object and computes batches of videos that share one prompt and one kept
set, which makes it several times faster than the generic forward. It touches nothing outside the model it is given.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import captioned
from vllm_vidspec.assets import FAMILIES
from vllm_vidspec.shapeworld import world

NUM_LLAVA_FRAMES = 16
LLAVA_FRAMES = np.linspace(0, world.NUM_FRAMES - 1, NUM_LLAVA_FRAMES, dtype=int)  # as vLLM's loader samples
QWEN_GROUPS = world.NUM_FRAMES // 2
CELLS = world.GRID_SIZE**2
NUM_TIMES = 64  # seconds that Qwen3-VL's tokenizer has a word for
TEMPORAL_STEP = 2  # tokens_per_second * second_per_grid = 2 * (2 frames / 2 fps)
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",  # Qwen2.5-VL
    "<image>", "<video>",  # LLaVA-OneVision
)  # fmt: skip
PROMPT_WORDS = (  # noqa: SIM905
    "system user assistant you are a helpful please what happens in this do see tell me about is it now again "
    "and how many ? ! : hello image video clip first second scene color shape move"
).split()
TIME_WORDS = ("<", ">", "seconds", *map(str, range(NUM_TIMES)))  # Qwen3-VL tells when each pair of frames was shown
_ANSWER = f"{world.QUESTION} <|im_end|> <|im_start|> assistant"
PROMPTS = {  # before and after the video
    "qwen2.5-vl": ("<|im_start|> user <|vision_start|>", f"<|vision_end|> {_ANSWER}"),
    "llava-onevision": ("<|im_start|> user", _ANSWER),
    "qwen3-vl": ("<|im_start|> user", _ANSWER),
}
_CLIP = torch.tensor([[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]])
NORMALISATION = {  # mean and standard deviation of a pixel's channels, [2, 3]
    "qwen2.5-vl": _CLIP,
    "llava-onevision": _CLIP,
    "qwen3-vl": torch.full((2, 3), 0.5),
}
_OF_MODEL_TYPE = {"qwen2_5_vl": "qwen2.5-vl", "llava_onevision": "llava-onevision", "qwen3_vl": "qwen3-vl"}


def token_ids(family: str = FAMILIES[0]) -> dict[str, int]:
    """Token -> id, the same for every bundled model of every family but Qwen3-VL, which can tell the time besides."""
    words = (*PROMPT_WORDS, *(TIME_WORDS if family == "qwen3-vl" else ()))
    tokens = ["<unk>", *captioned.vocabulary(), *words]
    return {token: i for i, token in enumerate(dict.fromkeys([*tokens, *SPECIAL_TOKENS]))}


def load(path: str | Path) -> Captioner:
    """Load a checkpoint directory in fp32."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    model = getattr(transformers, config.architectures[0]).from_pretrained(path, dtype=torch.float32)
    return Captioner(model, _OF_MODEL_TYPE[config.model_type])


class Captioner:
    """Batched forward of one bundled model."""

    def __init__(self, model: torch.nn.Module, family: str) -> None:
        self.model, self.family = model, family
        self.text, self.lm_head = model.model.language_model, model.lm_head
        self.embed = self.text.embed_tokens
        self.ids = token_ids(family)
        self.words = {i: word for word, i in self.ids.items()}
        self.eos = self.ids["<|im_end|>"]
        self.num_video_tokens = QWEN_GROUPS * CELLS + (family == "llava-onevision")  # + image_newline
        # What a video token brings: its embedding and, in Qwen3-VL, what is added after the first layers (deepstack).
        self.num_levels = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))

    def encode(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids if i != self.eos)

    # Vision

    def pixels(self, frames: np.ndarray) -> torch.Tensor:
        """Order uint8 videos [batch, NUM_FRAMES, 112, 112, 3] as the processor does: [batch, 16 * 64, patch values],
        per frame (LLaVA) or pair (Qwen) its 64 patches.
        """
        batch = frames.shape[0]
        if self.family != "llava-onevision":  # (t, H, W, mh, mw), (c, tp, ph, pw)
            x = frames.reshape(batch, QWEN_GROUPS, 2, 4, 2, 14, 4, 2, 14, 3).transpose(0, 1, 3, 6, 4, 7, 9, 2, 5, 8)
        else:  # (t, y, x), (c, ph, pw)
            x = frames[:, LLAVA_FRAMES].reshape(batch, NUM_LLAVA_FRAMES, 8, 14, 8, 14, 3).transpose(0, 1, 2, 4, 6, 3, 5)
        return torch.from_numpy(np.ascontiguousarray(x).reshape(batch, QWEN_GROUPS * 64, -1))

    def vision(self, pixels: torch.Tensor) -> torch.Tensor:
        """Video embeddings [batch, num_video_tokens, num_levels * hidden]; LLaVA's end with its image_newline."""
        batch, num_patches = pixels.shape[:2]
        encode = {"qwen2.5-vl": _qwen_vision, "llava-onevision": _llava_vision, "qwen3-vl": _qwen3_vision}[self.family]
        tokens = encode(self.model.model, pixels.view(-1, 64, pixels.shape[-1])).view(batch, num_patches // 4, -1)
        if self.family == "llava-onevision":
            newline = self.model.model.image_newline.to(tokens.dtype).expand(batch, 1, -1)
            tokens = torch.cat([tokens, newline], 1)
        return tokens

    # Text

    def segments(self) -> list[list[int]]:
        """Ids before, between and after the parts of a video; only Qwen3-VL has several parts, with their times."""
        before, after = map(self.encode, PROMPTS[self.family])
        if self.family != "qwen3-vl":
            return [before, after]
        # Two frames at 2 fps: the k-th pair was shown at k + 0.25 s.
        times = [self.encode(f"< {k} . 2 seconds > <|vision_start|>") for k in range(QWEN_GROUPS)]
        end = self.encode("<|vision_end|>")
        return [before + times[0], *(end + time for time in times[1:]), end + after]

    def layout(
        self, segments: list[list[int]], kept: torch.Tensor, num_more: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where text and kept video tokens stand, as vLLM has it: pruning leaves gaps.

        Of `segments`, `kept` (int64 [num_kept], sorted) and `num_more` text tokens after the prompt. Returns for each
        place of the sequence its token, int64 [num_tokens], an index into the text followed by the kept video tokens;
        and rotary positions [3, num_tokens].
        """
        size = self.num_video_tokens // (len(segments) - 1)
        part = self._part_positions(size)
        places: dict[str, list[torch.Tensor]] = {"text": [], "video": []}
        positions, place, resume = [], 0, 0
        for i, ids in enumerate(segments):
            last = i == len(segments) - 1
            count = len(ids) + num_more * last
            for kind, what in (("text", torch.arange(count).expand(3, -1)), ("video", part))[: 1 if last else 2]:
                positions.append(what + resume)
                places[kind].append(torch.arange(what.shape[1]) + place)
                place, resume = place + what.shape[1], int(positions[-1].max()) + 1
        text, video = (torch.cat(found) for found in places.values())
        at = torch.cat([text, video[kept]])
        return at.argsort(-1), torch.cat(positions, 1)[:, at.sort(-1).values]

    def _part_positions(self, size: int) -> torch.Tensor:
        """Rotary positions [3, size] of a part of a video, from 0."""
        if self.family == "llava-onevision":
            return torch.arange(size).expand(3, -1)
        times = torch.arange(size // CELLS) * TEMPORAL_STEP
        return torch.stack(torch.meshgrid(times, torch.arange(4), torch.arange(4), indexing="ij")).reshape(3, -1)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [num_tokens, head_dim] of positions [3, num_tokens]."""
        rope, head_dim = self.text.config.rope_parameters, self.text.layers[0].self_attn.head_dim
        frequency = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim)  # [head_dim / 2]
        sections = rope.get("mrope_section") or [head_dim // 2, 0, 0]
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))  # [head_dim / 2]
        if rope.get("mrope_interleaved"):  # THWTHW...TT
            axis = torch.zeros_like(axis)
            axis[1 : 3 * sections[1] : 3], axis[2 : 3 * sections[2] : 3] = 1, 2
        angle = positions[axis].movedim(0, -1).float() * frequency
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()

    def hidden(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        cache: list | None = None,
        deeper: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """Final hidden states of `embeds`, both [batch, num_tokens, hidden], at `positions` [3, num_tokens].

        `cache` is one (k, v) pair or None per layer, extended in place; a later call must bring one token.
        `deeper` is what the first layers' outputs have added (deepstack).
        """
        (cos, sin), x = self.rotary(positions), embeds
        for i, layer in enumerate(self.text.layers):
            past = cache[i] if cache else None
            x, k, v = decoder_layer(x, layer_weights(layer), cos, sin, past, layer.self_attn.head_dim)
            x = x + deeper[i] if i < len(deeper) else x
            if cache is not None:
                cache[i] = (k, v)
        return rms_norm(x, self.text.norm.weight)

    def sequence(
        self, video: torch.Tensor, kept: torch.Tensor, segments: list[list[int]], more: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
        """Embeddings of a prompt with a pruned video [batch, num_kept, num_levels * hidden] and the ids `more`.

        Returns embeds [batch, num_tokens, hidden], positions [3, num_tokens], what is added after the first layers
        (of the shape of embeds each), and where the kept video tokens are, int64 [batch, num_kept].
        """
        batch = len(video)
        prompt = torch.tensor([i for ids in segments for i in ids])
        text = self.embed(torch.cat([prompt.expand(batch, -1), more], 1))
        order, positions = self.layout(segments, kept, more.shape[1])
        order = order.expand(batch, -1)
        rows = torch.arange(batch)[:, None]
        first, *deeper = video.to(text.dtype).chunk(self.num_levels, -1)
        embeds, *deeper = (
            torch.cat([head, level], 1)[rows, order]
            for head, level in zip([text, *[torch.zeros_like(text)] * len(deeper)], [first, *deeper], strict=True)
        )
        return embeds, positions, tuple(deeper), order.argsort(-1)[:, text.shape[1] :]

    def teacher_forced(self, video: torch.Tensor, captions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Hidden states that predict each caption token, [batch, length, hidden].

        Of `video` [batch, num_kept, num_levels * hidden], already pruned, `captions` int64 [batch, length], padded with
        -100, and `kept` int64 [num_kept], sorted.
        """
        more = captions.clamp(min=0)[:, :-1]
        embeds, positions, deeper, _ = self.sequence(video, kept, self.segments(), more)
        return self.hidden(embeds, positions, deeper=deeper)[:, -captions.shape[1] :]

    @torch.no_grad()
    def greedy(self, video: torch.Tensor, max_tokens: int = 200) -> list[list[int]]:
        """Greedy captions of whole videos [batch, num_video_tokens, ...], as ids that end with the end token."""
        batch = video.shape[0]
        kept = torch.arange(self.num_video_tokens)
        nothing = torch.zeros((batch, 0), dtype=torch.int64)
        embeds, positions, deeper, _ = self.sequence(video, kept, self.segments(), nothing)
        cache: list = [None] * len(self.text.layers)
        tokens: list[torch.Tensor] = []
        for _ in range(max_tokens):
            logits = self.lm_head(self.hidden(embeds, positions, cache, deeper=deeper)[:, -1])
            tokens.append(logits.argmax(-1))
            if (torch.stack(tokens, 1) == self.eos).any(1).all():
                break
            embeds, positions, deeper = self.embed(tokens[-1])[:, None], positions[..., -1:] + 1, ()
        rows = torch.stack(tokens, 1).tolist()
        return [row[: row.index(self.eos) + 1] if self.eos in row else row for row in rows]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [batch, heads, num_tokens, head_dim]."""
    half = x.shape[-1] // 2
    return x * cos.to(x.dtype) + torch.cat([-x[..., half:], x[..., :half]], -1) * sin.to(x.dtype)


def layer_weights(layer: torch.nn.Module) -> tuple[torch.Tensor | None, ...]:
    """The weights of a Qwen2 or Qwen3 decoder layer in the order that `decoder_layer` unpacks."""
    a, m = layer.self_attn, layer.mlp
    norms = (a.q_norm.weight, a.k_norm.weight) if hasattr(a, "q_norm") else (None, None)
    return (
        layer.input_layernorm.weight, a.q_proj.weight, a.q_proj.bias, a.k_proj.weight, a.k_proj.bias,
        a.v_proj.weight, a.v_proj.bias, *norms, a.o_proj.weight, layer.post_attention_layernorm.weight,
        m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight,
    )  # fmt: skip


def decoder_layer(
    x: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    past: tuple[torch.Tensor, torch.Tensor] | None,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One decoder layer: x [batch, num_tokens, hidden] -> x, k and v [batch, kv_heads, all_tokens, head_dim]."""
    norm1, wq, bq, wk, bk, wv, bv, norm_q, norm_k, wo, norm2, gate, up, down = weights
    batch, num_tokens, _ = x.shape
    y = rms_norm(x, norm1)
    q, k, v = (
        F.linear(y, w, b).view(batch, num_tokens, -1, head_dim).transpose(1, 2)
        for w, b in ((wq, bq), (wk, bk), (wv, bv))
    )
    if norm_q is not None:  # Qwen3
        q, k = rms_norm(q, norm_q), rms_norm(k, norm_k)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    groups = q.shape[1] // k.shape[1]
    k_all, v_all = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    attended = F.scaled_dot_product_attention(q, k_all, v_all, is_causal=past is None)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, num_tokens, -1), wo)
    y = rms_norm(x, norm2)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down), k, v


def _embed_patches(patches: torch.Tensor, conv: torch.nn.Module, family: str) -> torch.Tensor:
    """Patch embedding of raw uint8 patches [num_frames, 64, values], with rescaling and normalisation folded in."""
    weight = conv.weight.flatten(1)  # [hidden, values], values ordered (channel, ...)
    repeats = weight.shape[1] // 3
    mean, std = NORMALISATION[family]
    scale, shift = 1 / (255 * std), mean / std
    bias = -(weight * shift.repeat_interleave(repeats)).sum(1)
    if conv.bias is not None:
        bias = bias + conv.bias
    return F.linear(patches.float(), weight * scale.repeat_interleave(repeats), bias)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Full attention inside each frame: [num_frames, heads, 64, head_dim] -> [num_frames, 64, hidden]."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _qwen_vision(model: torch.nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """Qwen2.5-VL tower and merger: uint8 [num_groups, 64, 1176] -> [num_groups * 16, hidden].

    Every block attends over a whole group, so groups are independent batch rows.
    """
    tower = model.visual
    x = _embed_patches(patches, tower.patch_embed.proj, "qwen2.5-vl")
    row, col = _merge_order()
    for block in tower.blocks:
        x = x + _qwen_attend(block.attn, rms_norm(x, block.norm1.weight), row, col)
        x = x + block.mlp(rms_norm(x, block.norm2.weight))
    merged = rms_norm(x, tower.merger.ln_q.weight).reshape(-1, 4 * x.shape[-1])
    return tower.merger.mlp(merged)


def _qwen3_vision(model: torch.nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """Qwen3-VL tower and mergers: uint8 [num_groups, 64, 1176] -> [num_groups * 16, num_levels * hidden]."""
    tower = model.visual
    row, col = _merge_order()  # 8 x 8, the grid of the position embeddings: nothing to interpolate
    x = _embed_patches(patches, tower.patch_embed.proj, "qwen3-vl") + tower.pos_embed.weight[row * 8 + col]
    deeper = []
    for i, block in enumerate(tower.blocks):
        x = x + _qwen_attend(block.attn, block.norm1(x), row, col)
        x = x + block.mlp(block.norm2(x))
        if i in tower.deepstack_visual_indexes:
            merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(i)]
            deeper.append(merger(x.flatten(0, 1)))
    return torch.cat([tower.merger(x.flatten(0, 1)), *deeper], -1)


def _merge_order() -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each of a group's 64 patches, those of one token next to each other."""
    row, col = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    return tuple(z.reshape(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(-1) for z in (row, col))


def _qwen_attend(module: torch.nn.Module, x: torch.Tensor, row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
    """Attention of a Qwen tower's block over normed x [num_groups, 64, hidden], with 2-D rotary positions."""
    heads, head_dim = module.num_heads, x.shape[-1] // module.num_heads
    frequency = 10000.0 ** (-torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))
    angle = torch.cat([row[:, None] * frequency, col[:, None] * frequency], -1).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    q, k, v = module.qkv(x).view(*x.shape[:2], 3, heads, head_dim).permute(2, 0, 3, 1, 4)
    return module.proj(_attend(rotate(q, cos, sin), rotate(k, cos, sin), v))


def _llava_vision(model: torch.nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """SigLIP (no final norm), projector, 2 x 2 pooling: uint8 [num_frames, n * n, 588] -> [num_frames * n * n / 4,
    hidden].
    """
    tower, half = model.vision_tower, math.isqrt(patches.shape[1]) // 2
    x = _embed_patches(patches, tower.embeddings.patch_embedding, "llava-onevision")
    x = x + tower.embeddings.position_embedding.weight
    for layer in tower.encoder.layers:
        a = layer.self_attn
        y = layer.layer_norm1(x)
        q, k, v = (f(y).view(*x.shape[:2], a.num_heads, -1).transpose(1, 2) for f in (a.q_proj, a.k_proj, a.v_proj))
        x = x + a.out_proj(_attend(q, k, v))
        x = x + layer.mlp(layer.layer_norm2(x))
    x = model.multi_modal_projector(x)
    # Bilinear interpolation to half the height and width is the mean of each 2 x 2 block.
    return x.view(-1, half, 2, half, 2, x.shape[-1]).mean((2, 4)).flatten(0, 2)
