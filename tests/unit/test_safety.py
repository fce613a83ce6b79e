"""What our sources may not do, whoever writes them next: run what they read, or trust what a model brings along."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("vllm_vidspec", "kernels", "scripts") for path in (ROOT / folder).rglob("*.py"))

MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "os.system", "os.popen"}

# file -> what it may do, and why.
ALLOWED = {
    "vllm_vidspec/engine/parallel/launch.py": {
        # The drafter's processes are configured by their parent's own objects, through memory without a name that they
        # inherit from it: one user, one program. vLLM hands its workers theirs in the same way.
        "cloudpickle"
    },
    "vllm_vidspec/tools/show_pruning.py": {
        # Tensors that the tool's own engine has written into its own temporary folder a moment before; `weights_only`.
        "torch.load"
    },
}


def name_of(node: ast.expr) -> str:
    """Return a dotted name, "" for what is none."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(source: str) -> set[str]:
    """Return what a source does of what none may."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            found |= {name} & CALLS
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("trust_remote_code", "shell", "allow_pickle") and is_true:
                    found.add(f"{keyword.arg}=True")
            if name == "torch.load" and not any(keyword.arg == "weights_only" for keyword in node.keywords):
                found.add("torch.load of anything")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_read_is_run(path):
    assert findings(path.read_text()) <= ALLOWED.get(str(path.relative_to(ROOT)), set())


def test_what_is_allowed_is_still_needed():
    for path, allowed in ALLOWED.items():
        assert findings((ROOT / path).read_text()) == allowed


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import yaml.representer",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "def f():\n  return eval(text)",
        "get_config(model, trust_remote_code=True)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_the_search_finds(source):
    """Catches: a search that looks past what it is for."""
    assert findings(source)


def test_bundled_weights_are_safetensors():
    kinds = {path.suffix for path in (ROOT / "vllm_vidspec" / "assets").rglob("*") if path.is_file()}
    assert ".safetensors" in kinds and not kinds & {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
