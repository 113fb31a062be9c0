"""Computing on the device that is not there.

The kernels are the library's own sources, compiled for the CPU. With ``late=True`` they run when
somebody waits for them, and what is fetched holds rubbish until then. Torch's operations run at
once; `FakeDevice` says whether they were in order.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gds import Buffer
from offload.device.kernels.forms import Form
from offload.device.kernels.update import DeviceRun, form_of_run
from tests.device.host import HostDigests, HostKernels
from tests.fake_gpu.device import Event, FakeDevice, OnDevice, _held, _tensors
from tests.fake_gpu.streams import GARBAGE


class FakeCompute:
    """`offload.device.compute.Compute` in host memory."""

    def __init__(self, device: FakeDevice, kernels: HostKernels, digests: HostDigests) -> None:
        self.device = torch.device("meta")
        self._fake = device
        self._kernels = kernels
        self._digests = digests
        self._lock = threading.Lock()
        self.prepared: set[Form] = set()
        self.num_trimmed = 0
        self.num_updates = self.num_fetched = self.num_sent = 0

    def view(self, buffer: Buffer) -> torch.Tensor:
        assert buffer.kind == "device"
        array = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.address)
        array.owner = buffer  # type: ignore[attr-defined]
        return OnDevice(torch.frombuffer(array, dtype=torch.uint8))

    @contextmanager
    def queue(self, after: Iterable[Event]) -> Iterator[None]:
        with self._lock:
            self._fake.begin_computing(after)
            try:
                yield
            finally:
                self._fake.end_computing()

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        held = torch.empty(num_elements, dtype=dtype)
        held.view(torch.uint8).fill_(GARBAGE)
        return OnDevice(held)

    def trim(self) -> None:
        self.num_trimmed += 1

    def prepare(self, form: Form) -> None:
        assert not self._fake.computing(), "compiling takes long: not in the middle of a step"
        self._kernels.prepare(_family(form))
        self.prepared.add(form)

    def update(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        group: Mapping[str, Any],
        run: DeviceRun,
        *,
        step: int,
        factors: Sequence[float],
    ) -> None:
        changed = [*run.live, *run.arrays.values()]
        used = [*changed, *run.gradients]
        assert all(tensor.device.type == "meta" for tensor in used)
        self._fake.compute(_tensors(used), _tensors(changed))
        held = replace(
            run,
            live=[_held(live) for live in run.live],
            gradients=[_held(gradient) for gradient in run.gradients],
            arrays={name: _held(array) for name, array in run.arrays.items()},
        )
        assert form_of_run(optimizer_class, group, held) in self.prepared
        group = dict(group)  # a scheduler may change it before the kernel runs
        self._launch(
            lambda: self._kernels.update_run(
                optimizer_class, group, held, step=step, factors=factors
            )
        )
        self.num_updates += 1

    def step_by_torch(self, context, parameter, gradient, state, group) -> None:
        """Step as torch does on a device, where `device_check` asks for it.

        Torch's own step would be that of a CPU here. tests/device/test_update_arithmetic.py shows
        that the kernels' arithmetic is the one that torch has on CUDA.
        """
        tensors = [parameter, gradient, *state.values()]
        self._fake.compute(_tensors(tensors), _tensors([parameter, *state.values()]))
        run = DeviceRun(
            live=[_held(parameter)],
            gradients=[_held(gradient)],
            arrays={name: _held(values) for name, values in state.items()},
            first_elements=[0],
        )
        optimizer_class = type(context.stepper._instance)
        self._launch(lambda: self._kernels.update_run(optimizer_class, group, run, step=8))

    def leaf_digests(self, data: torch.Tensor) -> torch.Tensor:
        assert isinstance(data, OnDevice)
        self._fake.compute([data], [])
        out = torch.full((-(-data.nbytes >> 20),), -1, dtype=torch.int64)
        held = data.held

        def digest() -> None:
            found = self._digests.leaf_digests(held)
            out.copy_(torch.frombuffer(bytearray(found), dtype=torch.int64) if found else out)

        self._launch(digest)
        return out

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        self._fake.compute(_tensors(source), [])
        out = torch.empty(source.shape, dtype=source.dtype)
        out.view(torch.uint8).fill_(GARBAGE)
        self.num_fetched += out.nbytes
        self._launch(lambda: out.copy_(_held(source)))
        return out

    def send(self, source: torch.Tensor, into: torch.Tensor) -> None:
        self._fake.compute([], _tensors(into))
        self.num_sent += source.nbytes
        self._launch(lambda: _held(into).copy_(source))

    def mark(self) -> Event:
        return Event("compute", self._fake.streams.position("compute"), self._fake._num_computed)

    def wait(self, event: Event) -> None:
        self._fake.streams.run("compute", event.position)
        self._fake.computed(event.tick)

    def _launch(self, work: Callable[[], object]) -> None:
        self._fake.streams.launch("compute", work)
        self._fake.streams.settle("compute")


def _family(form: Form) -> list[Form]:
    """Return a form and those that a model with parameters of all dtypes has besides.

    To compile them all takes hardly longer than to compile one.
    """
    half = form.master if form.master != "own" else "float32"
    masters = {torch.float32: "own", torch.float16: "float32", torch.bfloat16: half}
    dtypes = [(live, live) for live in masters]
    dtypes += [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
    return [form] + [
        replace(form, live=live, gradient=gradient, master=masters[live])
        for live, gradient in dtypes
        if form.master != "own" or live is torch.float32
    ]
