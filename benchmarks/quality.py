"""What verification by each scorer leaves of the captions' facts; engines are subprocesses."""

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import typer

from benchmarks.captions import TELLING_WORDS, accuracies, count_right, kind_shares, relevance_auc, retention
from benchmarks.session import BenchSession
from vllm_vidspec import assets
from vllm_vidspec.cli import options, running
from vllm_vidspec.cli.bench import measure
from vllm_vidspec.config import parse_config
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.metrics import SKIP_REASONS, STRICT_REASONS, summarize
from vllm_vidspec.scoring import TOP_N
from vllm_vidspec.shapeworld import world
from vllm_vidspec.tools import pairs
from vllm_vidspec.tools.bench.acceptance import identical_frac
from vllm_vidspec.tools.engine_session import answer_command
from vllm_vidspec.tools.progress import Report, silent
from vllm_vidspec.tools.provenance import provenance
from vllm_vidspec.tools.session_job import WARM_UP_TOKENS

TARGET, DRAFT, STRICT = "target", "draft", "strict"
ORACLE = "oracle"  # loosens what tells nothing about the video: what perfect relevance could reach
LOSSY = ("loose", "fly", "fly-entropy", "random", ORACLE)
# What a setting has where it does not say otherwise; the paper's lambda, and nothing but it.
DEFAULTS: dict[str, Any] = {
    "lambda_loose": 0.7,
    "position_shift": False,
    "relevance_rows": "token",
    "fly_entropy": 0.3,
}
# Fields of `Quality` that a row repeats.
_SHARED = ("draft", "num_speculative_tokens", "prune_ratio", "requests", "batch_size", "max_tokens", "seed", "knobs")


@functools.cache
def _facts_of(i: int) -> tuple[world.SceneFact, ...]:
    """Return what the i-th held-out video shows; it takes 30 ms to draw, and every batch of captions asks."""
    return world.held_out(i).facts


@dataclass(frozen=True)
class Setting:
    """How drafts are verified: a scorer and what has a bearing on it, None for the rest (knobs of VidSpecConfig)."""

    scorer: str
    lambda_loose: float | None = None
    position_shift: bool | None = None
    relevance_rows: str | None = None
    fly_entropy: float | None = None

    def knobs(self) -> dict[str, Any]:
        """Return every knob of a setting, so that nothing is left over from the one before."""
        ours = {name: value for name, value in asdict(self).items() if value is not None}
        if self.scorer == ORACLE:
            ours = {"scorer": "random", "lambda_loose": 1.0, "protected_tokens": sorted(TELLING_WORDS)}
        return DEFAULTS | {"protected_tokens": None} | ours


@dataclass(frozen=True)
class Quality:
    """What to measure."""

    families: tuple[str, ...] = ("qwen2.5-vl",)  # bundled pairs
    draft: str = DRAFT  # which of a pair's drafts: "draft" or "far"
    temperatures: tuple[float, ...] = (0.0,)  # of the target and the draft
    draft_noise: str = "shared"  # the knob
    scorers: tuple[str, ...] = LOSSY  # of LOSSY; strict is always measured
    lambdas: tuple[float, ...] = (0.2, 0.5, 0.7, 0.9)  # shares of mismatches that `loose` and `random` accept
    position_shifts: tuple[bool, ...] = (False, True)  # whether `loose` tolerates shifts
    relevance_rows: tuple[str, ...] = ("token",)  # whose states `loose` looks at
    fly_entropies: tuple[float, ...] = (0.3,)  # thresholds of `fly` and `fly-entropy`
    requests: int = 64  # held-out videos, one caption each
    batch_size: int = 16  # vLLM's max_num_seqs
    num_speculative_tokens: int = 10  # draft tokens per verify step
    prune_ratio: float = 0.9  # share of the video tokens that the draft does not see
    max_tokens: int = 256  # longest caption in tokens
    seed: int = 0  # request i samples with seed + i
    knobs: dict[str, Any] = field(default_factory=dict)  # further knobs of VidSpecConfig

    def settings(self) -> list[Setting]:
        """Return what every engine is tried with: strict first, then the scorers in the order asked for."""
        found = [Setting(STRICT)]
        for scorer in self.scorers:
            if scorer == "loose":
                combinations = itertools.product(self.relevance_rows, self.position_shifts, self.lambdas)
                found += [Setting(scorer, value, shift, rows) for rows, shift, value in combinations]
            elif scorer == "random":
                found += [Setting(scorer, value, position_shift=False) for value in self.lambdas]
            elif scorer in ("fly", "fly-entropy"):
                found += [Setting(scorer, fly_entropy=value) for value in self.fly_entropies]
            else:
                found.append(Setting(scorer))
        return list(dict.fromkeys(found))

    def spec(self, setting: Setting) -> dict[str, Any]:
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "prune_ratio": self.prune_ratio,
            "draft_noise": self.draft_noise,
            "on_draft_error": "raise",  # a measurement without drafts would say nothing
            **setting.knobs(),
            **self.knobs,
        }

    def job(self, family: str, role: str | None) -> dict[str, Any]:
        """Return what an engine reads: vanilla vLLM on the checkpoint of a role, or the pair."""
        overrides = {"max_num_seqs": self.batch_size}
        if role is not None:
            alone = pairs.checkpoint(family, self.draft if role == DRAFT else role)
            llm = pairs.llm_kwargs(family, target=alone, overrides=overrides)
        else:
            # An engine that starts with `loose` has what every other scorer needs.
            llm = pairs.llm_kwargs(family, self.draft, overrides=overrides, **self.spec(Setting("loose")))
        prompts = {"family": family, "held_out": list(range(self.requests)), "question": pairs.DEFAULT_QUESTION}
        return {"llm": llm, "prompts": prompts}

    def command(self, temperature: float, setting: Setting | None = None) -> dict[str, Any]:
        """Return what an engine is asked; with a setting the pair's, which is watched, too."""
        knobs = None if setting is None else setting.knobs()
        sampling = {"temperature": temperature, "max_tokens": self.max_tokens}
        return answer_command(knobs, seed=self.seed, **sampling) | {"watch": setting is not None}


def check(quality: Quality) -> None:
    """Refuse a wrong value, in one line, before an engine starts."""
    for temperature in quality.temperatures:
        if not 0 <= temperature < float("inf"):
            raise VidSpecError(f"--temperature: {temperature:g} is no temperature")
    for name in quality.knobs.keys() & {"model", *replace(quality, knobs={}).spec(Setting(STRICT))}:
        raise VidSpecError(f"--knob {name}: it has an option of its own, or is fixed")
    if quality.draft not in (DRAFT, assets.FAR):
        raise VidSpecError(f"--draft: {quality.draft!r} is neither {DRAFT} nor {assets.FAR}")
    for family in quality.families:
        pairs.pair_for(family)
        for setting in quality.settings():
            parse_config(pairs.speculative_config(family, quality.draft, **quality.spec(setting)))


def run(quality: Quality, report: Report = silent) -> dict[str, Any]:
    """Write captions with the target alone, the draft alone and every setting, one engine after another; return `rows`
    (by family and temperature, the two models' own first, without noise) and `provenance`.
    """
    check(quality)
    settings = quality.settings()
    report("plan", {"total": len(quality.families) * len(quality.temperatures) * (2 + len(settings))})
    rows: dict[tuple[str, float], list[dict[str, Any]]] = {}
    references: dict[tuple[str, float], dict[str, Any]] = {}  # what the target alone has answered
    roles = {TARGET: [Setting(TARGET)], DRAFT: [Setting(DRAFT)], None: settings}
    for family, (role, own) in itertools.product(quality.families, roles.items()):
        report("loading", {"label": f"{family}: {'the pair' if role is None else f'the {role} alone'}"})
        with BenchSession(quality.job(family, role)) as session:
            # Reading the videos is in no measured time, for whichever setting.
            session.ask(answer_command(seed=quality.seed, max_tokens=WARM_UP_TOKENS))
            for temperature, setting in itertools.product(quality.temperatures, own):
                answer = session.ask(quality.command(temperature, setting if role is None else None))
                if role is None:
                    _require_whole(f"{family}, {setting.scorer}", setting, answer["metrics"])
                panel = rows.setdefault((family, temperature), [])
                reference = references.setdefault((family, temperature), answer)
                # Behind the two models alone strict comes first.
                strict_length = panel[2]["acceptance_length"] if len(panel) > 2 else None
                noise = quality.draft_noise if role is None else None
                row = {"family": family, "temperature": temperature, "draft_noise": noise}
                panel.append(row | _row(quality, setting, answer, reference, strict_length))
                note = f"{setting_name(panel[-1])}: {100 * (panel[-1]['retention'] or 0):.1f} % kept"
                report("measured", {"note": note})
    return {"rows": list(itertools.chain(*rows.values())), "provenance": provenance()}


def _row(
    quality: Quality, setting: Setting, answer: dict[str, Any], reference: dict[str, Any], strict_length: float | None
) -> dict[str, Any]:
    """Turn one batch of captions into a row; the setting of a model that wrote alone is its role.

    `reference` is the target's own answer at the temperature, `strict_length` strict's in the same engine; None: this
    is strict, or there are no drafts.
    """
    found, at_best = (_accuracies(one["texts"]) for one in (answer, reference))
    captions = answer["captions"] or []
    words, relevance = ([one[name] for one in captions] for name in ("words", "relevance"))
    output_tokens = sum(map(len, answer["token_ids"]))
    return {
        "method": setting.scorer,
        **{name: getattr(setting, name) for name in DEFAULTS},
        **{name: getattr(quality, name) for name in _SHARED},
        "retention": retention(found["accuracy"], at_best["accuracy"]),
        **found,
        **draft_figures(answer["metrics"], output_tokens - quality.requests, strict_length),
        **kind_shares([caption["kinds"] for caption in captions]),
        "identical_frac": identical_frac(answer["token_ids"], reference["token_ids"]),
        "tokens_per_caption": output_tokens / quality.requests,
        "relevance_auc": relevance_auc(words, relevance),
        "decode_s": answer["seconds"],
    }


def _accuracies(texts: Sequence[str]) -> dict[str, Any]:
    return accuracies(count_right(texts, [_facts_of(i) for i in range(len(texts))]))


def _require_whole(label: str, setting: Setting, counters: dict[str, int]) -> None:
    """Refuse a batch that is only in part what a row would say."""
    if skipped := [reason for reason in SKIP_REASONS if counters[f"skipped_{reason}"]]:
        raise VidSpecError(f"{label}: requests ran without speculation ({', '.join(skipped)})")
    held = [reason for reason in STRICT_REASONS if counters[f"strict_{reason}"]]
    if held and setting.scorer != STRICT:
        raise VidSpecError(f"{label}: requests were verified strictly ({', '.join(held)})")
    if not counters["drafts"]:
        raise VidSpecError(f"{label}: nothing was drafted, the captions are too short")


def knob(row: dict[str, Any]) -> float | None:
    """Return lambda, or the threshold of the two FLy."""
    return row["fly_entropy"] if row["lambda_loose"] is None else row["lambda_loose"]


def setting_name(row: dict[str, Any]) -> str:
    """Return a setting in a few characters, "loose 0.7 N1 shift pred": lambda (of the two FLy the threshold), N where
    it is not the default, and "pred" where states are read that predict the drafts.
    """
    value, (method, *more) = knob(row), line_name(row).split()
    return " ".join([method, *([] if value is None else [f"{value:g}"]), *more])


def line_name(row: dict[str, Any]) -> str:
    """Return a setting without its lambda or threshold."""
    words = [row["method"]]
    if row.get("top_n") not in (None, TOP_N):  # of rows that were measured while it was a knob
        words.append(f"N{row['top_n']:g}")
    return " ".join(
        words + ["shift"] * bool(row["position_shift"]) + ["pred"] * (row["relevance_rows"] == "prediction")
    )


def draft_figures(counters: dict[str, int] | None, num_verified: int, strict_length: float | None) -> dict[str, Any]:
    """Return what the drafts gained in one batch; None where there were none.

    `num_verified` are output tokens that came from verify steps: all but a request's first. `delivered_length` is these
    per step: it lacks what was accepted past the end of a caption, of which a lossy scorer accepts more.
    """
    if counters is None:
        return dict.fromkeys(("acceptance_length", "ratio_to_strict", "delivered_length", "num_drafts"))
    figures = summarize(counters)
    length, num_drafts = float(figures["acceptance_length"] or 0), int(figures["num_drafts"] or 0)
    return {
        "acceptance_length": length,
        "ratio_to_strict": length / (strict_length or length),
        "delivered_length": num_verified / num_drafts,
        "num_drafts": num_drafts,
    }


# ---- the command -----------------------------------------------------------------------------------------------------

# Option -> the field of `Quality` that holds its values, and what they are.
_SWEPT = {
    "family": ("families", str),
    "temperature": ("temperatures", float),
    "scorer": ("scorers", str),
    "lambda_loose": ("lambdas", float),
    "relevance_rows": ("relevance_rows", str),
    "fly_entropy": ("fly_entropies", float),
}


def command(
    family: options.Families = "qwen2.5-vl",
    draft: Annotated[str, typer.Option(help="The pair's draft, or far: the one that is wrong more often.")] = "draft",
    scorer: Annotated[
        str, options.sweep("Beside strict: loose, fly, fly-entropy, random, oracle.")
    ] = "loose,fly,fly-entropy,random,oracle",
    lambda_loose: Annotated[
        str, options.sweep("Share of mismatches that loose and random accept.", "--lambda")
    ] = "0.2,0.5,0.7,0.9",
    position_shift: Annotated[str, options.sweep("loose: off, on.")] = "off,on",
    relevance_rows: Annotated[str, options.sweep("loose: token, prediction.")] = "token",
    fly_entropy: Annotated[str, options.sweep("Threshold of fly and fly-entropy.")] = "0.3",
    temperature: options.Values = "0",
    draft_noise: Annotated[str, typer.Option(help="shared, independent, greedy.")] = "shared",
    num_speculative_tokens: options.NumTokens = 10,
    prune_ratio: options.PruneRatio = 0.9,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one caption each.")] = 64,
    batch_size: options.BatchSize = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest caption in tokens.")] = 256,
    seed: options.Seed = 0,
    knob: options.Knobs = None,
    plot_path: Annotated[str | None, options.plot("Draw what is kept by acceptance length")] = None,
    json_path: options.Json = None,
) -> None:
    """Measure what lossy verification keeps of the captions' facts, and the acceptance length that it gains.

    What the held-out videos show is known: a caption's attributes (colours, shapes, motion, order) are right or wrong.
    "kept" is the share that is right, divided by that of the target alone at the same temperature with the same seeds.
    The target alone and the draft alone are measured too, each in an engine of its own; one engine serves all scorers.

    loose has every combination of --lambda, --position-shift and --relevance-rows. A name says what differs from no
    shift and the token's own state: "loose 0.7 shift pred". "not exact" is the share of accepted drafts that are not
    the target's choice, "same" the share of captions that are the target's to the last token. "AUC" is how well the
    measured relevance tells words about the video from fillers: 0.5 is not at all, 1 always.
    """
    given = locals()
    from benchmarks import views

    swept = {
        field: tuple(options.values("--" + name.removesuffix("_loose").replace("_", "-"), given[name], kind))
        for name, (field, kind) in _SWEPT.items()
    }
    shifts = options.values("--position-shift", position_shift, str)
    if wrong := [text for text in shifts if text not in ("on", "off")]:
        raise VidSpecError(f"--position-shift: {wrong[0]!r} is neither on nor off")
    swept["position_shifts"] = tuple(text == "on" for text in shifts)
    what = options.pick(Quality, given, **swept, knobs=options.knobs(knob))
    measure(sys.modules[__name__], what, given, views.quality_tables, views.draw_quality)


app = typer.Typer(add_completion=False, rich_markup_mode=None)
running.add(app, command, "python -m benchmarks.quality --scorer loose --lambda 0.5 --requests 4 --max-tokens 32")

if __name__ == "__main__":
    app()
