"""The contract of a key-value store that all ranks share, through which they agree."""

from __future__ import annotations

from typing import Protocol

from offload.errors import RanksError


class ChannelLostError(RanksError):
    """The key-value store does not answer; probably the process that serves it has ended."""


class Channel(Protocol):
    """One connection to the key-value store of all ranks.

    A key is a short text, and so is a value. Every rank sees a value soon after `put` has returned.
    Each method except `clone` raises `ChannelLostError` if the store does not answer. After that
    error of `put` it is not known whether the other ranks see the value.

    Only one thread may use a channel at a time; a further thread uses a `clone`.
    """

    def put(self, key: str, value: str, *, within_s: float | None = None) -> None:
        """Set the value of a key, whether or not it has one.

        Args:
            key: The key.
            value: The value.
            within_s: Seconds after which a store that does not answer is given up; None for the
                limit of the channel.
        """
        ...

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none. Never waits for another rank."""
        ...

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Wait until a key has a value, and return it; None after about `timeout_s` seconds."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    def now(self) -> float:
        """Return the time in seconds by a clock that never goes back."""
        ...

    def clone(self) -> Channel:
        """Return another connection to the same store, for another thread.

        Raises:
            ChannelLostError: The store does not answer.
        """
        ...

    def close(self) -> None:
        """Release the connection. Never waits; later calls raise `ChannelLostError`."""
        ...
