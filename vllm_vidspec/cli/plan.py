"""`vidspec plan`."""

from typing import Annotated

import typer

from vllm_vidspec.cli import options, running
from vllm_vidspec.cli.options import values
from vllm_vidspec.errors import VidSpecError

Target = Annotated[
    str, typer.Option(help="A model of a supported family by name, or a local directory with its config.json.")
]
Draft = Annotated[str, typer.Option(help="The same; a size of the target's family such as 7B; or self.")]
GpuName = Annotated[str, typer.Option("--gpu", help="As h100, l40s or RTX 4090; a wrong name lists those known.")]
Ranks = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks of target and draft, a GPU each.")]
DraftGpus = Annotated[int, typer.Option(min=0, help="GPUs more, for a drafter that works in parallel.")]
TextTokens = Annotated[int, typer.Option(min=1, help="The prompt's text, and half of the answer.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Of an answer.")]
Quantised = Annotated[
    str | None,
    typer.Option(help="Of the draft's layers: fp8_per_tensor, as vLLM makes it of any draft, or int4. Default: none."),
]
Ratios = Annotated[
    str | None, typer.Option("--prune-ratio", help="Of these the best is taken. Default: 0,0.5,0.8,0.9,0.95.")
]
VideoTokens = Annotated[int | None, typer.Option(min=0, help="Of a request. Default: 25,000, or as --minutes says.")]
Minutes = Annotated[float | None, typer.Option(min=0, help="Of a video, in place of its tokens; 640 x 360 pixels.")]
Fps = Annotated[float | None, typer.Option(help="Frames a second that a video of --minutes is sampled at. Default: 2.")]
ACCEPTANCE = (
    "Draft acceptance rate: at the first position, or by position as `vllm bench serve` prints it. Default: what "
    "the papers' figures of the family come to."
)


def plan(
    target: Target = "Qwen/Qwen3-VL-8B-Instruct",
    draft: Draft = "2B",
    gpu: GpuName = "h100",
    ranks: Ranks = 1,
    draft_gpus: DraftGpus = 0,
    video_tokens: VideoTokens = None,
    minutes: Minutes = None,
    fps: Fps = None,
    text_tokens: TextTokens = 512,
    answer_tokens: AnswerTokens = 256,
    batch: Annotated[str, typer.Option(help="Requests at a time, comma-separated; a full server is added.")] = "1,8",
    draft_quantization: Quantised = None,
    prune_ratio: Ratios = None,
    acceptance: Annotated[str | None, typer.Option(help=ACCEPTANCE)] = None,
    target_ms: Annotated[float | None, typer.Option(help="Measured decode step of one request.")] = None,
    draft_ms: Annotated[float | None, typer.Option(help="Measured draft forward of one request.")] = None,
    json_path: options.Json = None,
) -> None:
    """Say what drafts would gain on given GPUs, in whole answers, by requests at a time, and print the line to serve.

    Everything is modelled, and no GPU is needed: times by a roofline of the GPU's data sheet (or scaled to --target-ms
    and --draft-ms, if you have measured them), acceptance as given or as published. How far to trust it is in
    docs/choose-a-draft.md.
    """
    given = locals()
    from vllm_vidspec.planning import candidates, planner, roofline, shapes
    from vllm_vidspec.planning.acceptance import RUNNER_UP, Agreement, agreement_of_positions
    from vllm_vidspec.tools import views
    from vllm_vidspec.tools.provenance import provenance
    from vllm_vidspec.tools.user_files import check_output

    target_shape = shapes.target_shape(target)
    draft_shape = shapes.draft_shape(draft, target_shape)
    if draft_quantization is not None:
        if draft_shape is target_shape:
            raise VidSpecError("--draft-quantization: a target that drafts for itself has no weights but its own")
        draft_shape = draft_shape.quantised(draft_quantization)
    agreement: Agreement | None = None
    ratios: tuple[float, ...] = candidates.RATIOS
    if acceptance is not None:
        shares = values("--acceptance", acceptance, float)
        agreement, ratios = agreement_of_positions(shares, RUNNER_UP), (0.9,)
    if prune_ratio is not None:
        ratios = tuple(values("--prune-ratio", prune_ratio, float))
    if minutes is not None:
        if video_tokens is not None:
            raise VidSpecError("--minutes and --video-tokens: give one of them")
        fps = given["fps"] = 2.0 if fps is None else fps
        given["video_tokens"] = shapes.video_tokens(target_shape.family, minutes, fps)
    elif fps is not None:
        raise VidSpecError("--fps needs --minutes")
    elif video_tokens is None:
        del given["video_tokens"]
    asked = {"target": target_shape, "draft": draft_shape, "gpu": roofline.gpu_named(gpu)}
    what = options.pick(candidates.Question, given, **asked, prune_ratios=ratios, agreement=agreement)
    batches = values("--batch", batch, int)
    if min(batches) < 1:
        raise VidSpecError("--batch: each must be at least 1")
    candidates.check(what)
    if json_path not in (None, "-"):
        check_output(json_path)
    result = planner.plan(what, batches)
    running.write_json(json_path, result | {"provenance": provenance()})
    if json_path != "-":
        views.show_plan(result, running.console())
