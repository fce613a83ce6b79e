"""`vidspec calibrate` and `vidspec show-pruning` with real engines, each in a process of its own as in the commands."""

import pytest
import torch

from benchmarks.methods import POLICY
from benchmarks.roles import OF_RUNNER, VANILLA, Roles
from benchmarks.session import BenchSession
from tests.engine import harness
from tests.engine.harness import QWEN
from tests.engine.test_policy import steps
from vllm_vidspec.errors import VidSpecError
from vllm_vidspec.pruning import PruneInputs, TokenGrid, get_pruner
from vllm_vidspec.pruning.pruners import top_k_indices
from vllm_vidspec.tools import calibrate, pairs, show_pruning
from vllm_vidspec.tools.calibrate import Calibration
from vllm_vidspec.tools.engine_session import answer_command
from vllm_vidspec.tools.progress import silent

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("cv2")

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_knobs_reach_the_pruner_of_a_pair_of_ones_own():
    """The bundled checkpoints, named as a user names their own: each measurement's knobs reach the pruner."""
    own = Calibration(
        target=pairs.checkpoint("qwen2.5-vl", "target"),
        draft=pairs.checkpoint("qwen2.5-vl", "target"),
        videos=(str(pairs.sample_video()),),
        max_tokens=8,
        engine_args={"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 2}
        | {"kv_cache_memory_bytes": 64 * 2**20},
    )
    calibrate.check(own)
    kept, scores = [], []
    with BenchSession(own.job()) as session:
        assert session.ready == {"num_layers": 4, "default_uv_layer": 3, "scheduling": "sync"}
        for lambda_r, layers in ((1.0, "all"), (1.0, (2,)), (0.0, "all"), (1.0, "all")):
            knobs = {"lambda_r": lambda_r, "guidance_layers": layers}
            assert calibrate._ask(session, own, knobs, lambda_r=lambda_r, guidance_layers=layers).num_drafts >= 1
            (item,) = session.ask({"command": "look", "knobs": {}})["items"]
            assert item["grid"] == [16, 4, 4, 0]
            kept.append(item["kept_indices"])
            scores.append(torch.tensor(item["scores"]))
        with pytest.raises(VidSpecError, match="uv_layer cannot change while the engine runs"):
            session.ask(answer_command({"uv_layer": 3}, max_tokens=8))
    assert kept[0] == kept[3] == top_k_indices(scores[0], 25).tolist()
    assert kept[1] == top_k_indices(scores[1], 25).tolist()
    assert kept[2] == get_pruner("uniform")(PruneInputs(TokenGrid(16, 4, 4), 25)).tolist()
    assert torch.equal(scores[0], scores[3])
    assert not torch.equal(scores[0], scores[1])


@pytest.mark.slow
def test_show_pruning_draws_what_the_engine_kept(tmp_path):
    """One engine prunes in every way; LLaVA's newline counts but is not drawn.

    Catches: a pruner that the engine does not change to; guidance that it does not observe from its start.
    """
    out, pruners = tmp_path / "pruning.png", ("dycoke", "uniform", "specvlm", "uv")
    show = show_pruning.Show(out=str(out), pruners=pruners, family="llava-onevision")
    result = show_pruning.run(show)
    assert [row["pruner"] for row in result["rows"]] == list(pruners)
    assert {(row["kept"], row["total"]) for row in result["rows"]} == {(25, 16 * 16 + 1)}
    assert len({row.kept_indices.tobytes() for row in show_pruning._look(show, silent)}) == len(pruners)
    assert Image.open(out).format == "PNG"


def test_one_engine_plays_several():
    """Catches: a hook that was renamed, and that vanilla would have; a step of a fixed chain that drafts otherwise; a
    policy that is not told that its requests have ended.
    """
    sampling = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    prompts = [(prompt, sampling) for prompt, *_ in harness.videos(QWEN, 2)]
    with harness.engine(QWEN, "draft", adaptive_tokens=True) as engine, steps(engine):  # drafts pay by this clock
        roles = Roles(engine.llm)
        seen = []
        for role in (POLICY, VANILLA, 2, VANILLA, POLICY):
            roles.play(role)
            outputs, counted = engine.measured(prompts)
            seen.append(([list(output.outputs[0].token_ids) for output in outputs], counted))
        roles.play(POLICY)
        assert not list(engine.scheduler._vidspec_side._policy._slots)
    assert all(answers == seen[0][0] for answers, _ in seen)
    assert [counted["drafts"] > 0 for _, counted in seen] == [True, False, True, False, True]
    fixed = seen[2][1]
    assert fixed["draft_tokens"] == 2 * fixed["drafts"] and fixed["drafts"] + fixed["accepted_tokens"] >= 2 * 23
    assert len(roles.methods) == 3 + len(OF_RUNNER)
