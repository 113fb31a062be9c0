"""A channel over the key-value store of `torch.distributed`, which exists before any process group.

The calls of one connection to a `TCPStore` take turns: while one thread waits for a key, a `set` of
another thread does not begin. Therefore every thread has a connection of its own, a clone. This
module does not use the store's own `wait` either, because every wait that reaches its time limit
prints two lines to standard error. It asks again and again instead; one question takes about 20
microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import PrefixStore, Store

from offload.distributed.channel import ChannelLostError

_FIRST_POLL_S = 0.0002
_LAST_POLL_S = 0.02
_POLL_SHARE = 0.05
"""Pause between two questions, as a share of the time waited so far: an answer that comes at once
is seen at once, and one that takes seconds costs the store few questions."""


class TorchChannel:
    """A channel over a `torch.distributed.Store`; see `offload.distributed.channel.Channel`.

    Args:
        store: The store. The channel makes a connection of its own to it.
        prefix: Text before every key; no other user of the store may have the same one.

    Raises:
        ChannelLostError: The store does not answer.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        with _as_lost("connect to"):
            self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]  # not in the stubs
        self._origin = store
        self._prefix = prefix

    def put(self, key: str, value: str) -> None:
        """Set the value of a key."""
        with _as_lost("write to"):
            self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none."""
        with _as_lost("read from"):
            if not self._store.check([key]):  # `get` waits for a key that is missing
                return None
            return self._store.get(key).decode()

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
        with _as_lost("write to"):
            self._store.delete_key(key)

    def now(self) -> float:
        """Return the time in seconds by a clock that never goes back."""
        return time.monotonic()

    def clone(self) -> TorchChannel:
        """Return another connection to the same store, for another thread."""
        return TorchChannel(self._origin, self._prefix)


@contextmanager
def _as_lost(what: str) -> Iterator[None]:
    """Turn what torch raises if the server has gone into `ChannelLostError`."""
    try:
        yield
    except RuntimeError as error:  # `DistError` is one, and so is what a closed socket gives
        raise ChannelLostError(
            f"cannot {what} the key-value store of torch.distributed: {error}. The process that "
            "serves it (torchrun, or rank 0) has probably ended: restart the job"
        ) from error
