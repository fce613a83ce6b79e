"""Videos that the draft's tower encodes in parts, in running engines: the real towers, real drafts, real steps."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine import harness, random_models
from tests.engine.harness import LLAVA, QWEN, QWEN3
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.families import adapter_for

pytestmark = pytest.mark.engine


def videos_of(engine: harness.Engine, requests: list) -> list[Any]:
    """Run requests; return vLLM's features of their videos, pixels and all."""
    rows = engine.runner.requests
    with mock.patch.object(rows, "add", side_effect=rows.add) as add:
        engine.generate(requests)
    features = [feature for call in add.call_args_list for feature in call.args[0].features]
    return [feature for feature in features if feature.modality == "video"]


def grid_of(engine: harness.Engine, feature: Any) -> Any:
    data = {key: element.data for key, element in feature.data.items()}
    return adapter_for(engine.draft.hf_config).frames(feature.modality, data, engine.draft.hf_config)


def assert_parts_are_the_whole(engine: harness.Engine, requests: list) -> None:
    """The tower over 1, 2, 3 and more frames at a time makes what it makes over the whole video, bit for bit."""
    encode = torch.inference_mode()(engine.draft.encode)
    for feature in videos_of(engine, requests):
        grid = grid_of(engine, feature)
        (whole,) = encode([feature], [None])
        assert grid.num_frames > 3 and len(whole) == grid.num_tokens
        for size in (1, 2, 3, grid.num_frames - 1):
            cuts = [range(i, min(i + size, grid.num_frames)) for i in range(0, grid.num_frames, size)]
            parts = [encode([feature], [cut])[0] for cut in cuts]
            assert [len(part) for part in parts] == [
                len(cut) * grid.tokens_per_frame + grid.num_trailing for cut in cuts
            ]
            own = [part[: len(part) - grid.num_trailing] for part in parts[:-1]]
            assert torch.equal(torch.cat([*own, parts[-1]]), whole)
        # Not every part would do.
        assert not torch.equal(*(encode([feature], [range(i, i + 1)])[0] for i in range(2)))


@pytest.mark.parametrize("name", random_models.NAMES[:2])
def test_towers_without_a_bundled_pair_can_be_cut(name, tmp_path):
    """Qwen2-VL, and Qwen3-VL with what goes to deeper layers; Qwen3-VL with experts has the same tower."""
    checkpoint = random_models.build(name, tmp_path)
    with harness.engine(QWEN, "target", {"model": checkpoint}, pruner="none") as engine:
        assert_parts_are_the_whole(engine, harness.videos(QWEN, 2, max_tokens=2))


def whole_in_parts(self: DraftModel, features: list, frames: list) -> Iterator[torch.Tensor]:
    """What `encode` returns, cut out of embeddings of whole videos."""
    for feature, some in zip(features, frames, strict=True):
        (whole,) = encode(self, [feature], [None])
        grid = adapter_for(self.hf_config).frames(
            feature.modality, {key: element.data for key, element in feature.data.items()}, self.hf_config
        )
        size, tail = grid.tokens_per_frame, whole[len(whole) - grid.num_trailing :]
        yield whole if some is None else torch.cat((whole[some.start * size : some.stop * size], tail))


encode = DraftModel.encode
_KNOBS = {QWEN: {"pruner": "dycoke"}, LLAVA: {"drafting": "tree-static"}, QWEN3: {}}


@pytest.mark.parametrize("family", [QWEN, LLAVA, pytest.param(QWEN3, marks=pytest.mark.slow)])
def test_parts_change_no_draft(family, reference, monkeypatch):
    """Three videos beside each other and one that comes later, of four frames a step: vanilla's answers, and every
    count as with parts that are cut out of whole embeddings; as many drafts stand of those that are proposed.

    Catches: parts in another order, one that is lost, a step beyond its budget, requests that wait for the tower.
    """
    expected = harness.token_ids(reference(family, "videos"))
    requests = harness.videos(family, 4)
    steps: list[dict[str, int]] = []

    def noting(self, features, frames):
        made = encode(self, features, frames)
        steps[-1]["encoded"] += sum(map(len, made))
        steps[-1]["parts"] += len(made)
        return made

    with harness.engine(family, "draft", **_KNOBS[family]) as engine:
        assert_parts_are_the_whole(engine, requests[:1])
        grid = grid_of(engine, videos_of(engine, requests[:1])[0])
        allowed = 4 * grid.tokens_per_frame + grid.num_trailing
        monkeypatch.setattr(engine.draft, "max_encoder_tokens", allowed)
        propose = engine.speculator.propose

        def proposing(batch, *args, **kwargs):
            steps.append({"encoded": 0, "parts": 0, "decoding": int((~batch.is_prefilling_np).sum())})
            return propose(batch, *args, **kwargs)

        monkeypatch.setattr(engine.speculator, "propose", proposing)
        found = []
        for make in (noting, lambda self, features, frames: list(whole_in_parts(self, features, frames))):
            monkeypatch.setattr(DraftModel, "encode", make)
            engine.speculator.backend.forget_media()
            engine.llm.reset_prefix_cache()
            outputs, counted = engine.measured(requests)
            assert harness.token_ids(outputs) == expected[:4]
            found.append({name: n for name, n in counted.items() if not name.endswith("_us")})
    assert found[0] == found[1] and found[0]["accepted_tokens"] > 0 and not found[0]["draft_encoder_oversized"]
    assert found[0]["draft_encoder_misses"] == 4
    looks = [step for step in steps if step["parts"]]
    assert len(looks) >= 4 * grid.num_frames // 4 and max(step["encoded"] for step in looks) <= allowed
    assert sum(step["decoding"] >= 2 for step in looks) >= len(looks) // 2
