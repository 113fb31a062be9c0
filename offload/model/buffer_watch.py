"""Watch over the model's buffers, which checkpoints have as rank 0 has them.

A buffer may differ between ranks, as running statistics do if nothing synchronises them. A restore
then gives all ranks the values of rank 0, so the ranks go on otherwise than without it.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import torch

from offload.device.boundary import to_host
from offload.format.digests import leaf_digest, leaf_digests
from offload.model.parameters import unwrapped_names
from offload.model.shards import is_dtensor

_LIBRARIES: Final = ("offload.", "torch.")
"""Beginnings of the names of modules whose lines a warning does not show."""


class BufferWatch:
    """Finds the buffers that differ between ranks, until they have been named once.

    Args:
        model: Model that is trained; None if it was not given. DistributedDataParallel gives the
            buffers of rank 0 to all ranks before each forward, unless it was told not to. Then
            nothing is compared.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._model = None if wrapped and getattr(model, "broadcast_buffers", True) else model

    def note(self) -> str | None:
        """Return one digest of the values of all buffers; None if none is compared."""
        found = self.digests()
        return leaf_digest(memoryview("".join(found.values()).encode())).hex() if found else None

    def digests(self) -> dict[str, str]:
        """Return a digest of the values of each buffer that is compared, by name."""
        if self._model is None:
            return {}
        return {name: digest_of(buffer) for name, buffer in _buffers(self._model)}

    def stop(self) -> None:
        """Compare no more: it has been said which buffers differ."""
        self._model = None


def differ(notes: Iterable[str | None]) -> bool:
    """Return whether buffers differ between ranks.

    Args:
        notes: What `BufferWatch.note` has returned on each rank.
    """
    return len({note for note in notes if note is not None}) > 1


def in_words(digests: Mapping[int, Mapping[str, str]]) -> str:
    """Return which buffers differ, for the user; empty if they do not differ any more.

    Args:
        digests: What `BufferWatch.digests` has returned on each rank, by rank.
    """
    ranks = sorted(rank for rank, theirs in digests.items() if theirs)
    found: dict[str, int] = {}
    for rank in ranks[1:]:
        first = digests[ranks[0]]
        for name in {**first, **digests[rank]}:
            if first.get(name) != digests[rank].get(name):
                found.setdefault(name, rank)
    if not found:
        return ""
    name, rank = next(iter(found.items()))
    more = f" (one of {len(found)} buffers)" if len(found) > 1 else ""
    return (
        f"the buffer {name!r}{more} has other values on rank {rank} than on rank {ranks[0]}. "
        "Checkpoints have the buffers of rank 0, and restore() gives them to all ranks, so a "
        "resumed run may differ from one that was not stopped. Let all ranks have the same "
        "(torch.nn.SyncBatchNorm, for example), or put those of each rank into train_state"
    )


def say(words: str) -> Callable[[], None]:
    """Warn the user of buffers that differ.

    Returns:
        A function that raises the warning, if warnings are errors to the user.
    """
    errors: list[Warning] = []
    try:
        warnings.warn(words, RuntimeWarning, stacklevel=_frames_of_libraries())
    except RuntimeWarning as error:
        errors.append(error)

    def settle() -> None:
        """Raise the warning if it is an error."""
        for error in errors:
            raise error

    return settle


def _frames_of_libraries() -> int:
    """Return the stack level, for the caller, of the nearest frame of the user."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that checkpoints have and that are whole on each rank, by name."""
    unwrapped = unwrapped_names(model)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if torch.nn.parameter.is_lazy(buffer) or is_dtensor(buffer) or buffer.is_meta:
                continue
            yield unwrapped(f"{prefix}.{name}" if prefix else name), buffer


def digest_of(buffer: torch.Tensor) -> str:
    """Return a digest of the values of a tensor."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        flat = to_host(buffer.detach()).contiguous()
        if not flat.nbytes:
            return ""
        memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
        return leaf_digest(memoryview(leaf_digests(memoryview(memory).cast("B")))).hex()
