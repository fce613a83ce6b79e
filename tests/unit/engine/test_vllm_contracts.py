"""What we rely on is in the vLLM that is installed: `make test` looks at 0.32, `make test-cuda-host` at 0.33 too.

The first thing to run before another version is supported.
"""

import ast
import contextlib
import hashlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.platforms import current_platform

from unit.engine import vllm_contracts as contracts
from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.engine.compat.contract import MARK
from vllm_vidspec.scoring import top_entropy

ROOT = Path(__file__).resolve().parents[3]
IS_CPU = current_platform.is_cpu()
SOURCES = ("vllm_vidspec", "kernels", "scripts", *(() if IS_CPU else ("benchmarks", "tests/null_gpu")))


def resolve(path: str) -> Any:
    """Return what `module:Name.attribute` names in vLLM, whatever we have put in its place."""
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    found = getattr(found, MARK, found)
    return getattr(found, "fn", found)  # of a Triton kernel


def has(path: str) -> bool:
    for one in (path, path.replace(":", ".")):  # a name in a module, or a module
        with contextlib.suppress(ImportError, AttributeError):
            resolve(one)
            return True
    return False


def code(path: str) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(resolve(path))))


def last(values: Any) -> str:
    return str(values).split(":")[-1][:40]


def imports(file: Path) -> Iterator[str]:
    """Yield `module:name`, or a module, of each import of vLLM in a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")


def test_every_import_of_ours_is_there():
    """Catches: a name that vLLM has moved or dropped, inside functions too."""
    files = (file for folder in SOURCES for file in (ROOT / folder).rglob("*.py"))
    found = {
        path
        for file in files
        for path in imports(file)
        if file.name != "moved.py"  # which tries one module after the other
        and (IS_CPU or not ("cpu" in file.parts or file.name == "cpu.py" or ".cpu" in path))
    }
    assert len(found) > 80, "our own imports are not seen"
    assert [path for path in sorted(found) if not has(path)] == []
    assert not has("vllm.utils.torch_utils:renamed") and not has("vllm.renamed")


@pytest.mark.parametrize(("path", "names"), contracts.FUNCTIONS.items(), ids=last)
def test_functions_take_what_we_give(path, names):
    """Catches: a parameter that is renamed, moved or dropped."""
    taken = inspect.signature(resolve(path)).parameters
    assert [name for name in taken if name in names.split()] == names.split()


@pytest.mark.parametrize("path", contracts.OURS)
def test_our_methods_take_what_theirs_do(path):
    """Catches: a class that cannot be made any more; a method that vLLM's arguments do not reach, or has renamed."""
    ours = resolve(f"vllm_vidspec.engine.{path}")
    theirs = next(base for base in ours.__mro__ if base.__module__.startswith("vllm."))
    assert not inspect.isabstract(ours)
    methods = {name: method for name, method in inspect.getmembers(ours, inspect.isfunction) if name != "__init__"}
    shared = [name for name in methods if name in dir(theirs) and methods[name] is not getattr(theirs, name)]
    assert shared
    for name in shared:
        own, wanted = (inspect.signature(owner).parameters for owner in (methods[name], getattr(theirs, name)))
        named = [n for n, one in own.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        assert named == [*wanted][: len(named) if len(named) < len(own) else None], name


@pytest.mark.parametrize(("path", "where"), contracts.SOMETIMES.items(), ids=last)
def test_what_a_version_lacks_is_known(path, where):
    """Catches: a special case of ours that has lost its reason, or needs another one."""
    assert has(path) == vllm.__version__.startswith(where)


@pytest.mark.parametrize(("path", "names"), contracts.MEMBERS.items(), ids=last)
def test_classes_have_what_we_read(path, names):
    """Catches: a renamed field of a step, attribute of the runner, knob of a configuration."""
    members: set[str] = set()
    for base in (base for base in resolve(path).__mro__ if base.__module__.startswith("vllm.")):
        members |= {*vars(base), *inspect.get_annotations(base), *re.findall(r"self\.(\w+)", inspect.getsource(base))}
    assert not set(names.split()) - members


def test_vllm_reads_nothing_else_of_a_speculator():
    """Catches: an attribute that vLLM begins to read, and that ours do not have."""
    trees = [ast.parse(inspect.getsource(importlib.import_module(module))) for module in contracts.READERS]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    read = {node.attr for node in nodes if ast.unparse(node.value) in ("self.speculator", "speculator")}
    ours = contracts.READ_OF_OURS.split()
    assert read <= {*ours, *contracts.READ_OF_THEIRS.split()}
    source = (ROOT / "vllm_vidspec/engine/speculator.py").read_text()
    assert all(f"def {name}(" in source or f"    {name} = " in source for name in ours)


@pytest.mark.parametrize(("path", "names"), contracts.ORDER.items(), ids=last)
def test_vllm_calls_in_this_order(path, names):
    calls = re.findall(r"(?<!def )\b(\w+)\(", inspect.getsource(resolve(path)))
    assert [name for name in calls if name in names.split()] == names.split()


@pytest.mark.parametrize(("path", "name"), contracts.KEYWORDS, ids=last)
def test_vllm_calls_with_these_arguments(path, name):
    calls = [node for node in ast.walk(code(path)) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func).split(".")[-1] == name)
    assert sorted(keyword.arg or "**" for keyword in call.keywords) == contracts.KEYWORDS[path, name].split()


def test_the_noise_is_the_same_in_every_version():
    """Catches: noise that one version draws otherwise, where ours are the words of another."""
    text = "\n".join(ast.unparse(code(path)) for path in contracts.NOISE)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == contracts.NOISE_DIGEST


def test_fly_has_vllms_defaults_and_measure():
    """Catches: a threshold that means something else than vLLM's own (0.33 is the first that has FLy)."""
    fly = pytest.importorskip("vllm.v1.spec_decode.fly")
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, ::7] = -torch.inf
    for top_k in (1, 3, 100):
        theirs = fly.compute_fly_entropy(logits, top_k, from_logits=True)
        torch.testing.assert_close(top_entropy(logits, top_k), theirs)
    ours = VidSpecConfig(model="self", num_speculative_tokens=9)
    config = "vllm.config.speculative:SpeculativeConfig"
    fields = {
        ast.unparse(node.target): ast.unparse(node.value)
        for node in ast.walk(code(config))
        if isinstance(node, ast.AnnAssign) and node.value
    }
    assert fields["fly_entropy_threshold"] == f"Field(default={ours.score.fly_entropy}, ge=0)"
    assert fields["fly_entropy_top_k"] == f"Field(default={ours.score.fly_top_k}, ge=1)"
    assert "self.fly_window_size = min(6, self.num_speculative_tokens - 1)" in ast.unparse(code(config))
    assert ours.fly_window == 6
