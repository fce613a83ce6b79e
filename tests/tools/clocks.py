"""Engines that are not there, whose steps take what their layers say: for the tests of interleaved benchmarks."""

import json
from pathlib import Path

from tools.common import counters
from vllm_vidspec.config import METHOD

# What a decode step of the target and a draft forward take, in seconds, and by appended layer.
TARGET_S, TARGET_LAYER_S, DRAFT_S, DRAFT_LAYER_S = 0.04, 0.001, 0.004, 0.0005
DECODED = 48


def num_layers(checkpoint):
    return json.loads(Path(checkpoint, "config.json").read_text())["text_config"]["num_hidden_layers"]


class Clocks:
    """Engines whose steps take what their layers say: `turns` answered, `fails` (job, command -> why), `ids` by
    mode."""

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
