"""LVSpec on the long pair: what its relevance score keeps of an answer's facts, and why.

    python -m benchmarks.bench_long_quality --what curve --tokens 1024 --requests 24 --json quality.json
    python -m benchmarks.bench_long_quality --what score --tokens 1024 --requests 24 --json relevance.json

`curve` is `vidspec bench quality` with reels and their questions: facts kept over tokens per step, for the score, for
random loosening and for an oracle. `score` looks at the score alone, without an engine: the target reads each reel and
the true answer, and relevance is computed from states of each layer, of the token's own row and of the row that
predicts it, as they are and less their mean, over N video tokens. `auc` is the chance that a word about the video ranks
above a filler; `in_scene` is the share of the N that are of the scene that the word is about.
"""

import argparse
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks import harness, quality, reel
from benchmarks.bench_long import FAMILY, MAX_TOKENS, job
from benchmarks.captions import accuracy, auc, pooled
from benchmarks.training.train_long import Reader
from vllm_vidspec.tools import pairs

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


# ---- the score, step by step -----------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    harness.command(
        __doc__,
        lambda options: {"curve": curve, "score": score}[options.what](options),
        what="curve",
        tokens=1024,
        requests=24,
        temperature=[0.0],
        draft_noise=["shared"],
    )
