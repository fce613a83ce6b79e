"""Trees of drafts on a pair: what each gives, and what the best tree of its size would give.

    python -m benchmarks.trees --family qwen2.5-vl --draft far --json trees.json
    python -m benchmarks.trees --family qwen2.5-vl-long --tokens 1024

One engine drafts trees of 64 nodes and counts which of them the target takes, by rank path: the counts of one tree say
how long any smaller one's steps are. `counted` is that, for the trees of `draft_shape`, SpecVLM's and chains of as many
forwards; `best` is the tree of as many nodes, in at most as many forwards, that is grown by these counts of each rank
and depth. With `--engines` each shape is also drafted by an engine of its own: `measured`, and the share of answers
that are vanilla's.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.session import BenchEngine
from vllm_vidspec.config.static_tree import GROWN_DEPTHS, SPECVLM_PATHS, Path, grow_paths
from vllm_vidspec.drafting.static import topology_of
from vllm_vidspec.engine.report.observer import Observer
from vllm_vidspec.tools import pairs

WIDE = grow_paths(64, 5, lambda depth, rank: 0.6 * 0.4**rank)  # bushy: four ranks below the root, two at the end


class PathCounts(Observer):
    """Counts the paths that verify steps of one static tree accept; every path's own beginnings among them."""

    def __init__(self) -> None:
        self.paths, self.steps = Counter[Path](), 0
        self._names = ((), *topology_of(WIDE).paths)

    def verified(self, part: Any, scored: Any) -> None:
        if scored.path is None:
            return
        for request, rows in enumerate(part.num_logits_np.tolist()):
            if rows > 1:
                self.steps += 1
                for place in range(1, int(scored.num_sampled[request])):
                    self.paths[self._names[int(scored.path[request, place])]] += 1

    def length(self, paths: Sequence[Path]) -> tuple[float, int]:
        """Return the tokens of a step over a tree, and how many of its nodes were not counted and left out."""
        known = [path for path in paths if path in WIDE]
        return 1 + sum(self.paths[path] for path in known) / self.steps, len(paths) - len(known)

    def chance(self, depth: int, rank: int) -> float:
        """Return how often the candidate of a rank was the target's token, at all nodes of a depth whose parent was."""
        parents = {path[:-1] for path in WIDE if len(path) == depth and path[-1] == rank}
        reached = sum(self.paths[parent] if parent else self.steps for parent in parents)
        found = sum(self.paths[(*parent, rank)] for parent in parents)
        return min(max(found / reached if reached else 0.0, 1e-9), 1 - 1e-9)


def shapes(num_nodes: int) -> dict[str, tuple[Path, ...]]:
    """Return trees and chains by name."""
    grown = {f"{shape}/{num_nodes}": grow_paths(num_nodes, depth) for shape, depth in GROWN_DEPTHS.items()}
    chains = {f"chain/{length}": tuple((0,) * depth for depth in range(1, length + 1)) for length in (1, 3, 5)}
    return grown | {"tree-static/25": SPECVLM_PATHS} | chains


def prompts_of(options: argparse.Namespace) -> list[Any]:
    if options.tokens:
        numbers = range(options.requests)
        return BenchEngine.bundled_requests(
            {"family": options.family, "held_out": numbers, "reel_tokens": options.tokens}
        )
    return harness.videos(options.family, range(options.requests))


def measure(options: argparse.Namespace) -> Iterator[harness.Row]:
    prompts, common = prompts_of(options), {"family": options.family, "draft": options.draft}
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    overrides = {"max_model_len": options.tokens + 1024} if options.tokens else {}

    def engine(**knobs: Any) -> harness.Engine:
        draft = options.draft if knobs else None
        return harness.Engine(pairs.llm_kwargs(options.family, draft, overrides=overrides, **knobs))

    counts = PathCounts()
    wide = {"drafting": "tree-static", "tree_paths": [list(path) for path in WIDE], "num_speculative_tokens": len(WIDE)}
    with engine(**wide, adaptive_tokens=False) as running:
        running.runner.observers.append(counts)
        counted = running.answer(prompts, **sampling)
    vanilla = counted
    if options.engines:
        with engine() as running:
            vanilla = running.answer(prompts, **sampling)
    for name, paths in shapes(options.nodes).items():
        shape, _, number = name.partition("/")
        depth = max(map(len, paths))
        tokens, missing = counts.length(paths)
        steps = counts.steps
        row = {
            **common, "shape": shape, "num_drafts": int(number), "forwards": depth, "verify_steps": steps,
            "counted": round(tokens, 4), "not_counted_nodes": missing,
        }  # fmt: skip
        if shape != "chain":
            best, missing = counts.length(grow_paths(len(paths), depth, counts.chance))
            row |= {"best": round(best, 4), "best_not_counted_nodes": missing}
        if options.engines:
            knobs = {"drafting": shape, "num_speculative_tokens": int(number), "adaptive_tokens": False}
            with engine(**knobs) as running:
                answers, gained = running.measure(running.answer, prompts, **sampling)
            steps = gained["drafts"]
            tokens = 1 + gained["accepted_tokens"] / steps
            row |= {
                "measured": round(tokens, 4), "measured_steps": steps,
                "identical": sum(map(list.__eq__, answers, vanilla)) / len(answers),
            }  # fmt: skip
        row["ci95"] = harness.ci95(tokens, steps)  # of `measured`, or `counted`
        yield row


if __name__ == "__main__":
    harness.command(
        __doc__, measure, family="qwen2.5-vl", draft="draft", nodes=24, requests=24, max_tokens=128, temperature=0.0,
        tokens=0, engines=False,
    )  # fmt: skip
