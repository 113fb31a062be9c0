"""Addresses of runs on a server: ``offload+unix:///run/offload.sock/run``, ``offload://host/run``."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from offload.errors import NearError

PORT: Final = 7433
"""Port of a server that is not told another one."""

SCHEMES: Final = ("offload", "offload+unix")

_CONNECT_S = 30.0

_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""Name of a run: a directory below those that the server was given."""


@dataclass(frozen=True, slots=True)
class Place:
    """A run on a server."""

    url: str
    run: str
    socket_path: str
    """Path of the socket file; empty for TCP."""

    host: str = ""
    port: int = PORT

    @property
    def peer(self) -> str:
        """Name of the server for messages."""
        return f"the server at {self.socket_path or f'{self.host}:{self.port}'}"

    def checkpoint(self, path: object) -> str:
        """Return the URL of a checkpoint, given its path on the server."""
        return f"{self.url}/{str(path).rpartition('/')[2]}"

    def connect(self) -> socket.socket:
        """Return a socket that is connected to the server.

        Raises:
            NearError: The server cannot be reached.
        """
        try:
            if not self.socket_path:
                return socket.create_connection((self.host, self.port), _CONNECT_S)
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                found.settimeout(_CONNECT_S)
                found.connect(self.socket_path)
            except BaseException:
                found.close()
                raise
            return found
        except OSError as error:
            reason = error.strerror or str(error)
            raise NearError(
                f"{self.peer} cannot be reached ({reason}): start it with offload serve"
            ) from error


def is_remote(directory: object) -> bool:
    """Return whether a user's ``directory=`` names a run on a server."""
    if not isinstance(directory, str | os.PathLike):
        return False
    return os.fsdecode(directory).partition("://")[0] in SCHEMES


def place_of(directory: object) -> Place:
    """Return the run that a URL names.

    Raises:
        ValueError: The URL names no run; says how to write one.
    """
    url = os.fsdecode(directory)  # type: ignore[arg-type]
    how = "write offload+unix:///path/of/socket/run, or offload://host:port/run"
    parts = urlsplit(url)
    path, _, run = parts.path.rpartition("/")
    if parts.query or parts.fragment or parts.username is not None or not run:
        raise ValueError(f"{url!r} is not the address of a run on a server: {how}")
    try:
        run_name(run)
        port = parts.port or PORT
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}: {how}") from None
    if parts.scheme == "offload+unix":
        if parts.netloc or not path:
            raise ValueError(f"{url!r} is not the address of a run on a server: {how}")
        return Place(url, run, path)
    if path or not parts.hostname:
        raise ValueError(f"{url!r} is not the address of a run on a server: {how}")
    return Place(url, run, "", parts.hostname, port)


def run_name(value: object) -> str:
    """Return the value if it is the name of a run; raise ValueError otherwise."""
    if not isinstance(value, str) or not _RUN.fullmatch(value):
        raise ValueError(
            f"{value!r:.60} is not the name of a run: use letters, digits, '.', '_' and '-'"
        )
    return value


def token_for(place: Place) -> str | None:
    """Return the token for a server, from the file that ``OFFLOAD_TOKEN_FILE`` names; or None.

    Raises:
        NearError: The file cannot be read, or is empty.
    """
    path = os.environ.get("OFFLOAD_TOKEN_FILE")
    if place.socket_path or not path:
        return None
    try:
        found = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NearError(f"the token in OFFLOAD_TOKEN_FILE={path} cannot be read: {error}") from None
    if not found:
        raise NearError(f"the token file OFFLOAD_TOKEN_FILE={path} is empty: write the token in it")
    return found
