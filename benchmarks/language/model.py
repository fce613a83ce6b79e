"""The models: SmolLM2, whole or some of its layers, behind a bundled tower; adapters; texts that share one video.

A forward is of one video and several texts about it, each of which sees the video and itself alone: the video, most of
the work, is computed once. Touches nothing but the model it is given.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.language.fetch import IMAGE, VIDEO
from benchmarks.language.world import VALUES, Text
from vllm_vidspec import assets

FAMILY = "llava-onevision"
TOKENS_PER_FRAME = 16
BEFORE, ASKED, END = "<|im_start|>user\n", "\n{}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


class Adapted(torch.nn.Module):
    """A frozen linear map plus a low-rank one, which is nothing at first."""

    def __init__(self, linear: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)

    def merged(self) -> torch.nn.Linear:
        self.linear.weight.data += (self.up @ self.down).to(self.linear.weight.dtype)
        return self.linear


def attend(module, query, key, value, attention_mask, scaling=1.0, **_):
    """Attention written out in bf16: on a CPU a third of the time of the fused one, whose gradient is slow."""
    groups = query.shape[1] // key.shape[1]
    scores = (query * scaling) @ key.repeat_interleave(groups, 1).transpose(-1, -2)
    scores = scores + attention_mask
    return (scores.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


def build(language: Path, layers: tuple[int, ...], tower: str, rank: int, seed: int) -> torch.nn.Module:
    """Some layers of a Llama checkpoint, in bf16 and adapted, behind the tower of the bundled model `tower`."""
    import transformers

    torch.manual_seed(seed)
    text = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.bfloat16)
    seen = transformers.AutoModelForImageTextToText.from_pretrained(
        assets.checkpoint(FAMILY, tower), dtype=torch.float32
    )
    ids = tokenizer(language).convert_tokens_to_ids
    config = transformers.AutoConfig.from_pretrained(assets.checkpoint(FAMILY, tower))
    config.text_config = transformers.LlamaConfig.from_dict(text.config.to_dict() | {"num_hidden_layers": len(layers)})
    config.tie_word_embeddings = config.text_config.tie_word_embeddings
    config.image_token_index, config.video_token_index = ids(IMAGE), ids(VIDEO)
    model = transformers.LlavaOnevisionForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(seen.model.vision_tower.state_dict())
    model.requires_grad_(True)
    model.model.vision_tower.post_layernorm.requires_grad_(False)  # LLaVA takes what is before it
    # A video token is about as long as a word's embedding from the beginning.
    with torch.no_grad():
        model.model.multi_modal_projector.linear_2.weight *= 0.3
        model.model.image_newline.normal_(std=0.1)
    text.model.layers = torch.nn.ModuleList(text.model.layers[i] for i in layers)
    for i, layer in enumerate(text.model.layers):
        layer.self_attn.layer_idx = i
    transformers.AttentionInterface.register(attend.__name__, attend)
    text.model.config._attn_implementation = attend.__name__
    model.model.language_model = text.model.requires_grad_(False)
    model.lm_head = text.lm_head.requires_grad_(False)
    for layer in text.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Adapted(child, rank))
    return model


def tokenizer(language: Path):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(language)


@dataclass(frozen=True)
class Packed:
    """Texts one after another, [num_tokens]: ids, which text, place in it, label (-100: none), kind of fact (or -1)."""

    ids: torch.Tensor
    text: torch.Tensor
    place: torch.Tensor
    label: torch.Tensor
    kind: torch.Tensor


KINDS = tuple(VALUES)


def first_tokens(tokens) -> list[torch.Tensor]:
    """Of each kind of fact, the first token of each value: what a model chooses among."""
    found = []
    for kind, values in VALUES.items():
        said = [value if kind == "truth" else f" {value}" for value in values]  # an answer begins with its truth
        found.append(torch.tensor([tokens.encode(value, add_special_tokens=False)[0] for value in said]))
    return found


def pack(tokens, texts: list[Text]) -> Packed:
    columns: list[list[int]] = [[], [], [], [], []]
    for number, text in enumerate(texts):
        asked = tokens.encode(ASKED.format(text.question), add_special_tokens=False) if text.question else []
        found = tokens(text.answer, add_special_tokens=False, return_offsets_mapping=True)
        answer = [*found["input_ids"], tokens.convert_tokens_to_ids(END)]
        ids = [*asked, *answer]
        label, kind = [-100] * len(ids), [-1] * len(ids)
        label[len(asked) - 1 if asked else 0 : -1] = answer if asked else answer[1:]
        for start, _, name, _ in text.facts:
            at = next(i for i, (_, end) in enumerate(found["offset_mapping"]) if end > start)
            kind[len(asked) + at - 1] = KINDS.index(name)
        for column, more in zip(columns, (ids, [number] * len(ids), range(len(ids)), label, kind), strict=True):
            column.extend(more)
    return Packed(*(torch.tensor(column) for column in columns))


def pixels(frames: np.ndarray) -> torch.Tensor:
    """As the processor has them: float [1, num_frames, 3, side, side] of uint8 [num_frames, side, side, 3]."""
    mean, std = torch.tensor([[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]]).view(
        2, 3, 1, 1
    )
    return ((torch.from_numpy(frames).permute(0, 3, 1, 2) / 255 - mean) / std)[None]


def hidden(model: torch.nn.Module, tokens, packed: Packed, frames: np.ndarray | None) -> torch.Tensor:
    """Final states [num_tokens, hidden] of texts about a video, or, of `frames` None, of texts of their own."""
    llm = model.model.language_model
    start = torch.zeros((1, 0, llm.config.hidden_size), dtype=torch.bfloat16)
    if frames is not None:
        before = llm.embed_tokens(torch.tensor([tokens.encode(BEFORE, add_special_tokens=False)]))
        found = model.model.get_video_features(pixel_values_videos=pixels(frames))
        start = torch.cat([before, found.pooler_output.to(before.dtype)], 1)
    num, total = start.shape[1], start.shape[1] + len(packed.ids)
    owner = torch.cat([torch.full((num,), -1), packed.text])
    at = torch.arange(total)
    sees = (at[:, None] >= at) & ((owner[:, None] == owner) | (owner == -1))
    x = torch.cat([start, llm.embed_tokens(packed.ids)[None]], 1)
    mask = torch.zeros((total, total), dtype=x.dtype).masked_fill(~sees, float("-inf"))
    places = torch.cat([at[:num], packed.place + num])
    return llm(
        inputs_embeds=x, attention_mask=mask[None, None], position_ids=places[None], use_cache=False
    ).last_hidden_state[0, num:]


def answer_loss(model: torch.nn.Module, tokens, packed: Packed, frames: np.ndarray | None) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = packed.label >= 0
        logits = model.lm_head(hidden(model, tokens, packed, frames)[wanted])
        return F.cross_entropy(logits.float(), packed.label[wanted])


@torch.no_grad()
def facts_right(model: torch.nn.Module, tokens, packed: Packed, frames: np.ndarray | None) -> dict[str, list[bool]]:
    """By kind, whether the right value is the likeliest of its kind where a text says one, given what precedes it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        at = packed.kind >= 0
        logits = model.lm_head(hidden(model, tokens, packed, frames)[at]).float()
    firsts = first_tokens(tokens)
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for row, kind, label in zip(logits, packed.kind[at], packed.label[at], strict=True):
        right[KINDS[kind]].append(bool(firsts[kind][row[firsts[kind]].argmax()] == label))
    return right
