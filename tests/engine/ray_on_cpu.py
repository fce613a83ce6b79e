"""Ray's executor on vLLM's CPU engine: vLLM knows no device of a CPU that Ray could count, so it is given two "GPUs".

vLLM takes the platform from an entry point, in every process; Ray takes what its node has from the environment.
"""

import json
import os
from pathlib import Path

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, whose ranks Ray may place."""

    ray_device_key = "GPU"


def platform() -> str:
    """Say which platform vLLM is to use; the entry point of `environment`."""
    return f"{__name__}.RayCpuPlatform"


def environment(folder: Path, num_ranks: int) -> dict[str, str]:
    """Return what a server's environment needs for so many ranks; the folder, of a short name, is Ray's, too."""
    made = folder / "ray_on_cpu-1.dist-info"
    made.mkdir(exist_ok=True)
    (made / "entry_points.txt").write_text(f"[vllm.platform_plugins]\nray_on_cpu = {__name__}:platform\n")
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", os.getcwd()).split(os.pathsep)]),
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": num_ranks}),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # it would leave a token in the user's home
        "RAY_TMPDIR": str(folder),
    }
