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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gds.waiting import Monitor, start
from offload.errors import InDoubtError, NearError, StoreLockedError, reason_of
from offload.format._manifest_fields import mapping
from offload.journal import log_event
from offload.near.errors_sent import encode_error
from offload.near.place import run_name
from offload.near.terms import Terms, decode_terms
from offload.near.wire import Kind, Wire
from offload.serve.memory import DEFAULT_MEMORY_BYTES, require_allowed
from offload.serve.reading import answer, exchange_frames
from offload.serve.session import FORGOTTEN, Session

PARKED_S: Final = 60.0
"""Seconds for which the session of a lost client is kept."""

_HELLO_S: Final = 30.0
"""Seconds that a client has for its hello."""

_ALIVE_S: Final = 5.0
"""Seconds between two signs of life while a call is carried out."""

_HELLO_BYTES: Final = 4096
_RETRY_S: Final = 0.1
_MAX_CLIENTS: Final = 64
_MAX_PARKED: Final = 8


@dataclass
class _Run:
    """What the server knows of one run."""

    wire: Wire
    """Connection of the client that has come last."""

    session: Session | None = None
    """Session of the run; None while it is made."""

    secret: str = field(default_factory=partial(secrets.token_hex, 16))
    """Text by which the client of the session is known when it comes back."""

    in_use: bool = True
    """Whether a thread uses, makes or closes the session."""

    left: float = 0.0
    """Monotonic time at which the client was lost."""


class Server:
    """Serves clients on a socket until it is closed.

    Args:
        directories: Directories in which the runs are, one on each drive.
        listener: Socket that listens.
        token: Secret that a client must know; None if everybody who can connect may train.
        memory_bytes: Most bytes that state of one run may take.
    """

    def __init__(
        self,
        directories: Sequence[str],
        listener: socket.socket,
        *,
        token: str | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._directories = [os.path.abspath(one) for one in directories]
        self._listener = listener
        self._token = token
        self._memory_bytes = memory_bytes
        self._runs: dict[str, _Run] = {}
        self._lock = Monitor()
        self._clients: dict[threading.Thread, Wire] = {}
        self._closed = False

    def serve(self) -> None:
        """Serve until `close`; each client has a thread."""
        self._listener.settimeout(1.0)
        while not self._closed:
            self._close_left()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # too many files are open, or the client has gone again
                log_event(f"offload serve: {error}", logging.WARNING)
                time.sleep(_RETRY_S)
                continue
            wire = Wire(connection, "the client", _HELLO_S)
            with self._lock:
                if len(self._clients) >= _MAX_CLIENTS:
                    wire.close()
                    continue
                thread = threading.Thread(
                    target=self._client, args=(wire,), name="offload-serve", daemon=True
                )
                self._clients[thread] = wire
            try:
                start(thread)
            except RuntimeError as error:  # too many threads
                log_event(f"offload serve: {error}", logging.WARNING)
                wire.close()
                del self._clients[thread]

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
                self._admit(wire)
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

    def _admit(self, wire: Wire) -> None:
        """Check a client's two hellos, and serve its calls; or answer a question.

        The first hello is small: whoever does not know the token can have nothing else read.
        """
        hello = wire.read_document(wire.receive((Kind.HELLO,), 0), _HELLO_BYTES)
        given = str(hello.get("token")).encode(errors="replace")
        if self._token is not None and not hmac.compare_digest(given, self._token.encode()):
            raise PermissionError("the token is not the server's: give the client the same file")
        if "read" in hello:
            with _signs_of_life(wire, 0):
                found = self._answer(mapping(hello["read"]), wire)
            wire.send_document(Kind.RESULT, 0, found)
            return
        wire.send_document(Kind.RESULT, 0, {})
        terms = decode_terms(wire.read_document(wire.receive((Kind.HELLO,), 0)))
        require_allowed(terms.options, self._memory_bytes)
        wire.timeout_s = terms.timeout_s
        with _signs_of_life(wire, 0):
            run, session = self._take(terms, wire, hello.get("secret"))
        try:
            wire.send_document(Kind.RESULT, 0, {"secret": run.secret, **session.welcome()})
            self._calls(wire, session)
        finally:
            with self._lock:
                run.in_use, run.left = False, time.monotonic()
                if session.is_over:
                    del self._runs[terms.run]
                self._lock.notify_all()

    def _answer(self, question: Mapping[str, Any], wire: Wire) -> Mapping[str, Any]:
        """Return the answer to a question: about files, a seal of a session, or the link."""
        if question["what"] == "link":
            return exchange_frames(question, wire)
        if question["what"] != "sealed":
            return answer(question, self._directories[0], lambda: wire.alive(0))
        with self._lock:
            run = self._runs.get(run_name(question["run"]))
        if run is None or run.session is None or run.secret != question["secret"]:
            raise InDoubtError(FORGOTTEN)
        return run.session.sealed(question)

    def _take(self, terms: Terms, wire: Wire, secret: object) -> tuple[_Run, Session]:
        """Return the run that a client may use from now on: the one that it left, or a new one.

        Raises:
            StoreLockedError: Another client is there.
        """

        def vacant() -> tuple[_Run, Session | None] | None:
            """Take the run, and return it with its session; None while its client is leaving."""
            found = self._runs.get(terms.run)
            is_back = found is not None and found.secret == secret
            if found is not None and found.in_use:
                if is_back:
                    found.wire.shut()  # what is left of the connection that the client has lost
                elif not found.wire.is_gone():
                    raise StoreLockedError(
                        errno.EAGAIN,
                        "another client trains here: end it, or name another run",
                        terms.run,
                    )
                return None
            if found is not None and is_back:
                found.in_use, found.wire = True, wire
            else:
                self._runs[terms.run] = _Run(wire)
            return self._runs[terms.run], None if found is None else found.session

        run, session = self._lock.wait_until(vacant)
        if session is not None and run.session is session:
            return run, session
        try:
            self._end(terms.run, session)
            run.session = Session(terms, [os.path.join(d, terms.run) for d in self._directories])
        except BaseException:
            self._forget(terms.run)
            raise
        return run, run.session

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
            left = [(name, run) for name, run in self._runs.items() if not run.in_use]
            left.sort(key=lambda one: one[1].left, reverse=True)
            kept = 0 if everything else _MAX_PARKED
            ended = [
                (k, run)
                for n, (k, run) in enumerate(left)
                if n >= kept or now - run.left > PARKED_S
            ]
            for _, run in ended:
                run.in_use = True
        for name, run in ended:
            self._end(name, run.session)
            self._forget(name)

    def _end(self, name: str, session: Session | None) -> None:
        """Close a session whose client is lost."""
        try:
            if session is not None:
                session.close()
        except Exception as error:  # noqa: BLE001  (no client is left to be told)
            log_event(f"offload serve: {name}: {reason_of(error)}", logging.ERROR)

    def _forget(self, name: str) -> None:
        with self._lock:
            del self._runs[name]
            self._lock.notify_all()


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
