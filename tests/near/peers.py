"""A client that sends whatever a test likes, and a conversation of a real one to begin with."""

from __future__ import annotations

import copy
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import xxhash

from tests.limits import HANG_S
from tests.near.proxy import Proxy, read
from tests.near.servers import Server
from tests.near.training import make_model, make_optimizer, train

HELLO, CALL, RESULT, ERROR, PASS, GRADIENT, PARAMETER, TENSOR, BLOB, END, ALIVE = range(1, 12)

Change = Callable[[dict[str, Any]], object]
"""Function that changes a document in place, or returns another one."""


class Recorded:
    """What a real client has sent: the terms of its training, its calls, and every frame."""

    def __init__(self, server: Server) -> None:
        proxy = Proxy(server.socket)
        model = make_model()
        with make_optimizer(model, proxy.url("recorded")) as optimizer:
            train(model, optimizer, 1, 1)
            optimizer.checkpoint({"step": 1}, metrics={"loss": 1.0}).result()
            optimizer.pin("best")
            optimizer.restore()
            train(model, optimizer, 2, 2)
            optimizer.load_state_dict(optimizer.full_state_dict())
        proxy.close()
        self.frames = [frame for way, frame in proxy.frames if way == "up"]
        hellos = [frame for frame in self.frames if frame[4] == HELLO]
        self.terms = json.loads(hellos[1][32:])
        calls = [json.loads(frame[32:]) for frame in self.frames if frame[4] == CALL]
        self.calls = {call["call"]: call for call in calls}
        self.gradients = [f for f in self.frames if f[4] == GRADIENT]
        self.blob = next(frame[32:] for frame in self.frames if frame[4] == BLOB)


class Peer:
    """A connection to a server."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HANG_S)
        self.socket.connect(str(server.socket))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, kind: int, number: int, content: bytes = b"", **header: Any) -> None:
        """Send a frame; the server may have closed the connection."""
        try:
            self.socket.sendall(frame(kind, number, content, **header) + content)
        except (BrokenPipeError, ConnectionResetError):
            return

    def document(self, kind: int, number: int, document: object) -> None:
        """Send a frame with a document."""
        self.send(kind, number, json.dumps(document).encode())

    def answer(self) -> tuple[int, bytes]:
        """Return kind and content of the next frame but signs of life; (0, b"") at the end."""
        try:
            while header := read(self.socket, 32):
                content = read(self.socket, struct.unpack_from("<Q", header, 16)[0])
                if header[4] != ALIVE:
                    return header[4], content
        except ConnectionResetError:
            pass
        return 0, b""

    def error(self) -> str:
        """Return the message of the error that comes next; empty if the connection ends instead."""
        kind, content = self.answer()
        assert kind in (0, ERROR), (kind, content[:200])
        if kind == 0:
            return ""
        message = json.loads(content)["message"]
        assert isinstance(message, str)
        return message

    def greet(self) -> None:
        """Say the first hello, without a token."""
        self.document(HELLO, 0, {"token": None, "secret": ""})
        assert self.answer() == (RESULT, b"{}")

    def enter(self, terms: object) -> str:
        """Say both hellos; return the error, or that the connection ended, or an empty string."""
        self.greet()
        self.document(HELLO, 0, terms)
        kind, content = self.answer()
        assert kind in (0, RESULT, ERROR)
        if kind != ERROR:
            return "" if kind == RESULT else "the connection has ended"
        message = json.loads(content)["message"]
        assert isinstance(message, str)
        return message


def frame(
    kind: int,
    number: int,
    content: bytes = b"",
    *,
    index: int = 0,
    magic: bytes = b"OFN1",
    nbytes: int | None = None,
    digest: int | None = None,
) -> bytes:
    """Return the header of a frame."""
    nbytes = len(content) if nbytes is None else nbytes
    digest = xxhash.xxh3_64_intdigest(content) if digest is None else digest
    return struct.pack("<4sB3xIIQQ", magic, kind, number, index, nbytes, digest)


def changed(document: dict[str, Any], change: Change) -> Any:
    """Return a copy of a document with a change."""
    found = copy.deepcopy(document)
    other = change(found)
    return found if other is None else other


def put(*path: Any) -> Change:
    """Return a change that puts a value, the last argument, at a place."""
    *keys, last, value = path

    def change(document: Any) -> None:
        for key in keys:
            document = document[key]
        document[last] = value

    return change
