#!/usr/bin/env python3
"""Says what of our patches and of what we rely on no longer fits another vLLM's sources: `make contracts VLLM=PATH`.

PATH is a clone of vLLM, or a folder such as site-packages with a `vllm` in it. The checks are the contract tests, run
with these sources in the place of the installed vLLM's; what a build adds (libraries, FlashAttention's modules) comes
from the installed one. Reads both, writes to a temporary folder. Exit status 1 if something does not fit.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [f"tests/unit/engine/test_{name}.py" for name in ("vllm_contracts", "contract")]
ENGINE = ROOT / "vllm_vidspec" / "engine"


def overlay(sources: Path, folder: Path) -> Path:
    """Link another vLLM's sources, and what only a build has, into a folder of packages; return vLLM's there."""
    found = folder / "vllm"
    shutil.copytree(sources, found, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "no vLLM is installed here"
    installed = Path(spec.origin).parent
    for path in installed.rglob("*"):
        place = found / path.relative_to(installed)
        is_built = path.suffix == ".so" or "vllm_flash_attn" in place.parts
        if is_built and path.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)
    if not (found / "_version.py").exists():
        run = subprocess.run(["git", "describe", "--tags"], cwd=sources, capture_output=True, text=True)
        version = run.stdout.strip().removeprefix("v") or "0.dev"
        (found / "_version.py").write_text(f"__version__ = {version!r}\n__version_tuple__ = ()\n")
    return found


def failures(packages: Path) -> Iterator[tuple[str, str]]:
    """Run the contract tests on the packages in a folder; yield each that fails, and its error in one line."""
    report = packages / "report.xml"
    path = os.pathsep.join([str(packages), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if not report.exists():
        raise SystemExit(f"[contracts] error: the tests did not run: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    for case in xml.parse(report).iter("testcase"):
        for failure in (*case.findall("failure"), *case.findall("error")):
            lines = [line for line in (failure.text or "").splitlines() if re.match(r"E +\S", line)]
            words = lines[0][1:].strip() if lines else failure.get("message", "")
            yield case.get("name", ""), " ".join(words.split())[:300]


def users(case: str) -> list[str]:
    """Return our files that name what a failing case is about."""
    names = [one for one in re.findall(r"\w+", case.partition("[")[2].partition("-")[0]) if not one.startswith("__")]
    word = re.compile(rf"\b{names[-1]}\b" if names else r"(?!)")
    files = sorted(ENGINE.rglob("*.py"))
    return [str(path.relative_to(ROOT)) for path in files if word.search(path.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a clone of vLLM, or a folder with a `vllm` in it")
    given = parser.parse_args().path.resolve()
    sources = given / "vllm" if (given / "vllm" / "__init__.py").is_file() else given
    if not (sources / "v1").is_dir():
        raise SystemExit(f"[contracts] error: {given} holds no sources of vLLM")
    with tempfile.TemporaryDirectory(prefix="vidspec-contracts-") as folder:
        found = overlay(sources, Path(folder))
        version = re.search(r"__version__ (?:= version )?= ['\"]([^'\"]+)", (found / "_version.py").read_text())
        print(f"[contracts] vLLM {version[1] if version else '?'}", flush=True)
        broken = list(failures(Path(folder)))
    for case, words in broken:
        print(f"  {case}\n    {words}")
        for file in users(case)[:5]:
            print(f"    used in {file}")
    print(f"[contracts] {f'{len(broken)} checks fail' if broken else 'everything fits'}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
