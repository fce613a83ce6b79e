"""Videos encoded in parts by the real towers are the whole video, bit for bit."""

from unittest import mock

import pytest
import torch

from tests.engine import harness
from tests.engine.harness import QWEN
from tests.engine.random_models import QWEN2, build
from vllm_vidspec.families import adapter_for

pytestmark = pytest.mark.engine


def check_parts(engine: harness.Engine) -> None:
    """Over 1, 2, 3 and more frames at a time a draft's tower says what it says of the whole."""
    rows, draft = engine.runner.requests, engine.draft
    with mock.patch.object(rows, "add", side_effect=rows.add) as add:
        engine.generate(harness.videos(engine.family, 2, max_tokens=2))
    encode = torch.inference_mode()(draft.encode)
    features = [feature for call in add.call_args_list for feature in call.args[0].features]
    assert len(features) == 2
    for feature in features:
        data = {key: element.data for key, element in feature.data.items()}
        grid = adapter_for(draft.hf_config).frames(feature.modality, data, draft.hf_config)
        (whole,) = encode([feature], [None])
        assert grid.num_frames > 3 and len(whole) == grid.num_tokens
        for size in (1, 2, 3, grid.num_frames - 1):
            cuts = [range(i, min(i + size, grid.num_frames)) for i in range(0, grid.num_frames, size)]
            parts = [encode([feature], [cut])[0] for cut in cuts]
            sizes = [len(cut) * grid.tokens_per_frame + grid.num_trailing for cut in cuts]
            assert [len(part) for part in parts] == sizes
            own = [part[: len(part) - grid.num_trailing] for part in parts[:-1]]
            assert torch.equal(torch.cat([*own, parts[-1]]), whole)
        # Not every part would do.
        assert not torch.equal(*(encode([feature], [range(i, i + 1)])[0] for i in range(2)))


def test_parts_of_an_untrained_familys_video(tmp_path):
    with harness.engine(QWEN, "target", {"model": build(QWEN2, tmp_path)}, pruner="none") as engine:
        check_parts(engine)
