"""Frames of the connection: a fixed header, then bytes whose length the receiver has agreed to.

A header is 32 bytes, little-endian: magic, kind, number, index, length, and the xxh3_64 of the
content. Every length is compared with what the receiver expects before a byte of content is read,
so a hostile peer can make it allocate nothing. Documents are strict JSON of a bounded size. As in
NBD and the Redis protocol, each side knows from the order of calls which frames may come.

Nothing here is encrypted, and a digest finds damage, not forgery.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

import xxhash

from offload.errors import NearError
from offload.format.strict_json import parse_json

_MAGIC: Final = b"OFN1"
"""Magic, with the version of the protocol. The two sides must be of the same version."""

_HEADER: Final = struct.Struct("<4sB3xIIQQ")

MAX_DOCUMENT_BYTES: Final = 64 << 20
"""Largest document: that of a model with some hundred thousand parameters."""

MAX_VALUES: Final = 2_000_000

_PIECE_BYTES: Final = 1 << 20

_MAX_PARTS: Final = 512
"""Most buffers of one system call; the kernel takes up to 1,024."""

Bytes: TypeAlias = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    """Document: what the client trains, and in which store."""

    CALL = 2
    """Document: a call of the client, with its number."""

    RESULT = 3
    """Document: what the call of this number returns."""

    ERROR = 4
    """Document: the error that the call of this number raises."""

    PASS = 5
    """Document: the chunks of a step that begins, in their order."""

    GRADIENT = 6
    """Gradients of the chunk with this index."""

    PARAMETER = 7
    """Parameters of the chunk with this index: edited ones, or new ones."""

    TENSOR = 8
    """Values of the tensor with this index that no step changes: a buffer, or frozen."""

    BLOB = 9
    """Bytes that belong to a call or its result, such as a train state."""

    END = 10
    """No more frames of the present call follow."""

    ALIVE = 11
    """The sender is at work on a call."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Header of a frame whose content has not been read yet."""

    kind: Kind
    number: int
    index: int
    nbytes: int
    digest: int


class Wire:
    """One end of a connection. One thread may send while another one receives.

    Args:
        connection: Connected socket, which `close` closes.
        peer: Name of the other end, for messages.
        timeout_s: Seconds without a byte after which the other end counts as lost.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self._socket = connection
        self.peer = peer
        self._sending = threading.Lock()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.timeout_s = timeout_s
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that is switched off says nothing, and `wait` waits for ever.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def timeout_s(self) -> float:
        """Seconds without a byte after which the other end counts as lost."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = seconds
        self._socket.settimeout(seconds)

    def send(self, kind: Kind, number: int, parts: Sequence[Bytes] = (), *, index: int = 0) -> int:
        """Send a frame; return the digest of its content.

        Args:
            kind: Kind of the frame.
            number: Number of the call, or of the step.
            parts: Content, in pieces.
            index: Index of the chunk or tensor.

        Raises:
            NearError: The other end is lost.
        """
        digest = digest_of(parts)
        nbytes = sum(len(part) for part in parts)
        header = _HEADER.pack(_MAGIC, kind, number, index, nbytes, digest)
        with self._sending, self._naming("send to"):
            self._send_all([memoryview(header), *(memoryview(part) for part in parts)])
        return digest

    def send_document(self, kind: Kind, number: int, document: Mapping[str, Any]) -> None:
        """Send a frame whose content is a document.

        Raises:
            NearError: The other end is lost, or the document is larger than one may be.
        """
        text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > MAX_DOCUMENT_BYTES:
            raise NearError(
                f"a message to {self.peer} has {len(text)} bytes, at most {MAX_DOCUMENT_BYTES} are "
                "possible: the model has too many tensors"
            )
        self.send(kind, number, [text])

    def wait(self) -> None:
        """Wait for the beginning of a frame, for as long as it takes.

        Raises:
            NearError: The other end is lost.
        """
        self._socket.settimeout(None)
        try:
            with self._naming("hear from"):
                if not self._socket.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError("it has closed the connection")
        finally:
            self._socket.settimeout(self._timeout_s)

    def receive(self, expected: Collection[Kind], number: int | None = None) -> Frame:
        """Return the header of the next frame, whose content must be read next.

        Args:
            expected: Kinds that may come now, besides signs of life, which are passed over.
            number: Number that the frame must have; None for any.

        Raises:
            NearError: The other end is lost, or has sent something else.
        """
        header = bytearray(_HEADER.size)
        while True:
            self._fill([memoryview(header)])
            magic, code, found, index, nbytes, digest = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise self.not_ours(f"{bytes(magic)!r} instead of {_MAGIC!r}")
            if code == Kind.ALIVE and nbytes == 0:
                continue
            if code not in expected:
                raise self.not_ours(f"a frame of kind {code} instead of {sorted(expected)}")
            if number is not None and found != number:
                raise self.not_ours(f"a frame of call {found} instead of {number}")
            return Frame(Kind(code), found, index, nbytes, digest)

    def read_into(self, frame: Frame, parts: Sequence[memoryview]) -> None:
        """Read the content of a frame into memory that must have its length exactly.

        Raises:
            NearError: The other end is lost, or the length or the digest is another.
        """
        nbytes = sum(len(part) for part in parts)
        if frame.nbytes != nbytes:
            raise self.not_ours(f"{frame.nbytes} bytes of {frame.kind.name}, expected {nbytes}")
        self._fill(parts)
        self._require_whole(frame, parts)

    def _require_whole(self, frame: Frame, parts: Sequence[Bytes]) -> None:
        if digest_of(parts) != frame.digest:
            raise NearError(f"data from {self.peer} arrived changed: restore() continues")

    def read(self, frame: Frame, most_bytes: int) -> bytes:
        """Return the content of a frame of at most some bytes.

        Raises:
            NearError: The other end is lost, or the content is longer, or was changed.
        """
        if frame.nbytes > most_bytes:
            raise self.not_ours(f"{frame.nbytes} bytes, at most {most_bytes} were expected")
        content = bytearray()
        while len(content) < frame.nbytes:  # memory is taken for what arrives, not for what may
            piece = bytearray(min(frame.nbytes - len(content), _PIECE_BYTES))
            self._fill([memoryview(piece)])
            content += piece
        self._require_whole(frame, [content])
        return bytes(content)

    def skip(self, frame: Frame) -> None:
        """Read the content of a frame, and forget it."""
        left, scratch = frame.nbytes, bytearray(min(frame.nbytes, _PIECE_BYTES))
        while left:
            part = memoryview(scratch)[: min(left, len(scratch))]
            self._fill([part])
            left -= len(part)

    def read_document(self, frame: Frame, most_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
        """Return the content of a frame of at most some bytes as a document.

        Raises:
            NearError: The other end is lost, or the content is not a document.
        """
        try:
            found = parse_json(self.read(frame, most_bytes), max_values=MAX_VALUES)
        except ValueError as error:
            raise self.not_ours(str(error)) from None
        if not isinstance(found, dict):
            raise self.not_ours("a document that is no object")
        return found

    def alive(self, number: int) -> None:
        """Give a sign of life, unless another thread is sending, which is one as well."""
        if self._sending.acquire(blocking=False):
            try:
                header = _HEADER.pack(_MAGIC, Kind.ALIVE, number, 0, 0, digest_of(()))
                with self._naming("send to"):
                    self._send_all([memoryview(header)])
            finally:
                self._sending.release()

    def is_gone(self) -> bool:
        """Return whether the other end has closed the connection, or is dead."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True  # closed here

    def shut(self) -> None:
        """End the connection, so that a thread that waits for it goes on. Never raises."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.shut()
        self._socket.close()

    def _send_all(self, views: list[memoryview]) -> None:
        views = [view.cast("B") for view in views if len(view)]
        while views:
            sent = self._socket.sendmsg(views[:_MAX_PARTS])
            self.bytes_sent += sent
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _fill(self, parts: Sequence[memoryview]) -> None:
        views = [part.cast("B") for part in parts if len(part)]
        with self._naming("hear from"):
            while views:
                count = self._socket.recvmsg_into(views[:_MAX_PARTS])[0]
                if not count:
                    raise ConnectionResetError("it has closed the connection")
                self.bytes_received += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise NearError(
                f"could not {what} {self.peer} for {self.timeout_s:g} seconds: look whether it runs"
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise NearError(f"could not {what} {self.peer}: {reason}") from error

    def not_ours(self, what: str) -> NearError:
        """Return the error that says what the other end has sent, which nobody sends."""
        return NearError(
            f"{self.peer} sent {what}: it is not an offload server or client of this version"
        )


def digest_of(parts: Sequence[Bytes]) -> int:
    """Return the xxh3_64 of some bytes, which may be in pieces."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
