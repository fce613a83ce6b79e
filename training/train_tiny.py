"""Build, train and export the bundled models: a target and a draft of each family, from scratch on shape world.

    python training/train_tiny.py build   qwen2.5-vl target --out runs/qwen-target
    python training/train_tiny.py train   runs/qwen-target --minutes 30
    python training/train_tiny.py distill runs/qwen-draft --target runs/qwen-target --minutes 4
    python training/train_tiny.py eval    runs/qwen-target runs/qwen-draft
    python training/train_tiny.py export  runs/qwen-target vllm_vidspec/assets/qwen2.5-vl/target

One thread per process: run two at once on two cores. Every random choice follows from the seed; the schedule counts
steps, unless the time limit comes first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import tiny_captioner
from training.tiny_captioner import Captioner, acceptance_length, token_ids, uniform_kept
from vllm_vidspec.shapeworld import world

TEXT_SIZES = {
    "target": dict(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=768
    ),
    "draft": dict(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=320
    ),
}
QWEN_VISION_SIZES = {
    "target": dict(depth=3, hidden_size=96, num_heads=3, intermediate_size=192),
    "draft": dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128),
}
LLAVA_VISION_SIZES = {
    "target": dict(num_hidden_layers=3, hidden_size=128, num_attention_heads=4, intermediate_size=256),
    "draft": dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=160),
}
ROPE_THETA = 500.0
MAX_POSITIONS = 16384
STEPS = {"target": 1400, "draft": 900}
VISION_PHASE, SUBSET_PHASE = 0.25, 0.88  # ends of the vision-only and the subset phase, as fractions of the run
BATCH = 16
VISION_ONLY_BATCH, VISION_ONLY_FRAMES = 48, 5
MUON_LR, ADAMW_LR = 3e-3, 1.5e-3
FILLER_WEIGHT, EVENT_WEIGHT = 0.3, 2.0  # loss weights; other words have 1
STRUCTURE_WORDS = ("on", "at", "in", ",", ".", "next", "after", "then", "all")  # they tell layouts and numbers
NUM_CELLS = 16 * tiny_captioner.CELLS  # video tokens that show something
SUBSET_TOKENS = 96
UV_LAYER = 3  # of four, as the paper's 20 of 28
HEADS_FILE = "auxiliary_heads.pt"  # only to resume
VALIDATION_SEED = world.HELD_OUT_SEED - 10_000

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + 'ROLE_END' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] in ('image', 'image_url', 'input_image', 'image_pil') -%}
{{ 'IMAGE' }}
{%- elif content['type'] in ('video', 'video_url', 'input_video') -%}
{{ 'VIDEO' }}
{%- elif 'text' in content -%}
{{ content['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>TURN_END' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
TEMPLATE_WORDS = {
    "qwen2.5-vl": {
        "ROLE_END": "\\n",
        "IMAGE": "<|vision_start|><|image_pad|><|vision_end|>",
        "VIDEO": "<|vision_start|><|video_pad|><|vision_end|>",
        "TURN_END": "\\n",
    },
    "llava-onevision": {"ROLE_END": " ", "IMAGE": "<image>\\n", "VIDEO": "<video>\\n", "TURN_END": ""},
}


# Build


def build_tokenizer(family: str):
    """A word-level tokenizer whose ids are `tiny_captioner.token_ids()`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = token_ids()
    words = {word: i for word, i in ids.items() if word not in tiny_captioner.SPECIAL_TOKENS}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(tiny_captioner.SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(tiny_captioner.SPECIAL_TOKENS),
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    qwen = family == "qwen2.5-vl"
    tokenizer.image_token, tokenizer.video_token = (
        ("<|image_pad|>", "<|video_pad|>") if qwen else ("<image>", "<video>")
    )
    if any(tokenizer.convert_tokens_to_ids(token) != i for token, i in ids.items()):
        raise RuntimeError("the tokenizer numbered its tokens differently")
    return tokenizer


def build_processor(family: str):
    """The family's own processor for frames of 112 x 112."""
    import transformers

    tokenizer, side = build_tokenizer(family), world.FRAME_SIZE
    template = CHAT_TEMPLATE
    for name, text in TEMPLATE_WORDS[family].items():
        template = template.replace(name, text)
    if family == "qwen2.5-vl":
        pixels = dict(min_pixels=28 * 28, max_pixels=side * side)
        return transformers.Qwen2_5_VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessor(**pixels),
            video_processor=transformers.Qwen2VLVideoProcessor(**pixels, cap_pixels_per_frame=False),
            tokenizer=tokenizer,
            chat_template=template,
        )
    size = dict(height=side, width=side)
    clip = dict(image_mean=tiny_captioner.IMAGE_MEAN.tolist(), image_std=tiny_captioner.IMAGE_STD.tolist())
    return transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=_pinpoints(), **clip),
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size, **clip),
        tokenizer=tokenizer,
        num_image_tokens=64,
        vision_feature_select_strategy="full",
        chat_template=template,
    )


def build_model(family: str, role: str, seed: int) -> torch.nn.Module:
    """A randomly initialised model in fp32."""
    import transformers

    ids = token_ids()
    special = dict(bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"])
    rope: dict = {"rope_type": "default", "rope_theta": ROPE_THETA}
    if family == "qwen2.5-vl":
        rope["mrope_section"] = [8, 12, 12]
    text = dict(
        TEXT_SIZES[role], **special, vocab_size=len(ids), max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False, rope_parameters=rope, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(seed)
    if family == "qwen2.5-vl":
        vision = QWEN_VISION_SIZES[role]
        config = transformers.Qwen2_5_VLConfig(
            text_config=text,
            vision_config=dict(
                vision, out_hidden_size=text["hidden_size"], patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
                window_size=112, fullatt_block_indexes=list(range(vision["depth"])), tokens_per_second=2,
            ),
            image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=False,
        )  # fmt: skip
        return transformers.Qwen2_5_VLForConditionalGeneration(config).float()
    config = transformers.LlavaOnevisionConfig(
        text_config=dict(text, model_type="qwen2"),
        vision_config=dict(
            LLAVA_VISION_SIZES[role], model_type="siglip_vision_model", vision_use_head=False,
            image_size=world.FRAME_SIZE, patch_size=14,
        ),
        image_token_index=ids["<image>"], video_token_index=ids["<video>"], vision_feature_layer=-1,
        vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9", image_grid_pinpoints=_pinpoints(),
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlavaOnevisionForConditionalGeneration(config).float()


def _pinpoints() -> list[list[int]]:
    side = world.FRAME_SIZE
    return [[side, side], [side, 2 * side], [2 * side, side]]


def build(args: argparse.Namespace) -> None:
    model = build_model(args.family, args.role, seed=args.seed)
    model.save_pretrained(args.out)
    build_processor(args.family).save_pretrained(args.out)
    print(args.out, f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


# Data


class Stream:
    """Endless training batches; neighbours in caption length share a batch, to pad less."""

    def __init__(self, captioner: Captioner, seed: int) -> None:
        self.captioner, self.seed, self.queue = captioner, seed, []
        self.brief = False

    def next(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], list[world.Sample]]:
        """Returns pixels, captions, labels ([batch, 256] per name and for "scene"), samples."""
        if not self.queue or len(self.queue[0]) != batch:
            samples = [world.make_sample(self.seed + i, self.brief) for i in range(2 * batch)]
            self.seed += 2 * batch
            samples.sort(key=lambda s: len(s.caption))
            self.queue = [samples[:batch], samples[batch:]]
        return collate(self.captioner, self.queue.pop())


def collate(captioner: Captioner, samples: list[world.Sample]):
    """Stack samples into what `Stream.next` returns."""
    pixels = captioner.pixels(np.stack([s.frames for s in samples]))
    ids = [[*captioner.encode(s.caption), captioner.eos] for s in samples]
    captions = torch.full((len(ids), max(map(len, ids))), -100)
    for row, tokens in enumerate(ids):
        captions[row, : len(tokens)] = torch.tensor(tokens)
    frames = np.arange(0, world.NUM_FRAMES, 2) if captioner.family == "qwen2.5-vl" else tiny_captioner.LLAVA_FRAMES
    labels = {name: np.stack([s.labels[name][frames] for s in samples]) for name in world.LABELS}
    scenes = np.stack([s.scene_of_frame[frames] for s in samples])  # [batch, 16]
    labels["scene"] = np.repeat(scenes, tiny_captioner.CELLS, 1)
    return pixels, captions, {k: torch.from_numpy(v.reshape(len(ids), -1)) for k, v in labels.items()}, samples


def draw_prompt(captioner: Captioner, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Mostly the usual prompt; sometimes with a system message, another question, or the question first."""
    before, after = tiny_captioner.PROMPTS[captioner.family]
    if rng.random() < 0.1:
        before = "<|im_start|> system you are a helpful assistant . <|im_end|> " + before
    if rng.random() < 0.15:
        question = ("what happens in this video ?", "please describe the clip .", "tell me what you see .")[
            rng.integers(3)
        ]
        after = after.replace(world.QUESTION, question)
        if rng.random() < 0.4:
            before = before.replace("user", f"user {question}")
            after = after.replace(question, "")
    return captioner.encode(before), captioner.encode(after)


def draw_kept(captioner: Captioner, labels: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Choose `count` video tokens per video: those that show a shape, and others at random; int64 [batch, count]."""
    shows = F.pad(labels["color"] > 0, (0, captioner.num_video_tokens - NUM_CELLS))
    return (shows + torch.rand(shows.shape)).topk(count, -1).indices.sort(-1).values


def gather(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Rows `kept` [batch, num_kept] of x [batch, num_tokens, ...]."""
    return x[torch.arange(len(x))[:, None], kept]


def summary_labels(samples: list[world.Sample]) -> torch.Tensor:
    """What the last prompt tokens are taught to sum up: token j says object j.

    Returns int64 [batch, MAX_OBJECTS, len(SUMMARY_SIZES)], -100 where there is no such object.
    """
    result = torch.full((len(samples), world.MAX_OBJECTS, len(SUMMARY_SIZES)), -100)
    colors, sizes, positions = list(world.COLORS), list(world.SIZES), list(world.POSITIONS)
    for row, sample in enumerate(samples):
        facts = [(i, scene, fact) for i, scene in enumerate(sample.facts) for fact in scene.objects]
        for j, (scene_idx, scene, fact) in enumerate(facts):
            result[row, j] = torch.tensor([
                colors.index(fact.color) + 1, world.SHAPES.index(fact.shape) + 1, sizes.index(fact.size) + 1,
                positions.index(fact.position), world.MOTIONS.index(fact.motion),
                world.EVENTS.index(fact.event), colors.index(fact.new_color) if fact.new_color else -100,
                scene_idx, list(world.BACKGROUNDS).index(scene.background),
            ])  # fmt: skip
    return result


# Train


# colour, shape, size; position, motion, event, new colour, scene, background
OBJECT_SIZES = (world.LABELS["color"], world.LABELS["shape"], world.LABELS["size"])
SUMMARY_SIZES = (*OBJECT_SIZES, 5, 7, 3, 8, 4, 6)


def alignment_loss(states: list[torch.Tensor], kept_shows: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Rank tokens that show a shape above others by UV-Prune's score (METHODS: ParallelVLM eq. 2-4) at UV_LAYER.

    In large models visual tokens that matter grow towards the text by themselves; four layers need to be told.

    Args:
        states: embeddings and layer outputs [batch, num_tokens, hidden].
        kept_shows: bool [batch, num_kept].
        before, after: lengths of the prompt around the video.
    """
    end = before + kept_shows.shape[1]
    scores = torch.zeros(())
    for state, sign in ((states[UV_LAYER], 1), (states[0], -1)):
        unit = F.normalize(state[:, : end + after].float(), dim=-1)
        text = unit[:, :before].sum(1) + unit[:, end:].sum(1)  # [batch, hidden]
        scores = scores + sign * (unit[:, before:end] @ text[:, :, None])[..., 0]
    margin = scores[:, :, None] - scores[:, None, :]  # [batch, num_kept, num_kept]
    pairs = kept_shows[:, :, None] & ~kept_shows[:, None, :]
    return F.softplus(-margin)[pairs].mean()


class AuxiliaryHeads(torch.nn.Module):
    """Dense losses: what one frame shows at the vision output, the rest at the text model's video and prompt tokens.

    The prompt's last tokens learn to sum up the video, one object each, before the caption begins: large models do so
    by themselves, and it is what makes a target's attention from the prompt worth following. One head reads an
    object's look off video and prompt tokens alike.
    """

    TEXT_SIZES = (4, world.LABELS["direction"], world.LABELS["turned"])  # scene, direction, turned

    def __init__(self, hidden_size: int, family: str) -> None:
        super().__init__()
        # One LLaVA frame shows no motion: only its text model, which sees several frames, can learn the direction.
        of_time = ("turned",) if family == "qwen2.5-vl" else ("turned", "direction")
        self.names = [n for n in world.LABELS if n not in of_time]
        self.vision = torch.nn.Linear(hidden_size, sum(world.LABELS[n] for n in self.names))
        self.text = torch.nn.Linear(hidden_size, sum(self.TEXT_SIZES))
        self.object = torch.nn.Linear(hidden_size, sum(OBJECT_SIZES))
        self.summary = torch.nn.Linear(hidden_size, sum(SUMMARY_SIZES[len(OBJECT_SIZES) :]))
        for head in (self.vision, self.text, self.object, self.summary):  # a fresh head cannot disturb a resumed model
            torch.nn.init.zeros_(head.weight)

    def resume(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what fits."""
        own = self.state_dict()
        self.load_state_dict({k: v for k, v in state.items() if k in own and own[k].shape == v.shape}, strict=False)

    def vision_loss(
        self, video: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss and accuracy at object tokens; video [batch, 256, hidden]."""
        parts = self.vision(video).float().flatten(0, 1).split([world.LABELS[n] for n in self.names], -1)
        loss, accuracy, objects = torch.zeros(()), {}, labels["color"].flatten() > 0
        for name, logits in zip(self.names, parts, strict=True):
            label = labels[name].flatten()
            if name in ("shape", "size", "direction", "x", "y", "faded"):  # colour alone tells where objects are
                label = label.masked_fill(~objects, -100)
            loss = loss + F.cross_entropy(logits, label) * (2.0 if name in ("shape", "color", "direction") else 1.0)
            accuracy[name] = (logits.argmax(-1) == label)[objects].float().mean().item()
        return loss, accuracy

    def text_loss(self, hidden: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden [batch, num_kept, hidden] at video tokens; labels [batch, num_kept], -100 where there is no cell."""
        scene, direction, turned = self.text(hidden).float().flatten(0, 1).split(self.TEXT_SIZES, -1)
        looks = self.object(hidden).float().flatten(0, 1).split(OBJECT_SIZES, -1)
        flat = {name: label.flatten() for name, label in labels.items()}
        flat["turned"] = flat["turned"].masked_fill(flat["turned"] == 0, -100)
        loss = 0.1 * F.cross_entropy(scene, flat["scene"]) + F.cross_entropy(direction, flat["direction"])
        loss = loss + F.cross_entropy(turned, flat["turned"])
        for name, logits in zip(("color", "shape", "size"), looks, strict=True):
            loss = loss + 0.5 * F.cross_entropy(logits, flat[name])
        return loss

    def summary_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Hidden [batch, MAX_OBJECTS, hidden] at the prompt's last tokens; labels as of `summary_labels`."""
        logits = torch.cat([self.object(hidden), self.summary(hidden)], -1).float().flatten(0, 1)
        parts, labels = logits.split(SUMMARY_SIZES, -1), labels.flatten(0, 1)
        return sum(F.cross_entropy(part, labels[:, i]) for i, part in enumerate(parts)) / len(parts)


def caption_loss(
    captioner: Captioner, hidden: torch.Tensor, captions: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Cross entropy, facts at full weight; a position's candidates are all facts or all fillers: no bias."""
    loss = F.cross_entropy(
        captioner.lm_head(hidden).float().flatten(0, 1), captions.flatten(), ignore_index=-100, reduction="none"
    )
    weight = weights[captions.clamp(min=0)].flatten() * (captions >= 0).flatten()
    return (loss * weight).sum() / weight.sum()


def fact_words() -> dict[str, tuple[str, ...]]:
    """Fact words per attribute."""
    return {
        "color": tuple(world.COLORS), "background": tuple(world.BACKGROUNDS),
        "pattern": world.PATTERNS,
        "shape": world.SHAPES, "size": tuple(world.SIZES), "motion": world.MOTIONS,
        "event": world.EVENTS, "position": tuple(world.POSITIONS),
    }  # fmt: skip


@torch.no_grad()
def validate(captioner: Captioner, num_videos: int = 16) -> dict[str, float]:
    """Teacher-forced accuracy on fact words of videos outside training."""
    samples = [world.make_sample(VALIDATION_SEED + i) for i in range(num_videos)]
    pixels, captions, _, _ = collate(captioner, samples)
    kept = torch.arange(captioner.num_video_tokens)
    right, result = [], {}
    for lo in range(0, num_videos, 8):
        part = slice(lo, lo + 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _, _ = captioner.teacher_forced(captioner.vision(pixels[part]), captions[part], kept)
            right.append(captioner.lm_head(hidden).argmax(-1) == captions[part])
    for name, words in fact_words().items():
        at = torch.isin(captions, torch.tensor([captioner.ids[w] for w in words]))
        result[name] = round(torch.cat(right)[at].float().mean().item(), 3)
    return result


def make_optimizers(captioner: Captioner, heads: AuxiliaryHeads) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices, AdamW for the rest, each with its peak learning rate."""
    named = list(captioner.model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in chosen] + list(heads.parameters())
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    return [(muon, MUON_LR), (torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0), ADAMW_LR)]


def learning_rate_scale(step: int, progress: float) -> float:
    """Warm-up, constant, linear decay over the last 40 %; the vision phase ends low, the caption phase starts anew."""
    warm = min(1.0, (step + 1) / 40)
    if progress < VISION_PHASE:
        return warm * max(0.3, min(1.0, (1 - progress / VISION_PHASE) / 0.4))
    return warm * max(0.02, min(1.0, (1 - progress) / 0.4))


def train_step(
    captioner: Captioner,
    heads: AuxiliaryHeads,
    stream: Stream,
    rng: np.random.Generator,
    progress: float,
    weights: torch.Tensor,
) -> dict:
    """One forward and backward pass; returns what to log."""
    stream.brief = progress >= VISION_PHASE
    if progress < VISION_PHASE:
        pixels, _, labels, _ = stream.next(VISION_ONLY_BATCH)
        frames = torch.from_numpy(rng.choice(16, VISION_ONLY_FRAMES, replace=False))  # neighbours look alike
        pixels = pixels.view(pixels.shape[0], 16, 64, -1)[:, frames].flatten(1, 2)
        labels = {k: v.view(-1, 16, tiny_captioner.CELLS)[:, frames].flatten(1) for k, v in labels.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            video = captioner.vision(pixels)
            loss, accuracy = heads.vision_loss(video[:, : VISION_ONLY_FRAMES * tiny_captioner.CELLS], labels)
        loss.backward()
        return {"vision": round(loss.item(), 3), "vision_accuracy": {k: round(v, 2) for k, v in accuracy.items()}}
    pixels, captions, labels, samples = stream.next(BATCH)
    count = SUBSET_TOKENS if progress < SUBSET_PHASE else captioner.num_video_tokens
    kept, prompt = draw_kept(captioner, labels, count), draw_prompt(captioner, rng)
    labels = {
        name: gather(F.pad(v, (0, captioner.num_video_tokens - NUM_CELLS), value=-100), kept)
        for name, v in labels.items()
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():  # the vision tower is done by then
            video = gather(captioner.vision(pixels), kept)
        states: list[torch.Tensor] = []
        hidden, hidden_video, hidden_prompt = captioner.teacher_forced(video, captions, kept, prompt, states)
        alignment = alignment_loss(states, labels["color"] > 0, len(prompt[0]), len(prompt[1]))
        text_loss, loss = heads.text_loss(hidden_video, labels), caption_loss(captioner, hidden, captions, weights)
        summary = torch.zeros(())
        if hidden_prompt.shape[1] >= world.MAX_OBJECTS:
            summary = heads.summary_loss(hidden_prompt[:, -world.MAX_OBJECTS :], summary_labels(samples))
    (loss + text_loss + summary + 0.5 * alignment).backward()
    log = {"caption": loss, "text_aux": text_loss, "summary": summary, "alignment": alignment}
    return {name: round(value.item(), 3) for name, value in log.items()}


def train(args: argparse.Namespace) -> None:
    """Train a built checkpoint in place."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    captioner, path = tiny_captioner.load(args.path), Path(args.path)
    role = "target" if captioner.text.config.hidden_size == TEXT_SIZES["target"]["hidden_size"] else "draft"
    heads = AuxiliaryHeads(captioner.text.config.hidden_size, captioner.family)
    if args.resume_at and (path / HEADS_FILE).exists():
        heads.resume(torch.load(path / HEADS_FILE))
    optimizers = make_optimizers(captioner, heads)
    parameters = [p for o, _ in optimizers for group in o.param_groups for p in group["params"]]
    weights = torch.full((len(captioner.ids),), FILLER_WEIGHT)  # [vocab]
    weights[[captioner.ids[w] for words in fact_words().values() for w in words]] = 1.0
    weights[[captioner.ids[w] for w in STRUCTURE_WORDS]] = 1.0
    weights[[captioner.ids[w] for w in world.EVENTS]] = EVENT_WEIGHT
    compiled = torch.compile(tiny_captioner.decoder_layer, dynamic=True)
    stream, rng = Stream(captioner, 1_000_000 * args.seed), np.random.default_rng(args.seed)
    total, start, reported, step, progress = args.steps or STEPS[role], time.time(), time.time(), 0, 0.0
    while progress < 1:
        progress = max(step / total, (time.time() - start) / (60 * args.minutes))
        progress = args.resume_at + (1 - args.resume_at) * progress
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate_scale(step, progress)
        captioner.decoder_layer = compiled
        log = train_step(captioner, heads, stream, rng, progress, weights)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if time.time() - reported > 90 or progress >= 1:
            captioner.decoder_layer = tiny_captioner.decoder_layer
            log = {"step": step, "seconds": round(time.time() - start), "progress": round(progress, 3)} | log
            log |= {"validation": validate(captioner)} if progress > VISION_PHASE else {}
            print(json.dumps(log), flush=True)
            captioner.model.save_pretrained(path)
            torch.save(heads.state_dict(), path / HEADS_FILE)
            reported = time.time()


# Distil, evaluate, export


def distillation_view(rng: np.random.Generator, shows: torch.Tensor) -> torch.Tensor:
    """Video tokens of one distillation step, as a draft will see them: all; or a tenth to half, drawn at random or,
    as a guided pruner would, with those first that show a shape.

    Args:
        shows: bool [batch, num_video_tokens].

    Returns:
        int64 [batch, num_kept].
    """
    batch, num_tokens = shows.shape
    kind = rng.random()
    if kind < 0.3:
        return torch.arange(num_tokens).expand(batch, -1)
    count = int(num_tokens * rng.uniform(0.08, 0.5))
    # A guided choice is not perfect: one token in ten that shows a shape is not known to.
    known = shows & (torch.rand(shows.shape) < 0.9) if kind < 0.7 else torch.zeros_like(shows)
    return (known + torch.rand(shows.shape)).topk(count, -1).indices.sort(-1).values


def soft_labels(target: Captioner, seed: int, count: int) -> tuple[torch.Tensor, ...]:
    """The target's whole next-token distributions along reference captions, whose synonyms are drawn at random.

    Returns pixels of `count` videos, captions int64 [count, length] padded with -100, log-probabilities bf16
    [count, length, vocab_size] and, bool [count, num_video_tokens], which tokens show a shape. A draft that is taught
    the distribution, not its most likely token, agrees with the target at every temperature.
    """
    pixels, texts, shows = [], [], []
    for lo in range(0, count, 16):
        samples = [world.make_sample(1_000_000 * seed + lo + i) for i in range(16)]
        pixels.append(target.pixels(np.stack([sample.frames for sample in samples])))
        texts += [[*target.encode(sample.caption), target.ids["<|im_end|>"]] for sample in samples]
        shows.append(collate(target, samples)[2]["color"] > 0)
    captions = torch.full((count, max(map(len, texts))), -100)
    for row, ids in enumerate(texts):
        captions[row, : len(ids)] = torch.tensor(ids)
    everything, kept, labels = torch.cat(pixels), torch.arange(target.num_video_tokens), []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for lo in range(0, count, 16):
            hidden, _, _ = target.teacher_forced(target.vision(everything[lo : lo + 16]), captions[lo : lo + 16], kept)
            labels.append(target.lm_head(hidden).float().log_softmax(-1).to(torch.bfloat16))
    return everything, captions, torch.cat(labels), F.pad(torch.cat(shows), (0, target.num_video_tokens - NUM_CELLS))


def distill(args: argparse.Namespace) -> None:
    """Fine-tune a draft in place on the target's distributions; mostly it sees a tenth to a half of the video."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    target, draft = tiny_captioner.load(args.target), tiny_captioner.load(args.path)
    start = time.time()
    pixels, captions, labels, shows = soft_labels(target, args.seed, args.videos)
    print(f"{len(captions)} captions in {time.time() - start:.0f} s", flush=True)
    optimizer = torch.optim.AdamW(draft.model.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.0)
    rng, start, step, progress = np.random.default_rng(args.seed), time.time(), 0, 0.0
    while progress < 1:
        progress = max(step / args.steps, (time.time() - start) / (60 * args.minutes))
        optimizer.param_groups[0]["lr"] = 5e-4 * min(1, (step + 1) / 20) * max(0.02, 1 - progress)
        rows = torch.from_numpy(rng.choice(len(captions), BATCH, replace=False))
        kept, valid = distillation_view(rng, shows[rows]), captions[rows] >= 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _, _ = draft.teacher_forced(gather(draft.vision(pixels[rows]), kept), captions[rows], kept)
            log_q = draft.lm_head(hidden).float().log_softmax(-1)
        log_p = labels[rows].float()
        loss = ((log_p.exp() * (log_p - log_q)).sum(-1) * valid).sum() / valid.sum()  # KL(target || draft) per token
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(json.dumps({"step": step, "progress": round(progress, 3), "kl": round(loss.item(), 3)}), flush=True)
    draft.model.save_pretrained(args.path)


def attribute_accuracy(captioner: Captioner, outputs: list[list[int]], samples: list[world.Sample]) -> dict[str, float]:
    """Share of right attributes, by name and pooled ("all")."""
    counts: dict[str, list[int]] = {"all": [0, 0]}
    for ids, sample in zip(outputs, samples, strict=True):
        for name, (right, total) in world.score_caption(captioner.decode(ids), sample.facts).items():
            for key in (name, "all"):
                entry = counts.setdefault(key, [0, 0])
                entry[0], entry[1] = entry[0] + right, entry[1] + total
    return {name: round(right / total, 3) for name, (right, total) in counts.items()}


@torch.no_grad()
def evaluate(args: argparse.Namespace) -> None:
    """Print attribute accuracy on held-out videos and the draft's offline acceptance length."""
    torch.set_num_threads(args.threads)
    target, samples = tiny_captioner.load(args.target), [world.held_out(i) for i in range(args.videos)]
    pixels = target.pixels(np.stack([s.frames for s in samples]))
    outputs = target.greedy(target.vision(pixels))
    result: dict = {"target": attribute_accuracy(target, outputs, samples)}
    print(json.dumps(result), flush=True)
    if args.draft:
        draft, rng = tiny_captioner.load(args.draft), np.random.default_rng(0)
        total = draft.num_video_tokens
        result["draft"] = attribute_accuracy(draft, draft.greedy(draft.vision(pixels)), samples)
        kept = {"full": torch.arange(total)} | {f"uniform {p} %": uniform_kept(total, p / 100) for p in (50, 20, 10, 5)}
        kept["random 10 %"] = torch.from_numpy(np.sort(rng.choice(total, round(total * 0.1), replace=False)))
        kept["text only"] = torch.arange(0)
        result["acceptance_length"] = {
            name: round(acceptance_length(draft, pixels, outputs, k), 3) for name, k in kept.items()
        }
        print(json.dumps({"draft": result["draft"], "acceptance_length": result["acceptance_length"]}))
    print(target.decode(outputs[0]), samples[0].caption, sep="\n")
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def export(args: argparse.Namespace) -> None:
    """Write a checkpoint with bf16 weights."""
    captioner = tiny_captioner.load(args.path)
    config = captioner.model.config
    for part in (config, config.text_config, config.vision_config):
        part.dtype = torch.bfloat16
    captioner.model.to(torch.bfloat16).save_pretrained(args.out)
    build_processor(captioner.family).save_pretrained(args.out)
    use_hub_names(Path(args.out) / "model.safetensors")


def use_hub_names(path: Path) -> None:
    """Rename SigLIP's weights as published checkpoints do: vLLM's loader knows `vision_tower.vision_model.*` only."""
    from safetensors.torch import load_file, save_file

    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = {
        name.replace(old, new, 1) if name.startswith(old) and not name.startswith(new) else name: weight
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)

    def command(function, *positional: str) -> argparse.ArgumentParser:
        sub = commands.add_parser("eval" if function is evaluate else function.__name__, help=function.__doc__)
        sub.set_defaults(function=function)
        for name in positional:
            sub.add_argument(name)
        return sub

    sub = command(build, "family", "role")
    sub.add_argument("--out", required=True)
    sub.add_argument("--seed", type=int, default=0)
    sub = command(train, "path")
    sub.add_argument("--minutes", type=float, default=60, help="time limit; the schedule shrinks to fit")
    sub.add_argument("--steps", type=int)
    sub.add_argument("--resume-at", type=float, default=0.0, help="skip this fraction of the schedule")
    sub.add_argument("--seed", type=int, default=1)
    sub = command(distill, "path")
    sub.add_argument("--target", required=True)
    sub.add_argument("--minutes", type=float, default=5)
    sub.add_argument("--steps", type=int, default=300)
    sub.add_argument("--videos", type=int, default=512)
    sub.add_argument("--seed", type=int, default=3, help="videos and order; differs from training's")
    sub = command(evaluate, "target")
    sub.add_argument("draft", nargs="?")
    sub.add_argument("--videos", type=int, default=32)
    sub.add_argument("--threads", type=int, default=1)
    sub.add_argument("--out")
    command(export, "path", "out")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
