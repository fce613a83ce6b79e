"""The documentation: generated pages are current, links lead somewhere, commands parse, no figure is missing."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from null_gpu import report

from tools.common import ROOT
from vllm_vidspec.cli import app

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("name,whole", [("null-gpu", False), ("null-gpu-whole", True)])
def test_null_gpu_table_is_what_was_measured(name, whole):
    results = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    assert report.section(results, whole) in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_and_no_figure_is_left_open(page):
    text = page.read_text()
    assert "@@" not in text
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), target


def _commands(page: Path) -> list[list[str]]:
    """Every `vidspec …` command line of a page, in code blocks or between backticks; continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    command = r"vidspec (?:demo|doctor|status|studio|bench|calibrate|plan|show-pruning)\b"
    lines = re.findall(rf"^\s*(?:\$ )?({command}.*)$", text, re.MULTILINE)
    lines += re.findall(rf"`({command}[^`]*)`", text)
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_parse(page):
    group = typer.main.get_command(app)
    for args in _commands(page):
        command, rest = group, list(args)
        while hasattr(command, "commands") and rest and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        if rest:
            assert not hasattr(command, "commands"), args
            command.make_context(args[0], rest)
