"""The recipes of docs/benchmarks.md and docs/offline.ipynb, run as they stand there."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.processes import VllmServer, free_port

pytest.importorskip("vllm")
pytestmark = [pytest.mark.serve, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "runs" / "client-env" / "bin" / "python"  # the page says how it is made
OF_CLIENTS = ("lmms-eval", "aiperf", "LangChain")
HERE = "http://127.0.0.1:8000"
INTRO, *SECTIONS = re.split(r"^## ", (ROOT / "docs" / "benchmarks.md").read_text(), flags=re.MULTILINE)
SETTING = "A=vllm_vidspec/assets/qwen2.5-vl\n"
ENV = pairs.engine_env() | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT}:{ROOT}/kernels",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def commands(text):
    """Return the indented blocks of a page, those inside fences left out."""
    found = re.findall(r"(?:^    .*\n)+", re.sub(r"^```[\s\S]*?^```", "", text, flags=re.MULTILINE), re.MULTILINE)
    return [["bash", "-euc", SETTING + re.sub(r"^    ", "", block, flags=re.MULTILINE)] for block in found]


def programs(text, python):
    return [[str(python), "-c", block] for block in re.findall(r"^```python\n([\s\S]*?)^```", text, re.MULTILINE)]


def run(command, **more):
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600, **more)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of the page's own server, on a free port, with the page's own data."""
    data, (*bash, serve) = commands(INTRO)
    run(data)
    port, command = free_port(), [*bash, serve.replace("vllm serve", "printf '%s\\0'")]
    listed = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        patch.chdir(ROOT)
        args = [*listed.stdout.split("\0")[:-1], "--port", str(port)]
        with VllmServer(args, port, tmp_path_factory.mktemp("served") / "log") as server:
            server.wait_ready(timeout_s=300)
            yield server


CASES = [
    (title, *words)
    for title, text in (section.split("\n", 1) for section in SECTIONS)
    for words in (*commands(text), *programs(text, CLIENTS if title in OF_CLIENTS else sys.executable))
]
EXPECTED = {
    "vllm bench serve": r"Successful requests: +8\b[\s\S]*Acceptance length: +[2-6]\.",
    "lmms-eval": r"attributes_right\|↑ +\|0\.9[\s\S]*attributes_right\|↑ +\|0\.[3-9]",
    "aiperf": r"Request Count",
    "openai": r"strict: .*the video shows[\s\S]*loose: .*the video shows",
    "LangChain": r"the video shows",
}


@pytest.mark.parametrize(("title", "program", "option", "text"), CASES, ids=[title for title, *_ in CASES])
def test_a_recipe_does_what_its_page_says(served, title, program, option, text):
    """Catches: a flag, field or output of a client or of ours that has changed; requests that are not drafted for."""
    if title in OF_CLIENTS and not CLIENTS.exists():
        pytest.skip(f"{title}: docs/benchmarks.md's environment of clients is not there")
    before = served.metrics()
    printed = run([program, option, text.replace(HERE, served.base_url)])
    assert re.search(EXPECTED[title], printed)
    gained = {name: value - before[name] for name, value in served.metrics().items()}
    print(f"{title}: {1 + gained['accepted_tokens'] / max(gained['drafts'], 1):.2f} tokens per step")
    assert gained["prompts"] > 0 and gained["accepted_tokens"] > gained["drafts"] > 0
    assert not any(value for name, value in gained.items() if name.startswith("skipped_"))


def test_the_notebook_runs():
    """Its cells, one after the other. Catches: a name of vLLM's or ours that has changed; nothing drafted."""
    cells = json.loads((ROOT / "docs" / "offline.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = textwrap.indent(source, "    ")
    printed = run([sys.executable, "-c", f"def main():\n{code}\nif __name__ == '__main__':\n    main()"])
    assert "the video shows" in printed
    assert float(re.search(r"acceptance length (\d\.\d+)", printed)[1]) > 2
