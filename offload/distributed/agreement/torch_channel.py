"""A channel over the key-value store of `torch.distributed`, which exists before any process group.

Four facts about a `TCPStore` shape this module:

- The calls of one connection take turns: while one thread waits for a key, a `set` of another
  thread does not begin. So every channel has a connection of its own, a clone.
- If the process that serves the store is stopped, a call never returns, whatever the time limit of
  the store. The server often is rank 0. So calls are made on a thread of the channel, and a caller
  waits for that thread no longer than its limit.
- The server looks up the name of every process that connects. A name server that does not answer
  holds up all calls of all processes for seconds. So connections are few, and are made at the
  beginning, with a longer limit.
- Its own `wait` prints two lines to standard error whenever it reaches its time limit. So this
  module asks again and again instead; one question takes about 0.1 ms.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from gds.waiting import Pending, start
from offload.distributed.agreement.effects import ChannelLostError

T = TypeVar("T")

_Call: TypeAlias = tuple[Pending[Any], Callable[[], Any]]

_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.02
_POLL_SHARE = 0.05
"""Pause between two questions, as a share of the time waited so far: an answer that comes at once
is seen at once, and one that takes seconds costs the store few questions."""

_CONNECT_S = 60.0
"""Least time in seconds after which an attempt to connect is given up."""


class TorchChannel:
    """A channel over a `torch.distributed.Store`; see `effects.Channel`."""

    def __init__(self, store: Store, prefix: str, *, timeout_s: float) -> None:
        self._origin = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._is_lost = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        start(threading.Thread(target=_serve, args=(self._calls,), daemon=True, name=_THREAD))
        self._end = weakref.finalize(self, self._calls.put, None)
        limit_s = max(timeout_s, _CONNECT_S)
        try:
            self._connection = self._call("connect to", lambda: _clone(store), limit_s)
        except BaseException:
            self.close()
            raise
        self._store = PrefixStore(prefix, self._connection)

    def put(self, key: str, value: str, *, within_s: float | None = None) -> None:
        """Set the value of a key."""
        self._call("write to", lambda: self._store.set(key, value), within_s)

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none."""
        store = self._store

        def read() -> str | None:
            return store.get(key).decode() if store.check([key]) else None

        return self._call("read from", read)

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Wait until a key has a value, and return it; None after about `timeout_s` seconds."""
        started = self.now()
        while (value := self.get(key)) is None:
            waited_s = self.now() - started
            if waited_s >= timeout_s:
                return None
            pause_s = min(max(_FIRST_POLL_S, waited_s * _POLL_SHARE), _LAST_POLL_S)
            time.sleep(min(pause_s, timeout_s - waited_s))
        return value

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._call("write to", lambda: self._store.delete_key(key))

    def now(self) -> float:
        """Return the time in seconds by a clock that never goes back."""
        return time.monotonic()

    def clone(self) -> TorchChannel:
        """Return another connection to the same store, for another thread."""
        return TorchChannel(self._origin, self._prefix, timeout_s=self._timeout_s)

    def enter(self, name: str) -> None:
        """Let all further keys, also those of later clones, begin with a name."""
        self._prefix = f"{self._prefix}{name}/"
        self._store = PrefixStore(self._prefix, self._connection)

    def close(self) -> None:
        """End the channel's thread. Never waits."""
        self._end()

    def _call(self, what: str, call: Callable[[], T], limit_s: float | None = None) -> T:
        """Make a call on the channel's thread, and wait at most `limit_s` or the timeout."""
        limit_s = self._timeout_s if limit_s is None else limit_s
        answer: Pending[T] = Pending()
        if not self._end.alive:
            raise ChannelLostError("this connection to the key-value store is closed")
        if not self._is_lost:
            self._calls.put((answer, call))
            self._is_lost = not answer.wait(limit_s)
        if self._is_lost:
            raise ChannelLostError(
                f"cannot {what} the key-value store of torch.distributed: it has not answered for "
                f"{limit_s:g} s. The process that serves it (torchrun, or rank 0) is "
                "stopped, or its host cannot be reached: restart the job"
            )
        try:
            return answer.result()
        except RuntimeError as error:  # `DistError` is one, and so is what a closed socket gives
            self._is_lost = True
            raise ChannelLostError(
                f"cannot {what} the key-value store of torch.distributed: {error}. The process "
                "that serves it (torchrun, or rank 0) has probably ended: restart the job"
            ) from error


_THREAD = "offload-ranks"
"""Name of the threads that call the store."""


def _clone(store: Store) -> Store:
    clone: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
    return clone


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    """Make the calls of a channel until there are no more."""
    while (asked := calls.get()) is not None:
        answer, call = asked
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            answer.set_exception(error)
        del asked, answer, call
