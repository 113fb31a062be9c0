"""The errors of the file formats, which `header` and `train_state` re-export.

Each kind of fault in a file or a value has its own class, so that callers and tests can tell the
faults apart without reading messages.
"""

from __future__ import annotations

from offload.errors import CheckpointError, OffloadError


class TensorFileError(OffloadError, ValueError):
    """A safetensors file is damaged, or the given content cannot be stored as one."""


class HeaderTooLargeError(TensorFileError):
    """The header is longer than the format's limit, or than the space reserved for it."""


class HeaderTruncatedError(TensorFileError):
    """The file ends before its header does."""


class HeaderEncodingError(TensorFileError):
    """The header is not a JSON object in UTF-8 that begins with ``{``."""


class HeaderStructureError(TensorFileError):
    """The header is JSON, but not a map of names to dtype, shape and data_offsets."""


class DuplicateNameError(TensorFileError):
    """A header has the same key twice, or two tensors have the same name."""


class ReservedNameError(TensorFileError):
    """A tensor would be called ``__metadata__``."""


class DtypeError(TensorFileError):
    """A dtype is unknown, or its elements are not whole bytes."""


class ShapeError(TensorFileError):
    """A shape is not a list of non-negative integers, is absurd, or contradicts the offsets."""


class OffsetError(TensorFileError):
    """Data offsets leave a hole, overlap, or are not two integers in order."""


class FileSizeError(TensorFileError):
    """The data that the header describes does not end where the file ends."""


class MetadataError(TensorFileError):
    """``__metadata__`` is not a flat map of strings to strings."""


class TrainStateTypeError(OffloadError, TypeError):
    """A value in `train_state` cannot be stored so that it comes back the same."""


class TrainStateTooLargeError(OffloadError, ValueError):
    """`train_state` does not fit the space reserved for it in each checkpoint."""


class TrainStateFormatError(CheckpointError):
    """A stored `train_state` is not what this package writes."""


class TrainStateTagError(TrainStateFormatError):
    """A stored `train_state` has a tag that this version does not know."""


class TrainStateDigestError(CheckpointError):
    """A stored `train_state` differs from what was written: the file is damaged or mixed up."""
