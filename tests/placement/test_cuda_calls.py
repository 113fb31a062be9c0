"""What is asked of torch's CUDA: which stream waits for which event, and when."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

import offload.device.boundary
import offload.device.compute
from gds.errors import DeviceLostError, DeviceMemoryError
from gds.kvikio import PageLockRefused
from offload.device.boundary import CudaBoundary
from offload.device.compute import CudaCompute

DEVICE = torch.device("cuda", 1)


class Recorder:
    """Stands where ``torch.cuda`` is, and writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.streams: list[Stream] = []
        self.active: list[str] = ["none"]
        self.refuses = 0
        self.guards = 0
        """Blocks that this thread is in, in which the device is current."""
        self.fails = ""
        """The error of a wait for an event, if it is to fail."""
        self.last_error = 0
        """What the next kernel that torch launches fails with."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        typed = types.SimpleNamespace(Stream=self.stream, Event=self.event, cudart=lambda: self)
        monkeypatch.setattr(offload.device.boundary, "_cuda", typed)
        monkeypatch.setattr(offload.device.compute, "_cuda", typed)
        training = Stream(self, "training")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: training)
        monkeypatch.setattr(torch.cuda, "stream", self.within)
        monkeypatch.setattr(torch.cuda, "device", self.on)

    def stream(self, device: torch.device, *, priority: int) -> Stream:
        assert device == DEVICE
        assert priority < 0, "training has 0, and its kernels would hold up these"
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def event(self, *, blocking: bool) -> Event:
        assert blocking
        return Event(self)

    @contextlib.contextmanager
    def within(self, stream: Stream):
        assert self.guards, "leaving the stream would make a context on the device before"
        self.active.append(stream.name)
        try:
            yield
        finally:
            self.active.pop()

    @contextlib.contextmanager
    def on(self, device: torch.device):
        assert device == DEVICE
        self.guards += 1
        try:
            yield
        finally:
            self.guards -= 1

    def compile_kernels(self, number: int) -> None:
        assert number == DEVICE.index
        assert self.guards, "CuPy's guard would make a context on the device before"
        self.calls.append("compile digests")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert self.guards
        self.calls.append(f"register {nbytes} {flags}")
        self.last_error = self.refuses or self.last_error
        return self.refuses

    def ones(self, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> None:
        assert device == DEVICE
        error, self.last_error = self.last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: {error}")

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.guards, "this would make a context on the current device"
        self.calls.append("unregister")
        return 0

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class Stream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_event(self, event: Event) -> None:
        self.recorder.calls.append(f"{self.name} waits for {event.name}")


class Event:
    num = 0

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.name = recorder, "an event that was not recorded"

    def record(self, stream: Stream) -> None:
        Event.num += 1
        self.name = f"event {Event.num} of {stream.name}"
        self.recorder.calls.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.recorder.calls.append(f"the host waits for {self.name}")
        if self.recorder.fails:
            raise torch.AcceleratorError(self.recorder.fails)


class Copied(torch.Tensor):
    """Writes down on which stream it is copied to."""

    recorder: Recorder

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        self.recorder.calls.append(f"copy on {self.recorder.active[-1]}")
        return super().copy_(source)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    recorder.install(monkeypatch)
    monkeypatch.setattr(Event, "num", 0)
    monkeypatch.setattr(Copied, "recorder", recorder, raising=False)
    return recorder


@pytest.fixture
def compute(cuda) -> CudaCompute:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
        patch.setattr(offload.device.compute.digest, "compile_kernels", cuda.compile_kernels)
        made = CudaCompute(DEVICE)
    assert cuda.take() == ["compile digests"]
    return made


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).as_subclass(Copied)


LOST = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


def test_errors_of_a_device_are_named_by_whoever_waits_or_computes(cuda, compute):
    boundary = CudaBoundary(DEVICE)
    cuda.fails = LOST
    for waits in (boundary, compute):
        with pytest.raises(DeviceLostError, match=r"cuda:1: .*resume in a new one") as caught:
            waits.wait(boundary.now())
        assert "illegal memory access" in str(caught.value)
        assert "TORCH_USE" not in str(caught.value)
    cuda.fails = "CUDA error: invalid argument"
    with pytest.raises(RuntimeError, match="invalid argument") as other:
        boundary.wait(boundary.now())
    assert not isinstance(other.value, DeviceLostError)
    said = r"cuda:1 has no memory left \(CUDA out of memory"
    with pytest.raises(DeviceMemoryError, match=said), compute.queue([]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")


def test_memory_that_the_driver_does_not_lock_is_taken_unlocked(cuda, monkeypatch):
    real, ones = torch.empty, []

    def empty(*arguments, pin_memory=False, **named):
        if pin_memory:
            assert cuda.guards
            raise torch.AcceleratorError("CUDA error: operation not supported\nmore")
        return real(*arguments, **named)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: ones.append(1))
    with pytest.warns(PageLockRefused, match=r"operation not supported\): copies .* are right"):
        memory = CudaBoundary(DEVICE).allocate(100)
    assert (memory.nbytes, len(ones)) == (100, 1), "the error would be reported again"


def test_pages_are_locked_for_as_long_as_that_is_asked_for(cuda, monkeypatch):
    boundary = CudaBoundary(DEVICE)
    memory = torch.zeros(4096, dtype=torch.uint8)
    locked = boundary.lock_pages(memory)
    assert cuda.take() == ["register 4096 1"]
    del locked
    assert cuda.take() == ["unregister"]
    monkeypatch.setattr(torch, "ones", cuda.ones)
    cuda.refuses = 2
    locked = boundary.lock_pages(memory)
    assert locked is not None
    assert cuda.last_error == 0, "the next kernel of this thread would be blamed for it"
    del locked
    assert cuda.take() == ["register 4096 1"], "what was not locked is not unlocked"
    # counted as torch's pool takes it
    sizes = {0: 0, 1: 1, 64: 64, 65: 128, (16 << 20) + 64: 32 << 20}
    assert {asked: boundary.held_bytes(asked) for asked in sizes} == sizes


def test_copies_are_ordered_by_events_on_two_streams_made_once(cuda):
    boundary = CudaBoundary(DEVICE)
    assert len(cuda.streams) == 2
    boundary.fence()
    assert cuda.take() == [], "nothing has been sent"
    began = boundary.now()
    host, device = tensor(0.0, 0.0), tensor(1.0, 2.0)
    boundary.wait(boundary.fetch([(device, host)], [began]))
    assert cuda.take() == [
        "record event 1 of training",
        "stream 0 waits for event 1 of training",
        "copy on stream 0",
        "record event 2 of stream 0",
        "the host waits for event 2 of stream 0",
    ]
    assert host.tolist() == [1.0, 2.0]
    boundary.send([(host, device), (host, device)], [])
    assert cuda.take() == ["copy on stream 1"] * 2 + ["record event 3 of stream 1"]
    boundary.fetch([(device, host)], [])
    assert cuda.take() == [
        "stream 0 waits for event 3 of stream 1",
        "copy on stream 0",
        "record event 4 of stream 0",
    ]
    boundary.send([], [began])
    boundary.fence()
    assert cuda.take() == [
        "stream 1 waits for event 1 of training",
        "record event 5 of stream 1",
        "training waits for event 5 of stream 1",
    ]
    assert len(cuda.streams) == 2


def test_computing_follows_what_it_depends_on_and_is_waited_for_by_the_host_alone(cuda, compute):
    boundary = CudaBoundary(DEVICE)
    assert len(cuda.streams) == 3
    began = boundary.now()
    target = tensor(0.0)
    with compute.queue([began]):
        compute.send(tensor(1.0), target)
        done = compute.mark()
    compute.wait(done)
    assert cuda.take() == [
        "record event 1 of training",
        "stream 0 waits for event 1 of training",
        "copy on stream 0",
        "record event 2 of stream 0",
        "the host waits for event 2 of stream 0",
    ]
    assert cuda.active == ["none"]
    with pytest.raises(ZeroDivisionError), compute.queue([]):
        _ = 1 / 0
    with compute.queue([]):
        compute.mark()
    assert cuda.take() == ["record event 3 of stream 0"]
    assert len(cuda.streams) == 3, "streams are made once"
