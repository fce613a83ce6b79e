"""What we rely on is in the sources of every supported vLLM; the first thing to read before another version.

The sources are read, not imported: 0.33 has no build for CPUs, and its CUDA build need not run here.
"""

import ast
from collections.abc import Iterator

import pytest
import torch

from unit.engine import vllm_contracts as contracts
from unit.engine.vllm_sources import ROOT, VERSIONS, Definition, Sources, calls, parameters, sources_of
from vllm_vidspec import SUPPORTED_CPU
from vllm_vidspec.scoring import top_entropy

# Where our imports of vLLM are, and what of it only the CPU engine runs.
OURS = ("vllm_vidspec", "kernels", "benchmarks", "scripts", "tests/null_gpu")
OF_THE_CPU = ("vllm_vidspec/engine/compat/cpu.py", "vllm_vidspec/engine/cpu/")


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def sources(version):
    """Return a version's sources."""
    found = sources_of(version)
    if found is None:
        pytest.skip(f"no sources of vLLM {version} here: `make setup-cuda-host` installs them")
    return found


# ---- imports


def imports(tree: ast.AST, is_careful: bool = False) -> Iterator[list[tuple[str, str]]]:
    """Yield what a module imports of vLLM, as lists of `(module, name)` of which one has to be there."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Try) and any(
            "NotFound" in ast.unparse(handler.type or node) for handler in node.handlers
        ):
            ways = (node.body, *(handler.body for handler in node.handlers))
            found = [list(imports(ast.Module(list(way), []))) for way in ways]
            yield from ([one for names in options for one in names] for options in zip(*found, strict=True))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ([(node.module, alias.name)] for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ([(alias.name, "")] for alias in node.names if alias.name.split(".")[0] == "vllm")
        else:
            yield from imports(node)


def our_imports(version: str) -> dict[str, list[list[tuple[str, str]]]]:
    """Return what each file of ours imports of vLLM, those left out that a version never runs."""
    files = (path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py")))
    names = {str(path.relative_to(ROOT)): path for path in files}
    skipped = () if version == SUPPORTED_CPU else OF_THE_CPU
    return {
        name: list(imports(ast.parse(path.read_text())))
        for name, path in names.items()
        if not name.startswith(skipped or "-")
    }


def is_there(sources: Sources, module: str, name: str) -> bool:
    return sources.tree(module) is not None if not name else sources.find(module, name) is not None


def test_every_import_of_ours_is_there(sources, version):
    """Catches: a name that vLLM has moved or dropped."""
    found = our_imports(version)
    assert sum(map(len, found.values())) > 100, "our own imports are not seen"
    missing = [
        f"{file}: {' or '.join(f'{module}.{name}' for module, name in ways)}"
        for file, names in found.items()
        for ways in names
        if not any(is_there(sources, module, name) for module, name in ways)
    ]
    assert not missing, f"vLLM {version} has no " + "\n".join(missing)


# ---- tables


def definition(sources: Sources, path: str) -> Definition:
    found = sources.resolve(path)
    assert found is not None and found.node is not None, f"{path} is gone"
    return found.node


@pytest.mark.parametrize(("path", "names"), contracts.FUNCTIONS.items(), ids=lambda value: value.split(":")[-1])
def test_functions_take_what_we_give(sources, path, names):
    """Catches: a parameter that is renamed, moved or dropped."""
    wanted = names.split()
    taken = parameters(definition(sources, path))
    assert [name for name in taken if name in wanted] == wanted, f"{path} takes {', '.join(taken)}"


@pytest.mark.parametrize("signature", contracts.MOVED)
def test_what_has_moved_takes_the_same(sources, version, signature):
    path = contracts.MOVED[signature][version]
    name, _, wanted = signature.rstrip(")").partition("(")
    assert path.endswith(f":{name}")
    assert parameters(definition(sources, path)) == wanted.split(", ")


@pytest.mark.parametrize(("path", "where"), contracts.SOMETIMES.items(), ids=lambda value: str(value).split(":")[-1])
def test_what_a_version_lacks_is_known(sources, version, path, where):
    """Catches: a special case of ours that has lost its reason, or needs another one."""
    assert (sources.resolve(path) is not None) == (version in where)


@pytest.mark.parametrize(("path", "names"), contracts.MEMBERS.items(), ids=lambda value: value.split(":")[-1][:40])
def test_classes_have_what_we_read(sources, path, names):
    """Catches: a renamed field of a step, attribute of the runner, knob of a configuration."""
    found = sources.resolve(path)
    assert found is not None and isinstance(found.node, ast.ClassDef), f"{path} is gone"
    assert not set(names.split()) - sources.members(found)


@pytest.mark.parametrize(("path", "ours"), contracts.ABSTRACT.items(), ids=lambda value: str(value).split(":")[-1][:40])
def test_ours_have_every_abstract_method(sources, path, ours):
    """Catches: a class of ours that cannot be made any more."""
    found = sources.resolve(path)
    assert found is not None
    wanted = sources.abstract(found)
    assert wanted
    for file, name in (one.split(":") for one in ours):
        (own,) = (node for node in ast.parse((ROOT / file).read_text()).body if getattr(node, "name", "") == name)
        assert not wanted - {getattr(node, "name", "") for node in own.body}, name


def test_propose_matches_the_interface(sources):
    """Catches: a `propose` of ours that vLLM's keyword arguments do not reach."""
    theirs = parameters(definition(sources, f"{contracts.GPU}.spec_decode.speculator:BaseSpeculator.propose"))
    nodes = ast.parse((ROOT / "vllm_vidspec/engine/speculator.py").read_text()).body
    (speculator,) = (node for node in nodes if getattr(node, "name", "") == "Speculator")
    (ours,) = (node for node in speculator.body if getattr(node, "name", "") == "propose")
    assert parameters(ours) == theirs


def test_vllm_reads_nothing_else_of_a_speculator(sources):
    """Catches: an attribute that vLLM begins to read, and that ours do not have."""
    read = {
        node.attr
        for module in contracts.READERS
        for node in ast.walk(sources.tree(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self.speculator", "speculator")
    }
    assert read <= {*contracts.READ_OF_OURS.split(), *contracts.READ_OF_THEIRS.split()}
    text = (ROOT / "vllm_vidspec/engine/speculator.py").read_text()
    assert all(f"def {name}(" in text or f"    {name} = " in text for name in contracts.READ_OF_OURS.split())


@pytest.mark.parametrize(("path", "names"), contracts.ORDER.items(), ids=lambda value: value.split(".")[-1][:40])
def test_vllm_calls_in_this_order(sources, path, names):
    wanted = names.split()
    assert [name for name in calls(definition(sources, path)) if name in wanted] == wanted


@pytest.mark.parametrize(("path", "name"), contracts.KEYWORDS, ids=lambda value: value.split(".")[-1])
def test_vllm_calls_with_these_arguments(sources, path, name):
    made = [node for node in ast.walk(definition(sources, path)) if isinstance(node, ast.Call)]
    (call,) = (node for node in made if name in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")))
    assert sorted(keyword.arg or "**" for keyword in call.keywords) == contracts.KEYWORDS[path, name].split()


@pytest.mark.parametrize("path", contracts.SAME, ids=lambda value: value.split(":")[-1])
def test_the_noise_is_the_same_in_every_version(path):
    """Catches: noise that one version draws otherwise, where ours are the words of another."""
    found = {version: sources_of(version) for version in VERSIONS}
    if None in found.values():
        pytest.skip("not every version's sources are here: `make setup-cuda-host` installs them")
    texts = {ast.unparse(definition(sources, path)) for sources in found.values() if sources is not None}
    assert len(texts) == 1


# ---- FLy


def test_fly_has_vllms_defaults_and_measure():
    """Catches: a threshold that means something else than vLLM's own (0.33 is the first that has FLy)."""
    sources = sources_of("0.33")
    if sources is None:
        pytest.skip("no sources of vLLM 0.33 here: `make setup-cuda-host` installs them")
    function = definition(sources, "vllm.v1.spec_decode.fly:compute_fly_entropy")
    scope = {"torch": torch}
    exec(ast.unparse(function), scope)
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, ::7] = -torch.inf
    for top_k in (1, 3, 100):
        theirs = scope["compute_fly_entropy"](logits, top_k, from_logits=True)
        torch.testing.assert_close(top_entropy(logits, top_k), theirs)
    from vllm_vidspec.config import VidSpecConfig

    theirs = definition(sources, "vllm.config.speculative:SpeculativeConfig")
    ours = VidSpecConfig(model="self", num_speculative_tokens=9)
    fields = {
        node.target.id: ast.unparse(node.value)
        for node in theirs.body
        if isinstance(node, ast.AnnAssign) and node.value
    }
    assert fields["fly_entropy_threshold"] == f"Field(default={ours.score.fly_entropy}, ge=0)"
    assert fields["fly_entropy_top_k"] == f"Field(default={ours.score.fly_top_k}, ge=1)"
    assert "self.fly_window_size = min(6, self.num_speculative_tokens - 1)" in ast.unparse(theirs)
    assert ours.fly_window == 6


# ---- the checks above are seen to fail


@pytest.fixture
def altered(sources):
    """Return sources in which a text of a module stands for another."""

    def alter(module: str, old: str, new: str) -> Sources:
        tree = sources.tree(module)
        assert tree is not None
        text = ast.unparse(tree)
        assert old in text
        changed = Sources(sources._root)
        changed.tree = lambda name: ast.parse(text.replace(old, new)) if name == module else sources.tree(name)
        return changed

    return alter


def test_a_renamed_parameter_is_seen(altered):
    changed = altered(f"{contracts.GPU}.attn_utils", "slot_mappings: ", "slots: ")
    path = f"{contracts.GPU}.attn_utils:build_attn_metadata"
    with pytest.raises(AssertionError, match="slots"):
        test_functions_take_what_we_give(changed, path, contracts.FUNCTIONS[path])


def test_a_renamed_name_is_seen(altered, version):
    changed = altered("vllm.utils.torch_utils", "def async_tensor_h2d(", "def tensor_h2d(")
    with pytest.raises(AssertionError, match=r"engine/requests.py: vllm.utils.torch_utils.async_tensor_h2d"):
        test_every_import_of_ours_is_there(changed, version)


def test_a_renamed_field_is_seen(altered):
    path = f"{contracts.GPU}.input_batch:InputBatch"
    changed = altered(f"{contracts.GPU}.input_batch", "prefill_len_np", "prefill_lens_np")
    with pytest.raises(AssertionError, match="prefill_len_np"):
        test_classes_have_what_we_read(changed, path, contracts.MEMBERS[path])


def test_another_order_is_seen(altered):
    path = f"{contracts.GPU}.model_runner:GPUModelRunner.sample_tokens"
    changed = altered(f"{contracts.GPU}.model_runner", "self.postprocess_sampled(", "self.later(")
    with pytest.raises(AssertionError):
        test_vllm_calls_in_this_order(changed, path, contracts.ORDER[path])


def test_an_abstract_method_is_seen(altered):
    path = "vllm.v1.outputs:AsyncModelRunnerOutput"
    changed = altered("vllm.v1.outputs", "def get_output(", "def get_outputs(")
    with pytest.raises(AssertionError, match="PublishingOutput"):
        test_ours_have_every_abstract_method(changed, path, contracts.ABSTRACT[path])
