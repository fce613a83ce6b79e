"""dispatch: which way a launch takes to the device."""

import pytest
import torch

from vidspec_kernels import dispatch


class Kernel:
    """Stands in for a jitted kernel; `launches` says how each launch came: by itself, or by what it had compiled."""

    def __init__(self, compiles=True):
        self.launches, self.compiles = [], compiles

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            self.launches.append(("kernel", grid, args, kwargs))
            return Compiled(self) if self.compiles else None

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launches.append(("compiled", grid, args, {}))


def test_known_launches_go_to_the_compiled_kernel():
    """Catches: constants left out or out of order, which the compiled kernel takes by their places; a grid of fewer
    dimensions than it takes; a key or a holder that is not asked."""
    kernel, plans, cuda = Kernel(), {}, torch.device("cuda")
    for key, number in ((1, 5), (1, 6), (2, 7), (1, 8)):
        dispatch.launch(kernel, (number, 2), cuda, (number, None), {"A": 3, "B": 4}, plans, key)
    dispatch.launch(kernel, (9,), cuda, (9, None), {"A": 3, "B": 4}, {}, 1)
    first = {"A": 3, "B": 4, "enable_fp_fusion": True}
    assert kernel.launches == [
        ("kernel", (5, 2), (5, None), first),
        ("compiled", (6, 2, 1), (6, None, 3, 4), {}),
        ("kernel", (7, 2), (7, None), first),
        ("compiled", (8, 2, 1), (8, None, 3, 4), {}),
        ("kernel", (9,), (9, None), first),
    ]


@pytest.mark.parametrize(("device", "compiles"), [("cuda", False), ("cpu", True)])
def test_what_is_not_kept(device, compiles):
    """Catches: the interpreter's launches, or those of a hook that compiles nothing, taken for compiled ones."""
    kernel, plans = Kernel(compiles), {}
    for _ in range(2):
        dispatch.launch(kernel, (1,), torch.device(device), (), {}, plans)
    assert [how for how, *_ in kernel.launches] == ["kernel", "kernel"] and not plans
