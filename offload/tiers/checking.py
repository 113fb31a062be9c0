"""Comparison of objects in a tier with the digests of their checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gds import Buffer
from offload.errors import DamagedError, TierNotFoundError
from offload.format.digests import DigestContext, LeafStream
from offload.format.manifest import Manifest
from offload.tiers.contents import Chunk, ModelObject, ModelRun
from offload.tiers.services.objects import Data, Objects
from offload.tiers.source import whole_digest

Advance = Callable[[int], None]
"""Function that is called with a number of bytes that have just been moved or checked."""


def nothing(_: int) -> None:
    """Report no progress."""


class Fetcher:
    """Reads ranges of a copy, and compares each with its digest.

    A range with another digest than it was sealed with is asked for once more: what differs may be
    the answer, and not the object. If it differs again, or is missing, that is a `DamagedError`.
    """

    def __init__(self, objects: Objects, folder: str, manifest: Manifest) -> None:
        self._objects = objects
        self._folder = folder
        self._context = DigestContext(manifest.store_id, manifest.generation)

    def run(self, name: str, run: ModelRun, into: Buffer) -> Data:
        """Return the bytes of consecutive chunks, in the memory that is given."""

        def digests(data: memoryview) -> str:
            found, start = [], 0
            for chunk in run.chunks:
                piece = data[start : start + chunk.nbytes]
                found.append(self._context.digest(chunk.array, chunk.index, piece))
                start += chunk.nbytes
            return _joined(found)

        expected = _joined([chunk.digest for chunk in run.chunks])
        return self.range(name, run.offset, run.nbytes, digests, expected, into)

    def range(
        self,
        name: str,
        start: int,
        nbytes: int,
        digest: Callable[[memoryview], str],
        expected: str,
        into: Buffer | None = None,
    ) -> Data:
        """Return bytes of an object whose digest is known."""
        if not nbytes:
            return b""
        found = ""
        for _ in range(2):
            with self._missing_named(name):
                data = self._read(f"{self._folder}/{name}", start, nbytes, into)
            found = digest(memoryview(data)) if len(data) == nbytes else f"{len(data)} bytes"
            if found == expected:
                return data
        raise self._damaged(name, start, nbytes, found, expected)

    def _read(self, path: str, start: int, nbytes: int, into: Buffer | None) -> Data:
        if into is not None:
            return self._objects.get_range(path, start, nbytes, into)
        return b"".join(bytes(piece) for piece in self._objects.pieces(path, start, nbytes))

    def whole(self, name: str, nbytes: int, expected: str) -> bytes:
        """Return a small object whose digest is in the marker."""
        return bytes(self.range(name, 0, nbytes, whole_digest, expected))

    def check(self, name: str, start: int, chunks: Sequence[Chunk], advance: Advance) -> None:
        """Read consecutive chunks of an object, and compare each; nothing of them is kept."""
        for chunk, found in zip(chunks, self._digests(name, start, chunks), strict=True):
            if found != chunk.digest:
                (again,) = self._digests(name, start, [chunk])
                if again != chunk.digest:
                    raise self._damaged(name, start, chunk.nbytes, again, chunk.digest)
            advance(chunk.nbytes)
            start += chunk.nbytes

    def _digests(self, name: str, start: int, chunks: Sequence[Chunk]) -> Iterator[str]:
        """Yield the digest of each chunk as it is in the tier; or how many bytes are left of it."""
        nbytes = sum(chunk.nbytes for chunk in chunks)
        leaves = LeafStream()
        pieces = self._objects.pieces(f"{self._folder}/{name}", start, nbytes)
        piece = memoryview(b"")
        for chunk in chunks:
            missing = chunk.nbytes
            while missing:
                if not piece:
                    with self._missing_named(name):
                        piece = next(pieces, piece)
                    if not piece:
                        break
                leaves.update(piece[:missing])
                missing, piece = missing - len(piece[:missing]), piece[missing:]
            digest = self._context.digest_leaves(chunk.array, chunk.index, leaves.finish())
            yield f"{chunk.nbytes - missing} bytes" if missing else digest

    @contextmanager
    def _missing_named(self, name: str) -> Iterator[None]:
        """Raise `DamagedError` if an object that a block reads is missing."""
        try:
            yield
        except TierNotFoundError as error:
            if self._objects.size(f"{self._folder}/{name}") is None:
                raise DamagedError(f"{self._place(name)}: the object is missing") from error
            raise

    def _damaged(
        self, name: str, start: int, nbytes: int, found: str, expected: str
    ) -> DamagedError:
        return DamagedError(
            f"{self._place(name)}: bytes {start} to {start + nbytes} are not those that were sent: "
            f"their digest is {found}, expected {expected}"
        )

    def _place(self, name: str) -> str:
        return f"{self._objects.url}/{self._folder}/{name}"


def _joined(digests: Sequence[str]) -> str:
    """Return one digest that stands for several; that of a single one stays."""
    return digests[0] if len(digests) == 1 else whole_digest(",".join(digests).encode())


def check_model(fetcher: Fetcher, model: ModelObject, advance: Advance) -> None:
    """Read an object of the model, and compare every piece."""
    encoded = bytes(model.header.encoded)
    fetcher.range(model.name, 0, len(encoded), whole_digest, whole_digest(encoded))
    advance(len(encoded))
    for run in model.runs():
        fetcher.check(model.name, run.offset, run.chunks, advance)


def check_whole(
    fetcher: Fetcher, sizes: Mapping[str, int], digests: Mapping[str, str], advance: Advance
) -> None:
    """Read the small objects and compare them."""
    for name, digest in digests.items():
        fetcher.whole(name, sizes[name], digest)
        advance(sizes[name])
