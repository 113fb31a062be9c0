"""Values that several ranks hold, which must be the same on all of them.

Each rank steps and stores a part of them. If they differed, the parts of several ranks would be
mixed, in the first step and in every checkpoint. So their digests are compared before the first
step and in each seal. A later step compares those that have been changed since the step before, as
far as torch counts changes: it does not if they are made through ``.data``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

import torch

from offload.device.boundary import Marks, is_on_device
from offload.device.staging import Traffic
from offload.distributed.agreement.messages import Json
from offload.distributed.gathering.gather_plan import BoxKey
from offload.format.digests import LEAF_BYTES, leaf_digest, leaf_digests
from offload.model.shards import is_dtensor
from offload.model.tensor_image import TensorImage

Find: TypeAlias = Callable[[str], torch.Tensor | None]
"""Function that returns the live tensor with a name, if there is one."""

_BATCH_BYTES = 4 * LEAF_BYTES


class Replicas:
    """The values on this rank that other ranks hold as well.

    Args:
        rank: This rank.
        find: Function that returns the parameter with a name.
        traffic: Counter of the bytes that cross between host and devices.
        progress: Function that tells the other ranks that this one makes progress.
    """

    def __init__(
        self, rank: int, find: Find, traffic: Traffic, progress: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._find = find
        self._traffic = traffic
        self._progress = progress
        self._held: dict[str, int] = {}
        """First of the ranks that hold the same values, by the name of the parameter."""
        self._known: dict[str, tuple[int, int]] = {}
        """What `_stamp` returned when the values were known to be the same on all ranks."""

    def know(self, holders: Mapping[BoxKey, tuple[int, ...]]) -> None:
        """Take the ranks that hold each box of each parameter. Values of new ones are unknown."""
        self._held = {
            name: ranks[0]
            for (name, _), ranks in holders.items()
            if len(ranks) > 1 and self._rank in ranks
        }

    def note(self) -> None:
        """Record that all values are the same on all ranks now."""
        self._known = self._stamps()

    def forget(self) -> None:
        """Record that nothing is known of the values on other ranks."""
        self._known = {}

    def changed(self) -> list[str]:
        """Return the names of the parameters whose values may differ between ranks."""
        known = self._known
        return [name for name, stamp in self._stamps().items() if known.get(name) != stamp]

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Return numbers for each parameter that are others after a change that torch counts."""
        stamps: dict[str, tuple[int, int]] = {}
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for name in self._held:
                tensor = self._find(name)
                if tensor is not None:
                    memory = _memory(tensor)
                    version = 0 if memory.is_inference() else memory._version
                    stamps[name] = version, memory.data_ptr()
        return stamps

    def digests(
        self,
        names: Collection[str] | None = None,
        find: Find | None = None,
        marks: Marks | None = None,
    ) -> list[Json]:
        """Return the name, the first rank that holds it, and the digest of each parameter.

        Args:
            names: Names of the parameters; None for all of them.
            find: Function that returns the parameters; None for that of the constructor.
            marks: Positions in the streams of devices where they have their values; None for now.
        """
        out = torch.empty(_BATCH_BYTES, dtype=torch.uint8, device="cpu")
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return [
                [name, first, self._digest(name, (find or self._find)(name), out, marks)]
                for name, first in self._held.items()
                if names is None or name in names
            ]

    def _digest(
        self, name: str, tensor: torch.Tensor | None, out: torch.Tensor, marks: Marks | None
    ) -> str:
        if tensor is None:
            return ""
        memory = _memory(tensor).detach()
        if memory.is_contiguous() and not is_on_device(memory):
            batches = self._in_place(memory)
        else:
            batches = self._copied(name, memory, out, marks)
        leaves: list[bytes] = []
        for batch in batches:
            leaves.append(leaf_digests(batch))
            self._progress()
        return leaf_digest(memoryview(b"".join(leaves))).hex()

    def _in_place(self, memory: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of contiguous host memory."""
        if memory.nbytes:
            data = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
            for start in range(0, memory.nbytes, _BATCH_BYTES):
                yield data[start : start + _BATCH_BYTES]

    def _copied(
        self, name: str, memory: torch.Tensor, out: torch.Tensor, marks: Marks | None
    ) -> Iterator[memoryview]:
        """Yield copies of the bytes of any memory."""
        image = TensorImage([memory], marks, self._traffic, names=[name])
        for start in range(0, image.data_bytes, _BATCH_BYTES):
            stop = min(start + _BATCH_BYTES, image.data_bytes)
            image.gather(start, stop, out[: stop - start], on_one_thread=True)
            yield out[: stop - start].numpy().data


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's live memory of a parameter, with its version counter."""
    if is_dtensor(tensor):
        held: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return held
    return tensor
