"""Pins: names that a user gives to checkpoints, which keep them from being recycled.

A pin is a small file ``pins/<name>`` in the store. The file is replaced atomically. So while a
pin moves from one checkpoint to another, its name exists at every moment. A pin is durable when the
call that made it returns.

A pin cannot race with recycling. A process that makes a pin holds a shared lock on the checkpoint,
or is the training process itself. The training process needs an exclusive lock to withdraw a
checkpoint, and it looks for pins again when it has that lock. So the training process either sees a
new pin in time, or the pin is refused. It syncs the pins after it has read them, before it decides.
Without this, power loss could undo the move of a pin by a process that has not synced it yet.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property

from gds import Backend, StorageError
from gds.contract import Stat
from offload.errors import CheckpointNotFoundError, PinError, writing
from offload.format import document
from offload.format.manifest import Manifest
from offload.format.names import PINS_NAME, step_of
from offload.format.unreadable import is_of_content, unreadable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STORE_ID = re.compile(r"[0-9a-f]{32}")
_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A name, and the checkpoint that the name keeps."""

    name: str
    """Name of the pin: at most 64 letters, digits, ``.``, ``_`` and ``-``. The first is a letter
    or a digit."""

    checkpoint: str
    """Name of the checkpoint's directory in the store."""

    store_id: str
    """Identifier of the checkpoint's store, 32 hexadecimal digits."""

    generation: int
    """Generation of the checkpoint. With `store_id` it identifies the checkpoint, even if another
    one gets the name of its directory."""

    def refers_to(self, path: str, manifest: Manifest) -> bool:
        """Return whether this is a pin of the checkpoint at `path` that has this manifest."""
        return (self.checkpoint, self.store_id, self.generation) == _checkpoint(path, manifest)


@dataclass(frozen=True)
class FoundPins:
    """The pins of a store, as they were read."""

    pins: tuple[Pin, ...] = ()
    """Pins that could be read, in the order of their names."""

    unreadable: tuple[str, ...] = ()
    """One sentence for each pin that cannot be read. It is unknown which checkpoint such a pin
    keeps."""

    failures: tuple[StorageError, ...] = ()
    """Errors of reading that say nothing about a pin's content, so that the pin may be intact."""

    @cached_property
    def _names(self) -> dict[tuple[str, str, int], tuple[str, ...]]:
        """Names of the pins of each checkpoint; a store may have hundreds of both."""
        found: dict[tuple[str, str, int], tuple[str, ...]] = {}
        for pin in self.pins:
            key = (pin.checkpoint, pin.store_id, pin.generation)
            found[key] = (*found.get(key, ()), pin.name)
        return found

    def names_of(self, path: str, manifest: Manifest) -> tuple[str, ...]:
        """Return the names of a checkpoint's pins."""
        return self._names.get(_checkpoint(path, manifest), ())

    def names_at(self, path: str) -> tuple[str, ...]:
        """Return the names of all pins on a directory, whatever checkpoint it holds now."""
        return tuple(pin.name for pin in self.pins if pin.checkpoint == os.path.basename(path))

    def dangling(self, checkpoints: Sequence[tuple[str, Manifest]]) -> tuple[Pin, ...]:
        """Return the pins that belong to none of these checkpoints."""
        known = {_checkpoint(*found) for found in checkpoints}
        lost = {name for key, names in self._names.items() if key not in known for name in names}
        return tuple(pin for pin in self.pins if pin.name in lost)


def _checkpoint(path: str, manifest: Manifest) -> tuple[str, str, int]:
    return os.path.basename(path), manifest.store_id, manifest.generation


def check_pin_name(name: object) -> str:
    """Return the name if a pin may have it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PinError(
            f"{name!r:.80} cannot be the name of a pin: use 1 to 64 letters, digits, '.', '_' and "
            "'-', beginning with a letter or a digit"
        )
    return name


def read_pins(backend: Backend, store: str) -> FoundPins:
    """Read the pins of a store. Entries of ``pins`` whose name no pin can have are ignored."""
    return PinReader(backend, store).read()


class PinReader:
    """Reads the pins of a store again and again, and opens only those that have changed.

    Not thread-safe, except that two calls at the same time both read correctly.
    """

    def __init__(self, backend: Backend, store: str) -> None:
        self._backend = backend
        self._directory = f"{store}/{PINS_NAME}"
        self._store = store
        self._last: tuple[Stat, FoundPins] | None = None
        """The directory of pins as it was when it was last read, and what was found in it."""
        self._read: dict[str, tuple[Stat, Pin]] = {}
        """Pins by name, each with its file as it was when it was read."""

    def read(self, *, each: bool = True) -> FoundPins:
        """Return the pins, each looked at anew; or if not `each`, those found last if none changed.

        Every call that makes, moves or removes a pin changes a name in the directory.
        """
        stat = self._backend.stat(self._directory)
        if stat is None:
            return FoundPins()
        if stat.kind != "directory":
            return FoundPins(
                (), (f"{self._directory}: a {stat.kind}, expected the directory of pins",)
            )
        last = self._last
        if not each and last is not None and stat.changed_ns and stat == last[0]:
            return last[1]
        found = self._read_all()
        self._last = None if found.unreadable else (stat, found)
        return found

    def _read_all(self) -> FoundPins:
        pins, sentences, failures = [], [], []
        names = self._backend.list_dir(self._directory)
        self._read = {name: self._read[name] for name in names if name in self._read}
        for name in names:
            if not _NAME.fullmatch(name):
                continue
            path = f"{self._directory}/{name}"
            try:
                pin = self._read_one(path, name)
            except (StorageError, ValueError, TypeError, KeyError, RecursionError) as error:
                if isinstance(error, StorageError) and not is_of_content(error):
                    failures.append(error)
                    advice = unreadable(error).strerror
                    sentences.append(
                        f"{path}: {advice}. Until then it is not known which checkpoint it keeps"
                    )
                    continue
                sentences.append(
                    f"{path}: cannot be read as a pin ({error}); pin the checkpoint again "
                    f"with `offload pin CHECKPOINT {name}`, or remove it with `offload unpin "
                    f"{self._store} {name}`"
                )
            else:
                if pin is not None:
                    pins.append(pin)
        return FoundPins(tuple(pins), tuple(sentences), tuple(failures))

    def _read_one(self, path: str, name: str) -> Pin | None:
        """Return a pin; None if it has just been removed."""
        stat = self._backend.stat(path)
        if stat is None:
            return None
        known = self._read.get(name)
        if known is not None and stat.changed_ns and stat == known[0]:
            return known[1]
        pin = _read_pin(self._backend, path, name, stat)
        if pin is not None:
            self._read[name] = (stat, pin)
        return pin


def write_pin(
    backend: Backend,
    store: str,
    pin: Pin,
    guard: AbstractContextManager[None] | None = None,
) -> None:
    """Make or move a pin; durable on return.

    The caller must keep the pinned checkpoint from being recycled meanwhile. `guard` is a context
    manager for the last steps: if one of them fails, it is unknown whether the new pin exists.
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
            if error.errno != errno.EEXIST:  # another process has just made it
                raise
    # The name is hidden until the file is complete. It is unique, because another process may be
    # writing the same pin.
    new = f"{directory}/.{pin.name}.{os.getpid()}-{threading.get_ident()}.new"
    if backend.stat(new) is not None:
        backend.remove(new)
    body = {
        "checkpoint": pin.checkpoint,
        "store_id": pin.store_id,
        "generation": pin.generation,
    }
    with backend.create(new, _BYTES) as file:
        try:
            file.write_bytes(document.padded(document.signed(body), _BYTES), 0)
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


def remove_pin(
    backend: Backend, store: str, name: str, guard: AbstractContextManager[None] | None = None
) -> None:
    """Remove a pin, even one that cannot be read; durable on return. See `write_pin`."""
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
    """Make the current state of the pins durable, whichever process made, moved or removed them."""
    if backend.stat(f"{store}/{PINS_NAME}") is not None:
        backend.sync_dir(f"{store}/{PINS_NAME}")


def drop_unfinished(backend: Backend, store: str) -> None:
    """Remove the files of processes that died while they made a pin; none may make one now."""
    directory = f"{store}/{PINS_NAME}"
    if backend.stat(directory) is not None:
        for name in backend.list_dir(directory):
            if name.startswith(".") and name.endswith(".new"):
                backend.remove(f"{directory}/{name}")


def _read_pin(backend: Backend, path: str, name: str, stat: Stat) -> Pin | None:
    """Read the file of a pin; return None if it has just been removed."""
    if stat.kind != "file" or stat.size_bytes != _BYTES:
        raise ValueError(f"a {stat.kind} of {stat.size_bytes} bytes, expected a file of {_BYTES}")
    try:
        file = backend.open(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    with file:
        body = document.read(file.read_bytes(0, _BYTES), "a pin")
    generation = body["generation"]
    if type(generation) is not int or not 0 <= generation < 1 << 63:
        raise ValueError(f"generation {generation!r:.30}")
    checkpoint, store_id = body["checkpoint"], body["store_id"]
    if not isinstance(checkpoint, str) or step_of(checkpoint) is None:
        raise ValueError(f"checkpoint {checkpoint!r:.80}")
    if not isinstance(store_id, str) or not _STORE_ID.fullmatch(store_id):
        raise ValueError(f"store_id {store_id!r:.80}")
    return Pin(name=name, checkpoint=checkpoint, store_id=store_id, generation=generation)
