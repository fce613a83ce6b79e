"""Who may import whom: the rooms' layers, no circles, vLLM in the engine room alone, and what an import may not do."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the lowest layer up. A room imports from lower layers only, never from its neighbours; a new room goes in here.
LAYERS = (
    {"", "errors", "names", "devices", "assets", "setup", "vidspec_kernels"},
    {"config", "metrics", "streams", "shapeworld", "visual_map"},
    {"pruning", "drafting", "scoring"},
    {"families"},
    {"planning"},
    {"engine", "doctor"},
    {"plugin", "tools"},
    {"cli"},
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
# The same inside engine/, whose rooms may import neighbours as well, as long as these do not import them.
ENGINE = "vllm_vidspec.engine."
FLOORS = (
    {"compat", "cpu", "triton_cpu", "requests", "knobs", "agreement", "kv_views", "tree_attention", "draft_backend"}
    | {"target_pruning", "hints", "policy", "estimates"},
    {"report", "failures"},
    {"hooks", "verify"},
    {"draft", "parallel"},
    {"speculator", "auto_pruner", "step_times", "scheduling"},
    {"runner", "stages", "worker", "cpu_worker", "parts", "preflight", "admin"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The doctor asks whether vLLM's engine can be imported, the plugin is vLLM's, a tool runs inside vLLM's worker.
TOUCHES_VLLM = {"engine", "doctor", "plugin", "vllm_vidspec.tools.session_job"}


def modules():
    found = {}
    for base, package in ((ROOT, "vllm_vidspec"), (ROOT / "kernels", "vidspec_kernels")):
        for path in (base / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(source):
    """Return the modules that a source imports, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {node.module}
    return found


IMPORTS = {name: imported(path.read_text()) for name, path in MODULES.items()}


def room_of(module):
    package, _, rest = module.partition(".")
    return rest.split(".")[0] if package == "vllm_vidspec" else package


@pytest.mark.parametrize("room", sorted({room_of(module) for module in MODULES}))
def test_a_room_imports_from_lower_layers_only(room):
    """Catches: an upward import, one between neighbours, one of tests, benchmarks or scripts; vLLM elsewhere."""
    assert room in HEIGHT, f"a new room: give {room} a layer"
    for module in (module for module in MODULES if room_of(module) == room):
        for name in IMPORTS[module]:
            package, other = name.split(".")[0], room_of(name)
            assert package not in ("tests", "benchmarks", "scripts"), f"{module} imports {name}"
            if package in ("vllm_vidspec", "vidspec_kernels") and other != room:
                assert HEIGHT[other] < HEIGHT[room], f"{module} imports {name}"
            assert package != "vllm" or {room, module} & TOUCHES_VLLM, f"{module} imports {name}"


def engine_room_of(module):
    return module.removeprefix(ENGINE).split(".")[0] if module.startswith(ENGINE) else None


@pytest.mark.parametrize("room", sorted({engine_room_of(module) for module in MODULES} - {None}))
def test_a_room_of_the_engine_imports_nothing_above_it(room):
    """Catches: an import that climbs inside engine/."""
    assert room in FLOOR, f"a new room of engine/: give {room} a floor"
    for module in (module for module in MODULES if engine_room_of(module) == room):
        for other in filter(None, map(engine_room_of, IMPORTS[module])):
            assert FLOOR[other] <= FLOOR[room], f"{module} imports {other}"


def test_every_listed_room_exists():
    """Catches: a row of a room that is gone."""
    assert HEIGHT.keys() == {room_of(module) for module in MODULES}
    assert FLOOR.keys() == {engine_room_of(module) for module in MODULES} - {None}


def circle_of(imports):
    """Return a circle of modules that import each other, None where there is none."""
    graph = {name: {other for other in found & imports.keys() if other != name} for name, found in imports.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_circle():
    """Catches: two modules that import each other, inside functions too; `circle_of` sees a planted circle."""
    assert circle_of({"a": {"b"}, "b": {"c", "torch"}, "c": {"a"}}) is not None
    assert circle_of(IMPORTS) is None


def test_no_circle_of_rooms_in_the_engine():
    """Catches: two folders of engine/ that import each other, if by different modules."""
    rooms = {room: set() for room in FLOOR}
    for module in filter(engine_room_of, MODULES):
        rooms[engine_room_of(module)] |= set(filter(None, map(engine_room_of, IMPORTS[module])))
    assert circle_of(rooms) is None


# What each room must load without, from the lightest on; Triton imports its backend while `import triton` is under way.
ENGINES = {"torch", "triton", "vllm", "transformers"}
WITHOUT = {
    "vllm_vidspec.engine.triton_cpu": ENGINES | {"numpy"},
    "vllm_vidspec.config": ENGINES | {"numpy", "vidspec_kernels"},
    "vllm_vidspec.planning.planner": ENGINES | {"rich", "typer", "vidspec_kernels"},
    **{f"vllm_vidspec.{name}": ENGINES for name in ("setup.fixups", "doctor", "metrics", "plugin", "cli")},
    "benchmarks.pages.__main__": ENGINES,  # pages are built where vLLM is not installed
    "vidspec_kernels": {"vllm", "vllm_vidspec.engine.worker", "transformers"},
    **{f"vllm_vidspec.{name}": {"vllm", "transformers"} for name in ("pruning", "families", "drafting", "scoring")},
}


def test_what_a_room_loads():
    """In turn, in one process. Catches: torch in a start-up check or a command line, vLLM in a pure room."""
    code = "import sys, json, importlib\n" + "".join(
        f"importlib.import_module('{name}'); print(json.dumps(list(sys.modules)))\n" for name in WITHOUT
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    for (name, heavy), loaded in zip(WITHOUT.items(), run.stdout.splitlines(), strict=True):
        assert not heavy & set(json.loads(loaded)), name


# vLLM's CPU worker replaces torch.cuda's streams, events and copies.
_LOOK = """
import sys, torch
import vllm.utils.torch_utils as torch_utils
import vllm.v1.worker.gpu_worker

def look():
    cuda = [getattr(torch.cuda, name) for name in ("Event", "Stream", "current_stream", "stream")]
    accelerator = [torch.accelerator.synchronize, torch.accelerator.get_memory_info]
    return [*cuda, *accelerator, torch.Tensor.pin_memory, torch_utils.async_tensor_h2d]

def report():
    print([a is b for a, b in zip(before, look())].count(False))
    of_cpus = ("vllm.v1.worker.cpu", "vllm_vidspec.engine.cpu")
    twins = [name for name in sys.modules if name.startswith("vidspec_kernels.") and name.endswith(".cpu")]
    print(sorted([*twins, *(name for name in sys.modules if name.startswith(of_cpus))]))

before = look()
import vllm_vidspec.engine.worker
report()
import vllm_vidspec.engine.cpu_worker, vllm_vidspec.engine.cpu.install
report()
"""


def test_the_gpu_worker_leaves_torch_untouched_and_the_cpus_code_unread():
    """The CPU worker, imported after it, shows that the look sees it: it replaces all eight."""
    result = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    replaced, loaded, replaced_after, loaded_after = result.stdout.splitlines()[-4:]
    assert (replaced, loaded) == ("0", "[]")
    assert replaced_after == "8"
    assert "'vllm_vidspec.engine.cpu', " in loaded_after and "'vllm_vidspec.engine.cpu_worker'" in loaded_after
