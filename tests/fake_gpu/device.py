"""A device that is not there: tensors that only `device.boundary` may touch, and that find races.

`OnDevice` looks like a tensor on another device (torch's ``meta``, the one whose autograd needs no
driver) and holds its values in host memory. A training loop computes with it as on a device. The
library may look at it, take views of it, and give it to a `Boundary`; anything else that it does
with one raises. The boundary keeps account of what has been ordered after what:

- a copy to the host must come after the last kernel that wrote its source;
- a copy to the device must come after the last kernel that used its target;
- a kernel must come after the copies to what it uses: the stream that it is on must have been
  fenced.

With ``late=True`` every copy happens as late as the events allow, otherwise at once, so that host
memory that is read too early, or used again too early, shows in the results.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

import offload
from gds.errors import DeviceMemoryError
from tests.fake_gpu.streams import GARBAGE, Streams

_PACKAGE = offload.__path__[0] + "/"
_TORCH = torch.__path__[0] + "/"
_PASSED_THROUGH = {"forward_plan.py", "applied_gradient.py", "watch.py", "mover.py", "outside.py"}
"""Of the library: modes and subclasses that call on what the training loop has called."""

_VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "squeeze", "t",
    "transpose", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor that is not in host memory, as far as anybody can see."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls: type[OnDevice], held: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        made.held = held
        return made

    def __init__(self, _held: torch.Tensor) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:
        return f"<{tuple(self.shape)} {self.dtype} on the fake device>"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory on the device, of a buffer that the library has asked for."""
        held = self.held.untyped_storage()
        return held if held._cdata in _device.buffers else super().untyped_storage()

    @property
    def data(self) -> torch.Tensor:
        """The same memory without a graph."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: OnDevice) -> None:
        torch.Tensor.data.__set__(self, value)
        self.held = value.held

    def data_ptr(self) -> int:
        """Return the address, which every device gives without reading memory."""
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        is_view = name in _VIEWS
        where = _library_frame()
        if where is not None and name == "clone" and "captured" in where:
            where = None
        if where is not None and not is_view and not _device.computing():
            raise AssertionError(f"the library calls {func} on the device, in {where}")
        if not is_view:
            _device.kernel(func, args, kwargs, library=where is not None)
        out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if name.endswith("_") and args and isinstance(args[0], OnDevice):
            return args[0]
        wrapped = tree_map(lambda t: OnDevice(t) if isinstance(t, torch.Tensor) else t, out)
        if not is_view:
            _device.made(wrapped, library=where is not None)
        return wrapped


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _library_frame() -> str | None:
    """Return where in the library this was called, if it was not the training loop that did."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and file.rsplit("/", 1)[1] not in _PASSED_THROUGH:
            return f"{file[len(_PACKAGE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if (
            not file.startswith((_TORCH, _PACKAGE))
            and file != __file__
            and "/lib/python" not in file
        ):
            return None
        frame = frame.f_back
    return None


def _storage(tensor: OnDevice) -> int:
    return tensor.held.untyped_storage()._cdata


def _tensors(value: Any) -> list[OnDevice]:
    found: list[OnDevice] = []
    tree_map(lambda t: found.append(t) if isinstance(t, OnDevice) else None, value)
    return found


@dataclass(frozen=True)
class Event:
    """A point on one of the streams."""

    stream: str
    position: int
    tick: int = 0
    """Kernels that the training loop has started before it, as far as is known."""


class FakeDevice:
    """The boundary, and the account of everything.

    Args:
        late: Whether copies are made as late as possible.
    """

    def __init__(self, *, late: bool) -> None:
        self.streams = Streams(late=late)
        self.num_kernels = 0
        self.num_fetched = self.num_sent = 0
        self.locked: list[torch.Tensor] = []
        self.is_full = False
        """Whether it has no more memory for the library."""
        self.buffers: set[int] = set()
        """Storages of buffers that the library has asked for."""
        self._keep: list[torch.Tensor] = []
        """Storages that have been seen: their numbers must not be given to others."""
        self._written: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._unfenced: dict[int, int] = {}
        self.num_computed = 0
        self._num_computed = 0
        self._computed: dict[int, int] = {}
        """What the library has computed, and nobody has waited for."""
        self._computing = 0
        self._computes_after = 0
        self._passed = 0
        """The last kernel that a thread of the host has waited for."""
        self._lock = self.streams.lock

    def forget(self) -> None:
        """Let go of all memory."""
        self._keep.clear()
        self.streams.clear()

    # What the training loop does.

    def kernel(self, func: Any, args: Any, kwargs: Any, *, library: bool = False) -> None:
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if library:
            self.streams.run("compute")
            self.compute(_tensors((args, kwargs)), _tensors(written))
            return
        with self._lock:
            self.num_kernels += 1
            for tensor in _tensors((args, kwargs)):
                key = self._see(tensor)
                if key in self._unfenced or key in self._computed:
                    raise AssertionError(f"{func} may run before its parameter has arrived")
                self._used[key] = self.num_kernels
            self.made(written)

    def made(self, value: Any, *, library: bool = False) -> None:
        with self._lock:
            for tensor in _tensors(value):
                key = self._see(tensor)
                if library:
                    self._computed[key] = self._num_computed
                else:
                    self._written[key] = self._used[key] = self.num_kernels

    # What the library computes: see `compute`.

    def computing(self) -> bool:
        """Return whether this thread's work goes to the library's own stream."""
        return self._computing == threading.get_ident()

    def begin_computing(self, after: Iterable[Event]) -> None:
        self._computing = threading.get_ident()
        self._computes_after = max((event.tick for event in after), default=0)

    def end_computing(self) -> None:
        self._computing = 0

    def compute(self, used: list[OnDevice], written: list[OnDevice]) -> None:
        """Note a kernel on the library's own stream."""
        with self._lock:
            assert self.computing(), "work of the library belongs on its own stream"
            self.num_computed += 1
            self._num_computed += 1
            seen = max(self._computes_after, self._passed)
            for tensor in used:
                key = self._see(tensor)
                if self._written.get(key, 0) > seen or key in self._unfenced:
                    raise AssertionError("the library may compute with what is not there yet")
            for tensor in written:
                key = self._see(tensor)
                if self._used[key] > seen:
                    raise AssertionError("the library may overwrite what a kernel still uses")
                self._computed[key] = self._num_computed

    def computed(self, position: int) -> None:
        """Note that a thread of the host has waited for the library's own stream."""
        with self._lock:
            self._computed = {k: p for k, p in self._computed.items() if p > position}
            self._passed = max(self._passed, self._computes_after)

    # What the library does: the boundary.

    def now(self) -> Event:
        with self._lock:
            return Event("training", 0, self.num_kernels)

    def fetch(self, copies: Any, after: Iterable[Event]) -> Event:
        with self._lock:
            tick = max((event.tick for event in after), default=0)
            self.streams.settle("send")
            sent = self.streams.position("send")
            for source, into in copies:
                _check(source, into)
                assert isinstance(source, OnDevice)
                assert not isinstance(into, OnDevice)
                key = self._see(source)
                if self._written.get(key, 0) > max(tick, self._passed) or key in self._computed:
                    raise AssertionError("a copy may begin before its source has been computed")
                into.reshape(-1).view(torch.uint8).fill_(GARBAGE)
                self.num_fetched += into.nbytes

                def copy(source: OnDevice = source, into: torch.Tensor = into) -> None:
                    self.streams.run("send", sent)
                    into.copy_(source.held)

                self.streams.launch("fetch", copy)
            return self._queued("fetch", tick)

    def send(self, copies: Any, after: Iterable[Event]) -> Event:
        with self._lock:
            after = list(after)
            tick = max((event.tick for event in after), default=0)
            queued = self.streams.position("fetch")
            for event in after:
                if event.stream == "fetch":
                    self.streams.launch("send", partial(self.streams.run, "fetch", event.position))
            for source, into in copies:
                _check(source, into)
                key = self._see(into)
                if self._used.get(key, 0) > max(tick, self._passed):
                    raise AssertionError("a copy may overwrite what a kernel still uses")
                if not isinstance(source, OnDevice):
                    self.num_sent += source.nbytes
                on_device = isinstance(source, OnDevice)
                self.streams.launch(
                    "send", partial(self._send, source, into, queued if on_device else 0)
                )
                self._unfenced[key] = self.streams.position("send")
            return self._queued("send", tick)

    def _send(self, source: torch.Tensor, into: OnDevice, queued: int) -> None:
        # What was queued on the other stream before may happen at any time: just now, for example.
        self.streams.run("fetch", queued)
        into.held.copy_(_held(source))

    def flatten(self, tensor: torch.Tensor, after: Iterable[Event]) -> torch.Tensor:
        with self._lock:
            assert isinstance(tensor, OnDevice)
            if self._written.get(self._see(tensor), 0) > max([e.tick for e in after] + [0]):
                raise AssertionError("a copy may begin before its source has been computed")
            flat = OnDevice(torch.empty(tensor.numel(), dtype=tensor.dtype))
            flat.held.view(torch.uint8).fill_(GARBAGE)
            sent = self.streams.position("send")

            def copy() -> None:
                self.streams.run("send", sent)
                flat.held.copy_(tensor.held.reshape(-1))

            self.streams.launch("fetch", copy)
            self._queued("fetch", 0)
            self._see(flat)
            return flat

    def wait(self, event: Event) -> None:
        with self._lock:
            if event.stream != "training":
                self.streams.run(event.stream, event.position)
            if event.stream == "send":  # whatever is computed from now on comes after it
                self._unfenced = {k: p for k, p in self._unfenced.items() if p > event.position}
            self._passed = max(self._passed, event.tick)

    def follow(self, event: Event) -> None:
        assert event.stream == "send"
        with self._lock:
            self.streams.run("send", event.position)
            self._unfenced = {k: p for k, p in self._unfenced.items() if p > event.position}

    def empty(self, nbytes: int) -> OnDevice:
        if self.is_full:
            raise DeviceMemoryError("the fake device has no memory left")
        made = OnDevice(torch.full((nbytes,), GARBAGE, dtype=torch.uint8))
        self.buffers.add(self._see(made))
        return made

    def fence(self) -> None:
        if threading.current_thread().name.startswith("offload"):
            return  # the stream of a thread of the library, on which no kernels run
        with self._lock:
            self.streams.run("send")
            self._unfenced.clear()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def held_bytes(self, nbytes: int) -> int:
        return nbytes

    def lock_pages(self, memory: torch.Tensor) -> object:
        self.locked.append(memory)
        return memory

    def _queued(self, stream: str, tick: int) -> Event:
        self.streams.settle(stream)
        return Event(stream, self.streams.position(stream), tick)

    def _see(self, tensor: OnDevice) -> int:
        key = _storage(tensor)
        if key not in self._used:
            self._keep.append(tensor.held)
            self._used[key] = 0
        return key


def _check(source: torch.Tensor, into: torch.Tensor) -> None:
    assert source.dtype == into.dtype
    assert source.numel() == into.numel()
    assert source.shape == into.shape
    if not (isinstance(source, OnDevice) and isinstance(into, OnDevice)):
        assert source.is_contiguous()
        assert into.is_contiguous()


_device = FakeDevice(late=False)


def use(device: FakeDevice) -> None:
    """Make one the device of all tensors from now on."""
    global _device
    _device = device


def upload(tensor: torch.Tensor) -> OnDevice:
    """Return a tensor that a kernel of the training stream has just made."""
    made = OnDevice(tensor)
    _device.num_kernels += 1
    _device.made(made)
    return made


def on_device(model: torch.nn.Module, names: Callable[[str], bool] = bool) -> torch.nn.Module:
    """Move a model's parameters and buffers to the device, in place; those with such names."""
    moved: dict[torch.Tensor, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not names(f"{prefix}.{name}".lstrip(".")):
                continue
            if parameter not in moved:
                new = torch.nn.Parameter(OnDevice(parameter.data), parameter.requires_grad)
                if parameter.requires_grad and parameter.grad_dtype is None:
                    new.grad_dtype = None
                moved[parameter] = new
            module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and names(f"{prefix}.{name}".lstrip(".")):
                module._buffers[name] = OnDevice(buffer)
    return model


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor holds, in host memory, as the training loop would copy it."""
    if isinstance(tensor, OnDevice):
        return tensor.detach().clone().held
    return tensor.detach()
