"""A pair on long videos, by length, pruner and share dropped, beside vanilla vLLM: a case at a time.

    python -m benchmarks.long acceptance --tokens 256,1024,4096,16384 --shares 0.5,0.9,0.99
    python -m benchmarks.long acceptance --family qwen2.5-vl --compacted specvlm,uniform
    python -m benchmarks.long speed --tokens 1024,4096,16384 --pads 0,5,9

Each request of a long pair is a held-out reel with one question of its own, of another pair a held-out video of 256
tokens to describe. `acceptance` asks one engine with every setting in turn; `speed` holds engines at once and lets each
answer a request before the next request comes. Finished points of these two stay in the pair's file, and a run measures
what is missing.
"""

import argparse
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import harness, inflated, inflation, reel
from benchmarks.methods import parallel_window
from benchmarks.pages.results import NAMES, RESULTS, mean_length
from benchmarks.session import BenchSession
from vllm_vidspec import assets
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.speed import cores, draft_ms
from vllm_vidspec.tools.provenance import provenance

FAMILY = assets.LONG
MAX_TOKENS = 160
WHOLE, BLIND = {"pruner": "none", "prune_ratio": 0.0}, {"pruner": "uniform", "prune_ratio": 1.0}
PRUNERS = ("specvlm", "specvlm:stride", "uv", "uniform", "uniform:stride", "random")
SHORT = 256  # video tokens of a pair that is not long


def job(
    tokens: int, held_out: range, spec: dict[str, Any] | None, layers: int = 0, family: str = FAMILY
) -> dict[str, Any]:
    """Return what an engine reads first; `spec` None is vanilla, `layers` no-op layers are appended to the target.

    vLLM sizes its encoder cache for videos of 14 frames; a longer one needs a prefill step of the whole prompt.
    """
    original = pairs.checkpoint(family, "target")
    longest = tokens + MAX_TOKENS + 128
    overrides = {
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
        "limit_mm_per_prompt": {"video": 1, "image": 0},
        "mm_processor_cache_gb": 0,
        "kv_cache_memory_bytes": 2**28 + 2 * longest * (4 + layers) * 1024,
    }
    knobs = {} if spec is None else {**inflation.guidance_knobs(original, {}), "on_draft_error": "raise", **spec}
    llm = pairs.llm_kwargs(
        family,
        None if spec is None else "draft",
        target=str(inflation.inflate(original, layers)),
        overrides=overrides,
        **knobs,
    )
    shown = {"reel_tokens": tokens} if family in assets.LONG_PAIRS else {"question": pairs.DEFAULT_QUESTION}
    prompts = {"family": family, **shown, "held_out": list(held_out), "warm_up": 10_000}
    return {"llm": llm, "prompts": prompts, "cpus": [cores()[0]]}


def clock(session: BenchSession, index: int) -> dict[str, Any]:
    """Let an engine answer one request alone."""
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    return session.ask({"command": "clock", "index": index, "sampling": sampling, "seed": index})


# ---- acceptance and speed --------------------------------------------------------------------------------------------


def acceptance(args: argparse.Namespace) -> Iterator[harness.Row]:
    is_long, data = args.family in assets.LONG_PAIRS, load(args.family)
    settings = {"whole": WHOLE, "blind": BLIND}
    for one, share in itertools.product(args.pruners, args.shares):
        settings[f"{one} {share:g}"] = {"pruner": one, "prune_ratio": share}
        if one in args.compacted:
            settings[f"{one} {share:g} compacted"] = {**settings[f"{one} {share:g}"], "draft_positions": "compacted"}
    for tokens in args.tokens if is_long else [SHORT]:
        points = data["acceptance"].setdefault(str(tokens), {})
        missing = [(name, spec) for name, spec in settings.items() if args.again or name not in points]
        if not missing:
            continue
        with BenchSession(job(tokens, range(args.requests), None, family=args.family)) as session:
            vanilla = [clock(session, i)["token_ids"] for i in range(args.requests)]
        kinds = [reel.held_out(i, tokens)[1].kind if is_long else "caption" for i in range(args.requests)]
        # An engine that starts with a guided pruner can change to an unguided one, not to another guided one.
        starts: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
        for name, spec in missing:
            guided = "uv" if spec["pruner"] == "uv" else "specvlm"
            starts.setdefault((guided, str(spec.get("draft_positions", "original"))), []).append((name, spec))
        for (guided, positions), own in starts.items():
            start = {"pruner": guided, "prune_ratio": 0.9, "draft_positions": positions}
            with BenchSession(job(tokens, range(args.requests), start, family=args.family)) as session:
                for name, spec in own:
                    knobs = {knob: value for knob, value in spec.items() if knob != "draft_positions"}
                    session.ask({"command": "retune", "knobs": knobs})
                    answers = [clock(session, i) for i in range(args.requests)]
                    points[name] = list(map(acceptance_of, answers, vanilla, kinds))
                    save(data)
                    same = statistics.mean(one["is_identical"] for one in points[name])
                    yield {"tokens": tokens, "setting": name, "length": mean_length(points[name]), "identical": same}


def acceptance_of(answer: dict[str, Any], vanilla: list[int], kind: str) -> dict[str, Any]:
    """Return what came of one request's drafts, and whether it was answered as vanilla answers it."""
    counted = answer["metrics"]
    return {
        "kind": kind,
        "output_tokens": len(answer["token_ids"]),
        "drafts": counted["drafts"],
        "accepted": counted["accepted_tokens"],
        "skipped": sum(n for name, n in counted.items() if name.startswith("skipped_")),
        "is_identical": answer["token_ids"] == vanilla,
    }


def speed_points(args: argparse.Namespace, pads: float) -> dict[str, dict[str, Any] | None]:
    """Return the engines that answer in turn; parallel ones have the second core for their drafter."""
    found: dict[str, dict[str, Any] | None] = {"vanilla": None, "whole": WHOLE, "blind": BLIND}
    found |= {pruner: {"pruner": pruner, "prune_ratio": 0.9} for pruner in args.pruners}
    place = {"device": "cpu", "cpu_cores": str(cores()[-1])}
    for pruner in filter(None, args.parallel):
        in_turns = WHOLE if pruner == "whole" else {"pruner": pruner, "prune_ratio": 0.9}
        found[f"parallel {pruner}"] = {**in_turns, "parallel": place, "num_speculative_tokens": parallel_window(pads)}
    if args.adaptive:
        found["default"] = {"pruner": "specvlm", "prune_ratio": 0.9, "adaptive_tokens": True}
    return found


def padding(pads: float, tokens: int, family: str) -> int:
    """Return how many no-op layers make one target step cost `pads` forwards of the draft on the whole video."""
    if not pads:
        return 0
    models = [pairs.checkpoint(family, role) for role in ("target", "draft")]
    path = inflation.cache_folder() / f"steps-{inflated.key_of(models, ['long', tokens])}.json"

    def points(drafts: bool, target_layers: int, draft_layers: int) -> dict[str, Any]:
        made = job(tokens, range(3), WHOLE if drafts else None, target_layers, family)
        if draft_layers:
            spec = made["llm"]["speculative_config"]
            spec["model"] = str(inflation.inflate(spec["model"], draft_layers))
        return made

    times = inflated.step_times(points, path, {"temperature": 0.0, "max_tokens": 64}, 3)
    return times.layers_for(pads)[0]


def speed(args: argparse.Namespace) -> Iterator[harness.Row]:
    """Measure decode time and time to first token of every engine, request by request in turn."""
    data = load(args.family)
    for pads in args.pads:
        layers = padding(pads, args.padded_at, args.family)
        for tokens in args.tokens:
            key, engines = f"{tokens} {pads:g}", speed_points(args, pads)
            point = data["speed"].setdefault(key, {"engines": {}})
            point["layers"], found = layers, point["engines"]
            missing = [name for name in engines if name != "vanilla" and (args.again or name not in found)]
            for lo in range(0, len(missing), args.at_once):
                names = ["vanilla", *missing[lo : lo + args.at_once]]
                jobs = {one: job(tokens, range(args.requests), engines[one], layers, args.family) for one in names}
                with ExitStack() as stack:
                    sessions = {name: stack.enter_context(BenchSession(jobs[name])) for name in names}
                    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
                    for index in range(args.requests):
                        for name in names if index % 2 == 0 else reversed(names):
                            answers[name].append(clock(sessions[name], index))
                for name in names[1:]:
                    found[name] = speed_row(answers[name], answers["vanilla"])
                    yield {"point": key, "engine": name} | found[name]
                save(data)


def speed_row(ours: list[dict[str, Any]], vanilla: list[dict[str, Any]]) -> harness.Row:
    """Return medians over requests of one engine beside vanilla in the same turns."""
    chosen = [(a, b) for a, b in zip(ours, vanilla, strict=True) if len(b["token_ids"]) > 8]
    counted = [a["metrics"] for a in ours]
    gains = [b["decode_s"] / a["decode_s"] for a, b in chosen]
    forwards_ms = [ms for one in counted if (ms := draft_ms(one))]

    def middle(values: Any, digits: int = 3, scale: float = 1.0) -> float:
        return round(scale * statistics.median(values), digits)

    return {
        "decode_over_vanilla": middle(gains),
        "spread": [round(min(gains), 3), round(max(gains), 3)],
        "tokens_per_step": round(
            1 + sum(one["accepted_tokens"] for one in counted) / max(1, sum(one["drafts"] for one in counted)), 3
        ),
        "ttft_over_vanilla": middle(a["ttft_s"] / b["ttft_s"] for a, b in chosen),
        "ttft_s": middle(a["ttft_s"] for a in ours),
        "vanilla_ttft_s": middle(b["ttft_s"] for b in vanilla),
        "guidance_s": middle((one["guidance_us"] for one in counted), 4, 1e-6),
        "draft_prefill_s": middle((one["draft_prefill_us"] for one in counted), 4, 1e-6),
        "step_ms": middle((s for a in ours for s in a["step_s"]), scale=1e3),
        "vanilla_step_ms": middle((s for b in vanilla for s in b["step_s"]), scale=1e3),
        "draft_forward_ms": middle(forwards_ms) if forwards_ms else None,
        "draft_kv_tokens": statistics.mean(one["text_tokens"] + one["visual_tokens_kept"] for one in counted),
        "identical": statistics.mean(a["token_ids"] == b["token_ids"] for a, b in zip(ours, vanilla, strict=True)),
        "requests": len(chosen),
    }


def load(family: str) -> dict[str, Any]:
    path = RESULTS / f"{NAMES[family]}.json"
    found = json.loads(path.read_text()) if path.exists() else {"acceptance": {}, "speed": {}}
    return found | {"family": family}


def save(data: dict[str, Any]) -> None:
    text = json.dumps(data | {"provenance": provenance()}, indent=1)
    text = re.sub(r"\{[^{}]*\}", lambda row: " ".join(row.group().split()), text)  # a request a line
    (RESULTS / f"{NAMES[data['family']]}.json").write_text(text + "\n")


_ALL = {"family": FAMILY, "pruners": list(PRUNERS), "again": False, "requests": 48}  # again: what the file has, too
_LENGTHS = [256, 1024, 4096, 16384]
# Case -> what measures it, and its options. `compacted`: pruners to measure with the draft's positions renumbered, too;
# `padded_at`: video tokens at which the padding is measured; `parallel`: "whole" or pruners, with the drafter on a core
# of its own; `adaptive`: also with the policy, as by default; `at_once`: engines beside vanilla that are in memory.
CASES: dict[str, tuple[Callable[[argparse.Namespace], Iterator[harness.Row]], dict[str, Any]]] = {
    "acceptance": (acceptance, {"tokens": _LENGTHS, "shares": [0.5, 0.8, 0.9, 0.95, 0.99], "compacted": [""]} | _ALL),
    "speed": (
        speed,
        {"tokens": _LENGTHS, "pads": [0.0], "padded_at": 1024, "parallel": [""], "adaptive": False, "at_once": 3}
        | _ALL,
    ),
}

if __name__ == "__main__":
    harness.cases(__doc__, CASES)
