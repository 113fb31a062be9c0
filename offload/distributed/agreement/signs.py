"""Signs of progress: how the other ranks tell a slow rank from one that has ended or hangs.

A rank counts, under a key of its own for each exchange or seal, how often it had something to show:
bytes written, or a wait for other ranks that goes on within its limit. The others never compare
times of different hosts; they only look whether the number has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from offload.distributed.agreement.channel import Channel, ChannelLostError
from offload.distributed.agreement.peers import FIRST_SIGN, sign_key

SIGNS_PER_LIMIT = 10
"""Most signs that a rank gives within the limit; more would only burden the key-value store."""


class Signs:
    """Signs of progress of one rank. All methods may be called from any thread.

    Args:
        channel: A channel that nothing else uses.
        rank: This rank.
        timeout_s: Seconds without a sign after which a rank counts as lost.
    """

    def __init__(self, channel: Channel, rank: int, timeout_s: float) -> None:
        self._channel = channel
        self._rank = rank
        self._pause_s = timeout_s / SIGNS_PER_LIMIT
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._last_s: float | None = None

    def begin(self, scope: str) -> None:
        """Give signs for an exchange or a seal from now on; the first has been given."""
        with self._lock:
            self._counts[scope] = int(FIRST_SIGN)

    def end(self, scope: str) -> None:
        """Give no further sign for an exchange or a seal."""
        with self._lock:
            self._counts.pop(scope, None)

    def give(self) -> None:
        """Give a sign for each exchange and seal in progress, unless the last was just now."""
        with self._lock:
            now = self._channel.now()
            if self._last_s is not None and now - self._last_s < self._pause_s:
                return
            self._last_s = now
            for scope in self._counts:
                self._counts[scope] += 1
                self._put_sign(scope)

    def put(self, key: str, value: str, *, within_s: float | None = None) -> None:
        """Set the value of a key, from any thread; never raises. See `Channel.put`."""
        with self._lock:
            self._put(key, value, within_s)

    def get(self, key: str) -> str | None:
        """Return the value of a key, on any thread; None if it has none or cannot be read."""
        with self._lock, suppress(ChannelLostError):
            return self._channel.get(key)
        return None

    @contextmanager
    def during(self, scope: str) -> Iterator[None]:
        """Give signs for an exchange, the first at once."""
        self.begin(scope)
        with self._lock:
            self._put_sign(scope)
        try:
            yield
        finally:
            self.end(scope)

    def _put_sign(self, scope: str) -> None:
        self._put(sign_key(scope, self._rank), str(self._counts[scope]))

    def _put(self, key: str, value: str, within_s: float | None = None) -> None:
        with suppress(ChannelLostError):  # what waits for this rank, or it for others, reports it
            self._channel.put(key, value, within_s=within_s)
