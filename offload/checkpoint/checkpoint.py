"""A sealed checkpoint as a reader sees it. A reader needs no optimizer and writes nothing.

Importing this module does not import torch, so that looking at a checkpoint is quick.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gds import Backend, StorageError
from offload.checkpoint.file_check import (
    PartDirectories,
    is_quarantined,
    read_quarantine,
    read_train_state_file,
)
from offload.checkpoint.owner_parts import (
    OwnerPart,
    find_owner_parts,
)
from offload.checkpoint.reader_lock import held, recycled, was_recycled
from offload.checkpoint.reading import (
    are_only_recorded,
    part_paths,
    read_manifest,
)
from offload.checkpoint.sealed_slot import SealedSlot
from offload.checkpoint.verify import Findings, verify_files
from offload.checkpoint.verify import VerifyReport as VerifyReport
from offload.errors import (
    CheckpointError,
    DamagedError,
    TrainStateFormatError,
    TrainStateTagError,
)
from offload.format.header import TensorEntry
from offload.format.layout import Layout, array_file_name
from offload.format.manifest import Manifest
from offload.format.names import MANIFEST_NAME, TABLE_NAME, TRAIN_STATE_NAME
from offload.format.part_file import part_sizes
from offload.format.shares.part_table import OwnerTable
from offload.format.train_state import (
    EncodedState,
    decode,
    split_ranks,
)
from offload.format.unreadable import reading
from offload.interactive import html_table, names_to_offer
from offload.units import count

if TYPE_CHECKING:
    from gds.contract import Lock

_POSITION = re.compile(r"group[0-9]+\.param[0-9]+")
"""Name of a parameter whose name in the model is not known."""

_UNREAD = object()

_NOT_OFFERED = frozenset(
    (
        *("backend", "has_model_names", "held", "manifest", "marked_parts", "open_slot"),
        *("owns_part", "parts_are_only_recorded", "read_train_state", "unlocked"),
    )
)
"""Public names of `Checkpoint` that only other modules of this package need."""


def require_one_owner(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose state has several owners, for a caller that reads only owner 0.

    Raises:
        CheckpointError: Several ranks made the checkpoint.
    """
    num = len(checkpoint.manifest.owners)
    if num:
        raise CheckpointError(
            f"{checkpoint.path}: its state has {num + 1} owners, because several ranks made it, "
            "and this can only read checkpoints of one process so far. `offload ls`, `offload "
            "show` and `offload verify` read it"
        )


class Checkpoint:
    """A sealed, immutable checkpoint.

    `open_checkpoint`, `OffloadedOptimizer.restore` and a seal's `result` return it. A checkpoint
    from `open_checkpoint` holds a shared lock until `close`, which keeps the training process from
    recycling it meanwhile. If it is garbage-collected without `close`, it releases the lock with a
    `ResourceWarning`.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        manifest: Manifest,
        parts: PartDirectories = None,
        *,
        lock: Lock | None = None,
        resources: ExitStack | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._backend = backend
        self._lock = lock
        self._resources = resources or ExitStack()
        """Resources that `close` closes: the backend, unless the caller has passed it in."""
        self._rank, self._num_ranks = rank, num_ranks
        self._train_state: object = _UNREAD
        self._part_directories = parts
        self.manifest = manifest
        self.path = path

    @property
    def backend(self) -> Backend:
        """Storage backend that the checkpoint is read through."""
        return self._backend

    @property
    def quarantined(self) -> str:
        """Reason why the checkpoint is marked as damaged; empty if it is not marked."""
        marked = self.marked_parts
        for path in (self.path, *marked):
            reason = read_quarantine(self._backend, path)
            if reason is not None:
                return reason or "no reason is given"
        return ""

    @property
    def marked_parts(self) -> list[str]:
        """Paths of the parts of other owners that are seen here and are marked as damaged."""
        try:
            found = self.owners if self.manifest.owners else []
        except CheckpointError:  # a part is missing or has been rewritten
            return []
        seen = [owner.path for owner in found if owner.table is not None]
        return [path for path in seen if is_quarantined(self._backend, path)]

    def owns_part(self, path: str) -> bool:
        """Return whether a part is surely one of this store, and not of a store it is a copy of.

        It is if it is beside the checkpoint, or in a directory that the caller has given.
        """
        beside = os.path.dirname(self.path)
        return self._part_directories is not None or path.startswith(f"{beside}/")

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.manifest.step

    @property
    def generation(self) -> int:
        """Counter of the store: the checkpoint with the highest generation is the newest."""
        return self.manifest.generation

    @property
    def created(self) -> str:
        """ISO 8601 time at which the seal began."""
        return self.manifest.created

    @property
    def parameters_only(self) -> bool:
        """Whether the checkpoint has given up its state, so that no training can go on from it.

        See `offload.ParametersOnly`.
        """
        return not self.manifest.has_state

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that were given to ``checkpoint(metrics=...)``, by name."""
        return dict(self.manifest.metrics)

    @property
    def optimizer(self) -> str:
        """Qualified name of the torch optimizer class; empty for weights alone."""
        return self.manifest.optimizer

    @property
    def update_code(self) -> str:
        """Code that updated the state last, such as ``kernel (AVX512)``; empty if not known."""
        return self.manifest.update_code

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each parameter group."""
        return [dict(group) for group in self.manifest.groups]

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements; those of owners that are not seen here are left out.

        Of weights alone, which no optimizer has seen, every element counts.
        """
        if self.manifest.is_untrained:
            return sum(math.prod(tensor.shape) for tensor in self.manifest.layout.model)
        return sum(layout.num_elements for layout in self._layouts())

    @property
    def state_arrays(self) -> dict[str, int]:
        """Size in bytes of each state array, by name; owners not seen here are left out."""
        sizes: dict[str, int] = {}
        for layout in self._layouts():
            for name in layout.array_names:
                sizes[name] = sizes.get(name, 0) + layout.array_bytes(name)
        return sizes

    def _layouts(self) -> list[Layout]:
        """Return the layout of each owner that is seen here, owner 0 first."""
        found = self.owners if self.manifest.owners else []
        return [self.manifest.layout, *(o.table.layout for o in found if o.table is not None)]

    @property
    def has_model_names(self) -> bool:
        """Whether parameters have the names of the model, and not those of their positions.

        They have only positions if the optimizer was made without ``model=`` and from parameters
        without names. No other program can then match the tensors with a model.
        """
        names = (spec.name for spec in self.manifest.layout.parameters)
        return not any(_POSITION.fullmatch(name) for name in names)

    @property
    def parts(self) -> list[str]:
        """Directories on the store's other drives, which hold the rest of the state, in order."""
        return part_paths(self.manifest, self._part_directories, self.path)

    @property
    def owners(self) -> list[OwnerPart]:
        """Parts of the other owners of state, if several ranks made the checkpoint.

        Raises:
            offload.errors.CheckpointError: A part is not the one that was sealed with the
                checkpoint.
            offload.errors.UnreadableError: A part could not be read.
        """
        return find_owner_parts(
            self._backend,
            self.path,
            self.manifest,
            self._part_directories,
            even_quarantined=True,
        )

    @property
    def parts_are_only_recorded(self) -> bool:
        """Whether only the manifest names the directories of `parts`, and the caller gave none.

        These directories may belong to the store that this one is a copy of.
        """
        return are_only_recorded(self.manifest, self._part_directories)

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file: by name, or by path for the files in `parts`."""
        sizes = dict(self.manifest.layout.file_sizes())
        for name in (TRAIN_STATE_NAME, MANIFEST_NAME):
            stat = self._backend.stat(f"{self.path}/{name}")
            sizes[name] = stat.size_bytes if stat else 0
        for drive, part in enumerate(self.parts, 1):
            found = part_sizes(self.manifest.layout, drive)
            sizes |= {f"{part}/{name}": nbytes for name, nbytes in found.items()}
        for owner in self.owners if self.manifest.owners else ():
            if owner.table is not None:
                layout = owner.table.layout
                names = [*map(array_file_name, layout.array_names), TABLE_NAME]
                names += [] if layout.shard is None else [layout.model_name]
                stats = {name: self._backend.stat(f"{owner.path}/{name}") for name in names}
                sizes |= {f"{owner.path}/{n}": s.size_bytes for n, s in stats.items() if s}
        return sizes

    @property
    def tensors(self) -> list[TensorEntry]:
        """The tensors of ``model.safetensors``, in file order."""
        return list(self.manifest.layout.model_header.entries.values())

    @property
    def train_state(self) -> Any:
        """The value that was passed to `checkpoint(train_state=...)`; read once, then kept.

        If several ranks made the checkpoint, each of them has passed a value of its own. The
        checkpoint that `OffloadedOptimizer.restore` returns has the value of the calling rank, if
        as many ranks run now. All other checkpoints have the value of rank 0; see `train_states`.

        Raises:
            offload.errors.DamagedError: The train state is damaged or belongs to another
                checkpoint.
            offload.errors.UnreadableError: The train state could not be read.
            offload.errors.RecycledError: The checkpoint was not opened by `open_checkpoint`, and
                has been recycled.
            TrainStateTagError: A later version of this package wrote the train state.
        """
        if self._train_state is _UNREAD:
            states = self._decode_train_states()
            is_own = len(states) == self._num_ranks
            self._train_state = states[self._rank if is_own else 0]
        return self._train_state

    @property
    def train_states(self) -> list[Any]:
        """The value that each rank passed to `checkpoint(train_state=...)`, in their order.

        A checkpoint of one process has one value. The file is read at each use, with the errors of
        `train_state`.
        """
        return self._decode_train_states()

    def _decode_train_states(self) -> list[Any]:
        stored = self.read_train_state()
        path = f"{self.path}/{TRAIN_STATE_NAME}"
        try:
            return [decode(state) for state in split_ranks(stored)]
        except TrainStateTagError as error:  # written by a later version, not damaged
            raise TrainStateTagError(f"{path}: {error}") from error
        except TrainStateFormatError as error:
            raise DamagedError(f"{path}: damaged: {error}") from error

    def read_train_state(self) -> EncodedState:
        """Read and check the train state as it is stored, with the errors of `train_state`."""
        path = f"{self.path}/{TRAIN_STATE_NAME}"
        try:
            with reading(self.path):
                return read_train_state_file(self._backend, path, self.manifest)
        except (CheckpointError, StorageError) as error:
            if self._lock is None and was_recycled(self._backend, self.path, self.manifest):
                raise recycled(self.path) from error
            raise

    def unlocked(self, backend: Backend) -> Checkpoint:
        """Return the same checkpoint without its lock, to be read through another backend."""
        return Checkpoint(backend, self.path, self.manifest, self._part_directories)

    def open_slot(self, tables: Sequence[OwnerTable] = ()) -> SealedSlot:
        """Return the tensor files, to be read in a ``with`` block; opened when they are needed.

        Args:
            tables: Tables of other owners whose boxes of the model `SealedSlot.ranges` yields.
        """
        return SealedSlot(self._backend, self.path, self.parts, self.manifest, tables)

    def held(self) -> AbstractContextManager[None]:
        """Keep the checkpoint from being recycled within a block, even if it was opened unlocked.

        Raises:
            RecycledError: The checkpoint has been recycled already.
            StoreBusyError: A writer is replacing the checkpoint at this moment.
        """
        return held(self._backend, self.path, self.manifest, self._lock)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every byte and compare it with the digests taken when it was written.

        A range whose digest is wrong is read a second time in another way before it counts as
        damaged. This method may run beside a process that trains in the store: the checkpoint is
        not recycled meanwhile. Nothing is written; `offload.verify_and_mark` also marks a damaged
        checkpoint.

        Args:
            progress: Function that is called with the bytes checked so far and the total.

        Raises:
            RecycledError: The checkpoint was not opened by `open_checkpoint`, and has been
                recycled.
            StoreBusyError: The checkpoint was not opened by `open_checkpoint`, and a writer is
                replacing it.
        """
        with self.held():
            findings = Findings()
            try:
                # Read the manifest again, since it may have been damaged after opening.
                found = read_manifest(
                    self._backend, self.path, need_parts=False, even_quarantined=True
                )
                # Metrics are not compared: they may be replaced at any time.
                if replace(found, metrics={}).digest != replace(self.manifest, metrics={}).digest:
                    path = f"{self.path}/{MANIFEST_NAME}"
                    findings.problems.append(f"{path}: replaced since it was opened")
                self._decode_train_states()
            except (CheckpointError, StorageError) as error:
                findings.add(error)
            args = self._backend, self.path, self.manifest, self._part_directories
            report = verify_files(*args, findings, progress)
            return replace(report, quarantined=self.quarantined)

    def close(self) -> None:
        """Release the lock, so that a training process may recycle the checkpoint. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._resources.close()

    def __del__(self) -> None:
        # The lock and its backend refer to each other. Without this method the lock would be held
        # until Python next looks for cycles, and would keep a training process waiting meanwhile.
        lock = getattr(self, "_lock", None)
        if lock is None:
            return
        self._lock = None
        lock.release()
        warnings.warn(
            f"{self.path}: never closed; use `with` or call close(), because an open checkpoint "
            "cannot be recycled",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, path={self.path!r})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks, from what was read when the checkpoint was opened."""
        owners = len(self.manifest.owners)
        return html_table(
            f"Checkpoint of step {self.step}",
            {
                "path": self.path,
                "created": self.created[:16].replace("T", " "),
                "optimizer": self.optimizer,
                "state": "none: parameters only" if self.parameters_only else "",
                "parameters": count(self.manifest.layout.num_elements),
                "owners": f"{owners + 1}; the parameters are those of owner 0" if owners else "",
                "metrics": ", ".join(f"{name}={one:g}" for name, one in self.metrics.items()),
            },
        )

    def __dir__(self) -> list[str]:
        return names_to_offer(super().__dir__(), _NOT_OFFERED)
