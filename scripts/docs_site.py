#!/usr/bin/env python3
"""Builds the documentation as a site: `make docs`. The environment of the extra `docs` is made once."""

import os
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_env as base
from setup_env import ROOT, SetupError, say


def main() -> None:
    what = sys.argv[1] if sys.argv[1:] else "build"  # or "serve"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    venv = base.environments_home() / f"docs-{base.hash_of({'docs': wanted, 'python': sys.version_info[:2]})}"
    install = lambda python, log: base.pip(python, "installing MkDocs", log, *wanted)  # noqa: E731
    python, site = base.ensure(venv, venv, "MkDocs, once", install, holds_clone=False), ROOT / "runs" / "site"
    # Nothing is fetched, and no notice of another project's is printed.
    os.environ["NO_MKDOCS_2_WARNING"] = os.environ["DISABLE_MKDOCS_2_WARNING"] = "true"
    options = ["--site-dir", site, "--clean"] if what == "build" else []
    # Never --quiet: it silences the warnings that --strict counts.
    if base.run(python, "-m", "mkdocs", what, "--strict", *options, cwd=ROOT):
        raise SetupError("the site was not built: see above")
    say(f"{site}/index.html")


if __name__ == "__main__":
    sys.exit(base.command(main))
