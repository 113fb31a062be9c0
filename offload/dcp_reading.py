"""Directories of `torch.distributed.checkpoint`, read range by range.

Their ``.metadata`` is a pickle, which torch itself loads without restriction; here only the few
classes that it is made of can be named by it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from offload.dcp_files import boxes
from offload.errors import CheckpointError
from offload.pt_file import StoredTensor, read_structure, scratch_tensor

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(str(d).split(".")[1] for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8,
        torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    ))},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_dcp(path: str) -> Any:
    """Return the nested state dict of a distributed checkpoint, with tensors that can be read.

    Raises:
        CheckpointError: It is damaged, or names what would have to be executed.
    """
    try:
        with open(f"{path}/.metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        return _read(path, metadata)
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}/.metadata: cannot be read as that of a distributed checkpoint ({error})"
        ) from error


def _read(path: str, metadata: Any) -> Any:
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        offset = None if index.offset is None else tuple(index.offset)
        places[index.fqn, offset] = info
    root: dict[Any, Any] = {}
    for key, what in metadata.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            value: Any = BoxedTensor(path, key, what, places)
        elif isinstance(what, BytesStorageMetadata):
            info = places[key, None] if (key, None) in places else places[key, ()]
            file, start, stop = _region(path, info)
            with open(file, "rb") as opened:
                opened.seek(start)
                value = torch.load(io.BytesIO(opened.read(stop - start)), weights_only=True)
        else:
            raise CheckpointError(f"{path}: {key!r} is a {type(what).__name__}")
        names = (metadata.planner_data or {}).get(key) or tuple(key.split("."))
        at = root
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = value
    return _with_lists(root)


def _with_lists(value: Any, name: Any = None) -> Any:
    """Make lists of what the planner flattened as numbered entries; not of state by number."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item, key) for key, item in value.items()}
    if name != "state" and inner and set(inner) == set(range(len(inner))):
        return [inner[i] for i in range(len(inner))]
    return inner


def _region(path: str, info: Any) -> tuple[str, int, int]:
    name = str(info.relative_path)
    if os.path.basename(name) != name:
        raise CheckpointError(f"{path}: names a file outside its directory: {name!r:.80}")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{path}/{name}: compressed, which cannot be read in ranges")
    return f"{path}/{name}", int(info.offset), int(info.offset) + int(info.length)


class BoxedTensor:
    """A tensor that is stored as boxes; a `TensorSource`."""

    def __init__(
        self, path: str, key: str, what: TensorStorageMetadata, places: Mapping[Any, Any]
    ) -> None:
        self.shape = tuple(what.size)
        self.dtype = what.properties.dtype
        self._key = f"{path}: {key!r}"
        self._boxes = [
            (tuple(c.offsets), tuple(c.sizes), _region(path, places[key, tuple(c.offsets)]))
            for c in what.chunks
        ]
        if sum(math.prod(sizes) for _, sizes, _ in self._boxes) != math.prod(self.shape):
            raise CheckpointError(f"{self._key}: its parts are not the whole tensor")
        self._opened: tuple[int, StoredTensor] | None = None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements in row-major order."""
        if stop > start and len(self._boxes) == 1:
            return self._tensor(0).read(start, stop)
        if stop <= start:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        out = scratch_tensor(stop - start, self.dtype)
        at = 0
        for offsets, sizes in boxes(self.shape, start, stop):
            length = math.prod(sizes)
            self._read_box(offsets, out[at : at + length].view(sizes))
            at += length
        return out

    def _read_box(self, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        sizes = tuple(out.shape)
        for number, (begin, extent, _) in enumerate(self._boxes):
            first = [max(a, b) for a, b in zip(offsets, begin, strict=True)]
            last = [
                min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, begin, extent, strict=True)
            ]
            if any(a >= b for a, b in zip(first, last, strict=True)):
                continue
            inside = [a - b for a, b in zip(first, begin, strict=True)]
            common = [b - a for a, b in zip(first, last, strict=True)]
            strides = torch.empty(extent, dtype=self.dtype, device="meta").stride()
            low = sum(i * s for i, s in zip(inside, strides, strict=True))
            length = 1 + sum((n - 1) * s for n, s in zip(common, strides, strict=True))
            flat = self._tensor(number).read(low, low + length)
            target = out
            for dim, (a, n, o) in enumerate(zip(first, common, offsets, strict=True)):
                target = target.narrow(dim, a - o, n)
            target.copy_(flat.as_strided(common, strides))

    def _tensor(self, number: int) -> StoredTensor:
        if self._opened is None or self._opened[0] != number:
            _, sizes, (file, start, stop) = self._boxes[number]
            found = read_structure(file, start, stop)
            if not isinstance(found, StoredTensor) or (found.shape, found.dtype) != (
                sizes,
                self.dtype,
            ):
                raise CheckpointError(f"{self._key}: a part is not the tensor that it should be")
            self._opened = (number, found)
        return self._opened[1]
