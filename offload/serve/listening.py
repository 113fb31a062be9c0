"""Where a server listens, and its life as a process."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from offload.errors import NearError, StoreError
from offload.near.place import PORT
from offload.serve.server import Server
from offload.serve.session import note_warning

_PROBE_S: Final = 5.0


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a socket that listens, and its address in the form that clients use.

    Args:
        address: ``unix:PATH``, or ``HOST:PORT`` of one of this machine's own addresses. An empty
            host is that of this machine only.

    Raises:
        NearError: The address is none, or cannot be listened on.
    """
    kind, _, path = address.partition(":")
    if kind == "unix":
        if not path:
            raise NearError("unix: names no socket file: write unix:/run/offload.sock")
        return _listen_on_file(os.path.abspath(path))
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise NearError(f"{address!r} is no address: write unix:PATH, or HOST:PORT as in :{PORT}")
    host = host.strip("[]") or "127.0.0.1"
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise NearError(f"cannot listen on {address}: {error.strerror or error}") from error
    number = found.getsockname()[1]
    return found, f"offload://{f'[{host}]' if ':' in host else host}:{number}"


def run_server(
    directories: Sequence[str],
    listener: socket.socket,
    *,
    token: str | None,
    memory_bytes: int,
    ready: Callable[[], Any],
) -> None:
    """Serve until SIGTERM or SIGINT, then close all stores.

    Args:
        directories: Directories in which the runs are, one on each drive.
        listener: Socket that listens.
        token: Secret that clients must know; None for none.
        memory_bytes: Most bytes that state of one run may take.
        ready: Function that is called when clients can connect.
    """
    server = Server(directories, listener, token=token, memory_bytes=memory_bytes)

    warnings.simplefilter("always")
    warnings.showwarning = note_warning  # type: ignore[assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    ready()
    try:
        server.serve()
    finally:
        if listener.family == socket.AF_UNIX:
            with suppress(OSError):  # now, while no other server can have one of this name
                os.unlink(listener.getsockname())
        server.close()


def _listen_on_file(path: str) -> tuple[socket.socket, str]:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        before = os.umask(0o177)  # only this user can connect
        try:
            found.bind(path)
        finally:
            os.umask(before)
        found.listen()
    except OSError as error:
        found.close()
        raise NearError(f"cannot listen on {path}: {error.strerror or error}") from error
    return found, f"offload+unix://{path}"


def _remove_dead(path: str) -> None:
    """Remove a socket file that no process listens on; another file stays."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def require_directories(directories: Sequence[str]) -> None:
    """Refuse directories that do not exist.

    Raises:
        StoreError: One of them is no directory.
    """
    for one in directories:
        if not os.path.isdir(one):
            raise StoreError(errno.ENOTDIR, "there is no such directory: make it first", one)
