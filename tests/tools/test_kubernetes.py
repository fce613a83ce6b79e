"""The manifests of docs/kubernetes: what Kubernetes takes, and servers that vLLM and vidspec take."""

import json
import re
import shlex
from typing import Any

import pytest

from tools.common import ROOT
from vllm_vidspec.config import parse_config

yaml = pytest.importorskip("yaml")

FILES = sorted((ROOT / "docs" / "kubernetes").glob("*.yaml"))


def _read(file: Any) -> list[dict]:
    return list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_manifests_keep_to_the_schema(file):
    """Catches: a field of another name, place or type; services and workloads that do not name each other."""
    validate = pytest.importorskip("kubernetes_validate").validate
    found = _read(file)
    for manifest in found:
        validate(manifest, "1.33", strict=True)
    workload, *services = found
    pods = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= pods.items()
    for service in services:
        labels = pods | {"apps.kubernetes.io/pod-index": "0"}
        assert service["spec"]["selector"].items() <= labels.items()
    named = workload["spec"].get("serviceName", services[0]["metadata"]["name"])
    assert named in [service["metadata"]["name"] for service in services]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_servers_start_with_flags_that_exist(file):
    """Catches: a flag that vLLM does not have, a key that we do not, ranks that are not as many as GPUs and nodes."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    workload = _read(file)[0]["spec"]
    (container,) = workload["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    if words[:2] == ["/bin/sh", "-c"]:
        words = shlex.split(re.sub(r"\\\n", " ", words[2].split("exec ")[1]).replace("$NODE_RANK", "1"))[:-1]
    assert words[:2] == ["vllm", "serve"]
    args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words[3:])  # behind the model
    given = args.speculative_config
    config, _ = parse_config(given if isinstance(given, dict) else json.loads(given))
    assert config.model and config.prune_ratio == 0.9
    num_gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert args.nnodes == workload["replicas"]
    assert args.nnodes * num_gpus == args.tensor_parallel_size * args.pipeline_parallel_size


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_who_has_the_operators_key_has_the_route(file):
    """Catches: a key without the name by which vLLM loads the route, which then is missing without a word."""
    pytest.importorskip("vllm")
    from importlib.metadata import entry_points

    (container,) = _read(file)[0]["spec"]["template"]["spec"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in container.get("env", ())}
    plugins = {point.name for point in entry_points(group="vllm.endpoint_plugins")}
    if "VIDSPEC_ADMIN_KEY" in given:
        assert plugins & set((given.get("VLLM_PLUGINS") or "").split(",")) == {"vidspec"}
    assert given.get("VLLM_PLUGINS") is None or "VIDSPEC_ADMIN_KEY" in given
