"""The checks behind `vidspec doctor`: what is wrong with this environment and what to do. Changes nothing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from vllm_vidspec import assets, supported_releases, supports_vllm
from vllm_vidspec.config import METHOD, SELF
from vllm_vidspec.devices import has_nvidia_gpu
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.setup.fixups import CPU_ENGINE, OPTIONAL_CUDA_BUILDS, installed_version, probe_import

Status = Literal["ok", "warn", "fail"]

_FIX = "run `vidspec doctor --fix`"
_INSTALL_CPU = "pip install 'vllm-vidspec[cpu]'"
_INSTALL_GPU = "pip install 'vllm-vidspec[gpu]'"
_REINSTALL = "install vllm-vidspec again (`pip install -e .` in a clone)"
_PYTHONS = ((3, 11), (3, 14))  # first and last version that vLLM has wheels for
_LFS_POINTER_BYTES = 1024  # a checkpoint smaller than this is a pointer to one


@dataclass(frozen=True)
class Check:
    """One finding. `remedy` says what to do about it and is empty where nothing needs doing."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def _fail_unless(good: bool, name: str, detail: str, remedy: str) -> Check:
    return Check(name, "ok", detail) if good else Check(name, "fail", detail, remedy)


def run_checks(target: str | None = None, draft: str | None = None) -> list[Check]:
    """Look at everything that vidspec needs in order to run, in the order in which one would repair it.

    `target` is a path or a Hugging Face name, `draft` one, too, or "self"; without a target the bundled pairs are.
    """
    checks = [found for name, check in _CHECKS for found in _guarded(name, check)]
    if target is not None:
        checks += _guarded("pair", lambda: [check_pair(target, draft or SELF)])
        if draft not in (None, SELF) and checks[-1].status == "ok":
            checks += _guarded("draft cost", lambda: _draft_cost(target, str(draft)))
    elif draft is not None:
        checks.append(Check("pair", "fail", f"a draft ({draft}) without a target", "name the target too: --target"))
    else:
        checks += _guarded("pair", _bundled_pairs)
    return checks


def check_pair(target: str, draft: str) -> Check:
    """Return whether `draft` can draft for `target`. Reads configurations, no weights."""
    from vllm_vidspec import families

    name = f"pair {_short(target)} + {_short(draft)}"
    configs = []
    for role, model in (("target", target), ("draft", target if draft == SELF else draft)):
        try:
            configs.append(_hf_config(model))
        except Exception as error:
            return Check(name, "fail", f"cannot read the {role} {model}: {_line(error)}", _unreadable_remedy(model))
    try:
        adapter = families.check_pair(*configs)
        if draft != SELF:
            families.check_tokens(target, draft)
    except VidSpecError as error:
        return Check(name, "fail", str(error), 'choose a smaller model of the target\'s own family, or "self"')
    how = ", which has no adapter: pruned by the order of tokens" if adapter.embeds_by_itself else ""
    if not all(config.model_type for config in configs):
        how += "; its code comes with the checkpoint: vLLM needs --trust-remote-code"
    return Check(name, "ok", f"compatible, family {adapter.name}{how}")


def _draft_cost(target: str, draft: str) -> Iterator[Check]:
    """What a draft step reads beside its target's."""
    from vllm_vidspec.planning import draft_cost

    configs = [_hf_config(model).to_dict() for model in (target, draft)]
    weights = [draft_cost.stored_weights(config) for config in configs]
    if weights[0] is None or weights[1] is None:
        return
    four_bits = draft_cost.four_bit_checkpoint(configs[1])
    found = draft_cost.cost_hint(weights[0], weights[1], four_bits=four_bits)
    share = draft_cost.draft_share(weights[0], weights[1], draft_cost.USUAL_FORWARDS)
    detail = f"a step of {draft_cost.USUAL_FORWARDS} forwards reads {100 * share:.0f} % of a target step's weights"
    remedy = f"on a GPU draft with a checkpoint in four bits{f', such as {four_bits}' if four_bits else ''}"
    if weights[1].layer_bytes > 1:
        remedy += ', or quantise it as it loads: "quantization": "fp8_per_tensor"'
    yield Check("draft cost", "warn", found, remedy) if found else Check("draft cost", "ok", detail)


def _python() -> Iterator[Check]:
    good = _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]
    where = f" at {sys.prefix}" if good else ", vLLM has wheels for 3.11 to 3.14"
    yield _fail_unless(good, "python", platform.python_version() + where, "use Python 3.11")


def _engine() -> Iterator[Check]:
    """The engine's version, and whether vLLM finds its own distribution (the CPU wheel has another name)."""
    cpu, cuda = installed_version(CPU_ENGINE), installed_version("vllm")
    if cpu is None and cuda is None:
        yield Check("engine", "fail", "vLLM is not installed", _INSTALL_GPU if has_nvidia_gpu() else _INSTALL_CPU)
        return
    version = cpu or cuda or ""
    kind = "CPU" if _is_cpu_engine() else "CUDA"
    good = supports_vllm(version)
    detail = f"vLLM {version}" + (f", {kind} build" if good else f"; vidspec needs {supported_releases()}")
    yield _fail_unless(good, "engine", detail, _INSTALL_CPU if kind == "CPU" else _INSTALL_GPU)
    if cpu is not None:
        good = cuda is not None and cuda.startswith(cpu) and "cpu" in cuda
        detail = f"vLLM sees itself as {cuda}" if cuda else "vLLM cannot find its own distribution"
        yield _fail_unless(good, "engine alias", detail, _FIX)


def _torch() -> Iterator[Check]:
    import torch

    yield Check("torch", "ok", str(torch.__version__))
    if _is_cpu_engine() and torch.version.cuda is not None:
        yield Check("torch build", "warn", "a CUDA torch beside a CPU engine", "install the CPU build of torch")


def _torchvision() -> Iterator[Check]:
    try:
        import torchvision
    except Exception as error:
        yield Check("torchvision", "fail", _line(error), _FIX if _is_cpu_engine() else "install torchvision again")
        return
    yield Check("torchvision", "ok", str(torchvision.__version__))


def _optional_builds() -> Iterator[Check]:
    """On the CPU engine torchaudio and torchcodec are CUDA builds that break vLLM's imports when present."""
    if not _is_cpu_engine():
        return
    for name in OPTIONAL_CUDA_BUILDS:
        if installed_version(name) is not None and (problem := probe_import(name)) is not None:
            yield Check(name, "fail", f"installed but broken: {problem}", _FIX)


def _triton() -> Iterator[Check]:
    import triton.backends

    if not _is_cpu_engine():
        yield Check("triton", "ok", str(triton.__version__))
        return
    if "cpu" not in triton.backends.backends:
        hidden = os.environ.get("TRITON_BACKENDS_IN_TREE") == "1"
        remedy = "unset TRITON_BACKENDS_IN_TREE" if hidden else _REINSTALL
        yield Check("triton cpu backend", "fail", "not registered: Model Runner V2 needs it on a CPU", remedy)
    elif not triton.backends.backends["cpu"].driver.is_active():
        remedy = f"{_INSTALL_GPU}, or hide the GPU from this machine"
        yield Check("triton cpu backend", "fail", "inactive, since the machine has a GPU", remedy)
    elif os.environ.get("TRITON_INTERPRET") != "1":
        value = os.environ.get("TRITON_INTERPRET")
        yield Check("triton cpu backend", "fail", f"TRITON_INTERPRET is {value!r}", "unset TRITON_INTERPRET")
    else:
        yield Check("triton cpu backend", "ok", f"triton {triton.__version__}, interpreter active")


def _plugin() -> Iterator[Check]:
    """Whether vLLM finds our plugin, and its configuration is hooked once that is registered."""
    points = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == METHOD]
    if not points:
        yield Check("plugin", "fail", "not registered with vLLM", _REINSTALL)
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and METHOD not in allowed.split(","):
        remedy = f"add {METHOD} to VLLM_PLUGINS, or unset it"
        yield Check("plugin", "fail", f"VLLM_PLUGINS={allowed} leaves it out", remedy)
        return
    from vllm.engine.arg_utils import EngineArgs

    points[0].load()()
    # The hook wraps vLLM's function, so the function in its place is one of ours.
    good = EngineArgs.create_engine_config.__globals__["__name__"].startswith("vllm_vidspec.")
    detail = "registered and active" if good else "registered, but vLLM's configuration is not hooked"
    yield _fail_unless(good, "plugin", detail, _REINSTALL)


def _device() -> Iterator[Check]:
    import torch

    if _is_cpu_engine():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if has_nvidia_gpu():
            yield Check("device", "warn", "this machine has an NVIDIA GPU, the engine is for CPU", _INSTALL_GPU)
        else:
            yield Check("device", "ok", f"CPU, {platform.machine()}, {cores} core{'s' if cores > 1 else ''}")
        if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
            remedy = "install g++, or start vLLM with --enforce-eager"
            yield Check("compiler", "warn", "no C++ compiler: vLLM cannot compile models for the CPU", remedy)
    elif torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Check("device", "ok", ", ".join(names))
    else:
        no_gpu = f"no GPU here? {_INSTALL_CPU} in a new environment"
        remedy = "check the driver with nvidia-smi" if has_nvidia_gpu() else no_gpu
        yield Check("device", "fail", "the engine is for CUDA, torch sees no CUDA device", remedy)


def _threads() -> Iterator[Check]:
    if not _is_cpu_engine():
        return
    value = os.environ.get("OMP_NUM_THREADS")
    if value is None and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") is None:
        remedy = "export OMP_NUM_THREADS=1 (bundled models), or set VLLM_CPU_OMP_THREADS_BIND to cores of your own"
        yield Check("threads", "warn", "OpenMP threads are not pinned: up to 10x slower on shared cores", remedy)
    else:
        yield Check("threads", "ok", f"OMP_NUM_THREADS={value}" if value else "VLLM_CPU_OMP_THREADS_BIND is set")


def _checkpoints() -> Iterator[Check]:
    missing = []
    for family in assets.FAMILIES:
        for role in assets.ROLES:
            weights = assets.checkpoint(family, role) / "model.safetensors"
            if not weights.is_file():
                missing.append(f"{family}/{role}")
            elif weights.stat().st_size < _LFS_POINTER_BYTES:
                missing.append(f"{family}/{role} (a pointer, not the weights)")
    detail = f"missing: {', '.join(missing)}" if missing else f"target and drafts for {', '.join(assets.FAMILIES)}"
    remedy = "fetch the clone's assets again: git checkout -- vllm_vidspec/assets"
    yield _fail_unless(not missing, "bundled models", detail, remedy)


def _bundled_pairs() -> Iterator[Check]:
    for family in assets.FAMILIES:
        target, draft = (assets.checkpoint(family, role) for role in assets.PAIR)
        if target.is_dir() and draft.is_dir():
            yield check_pair(str(target), str(draft))


_CHECKS: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
    ("python", _python),
    ("engine", _engine),
    ("torch", _torch),
    ("torchvision", _torchvision),
    ("optional builds", _optional_builds),
    ("triton", _triton),
    ("device", _device),
    ("threads", _threads),
    ("plugin", _plugin),
    ("bundled models", _checkpoints),
)


def _guarded(name: str, check: Callable[[], Any]) -> Iterator[Check]:
    """Yield a check's findings. What it raises becomes a finding, so that one broken part hides no other."""
    try:
        yield from check()
    except Exception as error:
        remedy = "see the error; then run doctor again"
        if isinstance(error, ModuleNotFoundError):
            remedy = _INSTALL_GPU if has_nvidia_gpu() else _INSTALL_CPU
        yield Check(name, "fail", f"{type(error).__name__}: {_line(error)}", remedy)


def _hf_config(model: str) -> Any:
    """Return a model's configuration; of one that comes with its own code only what the file says: no code of it runs,
    and no `model_type` is known.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if model.startswith((os.sep, ".")) and not os.path.isdir(model):
        raise VidSpecError("the path does not exist")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except ValueError:
        fields, _ = PreTrainedConfig.get_config_dict(model)
        if "auto_map" not in fields:
            raise
        return PreTrainedConfig.from_dict({key: value for key, value in fields.items() if key != "model_type"})


def _unreadable_remedy(model: str) -> str:
    if os.environ.get("HF_HUB_OFFLINE") == "1" and not model.startswith((os.sep, ".")):
        return "HF_HUB_OFFLINE=1 is set: unset it, or download the model first"
    return "check the name or path: it needs a Hugging Face config.json"


def _short(model: str) -> str:
    path = Path(model)
    return f"{path.parent.name}/{path.name}" if path.is_absolute() else model


def _line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _is_cpu_engine() -> bool:
    return installed_version(CPU_ENGINE) is not None or "cpu" in (installed_version("vllm") or "")
