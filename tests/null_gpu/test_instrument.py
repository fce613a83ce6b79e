"""The instrument itself: it counts what is known to happen, and refuses what a device refuses, with CUDA's codes."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from null_gpu import device, emulate

MIB = 1 << 20


@triton.jit
def _add_one(x_ptr, out_ptr, size, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    mask = index < size
    tl.store(out_ptr + index, tl.load(x_ptr + index, mask=mask) + 1, mask=mask)


@triton.jit
def _add_one_of_pair(pair, size, block: tl.constexpr):
    x_ptr, out_ptr = pair
    _add_one(x_ptr, out_ptr, size, block)


@pytest.fixture
def before():
    """Return the counters after torch has initialised itself and its allocator holds free blocks."""
    block = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.synchronize()
    return device.counters()


def test_launches_are_counted_by_interface_and_kernel(before):
    x = torch.ones(512, device="cuda")
    _add_one[(2,)](x, x, 512, block=256)
    x @ x
    torch.mm(x.view(16, 32), x.view(32, 16))
    gained = device.gained(before)
    assert gained["launch.cudaLaunchKernel"] == 1  # ones
    assert gained["launch.cuLaunchKernelEx"] == gained["kernel:_add_one"] == 1
    assert gained["launch.cublas"] == 2
    assert gained["launch"] == 4


UPLOAD, DOWNLOAD, BOTH_HERE = {"copy.h2d_pinned": 1}, {"copy.d2h_pinned": 1}, {"copy.d2d": 1}
WAIT, READ_BACK = {"sync": 1}, {"copy.d2h_pinned": 1, "sync": 1}
STAGED = {"copy.h2d_pageable": 1, "copy.blocking": 1}
BLOCKING_UPLOAD = STAGED | WAIT
BLOCKING_DOWNLOAD = {"copy.d2h_pageable": 1, "copy.blocking": 1, "sync": 1}


def wait_for_event(_x):
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


# What PyTorch's own host code makes of a line, given six int64 numbers on the device.
TRANSFERS = [
    (UPLOAD, lambda x: torch.zeros(3, pin_memory=True).to(x.device, non_blocking=True)),
    (UPLOAD, lambda x: x.copy_(torch.zeros(6, dtype=torch.int64).pin_memory(), non_blocking=True)),
    (STAGED, lambda x: torch.from_numpy(np.arange(3)).to(x.device, non_blocking=True)),
    (BLOCKING_UPLOAD, lambda x: torch.tensor([1, 2], device=x.device)),
    (BLOCKING_UPLOAD, lambda x: torch.as_tensor(np.arange(2), device=x.device)),
    (BLOCKING_UPLOAD, lambda x: torch.zeros(3).to(x.device)),
    (BLOCKING_UPLOAD, lambda x: x.copy_(torch.zeros(6, dtype=torch.int64))),
    (BLOCKING_UPLOAD, lambda x: x.__setitem__(slice(2), torch.zeros(2, dtype=torch.int64))),
    (BLOCKING_UPLOAD, lambda x: x.__setitem__(x[:2] + 0, 3)),
    (BLOCKING_UPLOAD, lambda x: x.__setitem__(x[:2] + 0, torch.tensor(3))),
    (BLOCKING_UPLOAD, lambda x: x.view(2, 3).__setitem__((slice(None), x[:2] + 0), 3)),
    (BLOCKING_UPLOAD, lambda x: x[torch.tensor([0, 1])]),
    (BLOCKING_UPLOAD, lambda x: x[np.array([0, 1])]),
    (BLOCKING_UPLOAD, lambda x: x.__setitem__([0, 1], x[:2] + 0)),
    (DOWNLOAD, lambda x: torch.zeros(6, dtype=torch.int64, pin_memory=True)[:].copy_(x, non_blocking=True)),
    (BLOCKING_DOWNLOAD, lambda x: x.cpu()),
    (BLOCKING_DOWNLOAD, lambda x: x.tolist()),
    (BLOCKING_DOWNLOAD, lambda x: torch.ones(3).__setitem__(0, x[0].float())),
    (READ_BACK, lambda x: x[0].item()),
    (READ_BACK, lambda x: bool(x.any())),
    (READ_BACK, lambda x: x[x[0]]),
    (READ_BACK, lambda x: range(x[1])),
    (READ_BACK, lambda x: x[x > 2]),
    (READ_BACK, lambda x: x.__setitem__(x > 2, x[:1] + 0)),
    (READ_BACK, lambda x: x.nonzero()),
    (READ_BACK, lambda x: torch.where(x > 2)),
    (READ_BACK, lambda x: x.masked_select(x > 2)),
    (READ_BACK, lambda x: x.unique()),
    (WAIT, wait_for_event),
    (WAIT, lambda x: torch.cuda.synchronize()),
    (BOTH_HERE, lambda x: x.clone()),
]
KINDS = set().union(*(expected for expected, _ in TRANSFERS))


@pytest.mark.parametrize("expected,transfer", TRANSFERS)
def test_transfers_and_waits_are_counted(expected, transfer):
    x = torch.arange(6).cuda()
    transfer(x)  # lazily created buffers come first
    before = device.counters()
    transfer(x)
    gained = device.gained(before)
    assert {kind: gained[kind] for kind in KINDS if gained[kind]} == expected


def test_bytes_are_moved_and_counted(before):
    gpu = torch.arange(100, dtype=torch.int32).cuda()
    assert device.gained(before)["copy.h2d_pageable_bytes"] == 400
    assert gpu.cpu().tolist() == list(range(100))
    assert device.where(gpu.data_ptr()) == device.DEVICE
    assert device.where(torch.zeros(4).pin_memory().data_ptr()) == device.PINNED


def test_allocations_are_counted_and_bounded(before):
    total = torch.cuda.mem_get_info()[1]
    free = torch.cuda.mem_get_info()[0]
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    gained = device.gained(before)
    assert (gained["alloc.device"], gained["alloc.device_bytes"]) == (1, 64 * MIB)
    assert torch.cuda.mem_get_info()[0] == free - 64 * MIB
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")


def test_freed_memory_reads_as_zeros_again():
    first = torch.full((32 * MIB,), 7, dtype=torch.uint8).cuda()
    assert int(first[-1].cpu()) == 7
    del first
    torch.cuda.empty_cache()
    assert int(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda").cpu().sum()) == 0


def test_a_trace_names_the_line(before):
    x = torch.zeros(4, device="cuda")
    with device.trace("sync", "copy") as seen:
        x[0].item()
    assert {row.split("|")[0] for row in seen} == {"copy.d2h_pinned", "cudaStreamSynchronize"}
    assert all("test_instrument.py" in row and "test_a_trace_names_the_line" in row for row in seen)


def test_tensors_in_a_tuple_are_emulated_in_place(before):
    """Catches: an interpreter that makes copies of what it does not find, which then count as the engine's."""
    x, out = torch.arange(4.0).cuda(), torch.zeros(4, device="cuda")
    before = device.counters()
    with emulate.emulating():
        _add_one_of_pair[(1,)]((x, out), 4, block=16)
    assert device.gained(before)["copy.blocking"] == 0
    assert out.cpu().tolist() == [1, 2, 3, 4], emulate.failed


def capture(work):
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work(x)
    return graph, x, out


def test_a_graph_keeps_launches_and_replays_copies(before):
    source = torch.arange(8.0).cuda()
    target = torch.zeros(8).cuda()  # uploaded: here a kernel leaves memory as it is
    before = device.counters()
    graph, *_ = capture(lambda x: (target.copy_(source), x * 2 + 1))
    gained = device.gained(before)
    assert gained["captured.kernel"] == 2 and gained["captured.memcpy"] == 1
    assert target.cpu().tolist() == [0.0] * 8
    before = device.counters()
    graph.replay()
    gained = device.gained(before)
    assert (gained["graph.launch"], gained["graph.kernels"], gained["launch"]) == (1, 2, 0)
    assert target.cpu().tolist() == list(range(8))


def test_an_emulated_replay_computes_with_the_contents_of_the_moment():
    """Catches: a copy for a view, another order, frozen contents, a Python number that is not, reused results."""

    def kernel(x, *, by):
        return x + (by if x.max() > 3 else 0)  # a kernel may branch on what it reads

    def step(kernel, x, out, rows, number):
        y = (x * 2).view(2, 3)
        y[0].add_(number)
        y = y.t().contiguous().reshape(-1)
        y.index_copy_(0, rows, x.new_zeros(2))
        values, ids = y.topk(3)
        out[:3].copy_(values)
        out[3:6] = ids.float().softmax(0)
        torch.cumsum(kernel(y, by=7), 0, out=out[6:])
        return values, ids

    x, rows, expected = torch.rand(6), torch.tensor([1, 4]), torch.zeros(12)
    with emulate.emulating():
        on_gpu, out, graph = emulate.to_device([x, rows]), torch.zeros(12, device="cuda"), emulate.Graph()
        with graph.capture():
            values, ids = step(emulate.launched(kernel), on_gpu[0], out, on_gpu[1], 1)
        for seed in range(3):
            x.copy_(4 * torch.rand(6, generator=torch.Generator().manual_seed(seed)))
            rows.copy_(torch.tensor([seed, 5]))
            for there, here in zip(emulate.to_host(on_gpu), (x, rows), strict=True):
                there.copy_(here)
            step(kernel, x, expected, rows, 1)
            graph.replay()
            assert torch.equal(emulate.to_host(out), expected)
    assert emulate.to_host(values).isnan().all() and (emulate.to_host(ids) > 10**9).all()
    assert not emulate.failed


_ERRORS = ("Unsupported", "Invalidated", "Merge", "Unmatched", "Unjoined", "Isolation", "Implicit")
CODES = {f"cudaErrorStreamCapture{error}": 900 + i for i, error in enumerate(_ERRORS)} | {"cudaErrorCapturedEvent": 907}
CODES["cudaErrorIllegalState"] = 401  # no capture to end


class Runtime:
    """The runtime's C interface, for what torch does not let one do wrong."""

    def __init__(self):
        self.library = ctypes.CDLL("libcudart.so.13")
        self.library.cudaGetErrorName.restype = ctypes.c_char_p

    def __call__(self, name, *arguments):
        arguments = [ctypes.c_void_p(a) if isinstance(a, int) and a > 2**31 else a for a in arguments]
        error = getattr(self.library, name)(*arguments)
        label = self.library.cudaGetErrorName(error).decode()
        assert CODES.get(label, 0) == error, (label, error)
        self.library.cudaGetLastError()  # torch must not take it for one of its own
        return label

    def create(self, name, *arguments):
        handle = ctypes.c_void_p()
        assert self(name, ctypes.byref(handle), *arguments) == "cudaSuccess"
        return handle.value

    def begin(self, flags):
        """Return a stream that captures in CUDA's strictest mode."""
        stream = self.create("cudaStreamCreateWithFlags", flags)
        assert self("cudaStreamBeginCapture", stream, 0) == "cudaSuccess"
        return stream

    def end(self, stream):
        graph = ctypes.c_void_p()
        return self("cudaStreamEndCapture", stream, ctypes.byref(graph)), graph.value is not None


INVALIDATED = ("cudaErrorStreamCaptureInvalidated", False)


@pytest.fixture
def runtime():
    torch.cuda.current_stream()
    return Runtime()


@pytest.fixture
def gpu():
    return torch.zeros(8, device="cuda")


@pytest.fixture
def capturing(runtime, gpu):
    """Return a stream that captures; the capture is ended whatever became of it."""
    stream = runtime.begin(1)
    yield stream
    runtime.end(stream)


NULL_BUFFER = ctypes.create_string_buffer(64)


@pytest.mark.parametrize(
    "call",
    [
        ("cudaMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64)),
        ("cudaHostAlloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64), 0),
        ("cudaDeviceSynchronize",),
        ("cudaMemcpy", NULL_BUFFER, NULL_BUFFER, ctypes.c_size_t(8), 0),
        ("cudaStreamSynchronize", "stream"),
        ("cudaStreamQuery", "stream"),
    ],
    ids=lambda call: call[0],
)
def test_what_capture_forbids_fails_and_spoils_the_graph(runtime, capturing, call):
    name, *arguments = call
    arguments = [capturing if a == "stream" else a for a in arguments]
    assert runtime(name, *arguments) == "cudaErrorStreamCaptureUnsupported"
    assert runtime.end(capturing) == INVALIDATED


def test_events_and_streams_of_a_capture(runtime, capturing):
    inside, outside = (runtime.create("cudaEventCreateWithFlags", 2) for _ in range(2))
    other = runtime.create("cudaStreamCreateWithFlags", 1)
    assert runtime("cudaEventRecord", outside, other) == "cudaSuccess"
    assert runtime("cudaEventRecord", inside, capturing) == "cudaSuccess"
    assert runtime("cudaEventQuery", inside) == "cudaErrorCapturedEvent"
    runtime.end(capturing)
    assert runtime("cudaStreamBeginCapture", capturing, 0) == "cudaSuccess"
    assert runtime("cudaStreamWaitEvent", capturing, outside, 0) == "cudaErrorStreamCaptureIsolation"


def test_a_forked_stream_must_join(runtime, capturing, gpu):
    event = runtime.create("cudaEventCreateWithFlags", 2)
    fork = runtime.create("cudaStreamCreateWithFlags", 1)
    assert runtime("cudaEventRecord", event, capturing) == "cudaSuccess"
    assert runtime("cudaStreamWaitEvent", fork, event, 0) == "cudaSuccess"
    assert runtime("cudaMemsetAsync", gpu.data_ptr(), 1, ctypes.c_size_t(8), ctypes.c_void_p(fork)) == "cudaSuccess"
    assert runtime.end(capturing) == ("cudaErrorStreamCaptureUnjoined", False)


def test_two_captures_do_not_merge(runtime, capturing):
    event = runtime.create("cudaEventCreateWithFlags", 2)
    other = runtime.begin(1)
    assert runtime("cudaEventRecord", event, capturing) == "cudaSuccess"
    assert runtime("cudaStreamWaitEvent", other, event, 0) == "cudaErrorStreamCaptureMerge"
    assert runtime.end(other) == INVALIDATED


def test_the_legacy_stream_is_implicit_in_blocking_streams(runtime, gpu):
    blocking = runtime.begin(0)
    label = runtime("cudaMemsetAsync", gpu.data_ptr(), 1, ctypes.c_size_t(8), ctypes.c_void_p(0))
    assert (label, runtime.end(blocking)) == ("cudaErrorStreamCaptureImplicit", INVALIDATED)


@pytest.mark.parametrize("transfer", [transfer for expected, transfer in TRANSFERS if "sync" in expected])
def test_torch_fails_under_capture_as_on_a_device(transfer):
    with pytest.raises(Exception, match="captur"):
        capture(lambda x: transfer(x.long()[:6]))
    torch.cuda.synchronize()
    capture(lambda x: x + 1)  # the device is usable afterwards


def test_a_host_tensor_is_refused_by_triton_and_by_operators():
    gpu, host = torch.zeros(4, device="cuda"), torch.zeros(4)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        _add_one[(1,)](host, gpu, 4, block=16)
    with pytest.raises(RuntimeError, match="same device"):
        gpu + host


def test_a_grid_that_a_device_refuses_is_refused():
    gpu = torch.zeros(4, device="cuda")
    before = device.counters()
    with pytest.raises(RuntimeError):
        _add_one[(1, 70000)](gpu, gpu, 4, block=16)
    assert device.gained(before)["bad_grid"] == 1


_TWO_RANKS = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2, init_method="file://" + sys.argv[2])
groups = [dist.new_group([0, 1]) for _ in range(2)]
x, y = torch.tensor([1.0 + rank, 2.0]).cuda(), torch.tensor([float(rank)]).cuda()
parts = [torch.empty_like(x) for _ in range(2)]
dist.all_gather(parts, x)
dist.all_reduce(x)
dist.broadcast(y, 1)
print("result", x.tolist(), y.tolist(), [part.tolist() for part in parts])
for group in groups:
    dist.all_reduce(x, group=group)
try:
    dist.all_reduce(x, group=groups[0]) if rank == 0 else dist.broadcast(x, 0, group=groups[0])
except dist.DistBackendError:
    print("refused")
if rank == 0:
    try:
        dist.all_reduce(x, group=groups[1])
    except dist.DistBackendError:
        print("refused")
sys.stdout.flush()
import os
os._exit(0)
"""


def test_collectives_between_two_processes(tmp_path):
    """Sums, gathers and broadcasts are real; what would hang on a device is an error that names the other rank."""
    environment = os.environ | {"NULLGPU_DEVICES": "2", "NULLGPU_NCCL_TIMEOUT_S": "3"}
    command, pipes = [sys.executable, "-c", _TWO_RANKS], dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes, text=True, env=environment)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    for out, _ in outputs:
        assert out.splitlines()[0] == "result [3.0, 4.0] [1.0] [[1.0, 2.0], [2.0, 2.0]]"
    assert outputs[0][0].count("refused") == 2 and outputs[1][0].count("refused") == 1
    errors = outputs[0][1]
    assert "rank 0 of 2: ncclAllReduce of 8 bytes, but rank 1 calls ncclBroadcast of 8" in errors
    assert "rank 0 of 2: ncclAllReduce: rank 1 did not come within 3 s" in errors
