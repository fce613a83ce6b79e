"""The recorder itself: what it does again, what it freezes, and what it refuses by line."""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from tests.graph_emulator import launches
from tests.graph_emulator.graphs import Graph, capture
from tests.graph_emulator.recorder import CaptureError, Recording, ReplayError


def captured(function, *args):
    graph = Graph()
    with capture(graph):
        function(*args)
    return graph


def test_a_replay_computes_with_the_contents_of_the_moment():
    """Catches: a copy in place of a view, an operator in place on a copy, an order that changed, a frozen content."""

    def step(x, out, rows):
        y = (x * 2).view(2, 3)
        y[0].add_(1)
        y = y.t().contiguous().reshape(-1)
        y[rows] = torch.zeros(2)
        values, ids = y.topk(3)
        out[:3].copy_(values)
        out[3:6] = ids.float().softmax(0)
        torch.cumsum(y, 0, out=out[6:])

    x, rows, out, expected = torch.rand(6), torch.tensor([1, 4]), torch.zeros(12), torch.zeros(12)
    graph = captured(step, x, out, rows)
    for seed in range(3):
        x.copy_(torch.rand(6, generator=torch.Generator().manual_seed(seed)))
        rows.copy_(torch.tensor([seed, 5]))
        step(x, expected, rows)
        graph.replay()
        assert torch.equal(out, expected)


def test_python_is_frozen():
    """Numbers, branches and objects are those of the capture."""
    out, level, parts = torch.zeros(2), {"now": 1}, [torch.ones(2), torch.ones(2)]

    @launches.entry
    def kernel(parts, number, out):
        out.numpy()[:] += sum(len(part) for part in parts) + number

    def step():
        out.fill_(level["now"])
        if level["now"] == 1:
            kernel(parts, level["now"], out)

    graph = captured(step)
    level["now"] = 7
    del parts[1]
    graph.replay()
    assert out.tolist() == [6, 6]


def test_a_launch_is_one_entry_and_numpy_inside_it_is_done_again():
    @launches.entry
    def kernel(x, *, by):
        assert Recording.current is None
        if x.numpy().max() > 3:  # a kernel may branch on what it reads
            return torch.from_numpy(x.numpy() + by), x
        return x - by, x

    x, out = torch.zeros(2), torch.zeros(2)

    def step():
        y, same = kernel(x, by=10)
        assert same is x
        out.copy_(y)

    graph = captured(step)
    assert len(graph.recording.entries) == 2 and out.tolist() == [-10, -10]
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [15, 15]
    assert kernel(x, by=1)[0].tolist() == [6, 6]


REFUSED = {
    "item": lambda x, rows: x[0].item(),
    "tolist": lambda x, rows: x.tolist(),
    "bool": lambda x, rows: bool(x[0] > 1),
    "if": lambda x, rows: 1 if x.any() else 2,
    "int": lambda x, rows: int(x[0]),
    "range": lambda x, rows: range(rows[0]),
    "in": lambda x, rows: 3 in x,
    "numpy": lambda x, rows: x.numpy(),
    "asarray": lambda x, rows: np.asarray(x),
    "numpy index": lambda x, rows: np.arange(9)[rows],
    "cpu": lambda x, rows: x.cpu(),
    "address": lambda x, rows: x.data_ptr() == 0,
    "nonzero": lambda x, rows: x.nonzero(),
    "where": lambda x, rows: torch.where(x > 1),
    "unique": lambda x, rows: torch.unique(x),
    "masked_select": lambda x, rows: x.masked_select(x > 1),
    "mask": lambda x, rows: x[x > 1],
    "assignment by mask": lambda x, rows: x.__setitem__(x > 1, x[:4].clone()),
    "repeat_interleave": lambda x, rows: x.repeat_interleave(rows),
    "equal": lambda x, rows: torch.equal(x, x),
    "a number by index": lambda x, rows: x.__setitem__(rows, 3),
    "a list as index": lambda x, rows: x[[0, 1]],
    "an index without dimensions": lambda x, rows: x[rows[0]],
    "a tensor of Python's": lambda x, rows: x + torch.tensor([1] * 6),
    "a tensor of numpy's": lambda x, rows: x + torch.from_numpy(np.arange(6)),
    "a launch with a tensor of Python's": lambda x, rows: launches.entry(torch.add)(x, torch.tensor([1] * 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_host_read_is_refused_by_line(name):
    """Catches: a way to the host that goes unseen, after which a replay would run with what was read then."""
    x, rows = torch.arange(6), torch.tensor([1, 2, 0, 1, 0, 0])
    REFUSED[name](x.clone(), rows)
    with pytest.raises(CaptureError, match=r"under capture, at tests/graph_emulator/test_recorder.py:\d+"):
        captured(REFUSED[name], x, rows)
    assert Recording.current is None


def test_what_a_graph_may_hold():
    def step(x, rows):
        starts = torch.from_numpy(np.arange(7, dtype=np.int64))[1:]  # the host may work on its own
        assert starts.max().item() == 6 and starts.diff().tolist() == [1] * 5
        assert len(x) == 6 and x.shape == (6,) and x.is_contiguous()
        x[:2] = 3
        x[0] = 3
        x[x > 2] = 3
        x[rows] = x[:2].clone()
        x.index_fill_(0, rows, 5)
        torch.full((3,), 2) + torch.zeros_like(x)[:3] + x.new_ones(3)
        x.repeat_interleave(torch.full_like(x, 2), output_size=12)
        first, second = x.tensor_split((2,))
        torch.cat((first, second)).masked_fill(x > 1, 0).clamp(max=2)

    captured(step, torch.arange(6), torch.tensor([0, 3])).replay()


def test_memory_of_a_graph_holds_garbage_once_it_has_run():
    """Catches: a result that is read where the next replay, or another graph, may have written over it."""
    x, kept = torch.ones(3), {}

    def step():
        kept["float"], kept["int"], kept["view"] = x * 2, x.long() + 1, (x + 1)[1:]
        kept["persistent"] = x.add_(1)

    graph = captured(step)
    for _ in range(2):
        assert kept["float"].isnan().all() and kept["view"].isnan().all() and (kept["int"] > 10**9).all()
        graph.replay()
    assert kept["persistent"].tolist() == [4, 4, 4]


def test_uninitialised_memory_is_garbage():
    x, out = torch.ones(3), torch.zeros(3)

    def step(whole):
        y = torch.empty(3)
        y[: None if whole else 2] = x[: None if whole else 2]
        out.copy_(y)

    captured(step, True).replay()
    assert out.tolist() == [1, 1, 1]
    captured(step, False).replay()
    assert out.isnan().tolist() == [False, False, True]


def test_a_tensor_handed_from_graph_to_graph_is_refused():
    """Catches: parts of a step that meet anywhere but in persistent buffers."""
    x, out, kept = torch.ones(3), torch.zeros(3), {}
    first = captured(lambda: kept.update(y=x + 1))
    with pytest.raises(CaptureError, match="belongs to another graph"):
        captured(lambda: out.copy_(kept["y"]))
    del first


class Step:
    """A step of a small engine: what two requests write to a cache, through a table, at a level."""

    def __init__(self):
        self.table, self.rows, self.level = torch.arange(4), torch.zeros(2, dtype=torch.int64), torch.zeros(1).long()
        self.lens, self.out = torch.zeros(2, dtype=torch.int64), torch.zeros(2)

    def slots(self, level=None):
        """Write where the requests stand."""
        self.out.copy_(self.table[self.rows] + (self.level if level is None else level))

    def lengths(self, most):
        """Write how much of its length is read of each request."""
        launches.entry(lambda lens, out, most: out.copy_(lens.clamp(max=most)))(self.lens, self.out, most)

    def replayed(self, graph):
        graph.replay()
        return self.out.tolist()


def test_bugs_that_only_a_graph_shows_in_small():
    """A table that is allocated anew, a level or a split count of Python's; test_drafters.py has them in an engine."""
    step = Step()
    graph, by_python = captured(step.slots), captured(step.slots, 0)
    step.rows.copy_(torch.tensor([0, 3]))
    step.level.fill_(1)
    assert step.replayed(graph) == [1, 4]
    assert step.replayed(by_python) == [0, 3]
    step.table.copy_(torch.tensor([3, 0, 0, 1]))
    assert step.replayed(graph) == [4, 2]
    step.table = torch.arange(4)
    assert step.replayed(graph) == [4, 2] != [1, 4]

    step.lens.fill_(3)
    with pytest.raises(CaptureError, match=r"\.__int__\(\)"):
        captured(lambda: step.lengths(int(step.lens.max())))
    graph = captured(step.lengths, int(step.lens.max()))
    step.lens.fill_(9)
    assert step.replayed(graph) == [3, 3]


def test_a_size_that_changes_is_an_error():
    x, count = torch.ones(3), [2]

    @launches.entry
    def kernel(x):
        return x[: count[0]].clone()

    graph = captured(kernel, x)
    count[0] = 3
    with pytest.raises(ReplayError, match=r"gives \[3\], captured were \[2\]"):
        graph.replay()


def test_every_kernel_of_ours_is_an_entry():
    """Catches: a wrapper that the engine calls past the recorder."""
    from vllm_vidspec.drafting import adaptive
    from vllm_vidspec.engine import tree_attention
    from vllm_vidspec.engine.draft import buffers, drafter, forwards, noise

    def called():
        return (
            *(drafter.begin_step, forwards.kv_compact, buffers.next_level, noise.draw, noise.candidates),
            *(adaptive.tree_grow, tree_attention.tree_attention),
        )

    with launches.kernels_as_entries():
        assert all(function.is_entry for function in called())
    assert not any(hasattr(function, "is_entry") for function in called())
