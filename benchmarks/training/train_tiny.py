"""Build, train and export the bundled models: a target and a draft of each family, from random weights on shape world.

    python -m benchmarks.training.train_tiny build   qwen2.5-vl target --out runs/qwen-target
    python -m benchmarks.training.train_tiny train   runs/qwen-target --minutes 30
    python -m benchmarks.training.train_tiny distill runs/qwen-draft --target runs/qwen-target --minutes 4
    python -m benchmarks.training.train_tiny export  runs/qwen-target vllm_vidspec/assets/qwen2.5-vl/target

One thread per process: run two at once on two cores. Every random choice follows from the seed; the schedule counts
steps, unless the time limit comes first.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.optim._muon

from benchmarks import captioned
from benchmarks.training import tiny_captioner
from benchmarks.training.tiny_captioner import Captioner
from benchmarks.training.tiny_data import (
    NUM_CELLS,
    Stream,
    collate,
    distillation_view,
    draw_frames,
    draw_kept,
    draw_prompt,
    gather,
    summary_labels,
)
from benchmarks.training.tiny_losses import AuxiliaryHeads, alignment_loss, caption_loss, token_weights
from vllm_vidspec import assets
from vllm_vidspec.shapeworld import world

STEPS = {256: 1400, 128: 900}  # by hidden size, a target's and a draft's
VISION_PHASE, SUBSET_PHASE = 0.25, 0.88  # ends of the vision-only and the subset phase, as fractions of the run
BATCH = 16
VISION_ONLY_BATCH, VISION_ONLY_FRAMES = 48, 5
MUON_LR, ADAMW_LR = 3e-3, 1.5e-3
SUBSET_TOKENS = 96
HAS_BF16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def untrained(family: str, role: str, seed: int) -> torch.nn.Module:
    """What a bundled checkpoint is made of, in fp32, with random weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(assets.checkpoint(family, role))
    return getattr(transformers, config.architectures[0])(config).float()


def save(model: torch.nn.Module, family: str, out: str) -> None:
    """Write a model with the processor, tokenizer and chat template of a family's bundled target."""
    import transformers

    model.save_pretrained(out)
    transformers.AutoProcessor.from_pretrained(assets.checkpoint(family, "target")).save_pretrained(out)


def build(args: argparse.Namespace) -> None:
    model = untrained(args.family, args.role, args.seed)
    if args.vision:
        found = tiny_captioner.load(args.vision).model.model.state_dict()
        tower = {name: weight for name, weight in found.items() if not name.startswith("language_model.")}
        missing = model.model.load_state_dict(tower, strict=False).missing_keys
        assert all(name.startswith("language_model.") for name in missing), missing
    save(model, args.family, args.out)
    print(args.out, f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


def mixed_precision() -> torch.autocast:
    """bf16 where the CPU computes it; where it does not, bf16 would take five to ten times as long as fp32."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=HAS_BF16)


def orthogonalise(grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Muon's Newton-Schulz iteration, of which torch's is in bf16 on every CPU: here in fp32."""
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if grad.shape[0] > grad.shape[1] else x


if not HAS_BF16:
    torch.optim._muon._zeropower_via_newtonschulz = orthogonalise


class Optimizers:
    """Muon for the matrices, AdamW for the rest: of a model and the heads that are trained with it."""

    def __init__(self, captioner: Captioner, heads: torch.nn.Module) -> None:
        named = list(captioner.model.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen] + list(heads.parameters())
        muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0)
        self.peaks = {muon: MUON_LR, adamw: ADAMW_LR}
        self._parameters = matrices + rest

    def step(self, scale: float) -> None:
        """Take a step at this share of the peak learning rates."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, peak in self.peaks.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
            optimizer.zero_grad()


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
    guided: bool = True,
    short: bool = False,
) -> dict:
    """One forward and backward pass; returns what to log.

    `guided` teaches what guided pruners live on; with `short` half of the steps show some frames only, down to none.
    """
    stream.brief = progress >= VISION_PHASE
    if progress < VISION_PHASE:
        pixels, _, labels, _ = stream.next(VISION_ONLY_BATCH)
        frames = torch.from_numpy(rng.choice(16, VISION_ONLY_FRAMES, replace=False))  # neighbours look alike
        pixels = pixels.view(pixels.shape[0], 16, 64, -1)[:, frames].flatten(1, 2)
        labels = {k: v.view(-1, 16, tiny_captioner.CELLS)[:, frames].flatten(1) for k, v in labels.items()}
        with mixed_precision():
            video = captioner.vision(pixels)
            loss, accuracy = heads.vision_loss(video[:, : VISION_ONLY_FRAMES * tiny_captioner.CELLS], labels)
        loss.backward()
        return {"vision": round(loss.item(), 3), "vision_accuracy": {k: round(v, 2) for k, v in accuracy.items()}}
    pixels, captions, labels, samples = stream.next(BATCH)
    count = SUBSET_TOKENS if progress < SUBSET_PHASE else captioner.num_video_tokens
    is_short = short and rng.random() < 0.5
    kept = draw_frames(captioner, rng, len(pixels)) if is_short else draw_kept(captioner, labels, count)
    prompt = draw_prompt(captioner, rng)
    labels = {
        name: gather(torch.nn.functional.pad(v, (0, captioner.num_video_tokens - NUM_CELLS), value=-100), kept)
        for name, v in labels.items()
    }
    with mixed_precision():
        with torch.no_grad():  # the vision tower is done by then
            video = gather(captioner.vision(pixels), kept)
        states: list[torch.Tensor] = []
        hidden, hidden_video, hidden_prompt = captioner.teacher_forced(video, captions, kept, prompt, states)
        segments = captioner.segments(prompt)
        order, _ = captioner.layout(segments, kept)
        num_text = sum(map(len, segments))
        alignment = summary = torch.zeros(())
        if guided:
            alignment = alignment_loss(states, labels["color"] > 0, order.argsort(-1)[:, num_text:], order.shape[1])
        # A few frames may hold nothing that the dense labels tell of.
        text_loss = torch.zeros(()) if is_short else heads.text_loss(hidden_video, labels)
        loss = caption_loss(captioner, hidden, captions, weights)
        if guided and hidden_prompt.shape[1] >= world.MAX_OBJECTS:
            summary = heads.summary_loss(hidden_prompt[:, -world.MAX_OBJECTS :], summary_labels(samples))
    (loss + text_loss + summary + 0.5 * alignment).backward()
    log = {"caption": loss, "text_aux": text_loss, "summary": summary, "alignment": alignment}
    return {name: round(value.item(), 3) for name, value in log.items()}


def train(args: argparse.Namespace) -> None:
    """Train a built checkpoint in place."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    captioner, path = tiny_captioner.load(args.path), Path(args.path)
    heads = AuxiliaryHeads(captioner.text.config.hidden_size, captioner.family, captioner.num_levels)
    optimizers = Optimizers(captioner, heads)
    weights = token_weights(captioner, args.style)
    captioner.decoder_layer = torch.compile(tiny_captioner.decoder_layer, dynamic=True)
    stream, rng = Stream(captioner, 1_000_000 * args.seed, args.style), np.random.default_rng(args.seed)
    total, step, progress = args.steps or STEPS[captioner.text.config.hidden_size], 0, 0.0
    start = reported = time.time()
    while progress < 1:
        progress = max(step / total, (time.time() - start) / (60 * args.minutes))
        progress = args.resume_at + (1 - args.resume_at) * progress
        log = train_step(captioner, heads, stream, rng, progress, weights, not args.plain, args.short)
        optimizers.step(learning_rate_scale(step, progress))
        step += 1
        if time.time() - reported > 90 or progress >= 1:
            log = {"step": step, "seconds": round(time.time() - start), "progress": round(progress, 3)} | log
            print(json.dumps(log), flush=True)
            captioner.model.save_pretrained(path)
            reported = time.time()


def soft_labels(target: Captioner, seed: int, count: int) -> tuple[torch.Tensor, ...]:
    """The target's whole next-token distributions along reference captions, whose synonyms are drawn at random.

    Returns pixels of `count` videos, captions int64 [count, length] padded with -100, log-probabilities bf16
    [count, length, vocab_size] and, bool [count, num_video_tokens], which tokens show a shape. A draft that is taught
    the distribution, not its most likely token, agrees with the target at every temperature.
    """
    pixels, captions, marks, _ = collate(target, [captioned.make_sample(1_000_000 * seed + i) for i in range(count)])
    kept, labels = torch.arange(target.num_video_tokens), []
    with torch.no_grad(), mixed_precision():
        for lo in range(0, count, 16):
            hidden, _, _ = target.teacher_forced(target.vision(pixels[lo : lo + 16]), captions[lo : lo + 16], kept)
            labels.append(target.lm_head(hidden).float().log_softmax(-1).to(torch.bfloat16))
    shows = torch.nn.functional.pad(marks["color"] > 0, (0, target.num_video_tokens - NUM_CELLS))
    return pixels, captions, torch.cat(labels), shows


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
        with mixed_precision():
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


def export(args: argparse.Namespace) -> None:
    """Write a checkpoint with bf16 weights."""
    captioner = tiny_captioner.load(args.path)
    model = captioner.model
    for part in (model.config, model.config.text_config, model.config.vision_config):
        part.dtype = torch.bfloat16
    save(model.to(torch.bfloat16), captioner.family, args.out)
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
    group = parser.add_subparsers(required=True)

    def command(function, *positional: str) -> argparse.ArgumentParser:
        sub = group.add_parser(function.__name__, help=function.__doc__)
        sub.set_defaults(function=function)
        for name in positional:
            sub.add_argument(name, choices=assets.ROLES if name == "role" else None)
        return sub

    sub = command(build, "family", "role")
    sub.add_argument("--out", required=True)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--vision", help="a checkpoint of this size whose vision tower to begin with")
    sub = command(train, "path")
    sub.add_argument("--style", choices=captioned.STYLES, default=captioned.STYLES[0], help="of the captions")
    sub.add_argument("--short", action="store_true", help="videos of fewer frames, too, down to none")
    sub.add_argument("--plain", action="store_true", help="without the two losses that teach what guided pruning needs")
    sub.add_argument("--minutes", type=float, default=60, help="time limit; the schedule shrinks to fit")
    sub.add_argument("--steps", type=int)
    sub.add_argument("--resume-at", type=float, default=0.0, help="skip this fraction of the schedule")
    sub.add_argument("--seed", type=int, default=1)
    sub = command(distill, "path")
    sub.add_argument("--target", required=True)
    sub.add_argument("--minutes", type=float, default=5)
    sub.add_argument("--steps", type=int, default=300)
    sub.add_argument("--videos", type=int, default=512)
    sub.add_argument("--seed", type=int, default=3, help="videos and order; differs from benchmarks.training's")
    command(export, "path", "out")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
