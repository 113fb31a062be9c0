"""A proxy before a server of HTTP: it counts requests, slows them down, and breaks some of them.

Every connection carries one request, so that a fault hits exactly one.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"
_PIECE = 16 << 10


@dataclass
class Request:
    """One request that has passed, or has not."""

    number: int
    method: str
    path: str
    fault: str = ""
    status: int = 0
    """Status that the client was given; 0 if it was given none."""
    reached_server: bool = False
    range: str = ""
    """Header ``Range`` of the request."""
    bytes_up: int = 0
    bytes_down: int = 0


Rule = Callable[[Request], str]
"""Function that chooses what happens to a request:

- "": it passes;
- "503": it is answered with that status and does not reach the server;
- "403:Code": the same, with the code of an error of S3;
- "cut": the connection ends before the server sees the request;
- "lost": the server carries it out, and its answer is lost;
- "truncate": the connection ends in the middle of the answer's body;
- "flip": a bit of the answer's body is flipped;
- "flip-up": a bit of the request's body is flipped;
- "hang": nothing happens any more, until the proxy is closed.
"""


class Proxy:
    """A proxy on a port of its own, until `close`."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self.requests: list[Request] = []
        self.rule: Rule = lambda _: ""
        self.after: Callable[[Request], None] = lambda _: None
        """Called when a request has been answered."""
        self.bytes_per_s: float | None = None
        self._budget = threading.Lock()
        self._next_s = 0.0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def puts(self) -> list[str]:
        """Names of the objects that were written, as often as the server said so."""
        return [
            r.path.rpartition("/gen-")[2].partition("/")[2].partition("/")[2]
            for r in self.requests
            if r.method == "PUT" and r.reached_server and 200 <= r.status < 300
        ]

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head, body = _read_head(client)
            if not head:
                return
            method, path, _ = head.split(b"\r\n")[0].decode().split(" ", 2)
            with self._lock:
                request = Request(len(self.requests), method, path)
                self.requests.append(request)
            request.range = _header(head, "range")
            request.fault = fault = self.rule(request)
            if fault == "hang":
                self._closed.wait()
                return
            body += self._read_exactly(client, _length(head) - len(body))
            request.bytes_up = len(body)
            if fault == "cut":
                return
            if fault[:3].isdigit():
                self._refuse(client, request)
                return
            if fault == "flip-up" and body:
                body = body[:-1] + bytes([body[-1] ^ 1])
            answer = self._ask(head, body)
            request.reached_server = True
            self._answer(client, request, answer)

    def _ask(self, head: bytes, body: bytes) -> bytes:
        lines = [
            line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
        ]
        with socket.create_connection(self._upstream) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            answer = bytearray()
            while piece := server.recv(1 << 20):
                answer += piece
        return bytes(answer)

    def _answer(self, client: socket.socket, request: Request, answer: bytes) -> None:
        if request.fault == "lost":
            return
        head, _, body = answer.partition(_HEAD_END)
        if request.fault == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if request.fault == "truncate" and body:
            body = body[: len(body) // 2]
        request.status = int(answer.split(b" ", 2)[1])
        head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head) + b"\r\nConnection: close"
        client.sendall(head + _HEAD_END)
        for start in range(0, len(body), _PIECE):
            self._wait_for(_PIECE)
            client.sendall(body[start : start + _PIECE])
        request.bytes_down = len(body)
        self.after(request)

    def _refuse(self, client: socket.socket, request: Request) -> None:
        status, _, code = request.fault.partition(":")
        request.status = int(status)
        # Servers repeat what they were sent, the key's identity among it, and number requests.
        body = (
            f"<Error><RequestId>0IMDS1</RequestId><Code>{code or 'SlowDown'}</Code>"
            f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId>"
            f"<Message>{SECRET}</Message></Error>"
        ).encode()
        client.sendall(
            f"HTTP/1.1 {status} Nope\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: application/xml\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        self.after(request)

    def _read_exactly(self, client: socket.socket, nbytes: int) -> bytes:
        body = bytearray()
        while len(body) < nbytes:
            piece = client.recv(min(nbytes - len(body), _PIECE if self.bytes_per_s else 1 << 20))
            if not piece:
                raise ConnectionError
            self._wait_for(len(piece))
            body += piece
        return bytes(body)

    def _wait_for(self, nbytes: int) -> None:
        """Wait until the link has room, which all connections share."""
        if self.bytes_per_s is None:
            return
        with self._budget:
            now = time.monotonic()
            self._next_s = max(self._next_s, now) + nbytes / self.bytes_per_s
            wait_s = self._next_s - now
        self._closed.wait(wait_s)


KEY_ID = "AKIATHISISNOTAKEY000"
SECRET = "this+is+no/secret+of+anybody+0123456789A"


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = bytearray()
    while _HEAD_END not in data:
        piece = client.recv(1 << 16)
        if not piece:
            return b"", b""
        data += piece
    head, _, body = bytes(data).partition(_HEAD_END)
    return head, body


def _length(head: bytes) -> int:
    return int(_header(head, "content-length") or 0)


def _header(head: bytes, name: str) -> str:
    match = re.search(rf"(?i)\r\n{name}: *([^\r]+)".encode(), head)
    return match[1].decode() if match else ""
