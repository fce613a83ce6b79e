"""A draft without a vision tower: it sees through the target's, directly where towers are equal, else through a map."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine import harness
from tests.engine.conftest import QUESTION, SCENARIOS
from tests.engine.harness import LLAVA, NO_CACHE, QWEN, QWEN3, Engine, assert_same_answers, token_ids
from vllm_vidspec.families import tower_of
from vllm_vidspec.tools import fitting, pairs

pytestmark = pytest.mark.engine


def forget(engine: Engine, *, both: bool = False) -> None:
    """Let vLLM drop its encoder's outputs, as it does when others need the room; with `both` the draft its own, too."""
    engine.scheduler.encoder_cache_manager.reset()
    engine.runner.encoder_cache.encoder_outputs.clear()
    if both:
        engine.speculator.backend.forget_media()


# LLaVA-OneVision's is also what two ranks do (test_tensor_parallel.py).
@pytest.fixture(scope="module", params=[QWEN, pytest.param(LLAVA, marks=pytest.mark.slow), QWEN3])
def equal(request, reference) -> Iterator[Engine]:
    """A draft with the target's weights: its tower would be the target's, so that it has none."""
    reference(request.param, "videos")  # an engine of its own, and only one lives at a time
    with harness.engine(request.param, pairs.checkpoint(request.param, "target"), pruner="none") as engine:
        yield engine


def several(family: str) -> list[tuple[dict, dict]]:
    """Return requests of two videos, of an image and a video, of images as frames."""
    frames = harness.shown(4)
    prompts = [
        pairs.media_prompt(family, QUESTION * 2, videos=frames[:2]),  # which begins in a block of its own
        pairs.media_prompt(family, "describe the video", videos=[frames[2]], images=[frames[3][0]]),
        pairs.media_prompt(family, "describe the video", images=[video[0] for video in frames[:2]]),
    ]
    return [(prompt, {"temperature": 0.5 * i, "seed": i}) for i, prompt in enumerate(prompts)]


def test_no_draft_of_an_equal_model_is_rejected(equal, reference):
    """Videos, several a prompt, images; then from the draft's cache, and by the target's tower once more.

    Catches: another video's embeddings, those of another level, a row too far; a tower that is loaded all the same.
    """
    assert equal.config.draft_vision == "target"
    assert not [name for name, _ in equal.draft.model.named_parameters() if "vis" in name and "language" not in name]
    # The first question begins in the block in which a video ends: the target encodes that again with every prompt.
    for asked, is_cached in ((SCENARIOS["videos"](equal.family)[:4], False), (several(equal.family), True)):
        first, counted = equal.measured(asked)
        assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
        assert counted["draft_encoder_misses"] == 0 < counted["draft_encoder_hits"]
        assert harness.skipped(counted) == {}
        forget(equal)  # the target has the prompts in its prefix cache, and encodes nothing
        again, counted = equal.measured(asked)
        assert counted["accepted_tokens"] == counted["draft_tokens"] > 0 == counted["draft_encoder_misses"]
        forget(equal, both=True)
        anew, counted = equal.measured(asked)
        assert counted["accepted_tokens"] == counted["draft_tokens"] > 0
        assert not is_cached or counted["draft_encoder_misses"] > 0
        assert token_ids(first) == token_ids(again) == token_ids(anew)
    assert token_ids(equal.generate(SCENARIOS["videos"](equal.family)[:4])) == token_ids(
        reference(equal.family, "videos")[:4]
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> dict[str, Any]:
    """Maps of the bundled Qwen2.5-VL pair by name, fitted to a dozen videos; one to other tokens' embeddings."""
    folder = tmp_path_factory.mktemp("maps")
    found: dict[str, Any] = {}
    with harness.engine(QWEN, "draft", NO_CACHE, draft_vision="own") as engine:
        tell = engine.llm.collective_rpc
        tell(fitting.begin)
        requests = harness.videos(QWEN, 15, max_tokens=1)
        engine.generate(requests[3:])
        tell(fitting.hold_out)
        engine.generate(requests[:3])
        towers = [tower_of(pairs.checkpoint(QWEN, role)) for role in ("target", "draft")]
        found["right"] = folder / "right.safetensors"
        found["r2"] = tell(fitting.finish, args=(str(found["right"]), {"towers": towers}))[0]["r2"]
        gathered = engine.runner.gathering.fit
        for level in gathered._xy:  # every channel of another video's token
            level.copy_(level[:, torch.randperm(level.shape[1], generator=torch.Generator().manual_seed(0))])
        found["wrong"] = folder / "wrong.safetensors"
        gathered.linear().map.save(found["wrong"], {"towers": towers})
        found["own"] = engine.measured(harness.videos(QWEN, 8))[1]
    return found


def accepted(counted: dict[str, int]) -> float:
    return counted["accepted_tokens"] / counted["draft_tokens"]


def test_a_fitted_map_is_nearly_as_good_as_a_tower(fitted, reference):
    """And every answer is vanilla's, whatever is asked; wrong embeddings cost acceptance alone."""
    assert max(fitted["r2"].values()) > 0.75
    expected = {scenario: reference(QWEN, scenario) for scenario in ("videos", "mixed")}
    rates = {}
    for name in ("right", "wrong"):
        with harness.engine(QWEN, "draft", draft_vision=str(fitted[name])) as engine:
            assert not list(engine.draft.model.visual.parameters())
            outputs, counted = engine.measured(SCENARIOS["videos"](QWEN))
            assert token_ids(outputs) == token_ids(expected["videos"])
            assert counted["draft_encoder_misses"] == 0 < counted["draft_encoder_hits"]
            rates[name] = accepted(counted)
            if name == "right":
                assert_same_answers(expected["mixed"], engine.generate(SCENARIOS["mixed"](QWEN)))
            assert engine.used_blocks() == 0
    assert rates["wrong"] + 0.1 < rates["right"] > 0.9 * accepted(fitted["own"])
