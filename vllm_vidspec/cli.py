"""The `vidspec` command: demo, doctor, calibrate, show-*, bench; heavy imports happen inside a command."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_vidspec.errors import VidSpecError

if TYPE_CHECKING:
    from vllm_vidspec.tools.calibrate import Calibration

app = typer.Typer(
    help="Speculative decoding for video language models in vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure on the bundled models.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

_JSON = typer.Option("--json", metavar="PATH", help="Write the result as JSON to a file, or '-' for standard output.")
_DTYPE = typer.Option(help="As of `vllm serve`: auto, float32, bfloat16. Default: the bundled pairs' is float32.")
_ENGINE_ARGS = typer.Option(metavar="JSON", help="More arguments of vllm.LLM, as an object.")
_LIST = "Comma-separated values sweep."


def _user_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a VidSpecError into one line on standard error and exit status 2, Ctrl-C into 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except VidSpecError as error:
            print(f"vidspec: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("vidspec: stopped", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapped


def _values(option: str, text: str, kind: type) -> list[Any]:
    """Parse the comma-separated values of an option."""
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise VidSpecError(f"{option}: {text!r} is not a list of {kind.__name__} values") from None
    if not values:
        raise VidSpecError(f"{option}: no value given")
    return values


def _write_json(path: str, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=2)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise VidSpecError(f"cannot write {path}: {error.strerror}") from None


@app.command()
@_user_errors
def demo(
    family: Annotated[str, typer.Option(help="Bundled pair: qwen2.5-vl or llava-onevision.")] = "qwen2.5-vl",
    prune_ratio: Annotated[float, typer.Option(help="Share of the video tokens that the draft does not see.")] = 0.9,
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens per verify step.")] = 5,
    pruner: Annotated[str, typer.Option(help="Which video tokens the draft keeps.")] = "specvlm",
    target: Annotated[str | None, typer.Option(help="A checkpoint in place of the bundled target.")] = None,
    draft: Annotated[str, typer.Option(help="'draft', 'target' (self-speculation) or a checkpoint.")] = "draft",
    video: Annotated[str | None, typer.Option(help="An mp4 file in place of the bundled one.")] = None,
    question: Annotated[str, typer.Option(help="What to ask about the video.")] = "describe the video",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    port: Annotated[int | None, typer.Option(help="Port of the servers. Default: a free one.")] = None,
    log_dir: Annotated[str | None, typer.Option(help="Folder for the servers' logs.")] = None,
    json_path: Annotated[str | None, _JSON] = None,
) -> None:
    """Serve the bundled pair twice, vanilla and with vidspec; ask about a video; compare.

    Exit status 1 if the two answers differ.
    """
    from rich.console import Console

    from vllm_vidspec.tools import demo as demo_module
    from vllm_vidspec.tools import progress, tables

    _end_on_sigterm()
    spec = {"prune_ratio": prune_ratio, "num_speculative_tokens": num_speculative_tokens, "pruner": pruner}
    what = demo_module.Demo(family, target, draft, video, question, max_tokens, port, log_dir, spec)
    to_stdout = json_path == "-"
    stderr, out = Console(stderr=True), Console(stderr=to_stdout)
    with progress.bars(stderr) as bars:
        result = demo_module.run(what, tables.DemoView(bars, out))
    if json_path is not None:
        _write_json(json_path, result)
    if not to_stdout:
        out.print(tables.demo_table(result))
        out.print(f"Each server answered one warm-up request first. Logs: {result['log_dir']}")
    if not result["identical"]:
        raise typer.Exit(1)


@app.command()
@_user_errors
def doctor(
    target: Annotated[str | None, typer.Option(help="A target model to check the pair of.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft model.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair the environment first (CPU engine only).")] = False,
    json_path: Annotated[str | None, _JSON] = None,
) -> None:
    """Check the engine, the device, the plugin and a pair; say what to do about each problem.

    Exit status 1 if a check fails.
    """
    from dataclasses import asdict

    from rich.console import Console

    from vllm_vidspec.doctor import run_checks
    from vllm_vidspec.tools import tables

    console = Console(stderr=json_path == "-")
    if fix:
        from vllm_vidspec.setup.fixups import FixupError, apply_fixups

        try:
            with console.status("repairing the environment"):
                done = apply_fixups()
        except FixupError as error:
            raise VidSpecError(str(error)) from None
        for item in done:
            console.print(f"{item.name}: {item.detail}" + (" (changed)" if item.changed else ""))
        if any(item.changed for item in done):
            raise typer.Exit(_doctor_anew(target, draft, json_path))
    with console.status("checking"):
        checks = run_checks(target=target, draft=draft)
    if json_path is not None:
        _write_json(json_path, {"checks": [asdict(check) for check in checks]})
    if json_path != "-":
        console.print(tables.checks_table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _doctor_anew(target: str | None, draft: str | None, json_path: str | None) -> int:
    """Check in a new process, which imports what has been repaired; return its exit status."""
    options = {"--target": target, "--draft": draft, "--json": json_path}
    given = [text for name, value in options.items() if value is not None for text in (name, value)]
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "vllm_vidspec.cli", "doctor", *given]).returncode


@app.command()
@_user_errors
def calibrate(
    family: Annotated[str, typer.Option(help="Bundled pair: qwen2.5-vl or llava-onevision.")] = "qwen2.5-vl",
    target: Annotated[str | None, typer.Option(help="A target of your own in place of the bundled pair.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft: a checkpoint, or 'self'.")] = None,
    pruner: Annotated[str, typer.Option(help="specvlm (lambda_r, guidance_layers) or uv (uv_layer).")] = "specvlm",
    video: Annotated[
        list[str] | None, typer.Option(help="A video of yours; repeat for more. Default: synthetic.")
    ] = None,
    question: Annotated[str, typer.Option(help="What to ask about each video.")] = "describe the video",
    prompts: Annotated[int, typer.Option(min=1, help="How many synthetic videos, without --video.")] = 4,
    prune_ratio: Annotated[float, typer.Option(help="Share of the video tokens that the draft does not see.")] = 0.9,
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens per verify step.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")] = 256,
    grid: Annotated[bool, typer.Option("--grid", help="Measure every layer set at every lambda_r.")] = False,
    dtype: Annotated[str | None, _DTYPE] = None,
    engine_args: Annotated[str, _ENGINE_ARGS] = "{}",
    out: Annotated[str, typer.Option(metavar="PATH", help="The calibration file to write.")] = "calibration.json",
    plot: Annotated[str | None, typer.Option(metavar="PATH", help="Plot the measurements to a file.")] = None,
    costs: Annotated[
        bool, typer.Option("--costs", help="Measure which shape of draft pays on this machine, by batch size, instead.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="With --costs: engines of each shape, in turn.")] = 3,
) -> None:
    """Choose a pair's pruning knobs by measured acceptance length; write them for the key `calibration`.

    With --costs: measure the knob draft_table instead, and add it to the file where there is one.
    """
    from rich.console import Console

    from vllm_vidspec.tools import calibrate as calibration
    from vllm_vidspec.tools import calibration_views as views
    from vllm_vidspec.tools import progress

    _end_on_sigterm()
    what = calibration.Calibration(
        pruner=pruner,
        family=family,
        target=target,
        draft=draft,
        videos=tuple(video or ()),
        question=question,
        prompts=prompts,
        prune_ratio=prune_ratio,
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        engine_args=_engine_args(engine_args, dtype),
        whole_grid=grid,
    )
    if costs:
        _calibrate_costs(what, rounds, out, plot)
        return
    calibration.check(what, out, plot)
    console = Console()
    with progress.bars(Console(stderr=True)) as bars:
        result = calibration.run(what, progress.View(bars))
    _write_json(out, result)
    if plot is not None:
        views.plot(result, plot)
    console.print(views.table(result))
    console.print(views.summary(result), highlight=False)
    console.print(f'Use it with "calibration": "{out}" in the speculative config.', highlight=False, soft_wrap=True)


def _calibrate_costs(what: "Calibration", rounds: int, out: str, plot: str | None) -> None:
    """Measure `draft_table`, show it and write it; what the file holds already stays and is in force."""
    from rich.console import Console

    from vllm_vidspec.tools import calibration_views as views
    from vllm_vidspec.tools import costs, progress

    if plot is not None:
        raise VidSpecError("--plot: --costs has nothing to plot")
    held = costs.read_file(out, what)
    measure = costs.Costs(what, rounds, out if held.get("config", {}).keys() - {"draft_table"} else None)
    costs.check(measure, out)
    console = Console()
    with progress.bars(Console(stderr=True)) as bars:
        result = costs.run(measure, progress.View(bars))
    if held:
        table = {"config": held["config"] | result["config"], "costs": result["costs"]}
        _write_json(out, held | table | {"costs_provenance": result["provenance"]})
    else:
        _write_json(out, result)
    console.print(views.costs_table(result))
    console.print(views.costs_summary(result), highlight=False)
    words = f'Use it with "draft": "auto" and "calibration": "{out}" in the speculative config.'
    console.print(words, highlight=False, soft_wrap=True)


@app.command("show-pruning")
@_user_errors
def show_pruning(
    video: Annotated[str | None, typer.Argument(help="A video file. Default: the bundled one.")] = None,
    pruner: Annotated[
        str, typer.Option(help="Comma-separated; one row each.")
    ] = "uniform,random,specvlm,attention,uv,dycoke",
    prune_ratio: Annotated[float, typer.Option(help="Share of the video tokens that is dropped.")] = 0.9,
    family: Annotated[str, typer.Option(help="Bundled pair: qwen2.5-vl or llava-onevision.")] = "qwen2.5-vl",
    target: Annotated[str | None, typer.Option(help="A target of your own in place of the bundled pair.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft: a checkpoint, or 'self'.")] = None,
    question: Annotated[str, typer.Option(help="What to ask about the video.")] = "describe the video",
    columns: Annotated[int, typer.Option(min=1, help="Most frames in a row.")] = 16,
    calibration: Annotated[
        str | None, typer.Option(help="A file of `vidspec calibrate`. Default: the bundled pair's.")
    ] = None,
    dtype: Annotated[str | None, _DTYPE] = None,
    engine_args: Annotated[str, _ENGINE_ARGS] = "{}",
    out: Annotated[str, typer.Option(metavar="PATH", help="The picture to write.")] = "pruning.png",
) -> None:
    """Draw which tokens of a video each pruner keeps for the draft."""
    from rich.console import Console

    from vllm_vidspec.tools import contact_sheet, progress
    from vllm_vidspec.tools import show_pruning as pruning

    _end_on_sigterm()
    pruners = tuple(_values("--pruner", pruner, str))
    show = pruning.Show(
        video=video,
        out=out,
        pruners=pruners,
        family=family,
        target=target,
        draft=draft,
        prune_ratio=prune_ratio,
        question=question,
        columns=columns,
        calibration=calibration,
        engine_args=_engine_args(engine_args, dtype),
    )
    console = Console()
    with progress.bars(Console(stderr=True)) as bars:
        result = pruning.run(show, progress.View(bars))
    console.print(contact_sheet.table(result))
    console.print(f"Wrote {out}", highlight=False, soft_wrap=True)


@app.command("show-relevance")
@_user_errors
def show_relevance(
    video: Annotated[str | None, typer.Argument(help="A video file. Default: the bundled one.")] = None,
    family: Annotated[str, typer.Option(help="Bundled pair: qwen2.5-vl or llava-onevision.")] = "qwen2.5-vl",
    target: Annotated[str | None, typer.Option(help="A target of your own in place of the bundled pair.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft: a checkpoint, or 'self'.")] = None,
    question: Annotated[str, typer.Option(help="What to ask about the video.")] = "describe the video",
    lambda_loose: Annotated[
        float, typer.Option("--lambda", help="Share of a step's drafts whose mismatches stand; 0 loosens nothing.")
    ] = 0.7,
    top_n: Annotated[int, typer.Option(help="Video tokens that make a relevance (N).")] = 10,
    position_shift: Annotated[
        bool, typer.Option("--position-shift/--no-position-shift", help="Let shifted tokens stand, too.")
    ] = True,
    relevance_rows: Annotated[str, typer.Option(help="Whose state is compared: token or prediction.")] = "token",
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens per verify step.")] = 10,
    prune_ratio: Annotated[float, typer.Option(help="Share of the video tokens that the draft does not see.")] = 0.9,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the request, where the temperature is not 0.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")] = 256,
    dtype: Annotated[str | None, _DTYPE] = None,
    engine_args: Annotated[str, _ENGINE_ARGS] = "{}",
    out: Annotated[str, typer.Option(metavar="PATH", help="The .html or .png file to write.")] = "relevance.html",
    json_path: Annotated[str | None, _JSON] = None,
) -> None:
    """Show a caption with every token in the colour of its visual relevance, and mark what was loosened."""
    from rich.console import Console

    from vllm_vidspec.tools import progress, relevance_views
    from vllm_vidspec.tools import show_relevance as relevance

    _end_on_sigterm()
    show = relevance.Show(
        video=video,
        out=out,
        family=family,
        target=target,
        draft=draft,
        question=question,
        lambda_loose=lambda_loose,
        top_n=top_n,
        position_shift=position_shift,
        relevance_rows=relevance_rows,
        num_speculative_tokens=num_speculative_tokens,
        prune_ratio=prune_ratio,
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        engine_args=_engine_args(engine_args, dtype),
    )
    relevance.check(show)
    console = Console(stderr=json_path == "-")
    with progress.bars(Console(stderr=True)) as bars:
        result = relevance.run(show, progress.View(bars))
    if json_path is not None:
        _write_json(json_path, result)
    console.print(relevance_views.table(result["rows"][0]))
    console.print(f"Wrote {out}", highlight=False, soft_wrap=True)


def _engine_args(text: str, dtype: str | None) -> dict[str, Any]:
    """Parse --engine-args and add what has an option of its own."""
    found = _json_object("--engine-args", text)
    if dtype is None:
        return found
    if "dtype" in found:
        raise VidSpecError("--engine-args: dtype is given by --dtype, too")
    return found | {"dtype": dtype}


def _json_object(option: str, text: str) -> dict[str, Any]:
    """Parse an option that holds a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise VidSpecError(f"{option}: {text!r} is not a JSON object")
    return value


def _knobs(option: str, texts: list[str]) -> dict[str, Any]:
    """Parse options of the form NAME=JSON."""
    knobs: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not name or not value:
            raise VidSpecError(f"{option}: {text!r} is not of the form NAME=JSON")
        if name in knobs:
            raise VidSpecError(f"{option} {name}: given twice")
        try:
            knobs[name] = json.loads(value)
        except ValueError:
            raise VidSpecError(f"{option} {name}: {value!r} is no JSON value (a text needs quotes)") from None
    return knobs


@bench_app.command()
@_user_errors
def acceptance(
    family: Annotated[str, typer.Option(help=f"qwen2.5-vl, llava-onevision. {_LIST}")] = "qwen2.5-vl",
    draft: Annotated[str, typer.Option(help=f"draft, target (self-speculation) or a path. {_LIST}")] = "draft",
    pruner: Annotated[str, typer.Option(help=_LIST)] = "specvlm",
    prune_ratio: Annotated[str, typer.Option(help=_LIST)] = "0.9",
    drafting: Annotated[
        str, typer.Option(help=f"Shape of the draft: chain, tree-static, tree-adaptive. {_LIST}")
    ] = "chain",
    num_speculative_tokens: Annotated[
        str | None, typer.Option(help=f"Default: 5 for chains, 25 and 64 for the two trees. {_LIST}")
    ] = None,
    scorer: Annotated[str, typer.Option(help=f"strict. {_LIST}")] = "strict",
    draft_noise: Annotated[str, typer.Option(help=f"shared, independent, greedy. {_LIST}")] = "shared",
    draft_positions: Annotated[str, typer.Option(help=f"original, compacted. {_LIST}")] = "original",
    temperature: Annotated[str, typer.Option(help=_LIST)] = "0",
    top_p: Annotated[str, typer.Option(help=_LIST)] = "1",
    top_k: Annotated[str, typer.Option(help=_LIST)] = "0",
    min_p: Annotated[str, typer.Option(help=_LIST)] = "0",
    presence_penalty: Annotated[str, typer.Option(help=_LIST)] = "0",
    frequency_penalty: Annotated[str, typer.Option(help=_LIST)] = "0",
    repetition_penalty: Annotated[str, typer.Option(help=_LIST)] = "1",
    seed: Annotated[int, typer.Option(help="Request i samples with seed + i.")] = 0,
    seeded: Annotated[bool, typer.Option("--seeded/--unseeded", help="Whether requests carry a seed.")] = True,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one request each.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at once (max_num_seqs).")] = 8,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate max-tokens tokens regardless.")] = False,
    target: Annotated[str | None, typer.Option(help="A checkpoint in place of the bundled target.")] = None,
    knob: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Any other knob of the speculative config, for all rows; repeat."),
    ] = None,
    sync_scheduling: Annotated[
        bool, typer.Option("--sync-scheduling", help="Adaptive trees keep their own size; async fills them up to K.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Engines that run at once; times are comparable at 1 only.")] = 1,
    csv_path: Annotated[
        str | None, typer.Option("--csv", metavar="PATH", help="Write the rows as CSV; '#' starts a comment.")
    ] = None,
    plot_path: Annotated[
        str | None,
        typer.Option(
            "--plot", metavar="PATH", help="Draw acceptance length by prune ratio, or by shape: a .png or .svg file."
        ),
    ] = None,
    json_path: Annotated[str | None, _JSON] = None,
) -> None:
    """Measure acceptance, identity with vanilla vLLM, and the draft's KV size on held-out videos.

    Every combination of the options is a row. Configurations that show the draft the same tokens (every pruner at 0,
    every pruner at 1, `none` at any ratio) share one engine, which `measured_as` names.

    A row's decode_s is the wall time of one LLM.generate call over all its requests, vision and prefill included,
    after a warm-up request. Exit status 1 if a configuration fails.
    """
    from rich.console import Console

    from vllm_vidspec.tools import plots, progress, tables
    from vllm_vidspec.tools.bench import acceptance as bench

    _end_on_sigterm()
    given = locals()
    kinds = {"num_speculative_tokens": int, "top_k": int}
    texts = ("family", "draft", "pruner", "drafting", "scorer", "draft_noise", "draft_positions")
    axes: dict[str, list[Any]] = {
        name: [None]
        if given[name] is None
        else _values("--" + name.replace("_", "-"), given[name], str if name in texts else kinds.get(name, float))
        for name in bench.AXES
    }
    sweep = bench.Sweep(
        *(axes, requests, max_tokens, batch_size, seed if seeded else None, ignore_eos, target),
        jobs=jobs,
        knobs=_knobs("--knob", knob or []),
        sync_scheduling=sync_scheduling,
    )
    bench.check(sweep)
    plots.check_outputs(axes, csv_path=csv_path, plot_path=plot_path, json_path=json_path)
    stderr, stdout = Console(stderr=True), Console()
    with progress.bars(stderr) as bars:
        result = bench.run(sweep, progress.View(bars))
    if json_path is not None:
        _write_json(json_path, result)
    if csv_path is not None:
        plots.write_csv(csv_path, result)
    if plot_path is not None and result["rows"]:
        plots.draw([plots.flatten(row) for row in result["rows"]], plot_path)
    if json_path != "-" and result["rows"]:
        stdout.print(tables.acceptance_table(result["rows"]))
    if result["failures"]:
        raise typer.Exit(1)


@bench_app.command()
@_user_errors
def quality(
    family: Annotated[str, typer.Option(help=f"qwen2.5-vl, llava-onevision. {_LIST}")] = "qwen2.5-vl",
    scorer: Annotated[
        str, typer.Option(help=f"Beside strict: loose, fly, fly-entropy, random, oracle. {_LIST}")
    ] = "loose,fly,fly-entropy,random,oracle",
    lambda_loose: Annotated[
        str, typer.Option("--lambda", help=f"Share that loose and random let stand. {_LIST}")
    ] = "0.2,0.5,0.7,0.9",
    top_n: Annotated[str, typer.Option(help=f"loose: video tokens that make a relevance (N). {_LIST}")] = "10",
    position_shift: Annotated[str, typer.Option(help=f"loose: off, on. {_LIST}")] = "off,on",
    relevance_rows: Annotated[str, typer.Option(help=f"loose: token, prediction. {_LIST}")] = "token",
    fly_entropy: Annotated[str, typer.Option(help=f"Threshold of fly and fly-entropy. {_LIST}")] = "0.2",
    temperature: Annotated[str, typer.Option(help=_LIST)] = "0",
    draft_noise: Annotated[
        str, typer.Option(help=f"shared, independent, greedy; at temperature 0 only the first. {_LIST}")
    ] = "shared",
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens per verify step.")] = 10,
    prune_ratio: Annotated[float, typer.Option(help="Share of the video tokens that the draft does not see.")] = 0.9,
    requests: Annotated[int, typer.Option(min=1, help="Held-out videos, one caption each.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at once (max_num_seqs).")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest caption in tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="Request i samples with seed + i.")] = 0,
    knob: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Any other knob of the speculative config, for all rows; repeat."),
    ] = None,
    csv_path: Annotated[
        str | None, typer.Option("--csv", metavar="PATH", help="Write the rows as CSV; '#' starts a comment.")
    ] = None,
    plot_path: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw what is kept by acceptance length: a .png or .svg file."),
    ] = None,
    json_path: Annotated[str | None, _JSON] = None,
) -> None:
    """Measure what lossy verification keeps of the captions' facts, and the acceptance length that it gains.

    What the held-out videos show is known: a caption's attributes (colours, shapes, motion, order) are right or wrong.
    "kept" is the share that is right, divided by that of the target alone at the same temperature with the same seeds.
    Beside the scorers stand the target and the draft alone, each in an engine of its own; one engine per noise serves
    all scorers.

    loose has every lambda at the N closest to 10, with the first of --position-shift and --relevance-rows and with each
    other one of these; and the other N at the lambda closest to 0.7. A name says what differs from N 10, no shift and
    the token's own state: "loose 0.7 N1 shift pred". "not exact" is the share of the drafts that stood without being
    the target's choice, "same" the share of captions that are the target's to the last token. "AUC" is how well the
    measured relevance tells words about the video from fillers: 0.5 is not at all, 1 always.
    """
    from rich.console import Console

    from vllm_vidspec.tools import progress
    from vllm_vidspec.tools import quality_views as views
    from vllm_vidspec.tools.bench import quality as bench

    _end_on_sigterm()
    what = bench.Quality(
        families=tuple(_values("--family", family, str)),
        temperatures=tuple(_values("--temperature", temperature, float)),
        draft_noises=tuple(_values("--draft-noise", draft_noise, str)),
        scorers=tuple(_values("--scorer", scorer, str)),
        lambdas=tuple(_values("--lambda", lambda_loose, float)),
        top_ns=tuple(_values("--top-n", top_n, int)),
        position_shifts=tuple(_switch("--position-shift", value) for value in position_shift.split(",")),
        relevance_rows=tuple(_values("--relevance-rows", relevance_rows, str)),
        fly_entropies=tuple(_values("--fly-entropy", fly_entropy, float)),
        requests=requests,
        batch_size=batch_size,
        num_speculative_tokens=num_speculative_tokens,
        prune_ratio=prune_ratio,
        max_tokens=max_tokens,
        seed=seed,
        knobs=_knobs("--knob", knob or []),
    )
    bench.check(what)
    views.check_outputs(csv_path=csv_path, plot_path=plot_path, json_path=json_path)
    with progress.bars(Console(stderr=True)) as bars:
        result = bench.run(what, progress.View(bars))
    if json_path is not None:
        _write_json(json_path, result)
    if csv_path is not None:
        views.write_csv(csv_path, result)
    if plot_path is not None:
        views.draw(result["rows"], plot_path)
    if json_path != "-":
        for table in views.tables(result["rows"]):
            Console().print(table)


def _switch(option: str, text: str) -> bool:
    """Parse on or off."""
    words = {"on": True, "off": False}
    if text.strip() not in words:
        raise VidSpecError(f"{option}: {text.strip()!r} is neither on nor off")
    return words[text.strip()]


def _end_on_sigterm() -> None:
    """Make SIGTERM unwind the stack, so that engine processes are ended as on Ctrl-C."""
    import signal

    def stop(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    app()
