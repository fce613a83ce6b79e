"""The simulated device itself: it refuses what CUDA refuses, it counts each kind of crossing, and nothing else."""

import numpy as np
import pytest
import torch

from tests.simulated_device import device as sim
from tests.simulated_device.crossings import CAUTIOUS, EACH_CROSSING


@pytest.fixture
def device():
    with sim.SimulatedDevice() as device:
        yield device


def on_device(*sizes):
    return torch.arange(int(np.prod(sizes)), device=sim.DEVICE).view(*sizes)


@pytest.mark.parametrize("kind,cross", EACH_CROSSING + CAUTIOUS)
def test_every_crossing_is_counted_by_kind_and_by_line(device, kind, cross):
    """Catches: a way to the host that goes unseen, or is taken for another."""
    cross(on_device(6))
    assert [crossing.kind for crossing in device.crossings] == [kind]
    assert device.crossings[0].line.startswith("crossings.py:")


def free_of_charge(x, rows):
    x[:2] = 3
    x[0] = 3
    x[x > 2] = 3  # a masked fill
    x[rows] = x[:2].clone()
    x.index_fill_(0, rows, 5)
    x.view(2, 3)[0].add_(1)
    torch.where(x > 1, x, 0).clamp(max=7).to(torch.int32)
    assert len((1 - x) * torch.tensor(2) + np.int64(1) // 2) == len(~(x > 1))
    torch.full((3,), 2, device=x.device)
    x.new_zeros(3, 4).copy_(x[:3, None])
    x.expand(3, -1).contiguous()
    torch.zeros_like(x, device="cpu", pin_memory=True)
    x.repeat_interleave(torch.full_like(x, 2), output_size=12)
    first, second = x.tensor_split((2,))
    torch.cat((first, second)).topk(2).values.float().softmax(0).cumsum(0)
    torch.cuda.Event().query()
    return len(x), x.shape, list(x.view(2, 3))


def test_what_crosses_nothing_is_not_counted(device):
    x = on_device(6)
    free_of_charge(x, torch.arange(2, device=sim.DEVICE))
    assert not device.crossings


def test_values_are_those_of_the_cpu(device):
    """Catches: a view that became a copy, an operator in place on a copy."""
    results = []
    for where in (sim.DEVICE, torch.device("cpu")):
        x = torch.arange(6, device=where)
        rows = torch.arange(2, device=where)
        x[:2] = 3
        x[x > 4] = 9
        x[rows + 2] = x[:2].clone()
        x.view(2, 3)[1].add_(1)
        x.index_fill_(0, rows, 5).clamp_(max=8)
        x.unflatten(0, (3, 2)).copy_(x.view(3, 2) * 2)
        results.append(sim.to_host(x).tolist())
    assert results[0] == results[1]


MIXED = {
    "add": lambda x, host: x + host,
    "add the other way": lambda x, host: host + x,
    "in place": lambda x, host: host.add_(x),
    "cat": lambda x, host: torch.cat((x, host)),
    "cat a number": lambda x, host: torch.cat((x, torch.tensor([1]))),
    "where": lambda x, host: torch.where(x > 2, x, host),
    "gather": lambda x, host: x.gather(0, host),
    "index_fill": lambda x, host: x.index_fill_(0, host, 1),
    "index assignment": lambda x, host: x.__setitem__(x[:2], host[:2]),
    "host text, device index": lambda x, host: host[x],
    "stack": lambda x, host: torch.stack((x, host)),
    "a number of no pointwise operator": lambda x, host: x.index_fill_(0, host[0], 1),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_raises(device, name):
    """Catches: an operator that computes with the host's tensor, as the CPU would."""
    x, host = on_device(6), torch.arange(6)
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](x, host)


@pytest.mark.parametrize("convert", [np.asarray, lambda x: x.numpy(), lambda x: np.ones(6)[x]])
def test_numpy_does_not_see_its_memory(device, convert):
    with pytest.raises(TypeError, match=r"convert|only integer"):
        convert(on_device(6))


def test_a_launch_is_one_and_takes_no_host_tensor(device):
    x = on_device(6)

    def kernel(x, by):
        x[x > 2] = by
        return x + int(x.max())

    out = device.launch(kernel)(x, by=7)
    assert sim.to_host(x).tolist() == [0, 1, 2, 7, 7, 7] and sim.to_host(out).tolist() == [7, 8, 9, 14, 14, 14]
    assert sim.is_device(out) and not device.crossings
    with pytest.raises(AssertionError, match="host tensor"):
        device.launch(kernel)(torch.arange(6), by=7)


def test_references_stand_for_launches(device):
    """What a kernel's reference reads back is not counted: on a GPU the kernel is launched."""
    from vidspec_kernels import CacheList, kv_compact

    cache = torch.arange(64.0, device=sim.DEVICE).view(4, 4, 2, 2)
    caches = CacheList([(cache, cache)])
    with device.counting() as counts:
        ones = torch.ones(1, 4, dtype=torch.int32, device=sim.DEVICE)
        kv_compact(caches, on_device(1, 4).int(), on_device(1), on_device(1).int(), 2 * ones, ones[0, :1].clone())
    assert not counts
    assert torch.equal(sim.to_host(cache)[0, 1], torch.arange(8.0, 12.0).view(2, 2)), "nothing was moved"


def test_nothing_stays_behind():
    """Catches: a stand-in that other tests of the process would meet."""
    before = torch.cuda.Event, torch.cuda.is_initialized(), torch.ones(2) + 1
    with sim.SimulatedDevice():
        torch.zeros(2, device=sim.DEVICE)
    assert (torch.cuda.Event, torch.cuda.is_initialized()) == before[:2]
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        if torch.cuda.is_available():
            raise RuntimeError("a real one")
        torch.zeros(2, device=sim.DEVICE)
