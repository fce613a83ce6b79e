"""Build, train and export a long pair: a target and a draft of reel world, 256 to 16,384 video tokens.

    python -m benchmarks.training.train_long build  target --out runs/long-target
    python -m benchmarks.training.train_long train  runs/long-target --minutes 110
    python -m benchmarks.training.train_long export runs/long-target benchmarks/training/models/qwen2.5-vl-long/target

Both are trained for the answers alone, on whole videos: no loss that helps pruning, guidance or relevance, and no
distillation. First the vision tower learns by itself what each cell shows; then it stays as it is, and the language
model learns to answer. Lengths are drawn on a log scale, up to a limit that grows. Many questions share one video: each
sees the video and itself. Minutes are of one core's time, so that a paused or starved run loses nothing.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import reel
from benchmarks.training import tiny_captioner
from benchmarks.training.tiny_captioner import layer_weights, rms_norm, rotate
from benchmarks.training.train_tiny import Optimizers, build, commands, mixed_precision, save_in_bf16, use_hub_names
from vllm_vidspec import assets
from vllm_vidspec.shapeworld import world

VISION_END = 0.07  # of the run
# From this share of the run on, videos have at most so many tokens.
LIMITS = ((0.0, 512), (0.25, 1024), (0.36, 2048), (0.5, 4096), (0.62, 8192), (0.74, 16384))
COUNT_PROBS = (0.4, 0.2, 0.15, 0.1, 0.15)  # of one to five scenes in an answer
STEP_VIDEO_TOKENS, STEP_TEXT_TOKENS = 2048, 3072
VALIDATION_SEED = reel.HELD_OUT_SEED - 100_000
DECAY_FROM = 0.75


class Reader:
    """A model that answers many questions about one video at once."""

    def __init__(self, path: str | Path) -> None:
        self.captioner = tiny_captioner.load(path, reel.vocabulary())
        before, self.after = tiny_captioner.PROMPTS[self.captioner.family]
        self.before = self.captioner.encode(before)
        self.newline = getattr(self.captioner.model.model, "image_newline", None)  # ends a video of LLaVA-OneVision

    def vision(self, frames: np.ndarray) -> torch.Tensor:
        """Video embeddings [num_pairs * 64, hidden] of uint8 frames [2 * num_pairs, 224, 224, 3].

        LLaVA-OneVision sees the first frame of each pair. Attention of Qwen2.5-VL's tower stays in windows of 4 x 4
        cells, so windows are rows of a batch.
        """
        pairs = len(frames) // 2
        if self.newline is not None:
            x = frames[::2].reshape(pairs, 16, 14, 16, 14, 3).transpose(0, 1, 3, 5, 2, 4)
            patches = torch.from_numpy(np.ascontiguousarray(x).reshape(pairs, 256, -1))
            return tiny_captioner._llava_vision(self.captioner.model.model, patches)
        # pair, two frames, windows down, cells down, patches down, pixels, the same across, channels
        x = frames.reshape(pairs, 2, 2, 4, 2, 14, 2, 4, 2, 14, 3).transpose(0, 2, 6, 3, 7, 4, 8, 10, 1, 5, 9)
        patches = torch.from_numpy(np.ascontiguousarray(x).reshape(pairs * 4, 64, -1))
        tokens = tiny_captioner._qwen_vision(self.captioner.model.model, patches)
        return tokens.view(pairs, 2, 2, 4, 4, -1).transpose(2, 3).reshape(pairs * 64, -1)

    def encode(self, question: reel.Question) -> tuple[list[int], list[int]]:
        """Ids of what follows the video up to the answer, and of the answer with its end."""
        encode = self.captioner.encode
        asked = encode(self.after.replace(world.QUESTION, question.text))
        return asked, [*encode(question.answer), self.captioner.eos]

    def positions(self, num_video_tokens: int, num_texts: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary positions [3, before + video (+ newline)] and [3, num_texts * length], as vLLM counts them."""
        start, pairs, side = len(self.before), num_video_tokens // 64, reel.GRID_SIZE
        grid = torch.meshgrid(torch.arange(pairs) * 2, torch.arange(side), torch.arange(side), indexing="ij")
        video = torch.stack(grid).reshape(3, -1) + start
        if self.newline is not None:
            video = torch.arange(start, start + num_video_tokens + 1).expand(3, -1)
        text = torch.arange(length).repeat(num_texts) + int(video.max()) + 1
        return torch.cat([torch.arange(start).expand(3, -1), video], 1), text.expand(3, -1)

    def hidden(self, video: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Final hidden states at the texts, [batch, num_texts, length, hidden]; arguments as of `states`."""
        *_, (_, y) = self.states(video, texts)
        return rms_norm(y, self.captioner.text.norm.weight).view(*texts.shape, -1)

    def states(self, video: torch.Tensor, texts: torch.Tensor, to_the_end: bool = False):
        """Yield after each layer the states of what precedes the texts and of the texts, both [batch, rows, hidden].

        `video` is [batch, num_video_tokens, hidden], `texts` int64 [batch, num_texts, length], padded with any id; each
        sees the video and itself. The last layer computes the video's states, which no answer needs, if `to_the_end`.
        """
        captioner, (batch, num_texts, length) = self.captioner, texts.shape
        before = captioner.embed(torch.tensor(self.before)).expand(batch, -1, -1)
        end = [] if self.newline is None else [self.newline.expand(batch, 1, -1)]
        x = torch.cat([part.to(before.dtype) for part in (before, video, *end)], 1)
        y = captioner.embed(texts.flatten(1))
        of_video, of_text = self.positions(video.shape[1], num_texts, length)
        rope, rope_text = captioner.rotary(of_video), captioner.rotary(of_text)
        own = torch.full((length, length), float("-inf")).triu(1)
        mask = torch.full((num_texts * length, x.shape[1] + num_texts * length), float("-inf"))
        mask[:, : x.shape[1]] = 0
        for i in range(num_texts):
            rows = slice(i * length, (i + 1) * length)
            mask[rows, x.shape[1] + i * length : x.shape[1] + (i + 1) * length] = own
        mask = mask.to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)
        layers = captioner.text.layers
        for i, layer in enumerate(layers):
            is_last = i == len(layers) - 1 and not to_the_end
            x, y = text_and_video_layer(
                x, y, layer_weights(layer), rope, rope_text, mask, layer.self_attn.head_dim, is_last
            )
            yield x, y


def text_and_video_layer(x, y, weights, rope, rope_text, mask, head_dim: int, is_last: bool):
    """One decoder layer over a video x [batch, num_video, hidden] and texts y [batch, num_rows, hidden].

    The video attends causally to itself; rows of the texts attend to the video and by `mask` [num_rows, num_video +
    num_rows] to one another. Nothing reads the video after the last layer, which leaves it as it was.
    """
    norm1, wq, bq, wk, bk, wv, bv, _, _, wo, norm2, gate, up, down = weights

    def project(z: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear(z, w, b).view(*z.shape[:2], -1, head_dim).transpose(1, 2)

    def finish(z: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        z = z + F.linear(attended.transpose(1, 2).reshape(*z.shape[:2], -1), wo)
        inner = rms_norm(z, norm2)
        return z + F.linear(F.silu(F.linear(inner, gate)) * F.linear(inner, up), down)

    normed, normed_y = rms_norm(x, norm1), rms_norm(y, norm1)
    k, v = rotate(project(normed, wk, bk), *rope), project(normed, wv, bv)
    k_y, v_y = rotate(project(normed_y, wk, bk), *rope_text), project(normed_y, wv, bv)
    groups = wq.shape[0] // wk.shape[0]
    k, v, k_y, v_y = (z.repeat_interleave(groups, 1) for z in (k, v, k_y, v_y))
    q_y = rotate(project(normed_y, wq, bq), *rope_text)
    attended = F.scaled_dot_product_attention(q_y, torch.cat([k, k_y], 2), torch.cat([v, v_y], 2), attn_mask=mask)
    y = finish(y, attended)
    if not is_last:
        q = rotate(project(normed, wq, bq), *rope)
        x = finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return x, y


def draw_questions(rng: np.random.Generator, scenes, num: int, count: int) -> list[reel.Question]:
    questions: list[reel.Question] = []
    while len(questions) < num:
        kind = reel.KINDS[rng.integers(len(reel.KINDS))]
        question = reel.ask(rng, scenes, kind, count)
        questions += [question] if question else []
    return questions


def draw_batch(reader: Reader, rng: np.random.Generator, num_pairs: int, videos: int, texts: int, count: int):
    """Videos with questions: embeddings [videos, tokens, hidden], ids and, -100 where none is, labels of texts."""
    video, asked = [], []
    for _ in range(videos):
        scenes = reel.draw_reel(rng, num_pairs)
        with torch.no_grad(), mixed_precision():
            video.append(reader.vision(reel.render(rng, scenes)[0]))
        asked.append([reader.encode(q) for q in draw_questions(rng, scenes, texts, count)])
    length = max(len(before) + len(answer) for row in asked for before, answer in row) - 1
    ids, labels = torch.zeros((videos, texts, length), dtype=torch.int64), torch.full((videos, texts, length), -100)
    for i, row in enumerate(asked):
        for j, (before, answer) in enumerate(row):
            whole = torch.tensor(before + answer)
            ids[i, j, : len(whole) - 1] = whole[:-1]
            labels[i, j, len(before) - 1 : len(whole) - 1] = torch.tensor(answer)
    return torch.stack(video), ids, labels


def answer_step(reader: Reader, rng: np.random.Generator, progress: float) -> dict:
    """One forward and backward pass over answers; returns what to log."""
    limit = next(tokens for start, tokens in reversed(LIMITS) if progress >= start)
    num_pairs = round(2 ** rng.uniform(np.log2(4), np.log2(limit / 64)))
    count = int(rng.choice(5, p=COUNT_PROBS)) + 1
    videos = max(1, STEP_VIDEO_TOKENS // (64 * num_pairs))
    texts = max(4, STEP_TEXT_TOKENS // (videos * (26 * count + 20)))
    video, ids, labels = draw_batch(reader, rng, num_pairs, videos, texts, count)
    with mixed_precision():
        hidden = reader.hidden(video, ids)
        wanted = labels >= 0
        loss = F.cross_entropy(reader.captioner.lm_head(hidden[wanted]).float(), labels[wanted])
    loss.backward()
    return {"tokens": 64 * num_pairs, "count": count, "loss": round(loss.item(), 3)}


class CellHead(torch.nn.Module):
    """What each cell shows, read off the vision tower's output: to train the tower with."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(hidden_size, sum(reel.LABELS.values()))

    def loss(self, video: torch.Tensor, labels: dict[str, np.ndarray]) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss, and accuracy at cells that show something; video [num_pairs * 64, hidden]."""
        total, accuracy = torch.zeros(()), {}
        parts = self.out(video).float().split(list(reel.LABELS.values()), -1)
        for name, logits in zip(reel.LABELS, parts, strict=True):
            label = torch.from_numpy(labels[name].reshape(-1))
            shown = label > 0 if name not in ("background", "pattern") else torch.ones_like(label, dtype=torch.bool)
            if name == "faded":
                shown = torch.from_numpy(labels["color"].reshape(-1)) > 0
            accuracy[name] = round((logits.argmax(-1) == label)[shown].float().mean().item(), 3)
            for part in (shown, ~shown):  # what shows something is rare, and weighs as much as what does not
                if part.any():
                    total = total + F.cross_entropy(logits[part], label[part])
        return total, accuracy


def vision_step(reader: Reader, rng: np.random.Generator, head: CellHead) -> dict:
    frames, labels = reel.render(rng, reel.draw_reel(rng, 64))
    with mixed_precision():
        loss, accuracy = head.loss(reader.vision(frames), labels)
    loss.backward()
    return {"vision": round(loss.item(), 3), "accuracy": accuracy}


@torch.no_grad()
def validate(reader: Reader, tokens: int, videos: int) -> dict[str, float]:
    """Share of right tokens, teacher-forced, of fillers, digits and facts, on videos outside training."""
    fillers = {word for options in reel.FILLERS.values() for option in options for word in option.split()}
    facts = {*reel.COLORS, *reel.BACKGROUNDS, *reel.PATTERNS, *reel.SHAPES, *reel.SIZES, *reel.MOTIONS, *reel.EVENTS}
    groups = {"digits": set("0123456789"), "facts": {*facts, "top", "bottom", "left", "right"}, "fillers": fillers}
    right = {name: [] for name in groups}
    for i in range(videos):
        rng = np.random.default_rng(VALIDATION_SEED + i)
        video, ids, labels = draw_batch(reader, rng, tokens // 64, 1, 16, 1 + i % 2)
        with mixed_precision():
            found = reader.captioner.lm_head(reader.hidden(video, ids)).argmax(-1) == labels
        for name, words in groups.items():
            at = torch.isin(labels, torch.tensor([reader.captioner.ids[w] for w in words]))
            right[name].append(found[at].float().mean().item())
    return {name: round(float(np.nanmean(values)), 3) for name, values in right.items()}


def train(args: argparse.Namespace) -> None:
    """Train a built checkpoint in place."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    path, reader = Path(args.path), Reader(args.path)
    head = CellHead(reader.captioner.text.config.hidden_size)
    optimizers, rng = Optimizers(reader.captioner, head), np.random.default_rng([args.seed, 0])
    start, reported, step, progress, logs = time.process_time(), time.time(), 0, 0.0, []
    while progress < 1:
        seconds = time.process_time() - start
        progress = args.resume_at + (1 - args.resume_at) * seconds / (60 * args.minutes)
        is_vision = progress < args.vision_end
        scale = learning_rate_scale(progress / args.vision_end if is_vision else progress, step)
        logs.append(vision_step(reader, rng, head) if is_vision else answer_step(reader, rng, progress))
        optimizers.step(scale)
        step += 1
        if time.time() - reported > 60 or progress >= 1:
            log = {"step": step, "seconds": round(seconds), "progress": round(progress, 3)} | logs[-1]
            if not is_vision:
                log["mean_loss"] = round(float(np.mean([one["loss"] for one in logs if "loss" in one])), 3)
            print(json.dumps(log), flush=True)
            reader.captioner.model.save_pretrained(path)
            reported, logs = time.time(), []
    print(json.dumps({tokens: validate(reader, tokens, 4) for tokens in (512, 2048, 8192)}))


def learning_rate_scale(progress: float, step: int) -> float:
    """Warm-up, constant, linear decay from DECAY_FROM on: once for the vision tower, once for the rest."""
    return min(1.0, (step + 1) / 40) * max(0.02, min(1.0, (1 - progress) / (1 - DECAY_FROM)))


def export(args: argparse.Namespace) -> None:
    """Write a checkpoint with bf16 weights."""
    captioner = Reader(args.path).captioner
    save_in_bf16(captioner.model, f"{captioner.family}-long", args.out)
    use_hub_names(Path(args.out) / "model.safetensors")


def parser() -> argparse.ArgumentParser:
    found, command = commands(__doc__)
    sub = command(build, "role")
    sub.add_argument("--out", required=True)
    sub.add_argument("--family", choices=assets.LONG_PAIRS, default=assets.LONG)
    sub.add_argument("--vision", help="a checkpoint whose vision tower to begin with")
    sub.add_argument("--seed", type=int, default=0)
    sub = command(train, "path")
    sub.add_argument("--minutes", type=float, required=True, help="of one core")
    sub.add_argument("--vision-end", type=float, default=VISION_END, help="share that trains the tower")
    sub.add_argument("--resume-at", type=float, default=0.0, help="skip this share of the run")
    sub.add_argument("--seed", type=int, default=1)
    command(export, "path", "out")
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.function(arguments)
