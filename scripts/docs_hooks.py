"""Hooks of MkDocs: the README is the site's first page, and a link out of docs/ becomes its words."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?![a-z]+:|#)[^)\s#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    text = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Take links to what is in the repository alone, such as training/, off their words."""

    def kept(found: re.Match[str]) -> str:
        inside = (ROOT / "docs" / page.file.src_uri).parent.joinpath(found[2]).resolve()
        return found[0] if inside.is_relative_to(ROOT / "docs") and inside.exists() else found[1]

    return LINK.sub(kept, markdown)
