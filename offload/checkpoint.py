"""Reading a checkpoint: open, verify. Needs no optimizer and writes nothing.

Importing this module does not import torch, so that looking at one is quick.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gds import ALIGNMENT, Backend, LockHeldError, PosixBackend, StorageError
from offload._verify import verify_tensors
from offload.errors import (
    CheckpointError,
    DamagedError,
    StoreBusyError,
)
from offload.manifest import MANIFEST_NAME, Manifest
from offload.parts import part_sizes
from offload.reading import (
    PartDirectories,
    checkpoint_paths,
    find_checkpoint,
    part_paths,
    read_manifest,
)
from offload.slot import TRAIN_STATE_NAME
from offload.tensorfile import TensorEntry, TensorFileError, header_length
from offload.train_state import (
    MAX_CAPACITY_BYTES,
    TrainStateDigestError,
    TrainStateFormatError,
    TrainStateTagError,
    unpack,
)

if TYPE_CHECKING:
    from types import TracebackType

    from gds._backend import Lock

_UNREAD = object()

_MOST_LOOKS = 100
"""At a store whose newest checkpoint is recycled each time before it is locked."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a complete read of a checkpoint found."""

    problems: tuple[str, ...]
    """One sentence for each damaged place; each names file and byte range."""

    bytes_checked: int

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems


class Checkpoint:
    """A sealed, immutable checkpoint.

    Made by `open_checkpoint`, `OffloadedOptimizer.restore` and a seal's `result`. One that
    `open_checkpoint` made holds a shared lock until `close`, which keeps the training process
    from recycling it meanwhile. One that is dropped without it lets go, with a `ResourceWarning`.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        manifest: Manifest,
        parts: PartDirectories = None,
        *,
        lock: Lock | None = None,
        owns_backend: bool = False,
    ) -> None:
        self._backend = backend
        self._lock = lock
        self._owns_backend = owns_backend
        self._train_state: object = _UNREAD
        self._part_directories = parts
        self.manifest = manifest
        self.path = path

    @property
    def backend(self) -> Backend:
        """What it is read through."""
        return self._backend

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.manifest.step

    @property
    def generation(self) -> int:
        """Counter of the store: the checkpoint with the highest is the newest."""
        return self.manifest.generation

    @property
    def created(self) -> str:
        """ISO 8601 time at which the seal began."""
        return self.manifest.created

    @property
    def metrics(self) -> dict[str, float]:
        """What was given to ``checkpoint(metrics=...)``, by name."""
        return dict(self.manifest.metrics)

    @property
    def optimizer(self) -> str:
        """Qualified name of the torch optimizer class."""
        return self.manifest.optimizer

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each parameter group."""
        return [dict(group) for group in self.manifest.groups]

    @property
    def num_parameters(self) -> int:
        """Trainable elements."""
        return self.manifest.layout.num_elements

    @property
    def state_arrays(self) -> dict[str, int]:
        """Bytes of each state array, by name."""
        layout = self.manifest.layout
        return {name: layout.array_bytes(name) for name in layout.array_names}

    @property
    def parts(self) -> list[str]:
        """Directories that hold the rest of the state, for a store on several drives."""
        return part_paths(self.manifest, self._part_directories, self.path)

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file, by name; of those in `parts`, by path."""
        sizes = dict(self.manifest.layout.file_sizes())
        for name in (TRAIN_STATE_NAME, MANIFEST_NAME):
            stat = self._backend.stat(f"{self.path}/{name}")
            sizes[name] = stat.size_bytes if stat else 0
        for drive, part in enumerate(self.parts, 1):
            found = part_sizes(self.manifest.layout, drive)
            sizes |= {f"{part}/{name}": nbytes for name, nbytes in found.items()}
        return sizes

    @property
    def tensors(self) -> list[TensorEntry]:
        """The tensors of ``model.safetensors``, in file order."""
        return list(self.manifest.layout.model_header.entries.values())

    @property
    def train_state(self) -> Any:
        """What was passed to `checkpoint(train_state=...)`; read once, then kept.

        Raises:
            offload.errors.DamagedError: It is damaged or belongs to another checkpoint.
        """
        if self._train_state is _UNREAD:
            path = f"{self.path}/{TRAIN_STATE_NAME}"
            try:
                state, header = unpack(self.read_train_state(), path)
            except TrainStateTagError:
                raise  # it is what was written, by a later version
            except (TensorFileError, TrainStateFormatError, TrainStateDigestError) as error:
                raise DamagedError(f"{path}: damaged: {error}") from error
            if dict(header) != train_state_header(self.manifest):
                raise DamagedError(f"{path}: belongs to another checkpoint")
            self._train_state = state
        return self._train_state

    def read_train_state(self) -> bytes:
        """Return the train state as it is stored."""
        file = self._backend.open(f"{self.path}/{TRAIN_STATE_NAME}")
        try:
            if file.size_bytes > MAX_CAPACITY_BYTES:
                raise DamagedError(
                    f"{file.path}: {file.size_bytes} bytes, expected at most {MAX_CAPACITY_BYTES}"
                )
            first = file.read_bytes(0, min(ALIGNMENT, file.size_bytes))
            header_bytes = header_length(first, file.size_bytes, file.path)
            if b"\0" in first[8 : max(header_bytes, 9)]:  # a hole: the rest is not worth its memory
                raise DamagedError(f"{file.path}: damaged: zero bytes in its header")
            return file.read_bytes(0, file.size_bytes)
        except TensorFileError as error:
            raise DamagedError(f"{file.path}: damaged: {error}") from error
        finally:
            file.close()

    def read_state(self, name: str) -> dict[str, Any]:
        """Read the optimizer state of one parameter.

        Args:
            name: The parameter's name, as in ``model.safetensors``.

        Returns:
            FP32 tensors of the parameter's shape: ``master`` and every state array, as the next
            step would compute with them. They are decoded if they are stored in fewer bits, and
            where a parameter was edited after the last step, ``master`` is the edited value. The
            arrays of a parameter that has never had a gradient are zeros. Nothing is compared
            with the digests; `verify` does that.

        Raises:
            CheckpointNotFoundError: There is no trainable parameter of that name.
            gds.StorageError: It cannot be read.
        """
        from offload.state_reading import read_state  # torch takes long to import

        return read_state(self, name)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every byte and compare it with the digests taken when it was written.

        Args:
            progress: Called with the bytes checked so far and the bytes in all.
        """
        problems: list[str] = []
        try:
            # Again, since it may have been damaged after opening.
            found = read_manifest(self._backend, self.path, self._part_directories)
            if found.digest != self.manifest.digest:
                problems.append(f"{self.path}/{MANIFEST_NAME}: replaced since it was opened")
            _ = self.train_state
        except (CheckpointError, StorageError) as error:
            problems.append(str(error))
        damaged, checked = verify_tensors(
            self._backend, self.path, self.parts, self.manifest, progress
        )
        return VerifyReport((*problems, *damaged), checked)

    def close(self) -> None:
        """Let the training process recycle this checkpoint again. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._owns_backend:
            self._backend.close()

    def __del__(self) -> None:
        # The lock and its backend refer to each other: without this it would be held until Python
        # next looks for cycles, and keep a training process waiting meanwhile.
        lock = getattr(self, "_lock", None)
        if lock is None:
            return
        self._lock = None
        lock.release()
        warnings.warn(
            f"{self.path}: never closed; use `with` or call close(), for until then it cannot be "
            "recycled",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, path={self.path!r})"


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> Checkpoint:
    """Open a checkpoint for reading, safely beside a process that is training.

    Args:
        path: A checkpoint directory, or a store, which means its newest usable checkpoint.
        parts: For a store on several drives that are no longer where they were: their
            directories, all but the first, in the store's order.
        backend: Where it is; the local file system by default.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        CheckpointError: There is no usable checkpoint; says why.
        StoreBusyError: It is being recycled at this moment; open the store's newest instead.
        gds.StorageError: It cannot be read.
    """
    return _open(os.fspath(path), parts, backend, need_parts=True)


def open_for_parameters(
    path: str | os.PathLike[str], *, backend: Backend | None = None
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, but look at the first drive only."""
    return _open(os.fspath(path), None, backend, need_parts=False)


def _open(
    path: str, parts: PartDirectories, backend: Backend | None, *, need_parts: bool
) -> Checkpoint:
    owns_backend = backend is None
    backend = backend or PosixBackend()
    looks_left = _MOST_LOOKS
    try:
        while True:
            present = _checkpoints_in(backend, path)
            looks_left -= 1
            try:
                found, manifest, lock = _open_found(backend, path, parts, need_parts=need_parts)
                break
            except (CheckpointError, StoreBusyError, StorageError):
                # Of a store that trains there always is a newest one. If it was recycled while it
                # was looked for, the one that has taken its place is meant.
                if not looks_left or present == _checkpoints_in(backend, path):
                    raise
    except BaseException:
        if owns_backend:
            backend.close()
        raise
    return Checkpoint(backend, found, manifest, parts, lock=lock, owns_backend=owns_backend)


def _checkpoints_in(backend: Backend, path: str) -> dict[str, int]:
    """Return the inode of each checkpoint of a store, by path; nothing if it is no store."""
    stats: dict[str, int] = {}
    try:
        for checkpoint in checkpoint_paths(backend, os.path.abspath(path)):
            if (stat := backend.stat(checkpoint)) is not None:
                stats[checkpoint] = stat.inode
    except StorageError:
        return {}
    return stats


def _open_found(
    backend: Backend, path: str, parts: PartDirectories, *, need_parts: bool
) -> tuple[str, Manifest, Lock]:
    lock = None
    try:
        found = find_checkpoint(backend, path, parts, need_parts=need_parts)
        before = backend.stat(found)
        try:
            lock = backend.lock(found, shared=True)
        except LockHeldError as error:
            raise StoreBusyError(
                error.errno, "this checkpoint is being recycled; open a newer one", found
            ) from error
        # The lock is on whatever had the name then; make sure that still has it now.
        after = backend.stat(found)
        if before is None or after is None or after.inode != before.inode:
            raise StoreBusyError(
                errno.EAGAIN, "this checkpoint has just been recycled; open a newer one", found
            )
        manifest = read_manifest(backend, found, parts, need_parts=need_parts)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return found, manifest, lock


def train_state_header(manifest: Manifest) -> dict[str, str]:
    """Return what ties a train state to its checkpoint."""
    return {
        "store_id": manifest.store_id,
        "generation": str(manifest.generation),
        "step": str(manifest.step),
    }
