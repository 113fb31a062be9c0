"""The server: it listens, and gives each client the session of its run.

A client that is lost may come back within a minute, and goes on with the state that it left. After
that its session is closed, as if its process had been killed. A store has one client at a time.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from gds.waiting import start
from offload.errors import NearError, StoreLockedError, reason_of
from offload.format._manifest_fields import mapping
from offload.journal import log_event
from offload.near.errors_sent import encode_error
from offload.near.terms import Terms, decode_terms
from offload.near.wire import Kind, Wire
from offload.serve.reading import answer
from offload.serve.session import Session

PARKED_S: Final = 60.0
"""Seconds for which the session of a lost client is kept."""

_HELLO_S: Final = 30.0
"""Seconds that a client has for its hello."""

_ALIVE_S: Final = 5.0
"""Seconds between two signs of life while a call is carried out."""

_MAX_CLIENTS: Final = 64


@dataclass
class _Run:
    """What the server knows of one run."""

    session: Session | None = None
    """Session of the run; None while it is made."""

    secret: str = ""
    """Text by which the client of the session is known when it comes back."""

    in_use: bool = True
    left: float = 0.0
    """Monotonic time at which the client was lost."""


class Server:
    """Serves clients on a socket until it is closed.

    Args:
        directories: Directories in which the runs are, one on each drive.
        listener: Socket that listens.
        token: Secret that a client must know; None if everybody who can connect may train.
    """

    def __init__(
        self, directories: Sequence[str], listener: socket.socket, *, token: str | None = None
    ) -> None:
        self._directories = [os.path.abspath(one) for one in directories]
        self._listener = listener
        self._token = token
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._clients: dict[threading.Thread, Wire] = {}
        self._closed = False

    def serve(self) -> None:
        """Serve until `close`; each client has a thread."""
        self._listener.settimeout(1.0)
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._close_left()
                continue
            except OSError:
                break  # closed
            wire = Wire(connection, "the client", _HELLO_S)
            with self._lock:
                if len(self._clients) >= _MAX_CLIENTS:
                    wire.close()
                    continue
                thread = threading.Thread(
                    target=self._client, args=(wire,), name="offload-serve", daemon=True
                )
                self._clients[thread] = wire
            start(thread)

    def stop(self) -> None:
        """Let `serve` return within a second. A signal handler may call this."""
        self._closed = True

    def close(self) -> None:
        """End all connections, and close all stores. What was not sealed is lost. Idempotent."""
        self._closed = True
        self._listener.close()
        with self._lock:
            clients = dict(self._clients)
        for thread, wire in clients.items():
            wire.shut()
            thread.join()
        self._close_left(everything=True)

    def _client(self, wire: Wire) -> None:
        """Serve one connection to its end."""
        try:
            try:
                frame = wire.receive((Kind.HELLO,))
                self._admit(wire, wire.read_document(frame))
            except NearError as error:
                log_event(f"offload serve: {error}", logging.WARNING)
            except Exception as error:  # noqa: BLE001  (the client is told, and others are served)
                log_event(f"offload serve: {reason_of(error)}", logging.WARNING)
                with suppress(NearError):
                    wire.send_document(Kind.ERROR, 0, encode_error(error))
        finally:
            wire.close()
            with self._lock:
                self._clients.pop(threading.current_thread(), None)

    def _admit(self, wire: Wire, hello: Mapping[str, Any]) -> None:
        """Check a hello, and answer its question, or serve the client's calls."""
        given = hello.get("token")
        if self._token is not None and not (
            isinstance(given, str) and hmac.compare_digest(given.encode(), self._token.encode())
        ):
            raise PermissionError("the token is not the server's: give the client the same file")
        if "read" in hello:
            with _signs_of_life(wire, 0):
                found = answer(mapping(hello["read"]), self._directories[0], lambda: wire.alive(0))
            wire.send_document(Kind.RESULT, 0, found)
            return
        terms = decode_terms(hello["terms"])
        wire.timeout_s = terms.timeout_s
        with _signs_of_life(wire, 0):
            run = self._take(terms, hello.get("secret"))
        try:
            session = run.session
            if session is None:
                raise RuntimeError("the session was not made")
            wire.send_document(Kind.RESULT, 0, {"secret": run.secret, **session.welcome()})
            self._calls(wire, session)
        finally:
            run.in_use, run.left = False, time.monotonic()
            if run.session is not None and run.session.is_over:
                with self._lock:
                    self._runs.pop(terms.run, None)

    def _take(self, terms: Terms, secret: object) -> _Run:
        """Return the run that a client may use from now on: the one that it left, or a new one."""
        with self._lock:
            found = self._runs.get(terms.run)
            if found is not None and found.in_use:
                raise StoreLockedError(
                    errno.EAGAIN,
                    "another client trains here: end it, or name another run",
                    terms.run,
                )
            if found is not None and isinstance(secret, str) and secret == found.secret:
                found.in_use = True
                return found
            run = self._runs[terms.run] = _Run(secret=secrets.token_hex(16))
        try:
            if found is not None and found.session is not None:
                found.session.close()
            run.session = Session(terms, [os.path.join(d, terms.run) for d in self._directories])
        except BaseException:
            with self._lock:
                del self._runs[terms.run]
            raise
        return run

    def _calls(self, wire: Wire, session: Session) -> None:
        """Carry out the calls of a client until it leaves.

        Raises:
            NearError: The client is lost.
        """
        while not session.is_over:
            wire.wait()  # the client computes, for as long as it likes
            frame = wire.receive((Kind.CALL,))
            document = wire.read_document(frame)
            with _signs_of_life(wire, frame.number):
                try:
                    session.serve(wire, frame.number, document)
                except NearError:
                    raise
                except Exception as error:  # noqa: BLE001  (the client raises it)
                    wire.send_document(Kind.ERROR, frame.number, encode_error(error))
                    session.drain()

    def _close_left(self, *, everything: bool = False) -> None:
        """Close sessions whose clients have not come back."""
        with self._lock:
            now = time.monotonic()
            ended = {
                name: run
                for name, run in self._runs.items()
                if not run.in_use and (everything or now - run.left > PARKED_S)
            }
            for name in ended:
                del self._runs[name]
        for name, run in ended.items():
            try:
                if run.session is not None:
                    run.session.close()
            except Exception as error:  # noqa: BLE001  (no client is left to be told)
                log_event(f"offload serve: {name}: {reason_of(error)}", logging.ERROR)


@contextmanager
def _signs_of_life(wire: Wire, number: int) -> Iterator[None]:
    """Tell a client, during a call that takes long, that the server is at work."""
    ended = threading.Event()

    def tell() -> None:
        """Give a sign every few seconds."""
        while not ended.wait(min(_ALIVE_S, wire.timeout_s / 4)):
            with suppress(NearError):
                wire.alive(number)

    thread = threading.Thread(target=tell, name="offload-serve-alive", daemon=True)
    start(thread)
    try:
        yield
    finally:
        ended.set()
        thread.join()
