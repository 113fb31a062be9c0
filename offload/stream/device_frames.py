"""Frames of the ring in device memory, and the digests of their content."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gds import Backend, Buffer
from offload.device.compute import Compute
from offload.device.staging import Traffic
from offload.format.digests import DigestContext, Run


class DeviceFrames:
    """Frames on a device; an implementation of `offload.stream.frame.FrameMemory`.

    Args:
        backend: Moves state between storage and device memory.
        compute: Compute of the device.
        traffic: Counter of the bytes that cross to the host. State crosses only if a caller of
            `fetch` needs it in host memory.
    """

    def __init__(self, backend: Backend, compute: Compute, traffic: Traffic) -> None:
        self.device = compute.device
        self._backend = backend
        self._compute = compute
        self._traffic = traffic

    def allocate(self, nbytes: int) -> tuple[Buffer, torch.Tensor]:
        """Return device memory as a buffer, and the same memory as a tensor of bytes.

        Args:
            nbytes: Size in bytes.

        Raises:
            gds.RefusedError: The backend cannot allocate device memory.
            MemoryError: The device has no memory left.
        """
        try:
            buffer = self._backend.allocate(nbytes, "device")
        except MemoryError:
            # torch caches freed memory, and the backend does not allocate from torch's cache.
            self._compute.trim()
            buffer = self._backend.allocate(nbytes, "device")
        return buffer, self._compute.view(buffer)

    def digests(self, arrays: Mapping[str, torch.Tensor]) -> DeviceDigests:
        """Return digests that the device computes."""
        return DeviceDigests(self._compute, arrays)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in host memory; they are complete on return."""
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
        """Copy host tensors back to the device; complete on return."""
        compute = self._compute
        with compute.queue([]):
            for name, tensor in tensors.items():
                compute.send(fetched[name], tensor)
            done = compute.mark()
        compute.wait(done)
        self._traffic.sent(sum(tensor.nbytes for tensor in tensors.values()))


class DeviceDigests:
    """Digests of a chunk, computed on the device. Only the digests cross to the host.

    Args:
        compute: Compute of the device.
        arrays: Bytes of the chunk by state array. Their memory must not be moved or freed.
    """

    def __init__(self, compute: Compute, arrays: Mapping[str, torch.Tensor]) -> None:
        self._compute = compute
        self._arrays = arrays
        self._leaves: dict[str, torch.Tensor] = {}

    def written(self, array: str, start: int, stop: int) -> None:
        """Queue the digests of an array if the range is the whole array; otherwise do nothing.

        Must be called within `Compute.queue`.
        """
        if (start, stop) == (0, self._arrays[array].nbytes):
            self._leaves[array] = self._compute.leaf_digests(self._arrays[array])

    def digested(self, array: str, number: int, digest: bytes) -> None:
        """Ignore the digest: all leaves of an array are digested together."""

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:  # noqa: ARG002
        """Wait for all queued work, and return the digest of each array."""
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
