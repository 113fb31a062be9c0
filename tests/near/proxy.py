"""A proxy between a client and a server: it passes frames on, loses them, or breaks them.

It knows of a frame only that byte 4 is its kind, and that bytes 16 to 23 are its length.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

RESULT, PASS, GRADIENT, PARAMETER, TENSOR, END = 3, 5, 6, 7, 8, 10

Way = Literal["up", "down"]
Fate = Literal["pass", "lose", "cut", "truncate", "flip"]
Rule = Callable[[Way, int], Fate]
"""Function that is told the way and the kind of a frame, and says what happens: it passes; it does
not arrive; the connection ends before it, or within it; or a bit of its content changes."""

_HEADER_BYTES = 32


class Proxy:
    """A proxy on a socket file of its own, until `close`."""

    def __init__(self, upstream: Path) -> None:
        self._upstream = str(upstream)
        self.rule: Rule = lambda _way, _kind: "pass"
        self.change: Callable[[Way, bytes, bytes], bytes] = lambda _, head, content: head + content
        """Returns what arrives in place of the header and the content of a frame that passes."""
        self.frames: list[tuple[Way, bytes]] = []
        """All that has come, in its order."""
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.path = Path(tempfile.mkdtemp(prefix="near-")) / "p"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, run: str) -> str:
        """Return the ``directory=`` of a run."""
        return f"offload+unix://{self.path}/{run}"

    def cut(self) -> None:
        """End all connections."""
        for pair in self._pairs:
            _cut(*pair)

    def close(self) -> None:
        """End everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.path.unlink()
        self.path.parent.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._upstream)
            except OSError:
                client.close()
                server.close()
                continue
            self._pairs.append((client, server))
            for way, source, target in (("up", client, server), ("down", server, client)):
                threading.Thread(target=self._pump, args=(way, source, target), daemon=True).start()

    def _pump(self, way: Way, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while header := read(source, _HEADER_BYTES):
                content = read(source, int.from_bytes(header[16:24], "little"))
                with self._lock:
                    self.frames.append((way, header + content))
                    fate = self.rule(way, header[4])
                if fate == "flip":
                    content = bytes([content[0] ^ 1]) + content[1:]
                if fate in ("pass", "flip"):
                    target.sendall(self.change(way, header, content))
                if fate == "truncate":
                    target.sendall(header + content[: len(content) // 2])
                if fate in ("cut", "truncate"):
                    break
        _cut(source, target)
        source.close()


def read(source: socket.socket, nbytes: int) -> bytes:
    """Return that many bytes, or fewer if the connection ends before."""
    found = bytearray()
    while len(found) < nbytes and (piece := source.recv(min(nbytes - len(found), 1 << 16))):
        found += piece
    return bytes(found)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def after(number: int, way: Way, kind: int, fate: Fate) -> Rule:
    """Return a rule: after a number of frames of a kind, the next one has a fate; others pass."""
    seen = 0

    def rule(found_way: Way, found_kind: int) -> Fate:
        nonlocal seen
        if (found_way, found_kind) != (way, kind):
            return "pass"
        seen += 1
        return fate if seen == number + 1 else "pass"

    return rule
