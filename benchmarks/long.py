"""A pair on long videos, by length, pruner and share dropped, beside vanilla vLLM: a case at a time.

    python -m benchmarks.long acceptance --tokens 256,1024,4096,16384 --shares 0.5,0.9,0.99
    python -m benchmarks.long acceptance --family qwen2.5-vl --compacted specvlm,uniform
    python -m benchmarks.long speed --tokens 1024,4096,16384 --pads 0,5,9
    python -m benchmarks.long memory --tokens 16384 --budget-mib 512 --json docs/results/long-memory.json
    python -m benchmarks.long curve --tokens 1024 --json quality.json
    python -m benchmarks.long score --tokens 1024 --json relevance.json
    python -m benchmarks.long steps --tokens 1024,4096,16384 --json docs/results/long-steps.json

Each request of a long pair is a held-out reel with one question of its own, of another pair a held-out video of 256
tokens to describe. `acceptance` asks one engine with every setting in turn; `speed` holds engines at once and lets each
answer a request before the next request comes. Finished points of these two stay in the pair's file, and a run measures
what is missing.

`memory`: each setting's engine is given requests until one has to wait. `running` counts those that vLLM's KV cache
holds, `drafting` those that the draft's pool holds beside it. `modelled` is the same by the arithmetic of the two pools
(`planning.pool`), which is also all that is said of larger pairs, by their shapes: sizes of 40 GiB, bf16.

`curve` is `benchmarks.quality` with reels and their questions: facts kept over tokens per step. `score` looks at
LVSpec's relevance score alone, without an engine: the target reads each reel and the true answer, and relevance is
computed from states of each layer, of the token's own row and of the row that predicts it, as they are and less their
mean, over N video tokens. `auc` is the chance that a word about the video ranks above a filler; `in_scene` is the share
of the N that are of the scene that the word is about.

`steps`: where a decode step goes, one request in an engine of its own: vanilla (one query row), then with drafts of the
whole video and of a tenth of it (six rows in a verify step). Medians over decode steps, in ms: `target attention` and
`draft attention` are vLLM's kernel, all layers; `target` and `draft` the rest of these models; `vidspec` our code on
the host, `vLLM` its runner. `gbs` and `gflops` are what the attention kernel reads and computes per second, beside what
the core can do (`core`).
"""

import argparse
import itertools
import json
import os
import re
import statistics
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks import harness, inflated, inflation, quality, reel
from benchmarks.captions import accuracy, auc, pooled
from benchmarks.harness import DecodeLoop
from benchmarks.methods import parallel_window
from benchmarks.pages.results import NAMES, RESULTS, mean_length
from benchmarks.session import BenchSession
from benchmarks.small_cases import Stopwatch
from benchmarks.training.train_long import Reader
from vllm_vidspec import assets
from vllm_vidspec.engine.kv_views import attention_layers
from vllm_vidspec.planning import pool
from vllm_vidspec.planning.shapes import from_folder, target_shape
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


# ---- memory ----------------------------------------------------------------------------------------------------------

PAIRS = (("72B", "7B"), ("32B", "7B"), ("7B", "7B"))  # of Qwen2.5-VL
PAIRS_BUDGET_MIB = 40 * 1024
PATIENCE = 6  # steps that a request waits before none more is thought to fit
BLOCK, TEXT_TOKENS = 16, 32
PRUNED = {"pruner": "uniform", "prune_ratio": 0.9}


def knobs(setting: str, tokens: int, target: int, draft: int, budget: float) -> tuple[float, dict[str, Any]]:
    """Return the share of the video that the draft sees, and the knobs; `target` and `draft` are KV bytes of a token,
    `budget` those of both caches.

    "sized" is "pruned" with the draft's pool set to what these requests need, where the default has room for more text.
    """
    if setting == "whole":
        return 1.0, WHOLE
    more = TEXT_TOKENS + MAX_TOKENS
    needed = draft * (0.1 * tokens + more) / (tokens + more)
    fraction = needed / (target + needed)
    return 0.1, PRUNED | ({"draft_kv_bytes": int(fraction * budget)} if setting == "sized" else {})


def modelled(budget_mib: int, target: int, draft: int, tokens: int, setting: str) -> harness.Row:
    """Return what a setting takes and how many requests fit, by arithmetic alone."""
    left = budget_mib * 2**20 * (1 - pool.VISION_SHARE)
    kept, spec = knobs(setting, tokens, target, draft, left)
    longest, shown = tokens + TEXT_TOKENS + MAX_TOKENS, kept * tokens + TEXT_TOKENS + MAX_TOKENS
    of_draft = spec.get("draft_kv_bytes") or pool.pool_bytes(int(left), target, draft, kept, longest, BLOCK)
    fits = min((left - of_draft) / target / longest, of_draft / draft / shown)
    row = {"setting": setting, "tokens": tokens, "budget_mib": budget_mib}
    return row | {"pool_mib": round(of_draft / 2**20, 1), "modelled": round(fits, 2)}


def admitted(engine: harness.Engine, prompt: harness.Row) -> tuple[int, int]:
    """Return the most requests that ran, and that drafted, in one step; more are added as long as none waits."""
    from vllm import SamplingParams

    llm, rows = engine.llm.llm_engine, engine.runner.requests
    scheduler = llm.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    added, waited, running, drafting = 0, 0, 0, 0
    while waited < PATIENCE:
        if not scheduler.waiting:
            llm.add_request(str(added), prompt, params)
            added, waited = added + 1, 0
        llm.step()
        waited += 1
        running, drafting = max(running, len(scheduler.running)), max(drafting, int(rows.has_draft_np.sum()))
    llm.abort_request([str(number) for number in range(added)])
    return running, drafting


def memory(options: argparse.Namespace) -> Iterator[harness.Row]:
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would replace the budget
    tokens = options.tokens
    shapes = [from_folder(pairs.checkpoint(FAMILY, role)) for role in ("target", "draft")]
    target, draft = (2 * shape.kv_bytes_per_token for shape in shapes)  # fp32 here
    frames, question, _ = reel.held_out(0, tokens)
    prompt = pairs.video_prompt(FAMILY, frames, question.text)
    for setting in options.setting:
        both = options.budget_mib * 2**20 * (1 - pool.VISION_SHARE)
        spec = knobs(setting, tokens, target, draft, both)[1]
        llm = job(tokens, range(1), spec)["llm"]
        size = {"kv_cache_memory_bytes": options.budget_mib * 2**20, "max_num_seqs": 32}
        with harness.Engine(llm | size | {"enable_prefix_caching": False}) as engine:
            running, drafting = admitted(engine, prompt)
        row = modelled(options.budget_mib, target, draft, tokens, setting)
        yield {"pair": FAMILY, **row, "running": running, "drafting": drafting}
    for names in PAIRS:
        target, draft = (target_shape(f"Qwen2.5-VL-{name}").kv_bytes_per_token for name in names)
        for setting in options.setting:
            yield {
                "pair": f"Qwen2.5-VL {' + '.join(names)}",
                **modelled(PAIRS_BUDGET_MIB, target, draft, tokens, setting),
            }


# ---- LVSpec's score --------------------------------------------------------------------------------------------------

FACT_WORDS = reel.fact_words()
FILLERS = set(reel.vocabulary()) - FACT_WORDS


@dataclass(frozen=True)
class Reels(quality.Quality):
    about: ClassVar[Collection[str]] = FACT_WORDS
    fillers: ClassVar[Collection[str]] = FILLERS
    telling: ClassVar[Collection[str]] = FACT_WORDS

    tokens: int = 1024

    def job(self, family: str, role: str, draft_noise: str | None = None) -> dict[str, Any]:
        spec = None if draft_noise is None else self.spec(draft_noise, quality.Setting("loose"))
        made = job(self.tokens, range(self.requests), spec)
        if spec is None:
            made["llm"]["model"] = pairs.checkpoint(family, role)
        made["llm"]["max_num_seqs"] = self.batch_size
        del made["cpus"]  # nothing is timed
        return made

    def accuracies(self, texts: Sequence[str]) -> dict[str, Any]:
        scores = (reel.score_answer(text, *reel.held_out(i, self.tokens)[1:]) for i, text in enumerate(texts))
        counts = pooled(reel.FACTS, scores)
        by_name = {name: accuracy(counts, [name]) for name in counts}
        return {"accuracy": accuracy(counts, counts), "group": {}, "attribute": by_name}


def curve(options: argparse.Namespace) -> Iterator[harness.Row]:
    what = Reels(
        families=(FAMILY,),
        temperatures=tuple(options.temperature),
        draft_noises=tuple(options.draft_noise),
        scorers=("loose", "fly", "fly-entropy", "random", quality.ORACLE),
        lambdas=(0.2, 0.5, 0.7),
        position_shifts=(False,),
        relevance_rows=("token", "prediction"),
        requests=options.requests,
        batch_size=4,
        max_tokens=MAX_TOKENS,
        tokens=options.tokens,
    )
    yield from quality.run(what)["rows"]


@torch.no_grad()
def read(reader: Reader, index: int, tokens: int) -> tuple[list[str], list[tuple[torch.Tensor, torch.Tensor]], list]:
    """Return the words of a true answer, of each layer the video's and the text's states, and the scene of each word.

    States are `[tokens, hidden]` and `[1 + words, hidden]`: row i predicts word i, row i + 1 has read it. The last
    entry is normalised, which is what goes into the output matrix.
    """
    frames, question, scenes = reel.held_out(index, tokens)
    asked, answer = reader.encode(question)
    words = question.answer.split()
    rows = slice(len(asked) - 1, len(asked) + len(words))
    text = torch.tensor([[asked + answer[:-1]]])
    start = len(reader.before)
    states = [(x[0, start:], y[0, rows]) for x, y in reader.states(reader.vision(frames)[None], text, to_the_end=True)]
    norm = reader.captioner.text.norm
    states.append((norm(states[-1][0]), norm(states[-1][1])))
    ends = np.cumsum([scene.num_pairs for scene in scenes]) * reel.TOKENS_PER_PAIR
    sentence = np.cumsum([0, *(word == "." for word in words)])[:-1]
    of_scene = [ends[i] - np.array([scenes[i].num_pairs * reel.TOKENS_PER_PAIR, 0]) for i in question.scenes]
    spans = [of_scene[place] if place < len(of_scene) and question.kind != "which" else None for place in sentence]
    return words, states, spans


def relevance(video: torch.Tensor, text: torch.Tensor, is_centred: bool) -> torch.Tensor:
    """Return the cosines `[words, tokens]` of states; LVSpec equation 8 before the N largest are taken."""
    if is_centred:
        video, text = video - video.mean(0), text - text.mean(0)
    return torch.nn.functional.normalize(text, dim=-1) @ torch.nn.functional.normalize(video, dim=-1).T


def score(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Yield what every way to compute the score is worth; as a control also with the states of another reel."""
    reader = Reader(pairs.checkpoint(FAMILY, "target"))
    answers = [read(reader, index, options.tokens) for index in range(options.requests)]
    layers = [f"layer {i + 1}" for i in range(len(answers[0][1]) - 1)] + ["final, normalised"]
    ways = itertools.product(
        range(len(layers)), ("token", "prediction"), (False, True), (1, 10, 100), ("own", "another")
    )
    for at, rows, is_centred, top_n, video in ways:
        if video == "own" or top_n == 10:
            way = {"states": layers[at], "rows": rows, "centred": is_centred, "top_n": top_n, "video": video}
            yield way | judge(answers, at, int(rows == "token"), is_centred, top_n, int(video == "another"))


def judge(answers: list, at: int, first: int, is_centred: bool, top_n: int, other: int) -> harness.Row:
    """Return the figures of one way: states `at`, rows from `first` on, the video that is `other` places further."""
    found: dict[bool, list[float]] = {True: [], False: []}
    windows, inside, share = [], [], []
    for i, (words, states, spans) in enumerate(answers):
        video, text = answers[(i + other) % len(answers)][1][at][0], states[at][1][first : first + len(words)]
        near = relevance(video, text, is_centred).topk(top_n)
        values = near.values.mean(-1).tolist()
        is_fact = [word in FACT_WORDS for word in words]
        windows += loosened(values, is_fact)
        for word, value, span, where in zip(is_fact, values, spans, near.indices, strict=True):
            found[word].append(value)
            if word and span is not None:
                inside.append(((where >= span[0]) & (where < span[1])).float().mean().item())
                share.append((span[1] - span[0]) / len(video))
    return {
        "auc": round(auc(found[True], found[False]) or 0.0, 3),
        "facts": round(len(found[True]) / (len(found[True]) + len(found[False])), 3),
        "facts_among_loosened": round(float(np.mean(windows)), 3),
        "in_scene": round(float(np.mean(inside)), 3),
        "scene_share": round(float(np.mean(share)), 3),
    }


def loosened(values: list[float], is_fact: list[bool], window: int = 10, share: float = 0.2) -> list[bool]:
    """Return whether each word that would be loosened is a fact: the `share` of each window that ranks lowest."""
    found = []
    for first in range(0, len(values) - window + 1, window):
        order = np.argsort(values[first : first + window])[: int(share * window)]
        found += [is_fact[first + i] for i in order]
    return found


# ---- a step's parts --------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any] | None] = {
    "vanilla": None,
    "whole": WHOLE,
    "specvlm": {"pruner": "specvlm", "prune_ratio": 0.9},
}

MAX_STEPS = 256  # tokens that `job` leaves room for


def watch(engine: harness.Engine, is_ours: bool) -> Stopwatch:
    """Time the models, their attention, and our code on the host."""
    found, runner = Stopwatch(), engine.runner
    found.wrap(runner, "execute_model", "vLLM")
    found.wrap(runner, "sample_tokens", "vLLM")
    found.wrap(runner.model, "forward", "target")
    configs = {"target attention": engine.llm.llm_engine.vllm_config}
    if is_ours:
        backend = runner.speculator.backend
        found.wrap(runner.speculator, "propose", "vidspec")
        found.wrap(runner.rejection_sampler, "_verify", "vidspec")
        found.wrap(backend.draft_model, "_run", "draft")
        found.wrap(backend.draft_model, "compute_logits", "draft")
        configs["draft attention"] = backend.draft_model.config
    for label, config in configs.items():
        for layer in attention_layers(config).values():
            found.wrap(layer.impl, "forward", label)
    return found


def parts_of(
    engine: harness.Engine, prompt: harness.Row, is_ours: bool, number: int
) -> tuple[harness.Row, harness.Row]:
    """Return the parts of the prefill, and the medians of those of a decode step, in ms."""
    loop, clock = DecodeLoop(engine.llm.llm_engine, is_ours), watch(engine, is_ours)
    before = engine.counters() if is_ours else None
    begun = time.perf_counter()
    loop.start([prompt], MAX_STEPS, 10)
    prefill = {name: round(1e3 * seconds, 1) for name, seconds in clock.take().items()}
    prefill["all"] = round(1e3 * (time.perf_counter() - begun), 1)
    if before is not None:
        after = engine.counters()
        prefill |= {name: (after[f"{name}_us"] - before[f"{name}_us"]) / 1e3 for name in ("guidance", "draft_prefill")}
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(number):
        begin = time.perf_counter()
        loop.step()
        parts["step"].append(time.perf_counter() - begin)
        for name, seconds in clock.take().items():
            parts[name].append(seconds)
    loop.stop()
    clock.unwrap()
    return prefill, {name: round(1e3 * statistics.median(values), 3) for name, values in parts.items()}


def core_peaks() -> harness.Row:
    """Return what one core does at most: GFlop/s of a float32 product, GB/s of reading memory."""
    torch.set_num_threads(1)
    a, long = torch.randn(1536, 1536), torch.ones(2**27)

    product, read = (min(timeit.repeat(call, number=1, repeat=5)) for call in (lambda: a @ a, long.sum))
    return {"gflops": round(2 * 1536**3 / product / 1e9, 1), "gbs": round(4 * 2**27 / read / 1e9, 1)}


def steps(options: argparse.Namespace) -> Iterator[harness.Row]:
    yield {"core": core_peaks()}
    shape = from_folder(pairs.checkpoint(FAMILY, "target"))
    for tokens in options.tokens:
        frames, question, _ = reel.held_out(0, tokens)
        prompt = pairs.video_prompt(FAMILY, frames, question.text)
        for setting in options.setting:
            spec = SETTINGS[setting]
            with harness.Engine(job(tokens, range(1), spec)["llm"] | {"enable_prefix_caching": False}) as engine:
                engine.answer([prompt], max_tokens=8)
                prefill, step = parts_of(engine, prompt, spec is not None, options.steps)
            rows, seconds = (1 if spec is None else 6), step["target attention"] / 1e3 / shape.layers
            yield {
                "tokens": tokens,
                "setting": setting,
                "step": step,
                "prefill": prefill,
                "query_rows": rows,
                "attention_ms_per_layer": round(1e3 * seconds, 4),
                "gbs": round(2 * 4 * tokens * shape.kv_heads * shape.head_dim / seconds / 1e9, 1),
                "gflops": round(4 * rows * tokens * shape.heads * shape.head_dim / seconds / 1e9, 1),
            }


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
    "memory": (memory, {"tokens": 16384, "budget_mib": 512, "setting": ["whole", "pruned", "sized"]}),
    "curve": (curve, {"tokens": 1024, "requests": 24, "temperature": [0.0], "draft_noise": ["shared"]}),
    "score": (score, {"tokens": 1024, "requests": 24}),
    "steps": (steps, {"tokens": [1024, 4096, 16384], "setting": list(SETTINGS), "steps": 30}),
}

if __name__ == "__main__":
    harness.cases(__doc__, CASES)
