"""Hooks of MkDocs: the README is the site's first page, and a link out of docs/ becomes its words."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?![a-z]+:|#)[^)\s#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    text = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Take links to what is in the repository alone, such as benchmarks/, off their words."""
    docs = ROOT / "docs"
    folders = [docs, ROOT] if page.file.src_uri == "index.md" else [(docs / page.file.src_uri).parent]

    def kept(found: re.Match[str]) -> str:
        there = [path for folder in folders if (path := (folder / found[2]).resolve()).exists()]
        # One that leads nowhere stays, for MkDocs to refuse.
        return found[1] if there and not there[0].is_relative_to(docs) else found[0]

    return LINK.sub(kept, markdown)
