"""Pins: names that a user gives to checkpoints, which keep them from being recycled.

A pin is a small file ``pins/<name>`` in the store. It is replaced atomically, so that a name can be
moved from one checkpoint to another with no instant without it, and is durable when the call that
made it returns.

Against the training process: whoever pins holds a shared lock on the checkpoint, or is the training
process itself. That one looks for pins again when it has the exclusive lock without which no
checkpoint is withdrawn. So a pin either comes in time or is refused. What it sees then it makes
durable first: a name may just have been moved, by a process that has died since.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from gds import Backend, StorageError
from offload.errors import CheckpointNotFoundError, PinError
from offload.format import document
from offload.format.manifest import Manifest
from offload.format.names import PINS_NAME, step_of
from offload.format.unreadable import is_of_content, unreadable
from offload.format.unwritable import writing

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STORE_ID = re.compile(r"[0-9a-f]{32}")
_FORMAT = 1
_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One name, and the checkpoint that has it."""

    name: str
    """Letters, digits, ``.``, ``_`` and ``-``; at most 64."""

    checkpoint: str
    """Name of its directory in the store."""

    store_id: str
    generation: int
    """With `store_id`: which checkpoint that was, should another one get its directory's name."""

    def means(self, path: str, manifest: Manifest) -> bool:
        """Return whether it is a pin of this checkpoint."""
        return (self.checkpoint, self.store_id, self.generation) == (
            os.path.basename(path),
            manifest.store_id,
            manifest.generation,
        )


@dataclass(frozen=True, slots=True)
class FoundPins:
    """The pins of a store."""

    pins: tuple[Pin, ...] = ()
    """By name."""

    unreadable: tuple[str, ...] = ()
    """A sentence about each that cannot be read: nobody knows what it keeps."""

    failures: tuple[StorageError, ...] = ()
    """Of those, the errors that say nothing about what the pin holds: it may be whole."""

    def of(self, path: str, manifest: Manifest) -> tuple[str, ...]:
        """Return the names of a checkpoint's pins."""
        return tuple(pin.name for pin in self.pins if pin.means(path, manifest))

    def at(self, path: str) -> tuple[str, ...]:
        """Return the names of all pins on a directory, whatever is in it now."""
        return tuple(pin.name for pin in self.pins if pin.checkpoint == os.path.basename(path))

    def dangling(self, checkpoints: Sequence[tuple[str, Manifest]]) -> tuple[Pin, ...]:
        """Return the pins of none of these checkpoints, each given by path and manifest."""
        return tuple(
            pin for pin in self.pins if not any(pin.means(*found) for found in checkpoints)
        )


def check_pin_name(name: object) -> str:
    """Return the name of a pin if it can be one.

    Raises:
        PinError: It cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PinError(
            f"{name!r:.80} cannot be the name of a pin: use 1 to 64 letters, digits, '.', '_' and "
            "'-', beginning with a letter or a digit"
        )
    return name


def read_pins(backend: Backend, store: str) -> FoundPins:
    """Read the pins of a store. What is in ``pins`` under a name that no pin has is ignored.

    Raises:
        gds.StorageError: The directory cannot be read.
    """
    directory = f"{store}/{PINS_NAME}"
    stat = backend.stat(directory)
    if stat is None:
        return FoundPins()
    if stat.kind != "directory":
        return FoundPins((), (f"{directory}: a {stat.kind}, expected the directory of pins",))
    pins, sentences, failures = [], [], []
    for name in backend.list_dir(directory):
        if not _NAME.fullmatch(name):
            continue
        try:
            pin = _read_pin(backend, f"{directory}/{name}", name)
        except (StorageError, ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, StorageError) and not is_of_content(error):
                failures.append(error)
                advice = unreadable(error).strerror
                sentences.append(f"{directory}/{name}: {advice}. It may keep any checkpoint")
                continue
            sentences.append(
                f"{directory}/{name}: cannot be read as a pin ({error}); make it anew with "
                f"`offload pin CHECKPOINT {name}`, or remove it with `offload unpin {store} {name}`"
            )
        else:
            if pin is not None:
                pins.append(pin)
    return FoundPins(tuple(pins), tuple(sentences), tuple(failures))


def write_pin(
    backend: Backend,
    store: str,
    pin: Pin,
    guard: AbstractContextManager[None] | None = None,
) -> None:
    """Make a pin, or move it; durable on return. The caller keeps its checkpoint from going.

    Args:
        backend: Where the store is.
        store: Its directory.
        pin: What to write.
        guard: Entered around what leaves it unknown, should it fail, whether there is a new pin.

    Raises:
        PinError: It is called what no pin can be.
        UnwritableError: This user may not write to the store.
        gds.StorageError: No space, in which case nothing has changed; or it could not be made
            durable.
    """
    check_pin_name(pin.name)
    with writing(store):
        _write_pin(backend, store, pin, guard or nullcontext())


def _write_pin(backend: Backend, store: str, pin: Pin, guard: AbstractContextManager[None]) -> None:
    directory = f"{store}/{PINS_NAME}"
    if backend.stat(directory) is None:
        try:
            backend.make_dir(directory)
        except StorageError as error:
            if error.errno != errno.EEXIST:  # somebody else was quicker
                raise
    # Hidden until it is whole; a name of its own, for another process may be at it as well.
    new = f"{directory}/.{pin.name}.{os.getpid()}-{threading.get_ident()}.new"
    if backend.stat(new) is not None:
        backend.remove(new)
    body = {
        "checkpoint": pin.checkpoint,
        "store_id": pin.store_id,
        "generation": pin.generation,
    }
    file = backend.create(new, _BYTES)
    try:
        file.write_bytes(document.padded(document.signed(_FORMAT, body), _BYTES), 0)
        with guard:
            file.sync()
            backend.rename(new, f"{directory}/{pin.name}")
            backend.sync_dir(directory)
            backend.sync_dir(store)
    except BaseException:
        with suppress(StorageError):
            if backend.stat(new) is not None:
                backend.remove(new)
        raise
    finally:
        file.close()


def remove_pin(
    backend: Backend, store: str, name: str, guard: AbstractContextManager[None] | None = None
) -> None:
    """Remove a pin, also one that cannot be read; durable on return. Arguments as for `write_pin`.

    Raises:
        CheckpointNotFoundError: There is none of this name; says which there are.
        UnwritableError: This user may not write to the store.
        gds.StorageError: It could not be removed, or the removal not be made durable.
    """
    check_pin_name(name)
    path = f"{store}/{PINS_NAME}/{name}"
    if backend.stat(path) is None:
        names = ", ".join(pin.name for pin in read_pins(backend, store).pins) or "none"
        raise CheckpointNotFoundError(
            errno.ENOENT, f"there is no pin {name!r} in this store (it has: {names})", store
        )
    with writing(store), guard or nullcontext():
        backend.remove(path)
        backend.sync_dir(f"{store}/{PINS_NAME}")


def sync_pins(backend: Backend, store: str) -> None:
    """Make the pins that can be seen durable, whoever has made, moved or removed them."""
    if backend.stat(f"{store}/{PINS_NAME}") is not None:
        backend.sync_dir(f"{store}/{PINS_NAME}")


def drop_unfinished(backend: Backend, store: str) -> None:
    """Remove what processes that died while they pinned have left; none must be at it now."""
    directory = f"{store}/{PINS_NAME}"
    if backend.stat(directory) is not None:
        for name in backend.list_dir(directory):
            if name.startswith(".") and name.endswith(".new"):
                backend.remove(f"{directory}/{name}")


def _read_pin(backend: Backend, path: str, name: str) -> Pin | None:
    """Return a pin; None if it has just been removed."""
    stat = backend.stat(path)
    if stat is None:
        return None
    if stat.kind != "file" or stat.size_bytes != _BYTES:
        raise ValueError(f"a {stat.kind} of {stat.size_bytes} bytes, expected a file of {_BYTES}")
    try:
        file = backend.open(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    try:
        _, body = document.read(file.read_bytes(0, _BYTES), "a pin", (_FORMAT,))
    finally:
        file.close()
    generation = body["generation"]
    if type(generation) is not int or not 0 <= generation < 1 << 63:
        raise ValueError(f"generation {generation!r:.30}")
    checkpoint, store_id = body["checkpoint"], body["store_id"]
    if not isinstance(checkpoint, str) or step_of(checkpoint) is None:
        raise ValueError(f"checkpoint {checkpoint!r:.80}")
    if not isinstance(store_id, str) or not _STORE_ID.fullmatch(store_id):
        raise ValueError(f"store_id {store_id!r:.80}")
    return Pin(name=name, checkpoint=checkpoint, store_id=store_id, generation=generation)
