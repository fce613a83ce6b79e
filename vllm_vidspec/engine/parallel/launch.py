"""How the drafter's processes are started: what they are handed, where they run."""

import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cloudpickle  # noqa: TID251 - the drafter's processes get their parent's own objects, in memory that they inherit
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import get_draft_load_config

from vllm_vidspec.config import VidSpecConfig
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.streams import Sizes, Tables

MODULE = "vllm_vidspec.engine.parallel.process"
# Names of what an operator keeps to the server; with those of an object store a loader streams weights.
_SECRET = re.compile(r"(?!AWS_|AZURE_|GOOGLE_|RUNAI_).*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)", re.IGNORECASE)


@dataclass(frozen=True)
class Plan:
    """What a rank of the drafter gets as it starts, as JSON in its arguments."""

    rank: int  # of the drafter's ranks; its number of ranks is the configuration's
    parent: int  # the process that it ends with
    sizes: dict[str, int]  # of the tables
    tables: int  # descriptor of their memory
    config: int  # descriptor of the memory that holds what `pack_config` made
    channel: int | None  # descriptor of the socket to the target; None of every rank but the first
    rendezvous: int  # descriptor of memory, empty as they start, by which the drafter's ranks find one another
    vocab_size: int  # of the target


def write_memory(data: bytes, name: str) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def map_tables(descriptor: int, sizes: Sizes) -> Tables:
    return Tables(mmap.mmap(descriptor, Tables.num_bytes(sizes)), sizes)


def pack_config(vllm_config: Any, config: VidSpecConfig) -> bytes:
    """Return what the drafter's processes are configured by: their parent's objects, as vLLM's workers get them."""
    return cloudpickle.dumps((vllm_config, config.model_dump()))


def unpack_config(descriptor: int) -> tuple[Any, VidSpecConfig]:
    vllm_config, knobs = cloudpickle.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return vllm_config, VidSpecConfig(**knobs)


def fetch_weights(vllm_config: Any) -> None:
    """Download the draft's weights where they are a hub's and not here yet."""
    loader = get_model_loader(get_draft_load_config(vllm_config))
    loader.download_model(vllm_config.speculative_config.draft_model_config)


def start(plan: Plan, environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, json.dumps(asdict(plan))],
        env=environment,
        pass_fds=[fd for fd in (plan.tables, plan.config, plan.channel, plan.rendezvous) if fd is not None],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's interrupt is the server's to handle: it ends us
    )


def environment_for(config: VidSpecConfig, devices: Sequence[str]) -> dict[str, str]:
    """Return the environment of the drafter's processes, given the driver's names of its devices; none on the CPU.

    It has no secret of the server's: what a hub asks a token for, `fetch_weights` has brought.
    """
    env = {name: value for name, value in os.environ.items() if not _SECRET.fullmatch(name)}
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_DP_RANK", "VLLM_DP_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        env.pop(name, None)  # the server's own
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if cores := config.parallel.cores:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // config.parallel.tensor_parallel_size)))
    return env


def cores_of(config: VidSpecConfig, rank_pid: int) -> Collection[int]:
    """Return the cores of a drafter that `rank_pid` starts, and of the target's work for it; none if nothing says."""
    return config.parallel.cores or (cores_beside(rank_pid) if config.parallel.device == "cpu" else ())


def cores_beside(rank_pid: int) -> set[int]:
    """Return the cores that an engine may use beside those of its rank: where a drafter on the CPU has room.

    vLLM binds the rank to cores of its own, and what the rank starts inherits them: a drafter would starve there.
    """
    try:
        with open(f"/proc/{rank_pid}/stat") as file:
            engine_pid = int(file.read().rpartition(")")[2].split()[1])  # its parent, which has no cores of its own
        return os.sched_getaffinity(engine_pid) - os.sched_getaffinity(rank_pid)
    except OSError:  # no such file system, or the process has just ended
        return set()


def devices_of(config: VidSpecConfig, visible: str | None) -> list[str]:
    """Return the drafter's devices as the server's `CUDA_VISIBLE_DEVICES`, `visible`, names them; [] on the CPU."""
    places = places_of(config)
    if not visible:
        return list(map(str, places))
    names = visible.split(",")
    check_places(places, len(names))
    return [names[place] for place in places]


def places_of(config: VidSpecConfig) -> range:
    """Return the drafter's devices by their number among the server's; none on the CPU."""
    device = config.parallel.device
    assert device is not None
    if device == "cpu":
        return range(0)
    first = int(device.partition(":")[2] or 0)
    return range(first, first + config.parallel.tensor_parallel_size)


def check_places(places: range, num_devices: int) -> None:
    """Refuse devices that the server has not: without one of its own a drafter would load onto the target's first."""
    if places and places[-1] >= num_devices:
        raise VidSpecError(
            f"parallel: the drafter would need cuda:{places[-1]}, and the server sees {num_devices} devices "
            "(CUDA_VISIBLE_DEVICES); name one from cuda:0 on"
        )
