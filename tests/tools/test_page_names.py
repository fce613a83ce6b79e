"""Names in backticks on the pages: each is a file, a class with that member, or a word of our sources or vLLM's."""

import ast
import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tools.common import ROOT

# Users' and contributors' pages. Those of docs/notebook are dated, with the names of their day; one is generated.
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "configuration.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
# Of other projects, or put together from parts.
OTHERS = {
    *("HF_HOME", "RayCluster", "emptyDir", "startupProbe", "terminationGracePeriodSeconds", "engine_kwargs"),
    *("openai_compatible", "pass_video_url", "LlavaQwenForCausalLM", "server_metrics_export.json", "vVERSION"),
    *("num_exact_draft_tokens", "num_loosened_draft_tokens", "num_shifted_draft_tokens"),
}
THIS = Path(__file__).name
KINDS = (".py", ".toml", ".yml", ".yaml", ".html", ".cpp", "")


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of every source of ours and of vLLM's, by its path."""
    ours = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = {name: ROOT / name for name in ours if not name.startswith("docs/") and name != f"tests/tools/{THIS}"}
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    paths |= {str(path.relative_to(vllm.parent)): path for path in vllm.rglob("*.py")}
    return {name: p.read_text(errors="replace") for name, p in paths.items() if p.suffix in KINDS and p.is_file()}


@functools.cache
def words() -> set[str]:
    return {word for text in sources().values() for word in re.findall(r"[A-Za-z_]\w*", text)}


@functools.cache
def members() -> dict[str, set[str]]:
    """Return the names in each class of ours, those of its bases included as far as they are ours."""
    rooms = ("vllm_vidspec/", "kernels/", "benchmarks/")
    ours = [text for name, text in sources().items() if name.startswith(rooms) and name.endswith(".py")]
    classes = [node for text in ours for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    own = {c.name: {getattr(n, "name", getattr(n, "attr", getattr(n, "id", ""))) for n in ast.walk(c)} for c in classes}
    bases = {c.name: re.findall(r"\w+", " ".join(map(ast.unparse, c.bases))) for c in classes}
    return {name: own[name].union(*(own.get(base, set()) for base in bases[name])) for name in own}


def unknown(page: str) -> list[str]:
    found = []
    text = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    for span in sorted(set(re.findall(r"`([A-Za-z_][\w./-]*)(?:\(\))?`", text)) - OTHERS):
        owner, _, member = span.rpartition(".")
        if span.endswith(".py"):
            named = [name for name in sources() if f"/{name}".endswith(f"/{span}")]
            known = any("/" in span or not name.startswith("vllm/") for name in named)
        elif owner in members():
            known = member in members()[owner]
        else:  # words that only code would have
            known = all(
                p in words() for p in re.split(r"[./-]", span) if re.search(r"\w_\w|[a-z][A-Z]|^[A-Z][a-z]+$", p)
            )
        found += [] if known else [span]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_backticks_are_there(page):
    """Catches: a class, a method, a file or a knob that was renamed, and the page that still has its old name."""
    pytest.importorskip("vllm")
    assert unknown(page.read_text()) == []


def test_a_name_that_is_gone_is_found():
    pytest.importorskip("vllm")
    gone = ["Cohort", "Streams.hear", "no_such_name", "nowhere/at_all.py"]
    assert unknown("`Streams.observe`, `run_streams`, `speed.py` " + " ".join(f"`{name}`" for name in gone)) == gone
