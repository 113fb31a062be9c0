"""Writer of `torch.save` files that does not hold their tensors in memory.

torch itself writes the file, with room for the data (`torch.serialization.skip_data`). This module
then reads the position of each tensor's data from the file, and writes the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gds import Backend, File
from offload.exchange.destination import torch_writing
from offload.exchange.stored_tensor import StoredTensor
from offload.exchange.torch_reading import read_structure


@dataclass(frozen=True, slots=True, eq=False)
class Placeholder:
    """A contiguous tensor of a file, whose data is written later.

    If a structure contains the same object twice, the two are tied tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def write_structure(
    path: str, value: Any
) -> Callable[[Backend], tuple[File, dict[Placeholder, int]]]:
    """Write the whole structure of a file, with room for the data of its tensors."""
    placeholders: dict[Placeholder, torch.Tensor] = {}
    small: list[tuple[Placeholder, torch.Tensor]] = []

    def emptied(tensor: torch.Tensor) -> Placeholder:
        """Return a placeholder for a tensor, and note the tensor's data for later."""
        small.append(
            (Placeholder(tuple(tensor.shape), tensor.dtype), tensor.detach().cpu().contiguous())
        )
        return small[-1][0]

    def fake(placeholder: Placeholder) -> torch.Tensor:
        """Return a fake tensor for a placeholder, the same one at each call."""
        if placeholder not in placeholders:
            placeholders[placeholder] = torch.empty(
                placeholder.shape, dtype=placeholder.dtype, device="cpu"
            )
        return placeholders[placeholder]

    value = _replaced(value, torch.Tensor, emptied)  # real tensors cannot be used in FakeTensorMode
    with FakeTensorMode():
        imitation = _replaced(value, Placeholder, fake)
        with torch.serialization.skip_data(materialize_fake_tensors=True), torch_writing(path):
            torch.save(imitation, path)
    offsets: dict[Placeholder, int] = {}
    by_tensor = {id(tensor): placeholder for placeholder, tensor in placeholders.items()}
    stored = _leaves(read_structure(path), StoredTensor)
    for mine, theirs in zip(_leaves(imitation, torch.Tensor), stored, strict=True):
        offsets[by_tensor[id(mine)]] = theirs.offset

    def opened(backend: Backend) -> tuple[File, dict[Placeholder, int]]:
        """Open the file for writing, and write the data that is known already."""
        file = backend.open(path, writable=True)
        for placeholder, tensor in small:
            write_tensor(file, offsets[placeholder], tensor)
        return file, offsets

    return opened


def write_tensor(file: File, offset: int, tensor: torch.Tensor) -> None:
    """Write the data of a contiguous tensor through the page cache."""
    if tensor.numel():
        file.write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), offset)


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of a nested structure, with all leaves of a type replaced.

    Dictionaries of any kind become plain ones.
    """
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_replaced(item, kind, replace) for item in value])
    return value


def _leaves(value: Any, kind: type) -> Iterator[Any]:
    """Yield the leaves of a type in a nested structure, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, kind)
