"""Writes what was trained as a small file, and a whole checkpoint that vLLM loads.

    python -m benchmarks.language.export trained target RUN FILE
    python -m benchmarks.language.export checkpoint target SMOLLM2 FILE FOLDER

FILE has tower, projector and adapters in bf16; a checkpoint needs SmolLM2 (`benchmarks.language.fetch`) besides.
"""

import argparse
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.language import model as models
from benchmarks.language.train import ROLES
from vllm_vidspec import assets

CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for content in message['content'] -%}"
    "{%- if content['type'] in ('image', 'image_url', 'input_image', 'image_pil') -%}{{ '<image>\\n' }}"
    "{%- elif content['type'] in ('video', 'video_url', 'input_video') -%}{{ '<video>\\n' }}"
    "{%- elif 'text' in content -%}{{ content['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def write_trained(state: Path, file: Path) -> None:
    """Keep of a run what is trained, without the optimizer's moments, in bf16."""
    found = {name: p.to(torch.bfloat16) for name, p in load_file(state).items() if "/" not in name}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, file)


def merged(model: torch.nn.Module, file: Path) -> torch.nn.Module:
    """Put what was trained into a model as `models.build` makes it, and its adapters into its weights."""
    found = load_file(file)
    missing, unexpected = model.load_state_dict(found, strict=False)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if unexpected or trained & set(missing):
        raise ValueError(f"{file} is of another model: {unexpected or sorted(trained & set(missing))[:3]}")
    for layer in model.model.language_model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, models.Adapted):
                    setattr(part, name, child.merged())
    return model.to(torch.bfloat16).eval()


def write_checkpoint(model: torch.nn.Module, language: Path, folder: Path) -> None:
    """Write a merged model with SmolLM2's tokenizer and the bundled pair's processor."""
    import transformers

    tokens = models.tokenizer(language)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id
    )
    model.save_pretrained(folder)
    # vLLM knows SigLIP's weights by the names of published checkpoints only.
    weights = load_file(folder / "model.safetensors")
    named = {re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", k): w for k, w in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    processor = transformers.AutoProcessor.from_pretrained(assets.checkpoint(models.FAMILY, "target"))
    processor.tokenizer, processor.chat_template = tokens, CHAT_TEMPLATE
    processor.image_token_id, processor.video_token_id = map(tokens.convert_tokens_to_ids, (models.IMAGE, models.VIDEO))
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, names in (("trained", ("run", "file")), ("checkpoint", ("language", "file", "folder"))):
        sub = commands.add_parser(command)
        sub.add_argument("role", choices=ROLES)
        for name in names:
            sub.add_argument(name, type=Path)
    args = parser.parse_args()
    if args.command == "trained":
        write_trained(args.run / "state.safetensors", args.file)
        return
    role = ROLES[args.role]
    model = models.build(args.language, role.layers, role.tower, role.rank, role.seed)
    write_checkpoint(merged(model, args.file), args.language, args.folder)


if __name__ == "__main__":
    main()
