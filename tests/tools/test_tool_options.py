"""Wrong options of every command: one line, exit status 2, and no engine has started."""

import pytest

from tools.common import ROOT, refuses
from vllm_vidspec.planning import planner
from vllm_vidspec.tools import processes
from vllm_vidspec.tools.bench import speed

COMMANDS = ("calibrate", "show-pruning")
OF_ALL = (
    ("--target some/model", "--target needs --draft"),
    ("--target /no/such/model --draft self", "--target: no such checkpoint: /no/such/model"),
    ("--engine-args []", "--engine-args: '[]' is not a JSON object"),
    ('--engine-args {"model":"x"}', "--engine-args: model"),
    ("--out /no/such/folder/file", "no such folder"),
    ("--out /tmp", "it is a folder"),
)
BENCHES = ("bench acceptance", "-m benchmarks.quality")
TURNS = ("bench speed", "-m benchmarks.paper")  # with vanilla
DRAFTING = ("bench acceptance", "demo", *TURNS)
OF_SEVERAL = (
    ("--family llava", "unknown family 'llava'", (*COMMANDS, *BENCHES, *TURNS, "demo")),
    ("--prune-ratio 1.5", "prune_ratio", (*COMMANDS, *BENCHES, "demo")),
    ("--num-speculative-tokens 0", "num_speculative_tokens", ("calibrate", *BENCHES)),
    ("--video /no/such.mp4", "no such video: /no/such.mp4", ("calibrate", "demo")),
    ("/no/such.mp4", "no such video: /no/such.mp4", ("show-pruning",)),
    ("--json /no/such/rows.json", "cannot write /no/such/rows.json: no such folder", (*BENCHES, *TURNS)),
    ("--inflate 0.5", "a ratio of target time to draft time is at least 1", TURNS[1:]),
    ('--knob scorer="loose"', "--knob scorer: it has an option of its own", TURNS),
    *(
        (f"--draft {one}", f"--draft: {one!r} is neither a role of the bundled pair nor a checkpoint", DRAFTING)
        for one in ("small", "/no/such/draft", "some/draft", "docs", "README.md")
    ),
    *(
        (f"--target {one}{more}", f"--target: no such checkpoint: {one}", commands)
        for one in ("/no/such/target", "some/target", "docs", "README.md")
        for more, commands in (("", ("bench acceptance", "bench speed", "demo")), (" --draft self", COMMANDS))
    ),
    (
        "--target vllm_vidspec/assets/qwen2.5-vl/target --draft nowhere",
        "--draft: no such checkpoint: nowhere",
        COMMANDS,
    ),
)
OF_ONE = {
    "calibrate": (
        ("--pruner uniform", "'uniform' has nothing to calibrate"),
        ("--prune-ratio 1", "nothing to choose"),
    ),
    "show-pruning": (
        ("--pruner uniform,specvml", "did you mean 'specvlm'?"),
        ("--pruner ,", "--pruner"),
        ("--calibration /no/such.json", "calibration"),
        ("--out p.jpg", "must end in .png"),
    ),
    "bench acceptance": (
        ("--pruner unifrom", "did you mean 'uniform'?"),
        ("--prune-ratio 0.5,1.5", "prune_ratio"),
        ("--prune-ratio much", "--prune-ratio"),
        ("--num-speculative-tokens 2.5", "--num-speculative-tokens"),
        ("--scorer lenient", "scorer"),
        ("--drafting tree", "draft"),
        ("--draft ,", "--draft"),
        ("--plot /no/such/folder/f.png", "cannot write /no/such/folder/f.png"),
        ("--plot figure.jpeg", ".png or .svg"),
        ("--plot figure.png --temperature 0,1", "shows one temperature"),
        ("--plot f.png --draft-shape chain,tree-static --temperature 0,1 --prune-ratio 0,0.9", "shows one temperature"),
        ("--drafting chain,tree-static --num-speculative-tokens 5", "must be 25"),
        ("--drafting auto", "draft_table"),
        ("--knob tree_path=5", "did you mean 'tree_paths'?"),
        ("--knob max_draft_failures=9 --knob max_draft_failures=5", "given twice"),
        ("--knob max_draft_failures=0", "max_draft_failures"),
        ("--knob max_draft_failures", "'max_draft_failures' is not of the form NAME=JSON"),
        ("--knob position_shift=False", "'False' is no JSON value"),
        ("--knob prune_ratio=0.5", "an option of its own, --prune-ratio"),
        ('--knob draft_shape="tree-static"', "an option of its own, --drafting"),
    ),
    "-m benchmarks.quality": (
        ("--scorer lose", "scorer"),
        ("--lambda 0.5,1.5", "lambda_loose"),
        ("--lambda much", "--lambda: 'much' is not a list of float values"),
        ("--position-shift maybe", "--position-shift: 'maybe' is neither on nor off"),
        ("--relevance-rows tokens", "relevance_rows"),
        ("--fly-entropy -1", "fly_entropy"),
        ("--temperature -1", "--temperature: -1 is no temperature"),
        ("--temperature nan", "--temperature"),
        ("--draft-noise loud", "draft_noise"),
        ("--knob fly_entopy=3", "did you mean 'fly_entropy'?"),
        ("--knob lambda_loose=0.3", "--knob lambda_loose: it has an option of its own"),
    ),
    "bench speed": (
        ("--pruner unifrom", "did you mean 'uniform'?"),
        ("--drafting tree", "draft"),
        ("--scorer lenient", "scorer"),
        ("--parallel --drafting tree-static", "use draft_shape chain"),
    ),
    "-m benchmarks.paper": (
        ("--methods SpecVML", "--methods: 'SpecVML' is none of autoregressive, SD-chain"),
        ("--methods ,", "--methods: no value given"),
        ("--methods SD-chain --draft target --inflate 5", "--inflate: with --draft target there is no ratio to reach"),
        ("--knob lambda_lose=1", "did you mean 'lambda_loose'?"),
    ),
    "plan": (
        ("--target InternVL3-8B", "--target: no model 'InternVL3-8B' is known"),
        ("--target 72B", "--target: no model '72B' is known"),
        ("--target Qwen2.5-VL-13B", "there are Qwen2.5-VL 3B, Qwen2.5-VL 7B"),
        ("--target Qwen2.5-VL-72B-GPTQ-Int8", "--target: 'Qwen2.5-VL-72B-GPTQ-Int8': plans are made for weights of 16"),
        ("--draft 7B-AWQ", "--draft: no model '7B-AWQ' is known"),
        (
            "--target Qwen2.5-VL-7B --draft Qwen2.5-VL-7B-Instruct-AWQ --draft-quantization int4",
            "--draft-quantization: Qwen2.5-VL 7B (int4) is quantised already",
        ),
        ("--target /", "--target: / has no config.json"),
        ("--draft 7B", "--draft: no model '7B' is known"),
        ("--draft Qwen2.5-VL-3B", "--draft: Qwen2.5-VL 3B is of the family qwen2.5-vl"),
        ("--minutes 1 --video-tokens 1000", "--minutes and --video-tokens: give one of them"),
        ("--fps 2", "--fps needs --minutes"),
        ("--minutes 1 --fps 0", "--fps must be above 0"),
        ("--gpu mi300x", "--gpu: 'mi300x' is not supported: vidspec runs on NVIDIA's GPUs"),
        ("--gpu v100", "--gpu: unknown GPU 'v100'; expected one of a100"),
        ("--draft-quantization fp4", "--draft-quantization 'fp4' is none of fp8_per_tensor, int4"),
        ("--draft self --draft-quantization int4", "--draft-quantization: a target that drafts for itself"),
        ("--tp 3", "--tp 3: ranks cannot share"),
        ("--target Qwen2.5-VL-7B --draft 7B --draft-gpus 8", "--draft-gpus 8: ranks cannot share the draft's heads"),
        ("--target Qwen2.5-VL-72B --draft 7B --tp 8", "the draft's 28 heads cannot be shared by --tp 8 ranks"),
        (
            "--target Qwen2.5-VL-72B --draft 7B --gpu l40s --tp 2",
            "a rank of Qwen2.5-VL 72B has 73 GB of weights, more than l40s takes; --tp 4 would do",
        ),
        ("--target-ms 0", "--target-ms must be above 0"),
        ("--draft-ms inf --prune-ratio 0.9", "--draft-ms must be above 0"),
        ("--draft-ms 5", "--draft-ms: it was measured at one prune ratio"),
        ("--batch 1,x", "--batch: '1,x' is not a list of int values"),
        ("--batch 0", "--batch: each must be at least 1"),
        ("--prune-ratio nan", "--prune-ratio nan: a share lies between 0 and 1"),
        ("--acceptance 0.5,0.9", "--acceptance: rates by position cannot rise"),
        ("--acceptance 1.5", "--acceptance: each rate"),
        ("--acceptance 0.9 --prune-ratio 0.5,0.9", "--acceptance: it was measured at one prune ratio"),
        ("--json /no/such/folder/plan.json", "no such folder"),
    ),
}


CASES = [(command, *case) for command in COMMANDS for case in OF_ALL]
CASES += [(command, *case) for *case, commands in OF_SEVERAL for command in commands]
CASES += [(command, *case) for command, cases in OF_ONE.items() for case in cases]


@pytest.mark.parametrize(("command", "options", "words"), CASES)
def test_wrong_options_are_one_line_and_exit_2(fake_engines, monkeypatch, command, options, words):
    sessions = fake_engines(lambda *_: None)
    monkeypatch.setattr(speed, "cores", lambda: [0, 1])
    monkeypatch.setattr(planner, "plan", lambda *_: pytest.fail("planned before every value was checked"))
    monkeypatch.setattr(processes.VllmServer, "__enter__", lambda _: pytest.fail("a server has started"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)
    refuses(words, *command.split(), *options.split())
    assert not sessions, "no engine starts before every value is checked"
