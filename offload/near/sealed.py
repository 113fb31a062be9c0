"""Checkpoints that a server makes and keeps, as its client knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.engine.seal_handle import SealHandle
from offload.errors import NearError, SealError
from offload.format.train_state import EncodedState, decode, pack_encoded, packed_bytes
from offload.near.link import Link, Result
from offload.near.place import Place

_HEADER = {"format": "near"}


def packed(encoded: EncodedState) -> bytes:
    """Return a train state as the bytes that cross, which `unpack_encoded` reads."""
    nbytes = packed_bytes(encoded, _HEADER)
    return pack_encoded(encoded, capacity_bytes=nbytes, header=_HEADER)


class NearSealHandle(SealHandle):
    """Handle of a checkpoint that a server seals."""

    def __init__(self, link: Link, place: Place, result: Result, encoded: EncodedState) -> None:
        super().__init__(int(result["step"]))
        self._link, self._place = link, place
        self._number = int(result["handle"])
        self._encoded = encoded

    def done(self) -> bool:
        """Return whether the server has sealed the checkpoint, or failed to."""
        if not self._future.done():
            self._ask(0.0)
        return self._future.done()

    def outcome(self, timeout: float | None = None) -> Checkpoint:
        """Return the checkpoint; the user does not see an error that this raises."""
        if not self._future.done():
            self._ask(timeout)
        return self._future.result(0.0)

    def wait(self) -> None:
        """Wait until sealing has ended, with success or with an error."""
        if not self._future.done():
            self._ask(None)

    def _ask(self, timeout_s: float | None) -> None:
        try:
            found = self._link.ask("sealed", handle=self._number, timeout_s=timeout_s)
        except SealError as error:
            self.fail(error)
            return
        except NearError as error:
            failure = SealError(f"it is not known whether step {self.step} was sealed: {error}")
            failure.__cause__ = error
            self.fail(failure)
            return
        with self._link.understood():
            if not found["done"]:
                return
            self.bytes_written, self.seal_s = found["bytes_written"], found["seal_s"]
            sealed = NearCheckpoint(self._place, found["checkpoint"], self._encoded)
        self._future.set_result(sealed)


class NearCheckpoint(Checkpoint):
    """A checkpoint in a store of a server: what the client knows of it."""

    def __init__(self, place: Place, found: Mapping[str, Any], encoded: EncodedState) -> None:
        self.path = place.checkpoint(found["path"])
        self._step, self._generation = int(found["step"]), int(found["generation"])
        self._created, self._metrics = str(found["created"]), dict(found["metrics"])
        self._encoded = encoded
        self._lock = None

    @property
    def step(self) -> int:
        """Number of optimizer steps."""
        return self._step

    @property
    def generation(self) -> int:
        """Counter of the store."""
        return self._generation

    @property
    def created(self) -> str:
        """Time at which the seal began."""
        return self._created

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the checkpoint."""
        return dict(self._metrics)

    @property
    def train_state(self) -> Any:
        """The value that was passed to `checkpoint`."""
        return decode(self._encoded)

    def close(self) -> None:
        """Do nothing: the server holds the checkpoint."""

    def __repr__(self) -> str:
        return f"NearCheckpoint({self.path!r}, step={self.step})"
