"""Frames of the ring in the memory of a device, and the digests of what is in them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gds import Backend, Buffer
from offload.device.compute import Compute
from offload.device.staging import Traffic
from offload.format.digests import DigestContext, Run


class DeviceFrames:
    """Frames on a device; a `offload.stream.frame.FrameMemory`.

    Args:
        backend: Moves state between storage and memory of the device.
        compute: Of the device.
        traffic: Counts what crosses to the host: no state, unless somebody asks for it there.
    """

    def __init__(self, backend: Backend, compute: Compute, traffic: Traffic) -> None:
        self.device = compute.device
        self._backend = backend
        self._compute = compute
        self._traffic = traffic

    def allocate(self, nbytes: int) -> tuple[Buffer, torch.Tensor]:
        """Return memory of the device.

        Raises:
            gds.RefusedError: The backend has none.
            MemoryError: The device has none left.
        """
        try:
            buffer = self._backend.allocate(nbytes, "device")
        except MemoryError:
            # The backend's allocations are not torch's, which keeps what it has once had.
            self._compute.trim()
            buffer = self._backend.allocate(nbytes, "device")
        return buffer, self._compute.view(buffer)

    def digests(self, arrays: Mapping[str, torch.Tensor]) -> DeviceDigests:
        """Return digests that the device computes."""
        return DeviceDigests(self._compute, arrays)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in host memory."""
        compute = self._compute
        with compute.queue([]):
            fetched = {name: compute.fetch(tensor) for name, tensor in tensors.items()}
            done = compute.mark()
        compute.wait(done)
        self._traffic.fetched(sum(tensor.nbytes for tensor in fetched.values()))
        return fetched

    def send(
        self, fetched: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy them back."""
        compute = self._compute
        with compute.queue([]):
            for name, tensor in tensors.items():
                compute.send(fetched[name], tensor)
            done = compute.mark()
        compute.wait(done)
        self._traffic.sent(sum(tensor.nbytes for tensor in tensors.values()))


class DeviceDigests:
    """Digests of a chunk, computed on the device; only they cross to the host.

    Args:
        compute: Of the device.
        arrays: The bytes of the chunk in each array; they must stay where they are.
    """

    def __init__(self, compute: Compute, arrays: Mapping[str, torch.Tensor]) -> None:
        self._compute = compute
        self._arrays = arrays
        self._leaves: dict[str, torch.Tensor] = {}

    def written(self, array: str, start: int, stop: int) -> None:
        """Queue the digest of an array that is final as a whole; only within `Compute.queue`."""
        if (start, stop) == (0, self._arrays[array].nbytes):
            self._leaves[array] = self._compute.leaf_digests(self._arrays[array])

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:  # noqa: ARG002
        """Return the digest of each array, when everything that has been queued is done."""
        compute = self._compute
        with compute.queue([]):
            for name, data in self._arrays.items():
                if name not in self._leaves:
                    self.written(name, 0, data.nbytes)
            done = compute.mark()
        compute.wait(done)
        return {
            name: context.digest_leaves(name, chunk, leaves.numpy().tobytes())
            for name, leaves in self._leaves.items()
        }
