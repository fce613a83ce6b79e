"""DraftGraphs: which parts are captured, which run by their graph, and what a step is padded to."""

from types import SimpleNamespace

import pytest
from vllm.config.compilation import CUDAGraphMode

from tests.unit.engine.fakes import CPU
from vllm_vidspec.engine.draft import graphs as draft_graphs
from vllm_vidspec.engine.draft.graphs import DraftGraphs, batch_sizes, mode_of_draft


@pytest.mark.parametrize(
    ("sizes", "max_num_reqs", "expected"),
    [
        ([1, 2, 4, 8, 16], 8, [1, 2, 4, 8]),
        ([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)], 200, [1, 2, 4, 8, 16, 24, 32, 48, 64, 88, 120, 160, 200]),
        ([16, 8, 1], 5, [1, 5]),  # the size above holds the rest, and no more than there can be
        ([1, 2, 4], 64, [1, 2, 4]),  # larger steps have no graph
        ([], 8, []),
    ],
)
def test_sizes_are_vllms_up_to_all_requests(sizes, max_num_reqs, expected):
    assert batch_sizes(sizes, max_num_reqs) == expected


class Recorded(DraftGraphs):
    """Captures by running twice, as vLLM does, and replays by noting so."""

    def __init__(self, mode=CUDAGraphMode.FULL_AND_PIECEWISE, sizes=(1, 2, 4), max_num_reqs=4, mostly_processed=False):
        compilation = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
        self.graphs, self.replayed = {}, []
        with pytest.MonkeyPatch.context() as patch:
            init = lambda self, config, *args, **kwargs: setattr(self, "compilation_config", config.compilation_config)  # noqa: E731
            patch.setattr(draft_graphs.CudaGraphManager, "__init__", init)
            config = SimpleNamespace(compilation_config=compilation)
            super().__init__(config, CPU, mode, max_num_reqs, mostly_processed)


def test_a_step_is_padded_to_the_next_size_that_has_graphs():
    graphs = Recorded()
    assert [graphs.size_for(n, 1) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 5]
    # No forward has more tokens than the target's largest graph.
    assert [graphs.size_for(n, 2) for n in (1, 2, 3)] == [1, 2, 3]
    assert graphs.is_on


@pytest.mark.parametrize("mode", [mode for mode in CUDAGraphMode if mode])
def test_a_target_in_pieces_leaves_its_draft_whole(mode):
    """Catches: K eager forwards a step under `-O1`, `cudagraph_mode=PIECEWISE` or a KV connector by layers."""
    assert mode_of_draft(mode) == CUDAGraphMode.FULL_DECODE_ONLY
    graphs = Recorded(mode)
    assert graphs.is_on and graphs.size_for(3, 1) == 4
    graphs.give_up("its backend cannot")
    assert not graphs.is_on and graphs.is_wanted and graphs.size_for(3, 1) == 3


@pytest.mark.parametrize("mostly_processed", [False, True])
def test_the_kind_that_nobody_asks_for_by_default_has_few_sizes(mostly_processed):
    """Catches: the two kinds mistaken for each other, a largest size that only one of them has, a step padded to a size
    of the other kind."""
    sizes = [1, 2, 4, *range(8, 256, 8), 256]
    graphs = Recorded(sizes=sizes, max_num_reqs=200, mostly_processed=mostly_processed)
    usual, other = (graphs.sizes_of(2, is_processed) for is_processed in (mostly_processed, not mostly_processed))
    assert usual == [1, 2, 4, 8, 16, 24, 32, 48, 64, 88, 120] and other == [1, 4, 16, 64, 120]
    assert [graphs.size_for(n, 2, not mostly_processed) for n in (1, 2, 5, 17, 65, 121)] == [1, 4, 16, 64, 120, 121]
    assert graphs.size_for(5, 2, mostly_processed) == 8
