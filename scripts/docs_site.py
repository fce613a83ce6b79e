#!/usr/bin/env python3
"""Builds the documentation as a site: `make docs`. The environment of the extra `docs` is made once."""

import argparse
import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_env as base
from setup_env import ROOT, SetupError, say


def prepare() -> Path:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    venv = base.environments_home() / f"docs-{base.hash_of({'docs': wanted, 'python': sys.version_info[:2]})}"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with base.alone(venv.with_name(f"{venv.name}.lock"), "another set-up of this environment is running"):
        if base.read_stamp(venv) is None:
            shutil.rmtree(venv, ignore_errors=True)
            base.create(venv)
            base.pip(venv / "bin" / "python", "installing MkDocs", venv.with_name(f"{venv.name}.log"), *wanted)
            (venv / base.STAMP).write_text(json.dumps({"engine": "docs"}))
    return venv / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("build", "serve"), default="build")
    what = parser.parse_args().what
    python, site = prepare(), ROOT / "runs" / "site"
    # Nothing is fetched, and no notice of another project's is printed.
    os.environ["NO_MKDOCS_2_WARNING"] = os.environ["DISABLE_MKDOCS_2_WARNING"] = "true"
    options = ["--site-dir", site, "--clean"] if what == "build" else []
    # Never --quiet: it silences the warnings that --strict counts.
    if base.run(python, "-m", "mkdocs", what, "--strict", *options, cwd=ROOT):
        raise SetupError("the site was not built: see above")
    say(f"{site}/index.html")


if __name__ == "__main__":
    sys.exit(base.command(main))
