"""Acceptance and decode speed of a pair by length, pruner and share dropped, beside vanilla vLLM.

    python -m benchmarks.bench_long acceptance --tokens 256,1024,4096,16384 --shares 0.5,0.9,0.99
    python -m benchmarks.bench_long acceptance --family qwen2.5-vl --compacted specvlm,uniform
    python -m benchmarks.bench_long speed --tokens 1024,4096,16384 --pads 0,5,9
    python -m vidspec_tools.pages

Each request of a long pair is a held-out reel with one question of its own, of another pair a held-out video of 256
tokens to describe. `acceptance` asks one engine with every setting in turn; `speed` holds all engines at once and lets
each answer a request before the next request comes. Finished points stay in the file, and a run measures what is
missing.
"""

import argparse
import json
import re
import statistics
from contextlib import ExitStack
from typing import Any

from benchmarks import inflation, ratios, reel
from benchmarks.methods import parallel_window
from benchmarks.session import BenchSession
from vidspec_tools.pages.long_videos import draw
from vidspec_tools.pages.pruners import NAMES, mean_length
from vidspec_tools.pages.tables import RESULTS
from vllm_vidspec import assets
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.trials import cores
from vllm_vidspec.tools.provenance import provenance

FAMILY = assets.LONG
MAX_TOKENS = 160
WHOLE, BLIND = {"pruner": "none", "prune_ratio": 0.0}, {"pruner": "uniform", "prune_ratio": 1.0}
PRUNERS = ("specvlm", "specvlm:stride", "uv", "uniform", "uniform:stride", "random")
SHORT = 256  # video tokens of a pair that is not long
FIGURE = "docs/long-videos.png"


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


def acceptance(args: argparse.Namespace, data: dict[str, Any]) -> None:
    is_long = args.family in assets.LONG_PAIRS
    settings = {"whole": WHOLE, "blind": BLIND}
    settings |= {
        f"{one} {share:g}": {"pruner": one, "prune_ratio": share} for share in args.shares for one in args.pruners
    }
    settings |= {
        f"{one} {share:g} compacted": {**settings[f"{one} {share:g}"], "draft_positions": "compacted"}
        for share in args.shares
        for one in args.compacted
    }
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
            starts.setdefault((guided, spec.get("draft_positions", "original")), []).append((name, spec))
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
                    print(tokens, name, f"{mean_length(points[name]):.2f}", f"{same:.0%}", flush=True)


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
    for pruner in args.parallel:
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
    path = inflation.cache_folder() / f"steps-{ratios.key_of(models, ['long', tokens])}.json"

    def points(drafts: bool, target_layers: int, draft_layers: int) -> dict[str, Any]:
        made = job(tokens, range(3), WHOLE if drafts else None, target_layers, family)
        if draft_layers:
            spec = made["llm"]["speculative_config"]
            spec["model"] = str(inflation.inflate(spec["model"], draft_layers))
        return made

    times = ratios.step_times(points, path, {"temperature": 0.0, "max_tokens": 64}, 3)
    return times.layers_for(pads)[0]


def speed(args: argparse.Namespace, data: dict[str, Any]) -> None:
    """Measure decode time and time to first token of every engine, request by request in turn."""
    for pads in args.pads:
        layers = padding(pads, args.padded_at, args.family)
        for tokens in args.tokens:
            key, engines = f"{tokens} {pads:g}", speed_points(args, pads)
            point = data["speed"].setdefault(key, {"engines": {}})
            point["layers"], found = layers, point["engines"]
            missing = [name for name in engines if name != "vanilla" and (args.again or name not in found)]
            for lo in range(0, len(missing), args.at_once):
                names = ["vanilla", *missing[lo : lo + args.at_once]]
                with ExitStack() as stack:
                    sessions = {
                        name: stack.enter_context(
                            BenchSession(job(tokens, range(args.requests), engines[name], layers, args.family))
                        )
                        for name in names
                    }
                    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
                    for index in range(args.requests):
                        for name in names if index % 2 == 0 else reversed(names):
                            answers[name].append(clock(sessions[name], index))
                for name in names[1:]:
                    found[name] = speed_row(answers[name], answers["vanilla"])
                    print(key, name, json.dumps(found[name]), flush=True)
                save(data)


def speed_row(ours: list[dict[str, Any]], vanilla: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over requests of one engine beside vanilla in the same turns."""
    chosen = [(a, b) for a, b in zip(ours, vanilla, strict=True) if len(b["token_ids"]) > 8]
    drafts = sum(a["metrics"]["drafts"] for a in ours)
    forwards_ms = [ms for a in ours if (ms := ratios.draft_ms(a["metrics"]))]
    return {
        "decode_over_vanilla": round(statistics.median(b["decode_s"] / a["decode_s"] for a, b in chosen), 3),
        "spread": [round(f(b["decode_s"] / a["decode_s"] for a, b in chosen), 3) for f in (min, max)],
        "tokens_per_step": round(1 + sum(a["metrics"]["accepted_tokens"] for a in ours) / max(1, drafts), 3),
        "ttft_over_vanilla": round(statistics.median(a["ttft_s"] / b["ttft_s"] for a, b in chosen), 3),
        "ttft_s": round(statistics.median(a["ttft_s"] for a in ours), 3),
        "vanilla_ttft_s": round(statistics.median(b["ttft_s"] for b in vanilla), 3),
        "guidance_s": round(statistics.median(a["metrics"]["guidance_us"] for a in ours) / 1e6, 4),
        "draft_prefill_s": round(statistics.median(a["metrics"]["draft_prefill_us"] for a in ours) / 1e6, 4),
        "step_ms": round(1e3 * statistics.median(s for a in ours for s in a["step_s"]), 3),
        "vanilla_step_ms": round(1e3 * statistics.median(s for b in vanilla for s in b["step_s"]), 3),
        "draft_forward_ms": round(statistics.median(forwards_ms), 3) if forwards_ms else None,
        "draft_kv_tokens": statistics.mean(
            a["metrics"]["text_tokens"] + a["metrics"]["visual_tokens_kept"] for a in ours
        ),
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


def numbers(kind: type) -> Any:
    """Return a parser of comma-separated values."""
    return lambda text: [kind(value) for value in text.split(",") if value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("acceptance", "speed"))
    parser.add_argument("--family", choices=NAMES, default=FAMILY)
    parser.add_argument("--tokens", type=numbers(int), default=[256, 1024, 4096, 16384])
    parser.add_argument("--shares", type=numbers(float), default=[0.5, 0.8, 0.9, 0.95, 0.99])
    parser.add_argument("--pruners", type=numbers(str), default=list(PRUNERS))
    parser.add_argument(
        "--compacted",
        type=numbers(str),
        default=[],
        help="pruners to measure with the draft's positions renumbered, too",
    )
    parser.add_argument("--pads", type=numbers(float), default=[0.0])
    parser.add_argument("--padded-at", type=int, default=1024, help="video tokens at which the padding is measured")
    parser.add_argument(
        "--parallel", type=numbers(str), default=[], help="'whole' or pruners, with the drafter on a core of its own"
    )
    parser.add_argument("--adaptive", action="store_true", help="also with the controller, as by default")
    parser.add_argument("--again", action="store_true", help="measure also what the file has")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=3, help="engines beside vanilla that are in memory together")
    args = parser.parse_args()
    {"acceptance": acceptance, "speed": speed}[args.what](args, load(args.family))
    if args.family in assets.LONG_PAIRS:
        draw(FIGURE)


if __name__ == "__main__":
    main()
