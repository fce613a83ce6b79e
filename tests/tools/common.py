"""What the tools' tests share: the command, scripts of the repository, and engines that are not there."""

import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from typer.testing import CliRunner

from benchmarks import captioned
from benchmarks.captions import ATTRIBUTE_WORDS
from vllm_vidspec.cli import app
from vllm_vidspec.config import METHOD
from vllm_vidspec.metrics import NAMES
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench import acceptance

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = pairs.FAMILIES[:2]  # of what is recorded


def invoke(*args):
    """Run a command of `vidspec`, or with `-m` one of `benchmarks`."""
    if args[0] == "-m":
        return CliRunner().invoke(importlib.import_module(args[1]).app, list(args[2:]))
    return CliRunner().invoke(app, list(args))


def printed(*args, status=0):
    """Run a command with `--json -`; return what it prints."""
    result = invoke(*args, "--json", "-")
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout)


def refuses(words, *args):
    """Run a command that must be refused: one line with the words, status 2, nothing on standard output."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("vidspec: ") and words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def cut_off(command, log):
    """Start a run of steps, and end it in the one that hangs, whose log this is and which says its process."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        deadline = time.monotonic() + 60
        while not (log.exists() and re.search(r"\d+\n", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
    assert is_gone(re.findall(r"\d+", log.read_text())[-1]), "the step goes on"


def is_gone(pid):
    """Return whether a process ends, or waits for init to collect it, within seconds."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def load(path):
    path = ROOT / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Installer:
    """Stands in for pip and venv, and fails at `fail_at`: `steps` lists "venv" and pip's labels, `args` its
    arguments."""

    def __init__(self, monkeypatch, script, pip_module, fail_at=None):
        self.steps, self.args = [], {}

        def pip(python, label, log, *args):
            if fail_at and fail_at in label:
                raise pip_module.SetupError(f"pip failed while {label}")
            self.steps.append(label)
            self.args[label] = args

        def run(command, **_):
            if command[1:3] == ["-m", "venv"]:
                (Path(command[3]) / "bin").mkdir(parents=True)
                (Path(command[3]) / "bin" / "python").touch()
                self.steps.append("venv")
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(pip_module, "pip", pip)
        monkeypatch.setattr(script.subprocess, "run", run)


def counters(kept=0.1, **more):
    """Counters of a draft that saw a share of the video: the less it sees, the less stands."""
    return dict.fromkeys(NAMES, 0) | {
        "drafts": 100,
        "draft_tokens": 500,
        "accepted_tokens": round(200 + 200 * kept),
        "text_tokens": 20,
        "visual_tokens_full": 1000,
        "visual_tokens_kept": round(1000 * kept),
        "draft_kv_bytes_per_token": 8,
        "draft_depth": 400,
        "draft_forwards": 100,
        "draft_steps": 20,
        **more,
    }


def sweep(**given):
    """A sweep of the named axes; what is no axis is a field of `Sweep`."""
    axes = {"family": ["qwen2.5-vl"], "draft": ["draft"], "pruner": ["uniform"], "prune_ratio": [0.9]}
    axes |= {"drafting": ["chain"], "num_speculative_tokens": [5], "scorer": ["strict"], "draft_noise": ["shared"]}
    axes |= {"draft_positions": ["original"], **{name: [off] for name, off in acceptance.SAMPLING_AXES.items()}}
    axes |= {"temperature": [0.0]} | {name: list(given.pop(name)) for name in list(given) if name in acceptance.AXES}
    return acceptance.Sweep(axes, **{"requests": 2} | given)


# The caption of a held-out video, which is drawn once.
caption_of = functools.cache(lambda i: captioned.held_out(i).caption)


def answer_captions(session, command, **counters):
    """Answer as an engine of captions: the target's are true, the draft's know no colour, loose ones no motion."""
    spec, knobs = session.job["llm"].get("speculative_config"), command["knobs"] or {}
    scorer = knobs.get("scorer", "strict")
    captions = [caption_of(i) for i in session.job["prompts"]["held_out"]]
    if spec is None and "/draft" in session.job["llm"]["model"]:
        captions = [" ".join("red" if word in world.COLORS else word for word in c.split()) for c in captions]
    if scorer in ("loose", "random"):
        captions = [" ".join("nowhere" if word in world.MOTIONS else word for word in c.split()) for c in captions]
    token_ids = [[hash(word) for word in caption.split()] for caption in captions]
    answer = {"seconds": 1.0, "texts": captions, "token_ids": token_ids, "metrics": None, "captions": None}
    if spec is None:
        return answer
    gained = {"strict": 4, "loose": 6, "fly": 5}.get(scorer, 4.5)
    drafted = {"drafts": 100, "draft_tokens": 1000, "accepted_tokens": round(100 * (gained - 1))}
    answer["metrics"] = dict.fromkeys(NAMES, 0) | drafted | counters
    if command.get("watch"):
        answer["captions"] = [
            {
                "words": caption.split(),
                "relevance": [0.5 if word in ATTRIBUTE_WORDS else 0.25 for word in caption.split()],
                "kinds": [0, *([1, 2] * len(caption.split()))[: len(caption.split()) - 1]],
            }
            for caption in captions
        ]
    return answer


# What a decode step of the target and a draft forward take, in seconds, and by appended layer.
TARGET_S, TARGET_LAYER_S, DRAFT_S, DRAFT_LAYER_S = 0.04, 0.001, 0.004, 0.0005
DECODED = 48


def num_layers(checkpoint):
    return json.loads(Path(checkpoint, "config.json").read_text())["text_config"]["num_hidden_layers"]


class Clocks:
    """Engines whose steps take what layers say: `turns` answered, `fails` (job, command -> why), `ids` by mode."""

    def __init__(self):
        self.turns, self.fails, self.ids = [], lambda job, command: None, {}

    def mode(self, job):
        spec = job["llm"].get("speculative_config")
        if spec is None or spec["method"] != METHOD:
            return "vanilla" if spec is None else "stock"
        return "parallel" if "parallel" in spec else "sequential"

    def __call__(self, session, command):
        job, spec = session.job, session.job["llm"].get("speculative_config")
        if reason := self.fails(job, command):
            raise reason
        mode = self.mode(job)
        self.turns.append((mode, job["prompts"]["held_out"][command["index"]]))
        target_s = TARGET_S + TARGET_LAYER_S * (num_layers(job["llm"]["model"]) - 4)
        token_ids = self.ids.get(mode, list(range(DECODED + 1)))
        answer = {"token_ids": token_ids, "ttft_s": 0.2, "metrics": None, "verified": []}
        if spec is None:
            return answer | {"decode_s": DECODED * target_s, "step_s": [target_s] * DECODED}
        draft = job["llm"]["model"] if spec["model"] == "self" else spec["model"]
        draft_s = DRAFT_S + DRAFT_LAYER_S * (num_layers(draft) - 3)
        # Every step has four drafts and accepts three: twelve steps.
        step_s = target_s + (0 if mode == "parallel" else 4 * draft_s)
        spent = {"drafts": 12, "draft_tokens": 48, "accepted_tokens": 36, "draft_forwards": 48}
        gained = counters(**spent, draft_decode_us=round(48e6 * draft_s), late_drafts=3, stale_streams=3)
        verified = [[4, 3, 0]] * 12
        return answer | {"decode_s": 12 * step_s, "step_s": [step_s] * 12, "metrics": gained, "verified": verified}
