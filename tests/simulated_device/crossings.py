"""Ways between host and device by their kind, which the simulated device must count and CUDA's PyTorch must take."""

import numpy as np
import torch

from tests.simulated_device import device as sim


def wait_for_event(_x):
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


# Of six int64 numbers on the device.
CROSSINGS = {
    sim.UPLOAD: [
        lambda x: torch.zeros(3, pin_memory=True).to(x.device, non_blocking=True),
        lambda x: x.copy_(torch.zeros(6, dtype=torch.int64).pin_memory(), non_blocking=True),
    ],
    sim.STAGED_UPLOAD: [lambda x: torch.from_numpy(np.arange(3)).to(x.device, non_blocking=True)],
    sim.BLOCKING_UPLOAD: [
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.as_tensor(np.arange(2), device=x.device),
        lambda x: torch.zeros(3).to(x.device),
        lambda x: x.copy_(torch.zeros(6, dtype=torch.int64)),
        lambda x: x.__setitem__(slice(2), torch.zeros(2, dtype=torch.int64)),
    ],
    sim.DOWNLOAD: [lambda x: torch.zeros(6, dtype=torch.int64, pin_memory=True)[:].copy_(x, non_blocking=True)],
    sim.BLOCKING_DOWNLOAD: [
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: torch.ones(3).__setitem__(0, x[0].float()),
    ],
    sim.SCALAR_UPLOAD: [
        lambda x: x.__setitem__(x[:2] + 0, 3),
        lambda x: x.__setitem__(x[:2] + 0, torch.tensor(3)),
        lambda x: x.view(2, 3).__setitem__((slice(None), x[:2] + 0), 3),
    ],
    sim.HOST_INDEX: [
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[np.array([0, 1])],
        lambda x: x.__setitem__([0, 1], x[:2] + 0),
    ],
    sim.ITEM: [
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: int(x.max()),
        lambda x: 1 if x[0] == 0 else 2,
        lambda x: x[x[0]],
        lambda x: range(x[1]),
    ],
    sim.MASK: [
        lambda x: x[x > 2],
        lambda x: x.__setitem__(x > 2, x[:1] + 0),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 2),
        lambda x: x.masked_select(x > 2),
        lambda x: x.unique(),
    ],
    sim.EVENT_WAIT: [wait_for_event],
    sim.DEVICE_WAIT: [lambda x: torch.cuda.synchronize()],
}
EACH_CROSSING = [(kind, cross) for kind, cases in CROSSINGS.items() for cross in cases]
# Not asked of CUDA's PyTorch: what is called for these differs from their kind's, or depends on what a kernel computes.
CAUTIOUS = [
    (sim.BLOCKING_UPLOAD, lambda x: torch.zeros(3).pin_memory().to(x.device)),
    (sim.BLOCKING_DOWNLOAD, lambda x: x.to("cpu", non_blocking=True)),
    (sim.BLOCKING_DOWNLOAD, lambda x: torch.zeros(6, dtype=torch.int64).copy_(x, non_blocking=True)),
    (sim.MASK, lambda x: x.repeat_interleave(x)),
]
