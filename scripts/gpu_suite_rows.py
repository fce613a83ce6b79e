"""What `gpu_suite.py` measures: the kernels beside their floors and peers, engines of real shapes with made-up weights.

A process runs some steps and appends a JSON line to `rows.jsonl` for each row as it comes, so that whatever ends the
process leaves what was measured before. Top-level imports are the standard library's: the plan is read without torch.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
# ruff: noqa: E402
import gpu_smoke_steps as smoke
from made_up import SHAPES, Shape, write_checkpoint

FAMILY = "qwen2.5-vl"
BATCHES = (1, 4, 8)
Row = dict[str, Any]
Write = Callable[[Row], None]

# ---- kernels ---------------------------------------------------------------------------------------------------------

# What replaces the axes of `benchmarks/kernel_cases`: the shapes of the engines below, over the video.
KERNELS: dict[str, tuple[str, ...]] = {
    "tree_attention": ("shape=40x8x128", "context=25000", "num_reqs=1,8", "nodes=25,64"),
    "candidates": ("num_reqs=1,8",),
    "guidance_scores": ("shape=28x4x128", "num_keys=25000"),
    "visual_relevance": ("store=bfloat16", "hidden=5120", "batch=1x6,1x26,8x26", "num_tokens=25000"),
    "accept": ("kind=strict chain,strict tree,loose tree", "num_reqs=1,8"),
    "begin_step": ("num_reqs=1,8",),
    "next_level": ("num_reqs=1,8",),
    "draw": ("num_reqs=1,8",),
    "kv_compact": ("num_reqs=1,8",),
    "tree_grow": ("num_reqs=1,8",),
}
WITH_PEERS = ("tree_attention",)
# For a device that computes nothing: every kernel once.
_TINY_KERNELS: dict[str, tuple[str, ...]] = {
    "tree_attention": ("shape=4x2x32", "context=200", "num_reqs=2", "nodes=8"),
    "guidance_scores": ("shape=8x2x64", "num_keys=128", "num_queries=16"),
    "visual_relevance": ("store=bfloat16", "hidden=128", "batch=1x6", "num_tokens=128"),
    "accept": ("kind=strict tree", "num_reqs=1"),
    "begin_step": ("kind=tree", "num_reqs=1"),
    "next_level": ("kind=tree", "num_reqs=1"),
    "draw": ("temperature=0.8", "num_reqs=1", "vocab_size=2048"),
    "candidates": ("temperature=0.8", "num_reqs=1", "vocab_size=2048"),
    "kv_compact": ("path=scattered", "num_reqs=1"),
    "tree_grow": ("num_reqs=1",),
}


def kernel_rows(kernel: str, args: argparse.Namespace, write: Write, with_peers: bool = False) -> None:
    """Write a row for each size and implementation of a kernel, as `bench_kernels.py` measures it.

    Peers from other libraries, which compile longer than ours, have a step of their own, in turns with ours.
    """
    import bench_kernels

    module = importlib.import_module(f"kernel_cases.{kernel}")
    given = (_TINY_KERNELS if args.dry_run else KERNELS)[kernel]
    rounds = 1 if args.dry_run else module.ROUNDS
    with beside(with_peers, args.dry_run) if kernel in WITH_PEERS else contextlib.nullcontext():
        for size in bench_kernels.sizes_of(module.AXES, list(given)):
            case = {"kernel": kernel, "case": " ".join(f"{name}={value}" for name, value in size.items())}
            measured = module.case(**size)
            if args.dry_run:  # whose masks hold garbage where nothing is computed
                measured.calls.pop("torch", None)
            for row in bench_kernels.rows_of(measured, rounds, graphs=False):
                is_measured = row["median"] is not None
                write({"outcome": "measured" if is_measured else "refused", "reason": row["note"]} | case | row)


def beside(peers: bool, dry_run: bool) -> contextlib.AbstractContextManager:
    """Return what lets our attention be measured alone, or beside its peers; in a dry run none that compiles long."""
    from peers import attention

    ours, *others = attention.PEERS
    kept = [ours, *(name for name in others if peers and not (dry_run and name == "flex_attention"))]
    return mock.patch.object(attention, "PEERS", {name: attention.PEERS[name] for name in kept})


# ---- engines: what runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """A target and a draft; no shape: the bundled pair's own, for a device that computes nothing."""

    target: str | None
    draft: str | None
    fp8: bool

    def shapes(self) -> tuple[Shape, Shape]:
        """Return the shapes of target and draft."""
        assert self.target is not None and self.draft is not None
        return SHAPES[self.target], SHAPES[self.draft]


# The first of those that fit is taken, unless one is named.
MODELS = {
    "32b-bf16": Models("32b", "7b", False),
    "32b-fp8": Models("32b", "7b", True),
    "72b-fp8": Models("72b", "7b", True),
}
AUTO = ("32b-bf16", "32b-fp8")
_DRY_RUN = Models(None, None, True)


@dataclass(frozen=True)
class Engine:
    """An engine of the plan.

    Attributes:
        method: What drafts.
        graphs: Whether decode steps are CUDA graphs.
        num_drafts: K, 0 of vanilla.
        depth: The most drafts that follow each other.
        tau_of: The published method whose acceptance length is forced (`vidspec_tools/bench/published.py`).
    """

    method: str
    graphs: bool
    num_drafts: int = 0
    depth: int = 0
    tau_of: str = ""

    @property
    def name(self) -> str:
        """How rows call it."""
        return f"{self.method}-{'graphs' if self.graphs else 'eager'}"

    @property
    def is_ours(self) -> bool:
        """Whether it is vidspec."""
        return self.method in ("chain", "tree-static", "parallel")


_CHAIN, _TREE = ("chain", 5, 5, "SD"), ("tree-static", 25, 5, "SpecVLM")


def _of(method: str, num_drafts: int, depth: int, tau_of: str, graphs: bool) -> Engine:
    return Engine(method, graphs, num_drafts, depth, tau_of)


# The telling ones first: what is known when the time is up is worth most.
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vanilla", True),
        _of(*_TREE, True),
        _of(*_CHAIN, True),
        Engine("blind", True, 5, 5, "OnSD"),
        Engine("parallel", True, 5, 5, "ParallelVLM"),
        Engine("vanilla", False),
        _of(*_CHAIN, False),
        _of(*_TREE, False),
    )
}
# Of the papers' pairs, this one's target takes so many times its draft's time.
_RATIO = 3


def published_of(engine: Engine) -> tuple[float | None, float | None]:
    """Return the published acceptance length, the target's own token included, and speedup; None of vanilla.

    The length is what is forced.
    """
    from vidspec_tools.bench.published import published

    found = published(FAMILY, _RATIO, engine.tau_of)
    return found["published_m"], found["published_speedup"]  # type: ignore[return-value]


@dataclass(frozen=True)
class Video:
    """What every request shows."""

    num_frames: int = 128
    height: int = 392
    width: int = 784

    @property
    def num_tokens(self) -> int:
        """Of the target: two frames are merged, and patches of 28 x 28 pixels."""
        return self.num_frames // 2 * (self.height // 28) * (self.width // 28)


_TEXT_TOKENS = 64  # of a prompt beside the video, at most
_MOST_STEPS = 400  # until all requests draft


@dataclass(frozen=True)
class Sizes:
    """How long an engine is measured: `rounds` of `steps` decode steps after `skip` of them, all requests drafting."""

    video: Video = Video()
    skip: int = 8
    rounds: int = 3
    steps: int = 16

    def max_model_len(self, engine: Engine) -> int:
        """Return the longest text of a request: it must not end while it is measured."""
        measured = (self.skip + self.rounds * self.steps + 2) * (engine.depth + 1)
        return self.video.num_tokens + _TEXT_TOKENS + _MOST_STEPS + measured


_TINY_SIZES, TINY_BATCHES = Sizes(Video(4, 56, 56), skip=0, rounds=1, steps=2), (1,)

# ---- engines: whether they fit ---------------------------------------------------------------------------------------

_KEPT = 0.1  # of the video, by the draft
_WORKSPACE_BYTES = 6 * 2**30  # activations of a prompt's piece, logits, the towers, graphs, what CUDA itself takes
_USABLE = 0.97
_TINY_KV_BYTES = 128 * 2**20


def kv_bytes(models: Models, engine: Engine, batch: int, sizes: Sizes) -> tuple[int, int]:
    """Return the KV memory of vLLM's cache, and of our draft's pool beside it; a blind draft's is in vLLM's."""
    if models.target is None:
        return _TINY_KV_BYTES, _TINY_KV_BYTES // 4
    target, draft = models.shapes()
    length = sizes.max_model_len(engine) + 256  # whole blocks, a step under way
    blind = draft.kv_bytes_per_token if engine.method == "blind" else 0
    kept = length - round((1 - _KEPT) * sizes.video.num_tokens)
    pool = batch * kept * draft.kv_bytes_per_token if engine.is_ours else 0
    return batch * length * (target.kv_bytes_per_token + blind), pool


def embedding_bytes(models: Models, engine: Engine, sizes: Sizes) -> int:
    """Return what our draft keeps of the video's embeddings."""
    if not engine.is_ours:
        return 0
    return 2 * 2**20 if models.draft is None else 3 * SHAPES[models.draft].hidden_size * sizes.video.num_tokens


def need_bytes(models: Models, engine: Engine, batch: int, sizes: Sizes) -> int:
    """Return what an engine takes of the device, 0 of the bundled pair."""
    if models.target is None:
        return 0
    target, draft = models.shapes()
    weights = target.weight_bytes(models.fp8) + (draft.weight_bytes(models.fp8) if engine.num_drafts else 0)
    return (
        weights
        + sum(kv_bytes(models, engine, batch, sizes))
        + embedding_bytes(models, engine, sizes)
        + _WORKSPACE_BYTES
    )


def does_not_fit(models: Models, engine: Engine, batch: int, sizes: Sizes, total: int) -> str:
    """Return a line of why so many requests do not fit into `total` bytes, "" where they do."""
    need = need_bytes(models, engine, batch, sizes)
    if need <= _USABLE * total:
        return ""
    return f"needs {need / 2**30:.0f} GiB, the device has {total / 2**30:.0f} GiB"


def chosen_models(name: str, sizes: Sizes, total: int) -> str:
    """Return a key of MODELS: the one named, or the first of AUTO that leaves room for four requests of any engine."""
    if name != "auto":
        return name
    hungriest = max(ENGINES.values(), key=lambda engine: need_bytes(MODELS[AUTO[-1]], engine, 4, sizes))
    fitting = (key for key in AUTO if not does_not_fit(MODELS[key], hungriest, 4, sizes, total))
    return next(fitting, AUTO[-1])


# ---- engines: how they are made --------------------------------------------------------------------------------------


def checkpoints(models: Models, sizes: Sizes, folder: Path) -> dict[str, str]:
    """Write the directories of target and draft; return them by role."""
    from vllm_vidspec.tools import pairs

    pixels = sizes.video.height * sizes.video.width
    found = {}
    for role, size in (("target", models.target), ("draft", models.draft)):
        shape = None if size is None else SHAPES[size]
        source = Path(pairs.checkpoint(FAMILY, role))
        found[role] = str(write_checkpoint(source, folder / role, shape, fp8=models.fp8, pixels=(pixels, pixels)))
    return found


def llm_kwargs(
    engine: Engine, models: Models, where: dict[str, str], sizes: Sizes, batches: tuple[int, ...]
) -> dict[str, Any]:
    """Return the arguments of `LLM`; its memory is given, so that all engines of a run have the same."""
    from forced_acceptance import rate_for, unconditional_rates

    from vllm_vidspec.tools import pairs

    most = max(batches)
    cache, pool = kv_bytes(models, engine, most, sizes)
    embeddings = embedding_bytes(models, engine, sizes)
    ours = {"draft_kv_bytes": pool, "draft_encoder_bytes": embeddings} if engine.is_ours else {}
    in_process = sum(ours.values()) if engine.method != "parallel" else 0  # else it is the drafter's process's own
    in_process += (cache + in_process) // 50 if in_process else 0  # a hundredth of it all is for pixels
    overrides: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": sizes.max_model_len(engine),
        "max_num_seqs": most,
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": cache + in_process,
        "enable_prefix_caching": False,  # every request has a KV cache of its own
        "limit_mm_per_prompt": {"video": 1, "image": 0},
        "skip_mm_profiling": True,
        "disable_log_stats": True,
        "enforce_eager": not engine.graphs,
    }
    if engine.graphs:
        widths = {rows * batch for batch in batches for rows in (1, engine.num_drafts + 1)}
        overrides["compilation_config"] = {"mode": 0, "cudagraph_capture_sizes": sorted(widths)}
    if engine.method == "blind":
        length, _ = published_of(engine)
        assert length is not None
        overrides["speculative_config"] = {
            "method": "draft_model",
            "model": where["draft"],
            "num_speculative_tokens": engine.num_drafts,
            # vLLM's own way to force acceptance.
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": unconditional_rates(rate_for(length, engine.depth), engine.depth),
        }
    if not engine.is_ours:
        return pairs.llm_kwargs(FAMILY, target=where["target"], overrides=overrides)
    spec: dict[str, Any] = {"pruner": "uniform", "prune_ratio": 1 - _KEPT, "on_draft_error": "raise", **ours}
    if engine.method == "parallel":
        spec["parallel"] = {"device": "cuda:0"}
    spec |= {"drafting": "chain" if engine.method == "parallel" else engine.method}
    spec["num_speculative_tokens"] = engine.num_drafts
    return pairs.llm_kwargs(FAMILY, where["draft"], target=where["target"], overrides=overrides, **spec)


def prompt_of(video: Video) -> dict[str, Any]:
    """Return a prompt with a video of noise; all requests show the same one, and pay for its KV each."""
    import numpy as np

    from vllm_vidspec.tools import pairs

    frames = np.frombuffer(
        random.Random(0).randbytes(3 * video.num_frames * video.height * video.width), dtype=np.uint8
    ).reshape(video.num_frames, video.height, video.width, 3)
    metadata = {
        "fps": pairs.FRAME_RATE,
        "total_num_frames": video.num_frames,
        "duration": video.num_frames / pairs.FRAME_RATE,
        "frames_indices": list(range(video.num_frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    text = pairs.chat_prompt(FAMILY, pairs.DEFAULT_QUESTION, ["video"])
    return {"prompt": text, "multi_modal_data": {"video": [(frames, metadata)]}}


def skip_prefill(runner: Any, most_tokens: int) -> None:
    """Let the target compute nothing of forwards with more tokens than decoding has; its KV cache holds noise.

    A decode step over noise takes what one over a video takes, and minutes of prefill are spared.
    """
    import torch

    for cache in runner.kv_caches:
        cache.normal_()
    model, forward = runner.model, runner.model.forward
    hidden_size = runner.model_config.get_hidden_size()

    def decode_only(*args: Any, **kwargs: Any) -> Any:
        num_tokens = kwargs["positions"].shape[-1]
        if num_tokens <= most_tokens:
            return forward(*args, **kwargs)
        return torch.zeros(num_tokens, hidden_size, dtype=runner.model_config.dtype, device=runner.device)

    model.forward = decode_only


# ---- engines: what is measured ---------------------------------------------------------------------------------------


def engine_rows(engine: Engine, args: argparse.Namespace, write: Write) -> None:
    """Write a row for each batch size: what decode steps take, and what comes of them at the forced acceptance."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        raise smoke.SkippedError("vLLM is not installed")
    total = torch.cuda.mem_get_info()[1]
    sizes = _TINY_SIZES if args.dry_run else Sizes()
    name = "dry-run" if args.dry_run else chosen_models(args.models, sizes, total)
    models = MODELS.get(name, _DRY_RUN)
    wanted, speedup = published_of(engine)
    common = asdict(engine) | {
        "engine": engine.name,
        "models": name,
        "video_tokens": sizes.video.num_tokens,
        "acceptance": "forced" if engine.num_drafts else "none",
        "acceptance_length_wanted": wanted,
        "published_speedup": speedup,
        "prefill": "skipped, the target's KV is noise",
    }
    batches = []
    for batch in TINY_BATCHES if args.dry_run else BATCHES:
        if reason := does_not_fit(models, engine, batch, sizes, total):
            write(common | {"outcome": "refused", "batch": batch, "reason": reason})
        else:
            batches.append(batch)
    if not batches:
        raise smoke.SkippedError(f"not even one request fits: {reason}")
    common["bandwidth_gb_per_s"] = None if args.dry_run else _bandwidth()
    where = checkpoints(models, sizes, Path(args.work_dir) / f"models-{name}")
    kwargs = llm_kwargs(engine, models, where, sizes, tuple(batches))
    import vllm  # noqa: F401

    gc.freeze()  # vLLM collects garbage some twenty times an engine, over all that is imported
    begun = time.perf_counter()
    with smoke.engine(args, kwargs) as llm:
        common["start_s"] = round(time.perf_counter() - begun, 1)
        meter = Meter(llm, engine, wanted, sizes, max(batches))
        for batch in batches:
            write(common | {"outcome": "measured", "reason": "", "batch": batch} | meter.measure(batch))


def _bandwidth() -> float:
    """Return what the device copies now, in GB/s: a machine that has changed between two engines shows."""
    import bench_kernels
    import torch

    found = bench_kernels.rates(torch.bfloat16, 1024)[0] / 1e3
    torch.cuda.empty_cache()
    return round(found, 1)


class Meter:
    """Times the decode steps of a running engine.

    Args:
        llm: The engine.
        engine: Which one.
        wanted: The acceptance length to force, None of vanilla.
        sizes: How long.
        most: Requests at a time, at most.
    """

    def __init__(self, llm: Any, engine: Engine, wanted: float | None, sizes: Sizes, most: int):
        from forced_acceptance import ForcedAcceptance, rate_for
        from peers.engines import Clock

        self._engine, self._plan, self._sizes = llm.llm_engine, engine, sizes
        runner = smoke.runner_of(llm)
        skip_prefill(runner, most * (engine.num_drafts + 1))
        self._requests = runner.requests if engine.is_ours else None
        self._clock = Clock(runner.speculator)
        self._forced: ForcedAcceptance | None = None
        if engine.is_ours:
            assert wanted is not None
            rate = rate_for(wanted, engine.depth)
            least = int(engine.method == "parallel")  # what pads a window is 0
            self._forced = ForcedAcceptance(runner.rejection_sampler, runner.requests.has_draft, rate, least)
        self._prompt = prompt_of(sizes.video)
        self._tokens: dict[str, int] = {}

    def measure(self, batch: int) -> Row:
        """Return what so many requests at a time take.

        Raises:
            RuntimeError: They never draft, or one ends before the others have been timed.
        """
        names = self._begin(batch)
        for _ in range(self._sizes.skip):
            self._step()
        self._take()
        rounds = [self._round() for _ in range(self._sizes.rounds)]
        if self._engine.get_num_unfinished_requests() != batch:
            raise RuntimeError("a request has ended before its steps were timed")
        taken = self._take()
        self._end(names)
        step_ms = sorted(1e3 * seconds / self._sizes.steps for seconds, _ in rounds)
        tokens = sum(count for _, count in rounds)
        return {
            "step_ms": round(statistics.median(step_ms), 4),
            "step_ms_low": round(step_ms[0], 4),
            "step_ms_high": round(step_ms[-1], 4),
            "acceptance_length": round(tokens / (batch * self._sizes.rounds * self._sizes.steps), 4),
            "tokens_per_s": round(statistics.median(count / seconds for seconds, count in rounds), 2),
            **taken,
        }

    def _begin(self, batch: int) -> list[str]:
        """Let requests come, until all of them draft."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=self._sizes.max_model_len(self._plan), ignore_eos=True, detokenize=False
        )
        names = [f"{batch}-{number}" for number in range(batch)]
        for name in names:
            self._engine.add_request(name, self._prompt, params)
        for _ in range(_MOST_STEPS):
            if all(self._tokens.get(name) for name in names) and self._all_draft(batch):
                return names
            self._step()
        raise RuntimeError(f"the requests do not come to draft within {_MOST_STEPS} steps")

    def _all_draft(self, batch: int) -> bool:
        return self._requests is None or self._requests.has_draft_np.sum() == batch

    def _step(self) -> None:
        for output in self._engine.step():
            self._tokens[output.request_id] = len(output.outputs[0].token_ids)

    def _round(self) -> tuple[float, int]:
        """Return seconds of some steps, and the tokens that came of them."""
        import torch

        before = sum(self._tokens.values())
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(self._sizes.steps):
            self._step()
        torch.cuda.synchronize()
        return time.perf_counter() - begun, sum(self._tokens.values()) - before

    def _take(self) -> Row:
        return self._clock.take() | {"forcing_host_ms": self._forced and self._forced.take_host_ms()}

    def _end(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        for _ in range(_MOST_STEPS):
            if not self._engine.has_unfinished_requests():
                return
            self._step()
        raise RuntimeError("aborted requests do not end")


# ---- steps -----------------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[argparse.Namespace, Write], None]] = {
    "machine": lambda args, write: write(smoke.machine(args)),
    **{f"kernel-{name}": lambda args, write, name=name: kernel_rows(name, args, write) for name in KERNELS},
    **{f"peers-{name}": lambda args, write, name=name: kernel_rows(name, args, write, with_peers=True)
       for name in WITH_PEERS},
    **{f"engine-{name}": lambda args, write, engine=engine: engine_rows(engine, args, write)
       for name, engine in ENGINES.items()},
}  # fmt: skip


def run(name: str, args: argparse.Namespace, write: Write) -> None:
    """Run a step: its rows, and a last line that says how it ended."""
    import torch

    begun, outcome, reason = time.monotonic(), "passed", ""
    try:
        if not torch.cuda.is_available():
            raise smoke.SkippedError("torch sees no CUDA device")
        STEPS[name](args, lambda row: write({"step": name} | row))
    except smoke.SkippedError as why:
        outcome, reason = "skipped", str(why)
    except Exception as error:
        outcome, reason = "failed", smoke.reason_of(error)
    write({"step": name, "end": outcome, "reason": reason, "seconds": round(time.monotonic() - begun, 1)})


def main() -> int:
    """Run steps in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", help="of steps, with commas")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--models", default="auto")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--around", default="")
    args = parser.parse_args()
    if args.dry_run:  # one process for many engines: what was imported stays out of their garbage
        gc.unfreeze = lambda: None
    args.device = "cuda"  # what `gpu_smoke_steps` asks for
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with Path(args.work_dir, "rows.jsonl").open("a") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        for name in args.names.split(","):
            run(name, args, write)
    args.result.write_text(json.dumps({"outcome": "passed", "facts": {}}))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads must not keep the process: all is written


if __name__ == "__main__":
    # The kernel cases import the benchmark by its name.
    sys.exit(main())
