"""Objects in a folder: a tier on another drive, or on a parallel file system.

An object is a file. It is written under a temporary name, synced, renamed, and then its directory
is synced. So a file that has an object's name is whole and durable.
"""

from __future__ import annotations

import errno
import os
import shlex
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from gds import ALIGNMENT, Buffer, PosixBackend, StorageError
from gds.contract import File, Stat
from gds.errors import message_of
from offload.errors import TierAccessError, TierError, TierNotFoundError
from offload.tiers.services.address import TierAddress
from offload.tiers.services.objects import TIER_NAME, Data, Objects

TEMPORARY: Final = ".new-"
"""Beginning of the names of files that are no objects yet."""

_COPY_BYTES = 8 << 20
"""Size in bytes of the memory that each transfer needs."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderObjects(Objects):
    """Objects in a folder.

    The folder is made by the first write. Folders above it are not made: if they are missing, then
    its drive is probably not mounted.

    Args:
        folder: Absolute path of the folder.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")
        self._backend = PosixBackend()
        self._free: list[Buffer] = []
        """Memory of transfers that have ended: new memory costs more time than a copy into it."""

    @property
    def url(self) -> str:
        """URL of the tier, for messages."""
        return TierAddress("file", "", self._folder or "/").url

    def put(self, name: str, data: Data) -> None:
        """Make an object; see `Objects.put`."""
        self.put_stream(name, iter([data]), len(data))

    def put_new(self, name: str, data: Data) -> bool:
        """Make an object unless one has the name; see `Objects.put_new`."""
        if self.size(name) is not None:
            return False
        self.put(name, data)
        return True

    def put_stream(self, name: str, blocks: Iterator[Data], nbytes: int) -> None:
        """Make an object from blocks; see `Objects.put_stream`."""
        path = f"{self._folder}/{name}"
        directory = os.path.dirname(path)
        with self._named(name, "write it"):
            self._make_dirs(directory)
            beside = f"{directory}/{TEMPORARY}{uuid.uuid4().hex}"
            try:
                with self._backend.create(beside, nbytes) as file:
                    self._write(file, blocks)
                    file.sync()
                self._backend.rename(beside, path)
            except BaseException:
                with suppress(StorageError):
                    self._backend.remove(beside)
                raise
            self._backend.sync_dir(directory)

    def _write(self, file: File, blocks: Iterator[Data]) -> None:
        offset = 0
        with self._memory() as buffer:
            for block in blocks:
                view = memoryview(block).cast("B")
                for start in range(0, len(view), _COPY_BYTES):
                    piece = view[start : start + _COPY_BYTES]
                    part = buffer.slice(offset % ALIGNMENT, len(piece))
                    part.memoryview()[:] = piece
                    file.write(part, offset).result()
                    offset += len(piece)
        if offset != file.size_bytes:
            raise TierError(
                errno.EIO, f"{offset} bytes were given for {file.size_bytes}", file.path
            )

    def _make_dirs(self, directory: str) -> None:
        """Make the folders of an object, from the tier's own folder downwards, durably."""
        if self._backend.stat(directory) is not None:
            return
        if directory != self._folder:
            self._make_dirs(os.path.dirname(directory))
        parent = os.path.dirname(directory) or "/"
        try:
            self._backend.make_dir(directory)
        except StorageError as error:
            if error.errno != errno.EEXIST:  # another thread has made it
                raise
        self._backend.sync_dir(parent)

    def get(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a small object; see `Objects.get`."""
        with self._named(name, "read it"), self._open(name) as file:
            if file.size_bytes > most_bytes:
                raise TierError(
                    errno.EFBIG,
                    f"{file.size_bytes} bytes, expected at most {most_bytes}: not written by this "
                    "library",
                    f"{self.url}/{name}",
                )
            return file.read_bytes(0, file.size_bytes)

    def get_range(self, name: str, start: int, nbytes: int, into: Buffer) -> memoryview:
        """Return bytes of an object; see `Objects.get_range`."""
        with self._named(name, "read it"), self._open(name) as file:
            nbytes = max(0, min(nbytes, file.size_bytes - start))
            buffer = into.slice(0, nbytes)
            if nbytes:
                file.read(buffer, start).result()
            return buffer.memoryview()

    def pieces(self, name: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield bytes of an object; see `Objects.pieces`."""
        with self._named(name, "read it"), self._open(name) as file, self._memory() as buffer:
            end = min(start + nbytes, file.size_bytes)
            while start < end:
                piece = buffer.slice(start % ALIGNMENT, min(_COPY_BYTES, end - start))
                file.read(piece, start).result()
                start += piece.nbytes
                yield piece.memoryview()

    @contextmanager
    def _memory(self) -> Iterator[Buffer]:
        """Yield memory for a block, which is used again unless the block has failed."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self._backend.allocate(_COPY_BYTES + ALIGNMENT)
        try:
            yield buffer  # after an error, a transfer may still use it
        except GeneratorExit:  # nobody asks for further pieces, and none is being read
            self._free.append(buffer)
            raise
        self._free.append(buffer)

    def _open(self, name: str) -> File:
        return self._backend.open(f"{self._folder}/{name}")

    def size(self, name: str) -> int | None:
        """Return the size of an object; see `Objects.size`."""
        with self._named(name, "look at it"):
            found = self._backend.stat(f"{self._folder}/{name}")
        return found.size_bytes if found is not None and found.kind == "file" else None

    def sizes_below(self, folder: str) -> dict[str, int]:
        """Return the objects below a folder; see `Objects.sizes_below`."""
        with self._named(folder, "list it"):
            return {
                path: stat.size_bytes
                for path, stat in self._below(folder)
                if stat.kind == "file" and not _is_temporary(path)
            }

    def _below(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Yield everything in and below a folder that is no folder, by its name in the tier."""
        for name in self._names(folder):
            path = f"{folder}/{name}" if folder else name
            stat = self._backend.stat(f"{self._folder}/{path}")
            if stat is not None and stat.kind == "directory":
                yield from self._below(path)
            elif stat is not None:
                yield path, stat

    def folders(self, folder: str) -> list[str]:
        """Return the folders in a folder; see `Objects.folders`."""
        with self._named(folder, "list it"):
            above = f"{self._folder}/{folder}" if folder else self._folder
            stats = {name: self._backend.stat(f"{above}/{name}") for name in self._names(folder)}
        return [name for name, stat in stats.items() if stat and stat.kind == "directory"]

    def _names(self, folder: str) -> list[str]:
        path = f"{self._folder}/{folder}" if folder else self._folder or "/"
        stat = self._backend.stat(path)
        if stat is None or stat.kind != "directory":
            self._require_mounted()
            return []
        return self._backend.list_dir(path)

    def _require_mounted(self) -> None:
        above = os.path.dirname(self._folder) or "/"
        if self._backend.stat(f"{above}/.") is None:
            raise TierNotFoundError(
                errno.ENOENT, f"{above} does not exist: is its drive mounted?", self.url
            )

    def drive(self) -> str:
        """Return the identity of the file system, which a mount point without a drive lacks."""
        with suppress(OSError):
            number = os.statvfs(self._place()).f_fsid
            return f"{number:x}" if number else ""
        return ""

    def _place(self) -> str:
        """Return the folder, or the one above it if it does not exist."""
        folder = self._folder or "/"
        return folder if os.path.isdir(folder) else os.path.dirname(folder)

    def require_place(self, store: str) -> None:
        """Check that the drive of a new tier is mounted; see `Objects.require_place`.

        An empty directory that is no mount point, on the drive of the system or of the store, looks
        like the mount point of a drive that is not there.
        """
        self._require_mounted()
        folder, place = self._folder or "/", self._place()
        try:
            is_bare = not os.listdir(place) and not os.path.ismount(place)
            drives = {os.stat(one).st_dev for one in ("/", store) if os.path.isdir(one)}
            is_elsewhere = os.stat(place).st_dev not in drives
        except OSError:  # which the first write names
            return
        if is_bare and not is_elsewhere:
            raise TierNotFoundError(
                errno.ENOENT,
                f"no tier here, and {place} is empty and no mount point: is its drive mounted? For "
                f"a new tier in it, run: mkdir -p {shlex.quote(folder)} && touch "
                f"{shlex.quote(f'{folder}/{TIER_NAME}')}",
                self.url,
            )

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects, and folders that this leaves empty; see `Objects.delete`."""
        folders = set[str]()
        with self._named("", "remove objects"):
            for name in names:
                try:
                    self._backend.remove(f"{self._folder}/{name}")
                except StorageError as error:
                    if error.errno != errno.ENOENT:
                        raise
                folders.add(os.path.dirname(name))
            for folder in sorted(folders, key=len, reverse=True):
                self._remove_empty(folder)

    def _remove_empty(self, folder: str) -> None:
        while folder:
            path = f"{self._folder}/{folder}"
            if self._backend.stat(path) is not None:
                for name in self._backend.list_dir(path):
                    if name.startswith(TEMPORARY):  # of a process that died
                        self._backend.remove(f"{path}/{name}")
                if self._backend.list_dir(path):
                    return
                self._backend.remove_dir(path)
                self._backend.sync_dir(os.path.dirname(path))
            folder = os.path.dirname(folder)

    def drop_unfinished(self, folder: str) -> None:
        """Remove temporary files; see `Objects.drop_unfinished`."""
        with self._named(folder, "remove temporary files"):
            for path, _ in self._below(folder):
                if _is_temporary(path):
                    self._backend.remove(f"{self._folder}/{path}")

    def close(self) -> None:
        """Close the backend. Idempotent."""
        self._backend.close()

    @contextmanager
    def _named(self, name: str, doing: str) -> Iterator[None]:
        """Turn errors of this folder's file system into those of a tier."""
        url = f"{self.url}{'/' if name else ''}{name}"
        try:
            yield
        except StorageError as error:
            if not f"{error.filename}/".startswith(f"{self._folder}/"):
                raise  # of an iterator of blocks, which reads elsewhere
            if error.errno == errno.ENOENT:
                self._require_mounted()
                raise TierNotFoundError(errno.ENOENT, "there is no such object", url) from error
            reason = f"cannot {doing}: {message_of(error)}"
            if error.errno in _FORBIDDEN:
                raise TierAccessError(error.errno or 0, reason, url) from error
            if error.errno in _FULL:
                reason = (
                    f"{reason}. Free space there, and repeat this: it goes on from where it was"
                )
            raise TierError(error.errno or errno.EIO, reason, url) from error


def _is_temporary(path: str) -> bool:
    return os.path.basename(path).startswith(TEMPORARY)
