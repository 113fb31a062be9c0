"""Reader of `torch.distributed.checkpoint` directories, range by range.

The file ``.metadata`` in such a directory is a pickle, which torch itself loads without
restriction. This module loads it with the classes of torch's metadata only, and no function.
"""

from __future__ import annotations

import math
import os
import pickle
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata

from offload.errors import CheckpointError
from offload.exchange.stored_tensor import StoredTensor, require_file, scratch_tensor
from offload.exchange.torch_files import DTYPES, read_structure
from offload.format.boxes import Box, cut_range, hull

_MAX_METADATA_BYTES = 128 << 20
"""Largest metadata that is read, in bytes. That of a million tensors is about as large."""

_MAX_DIMS = 64
_MAX_DEPTH = 64
"""Largest number of parts in the nested name of a value."""

_MAX_NAME_BYTES = 4096


def _names() -> dict[tuple[str, str], Any]:
    """Return what a pickle of metadata may name.

    A pickle may set attributes of what it names. So these are classes and functions of their own,
    which nothing else uses. Paths become text.
    """
    kinds = (
        *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata),
        *(metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
        *(metadata.TensorStorageMetadata, filesystem._StorageInfo, filesystem._StoragePrefix),
    )
    encoding = metadata._MEM_FORMAT_ENCODING
    layout: Any = torch.serialization._get_layout

    def path(*parts: str) -> str:
        """Return a path as text."""
        return "/".join(parts)

    return {
        **{(kind.__module__, kind.__name__): type(kind.__name__, (kind,), {}) for kind in kinds},
        (metadata.__name__, encoding.__name__): lambda value: encoding(value),
        ("torch.serialization", "_get_layout"): lambda name: layout(name),
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
        **{("pathlib", kind): path for kind in ("Path", "PosixPath", "PurePosixPath")},
        ("pathlib._local", "PosixPath"): path,
        ("collections", "OrderedDict"): type("OrderedDict", (dict,), {}),
    }


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._known = _names()

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata, and refuse any other name."""
        found = self._known.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it refers to the global {module:.80}.{name:.80}")
        return found


def read_dcp(path: str) -> Any:
    """Return the nested state dict of a distributed checkpoint; tensors are read on demand."""
    file = f"{path}/.metadata"
    size = require_file(file)
    if size > _MAX_METADATA_BYTES:
        raise CheckpointError(f"{file}: {size} bytes, at most {_MAX_METADATA_BYTES} are read")
    try:
        with open(file, "rb") as opened:
            found = _Unpickler(opened).load()
        return _Directory(path).read(_of(found, metadata.Metadata))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may end in any error
        what = f"{type(error).__name__} {error}" if isinstance(error, LookupError) else error
        raise CheckpointError(
            f"{file}: cannot be read as the metadata of a distributed checkpoint ({what})"
        ) from error


def _of(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Check that a value is a tuple of sizes or offsets, one for each dimension, and return it."""
    if (
        not isinstance(value, tuple)
        or len(value) > _MAX_DIMS
        or any(type(n) is not int or not 0 <= n < 1 << 63 for n in value)
    ):
        raise ValueError(f"{str(value)[:80]} is not a tuple of sizes")
    return tuple(value)


class _Directory:
    """The files of a distributed checkpoint."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sizes: dict[str, int] = {}
        self._places: dict[tuple[Any, tuple[int, ...] | None], filesystem._StorageInfo] = {}

    def read(self, found: metadata.Metadata) -> Any:
        """Return the stored value with its original nesting, given the metadata."""
        for index, info in found.storage_data.items():
            offset = _of(index, metadata.MetadataIndex).offset
            place = index.fqn, None if offset is None else _sizes(offset)
            self._places[place] = _of(info, filesystem._StorageInfo)
        names = found.planner_data or {}
        root: dict[Any, Any] = {}
        for key, what in found.state_dict_metadata.items():
            if type(key) is not str or len(key) > _MAX_NAME_BYTES:
                raise ValueError(f"a key is not a string: {str(key)[:80]!r}")
            _insert(root, names.get(key) or tuple(key.split(".")), self._value(key, what))
        return _with_lists(root)

    def _value(self, key: str, what: Any) -> Any:
        if isinstance(what, metadata.TensorStorageMetadata):
            return BoxedTensor(self, key, what)
        if not isinstance(what, metadata.BytesStorageMetadata):
            raise CheckpointError(f"{self.path}: {key!r:.80} is a {type(what).__name__}")
        return read_structure(*self.region(key, None if (key, None) in self._places else ()))

    def region(self, key: str, offsets: tuple[int, ...] | None) -> tuple[str, int, int]:
        """Return where a stored value or box lies: path of the file, first byte, and end byte."""
        info = self._places[key, offsets]
        name: Any = info.relative_path  # text, if the metadata keeps to its class
        begin, length = info.offset, info.length
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{self.path}: names a file outside its directory: {str(name)[:80]!r}"
            )
        if info.transform_descriptors:
            raise CheckpointError(
                f"{self.path}/{name}: the data is compressed, so it cannot be read in ranges"
            )
        (begin, length) = _sizes((begin, length))
        if name not in self._sizes:
            self._sizes[name] = require_file(f"{self.path}/{name}")
        if begin + length > self._sizes[name]:
            raise CheckpointError(
                f"{self.path}/{name}: {self._sizes[name]} bytes, and {key!r:.80} is at {begin} to "
                f"{begin + length}"
            )
        return f"{self.path}/{name}", begin, begin + length


def _insert(root: dict[Any, Any], names: Any, value: Any) -> None:
    """Put a value into nested dictionaries, under a path of names."""
    if type(names) is not tuple or not 0 < len(names) <= _MAX_DEPTH:
        raise ValueError(f"a name of {len(names)} parts, at most {_MAX_DEPTH} are read")
    at = root
    for name in names[:-1]:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise ValueError(f"{str(name)[:80]!r} is both a value and a parent of other values")
    at[names[-1]] = value


def _with_lists(value: Any, name: Any = None) -> Any:
    """Turn dictionaries with the keys 0, 1, 2, ... back into lists, as the planner flattened lists.

    The dictionary ``state`` is left alone, since its keys may be the numbers of parameters.
    """
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item, key) for key, item in value.items()}
    if name != "state" and inner and set(inner) == set(range(len(inner))):
        return [inner[i] for i in range(len(inner))]
    return inner


class BoxedTensor:
    """A tensor that is stored as boxes, which together are the whole; a `TensorSource`."""

    def __init__(
        self, directory: _Directory, key: str, found: metadata.TensorStorageMetadata
    ) -> None:
        self.shape = _sizes(found.size)
        dtype = _of(found.properties, metadata.TensorProperties).dtype
        self._key = f"{directory.path}: {key!r:.80}"
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key!r:.80} has no dtype")
        self.dtype = dtype
        self._boxes = []
        for chunk in found.chunks:
            stored = _of(chunk, metadata.ChunkStorageMetadata)
            box = Box(_sizes(stored.offsets), _sizes(stored.sizes))
            region = directory.region(key, box.offsets)
            num_bytes = box.num_elements * dtype.itemsize
            if not box.fits(self.shape) or num_bytes > region[2] - region[1]:
                raise CheckpointError(
                    f"{self._key}: a stored part lies outside the tensor, or its file has too few "
                    "bytes"
                )
            self._boxes.append((box, region))
        if sum(box.num_elements for box, _ in self._boxes) != math.prod(self.shape):
            raise CheckpointError(f"{self._key}: its stored parts do not cover the tensor exactly")
        self._opened: tuple[int, StoredTensor] | None = None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in row-major order, flat, in host memory."""
        if stop > start and len(self._boxes) == 1:
            return self._tensor(0).read(start, stop)
        if stop <= start:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        out = scratch_tensor(stop - start, self.dtype)
        at = 0
        for box in cut_range(self.shape, start, stop):
            length = box.num_elements
            self._read_box(box, out[at : at + length].view(box.sizes))
            at += length
        return out

    def _read_box(self, wanted: Box, out: torch.Tensor) -> None:
        for number, (box, _) in enumerate(self._boxes):
            common = box.intersection(wanted)
            if common is None:
                continue
            strides = [math.prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]
            found = self._tensor(number).read(*hull(box, common)).as_strided(common.sizes, strides)
            out[common.within(wanted).slices].copy_(found)

    def _tensor(self, number: int) -> StoredTensor:
        if self._opened is None or self._opened[0] != number:
            box, (file, start, stop) = self._boxes[number]
            found = read_structure(file, start, stop)
            if not isinstance(found, StoredTensor) or (found.shape, found.dtype) != (
                box.sizes,
                self.dtype,
            ):
                raise CheckpointError(
                    f"{self._key}: a stored part has another shape or dtype than the metadata says"
                )
            self._opened = (number, found)
        return self._opened[1]
