"""Calls of ranks that leave, which `tests.ranks_training.calls.Calls.do` makes."""

from __future__ import annotations

import threading
import time
from typing import NoReturn

from offload.distributed.agreement.torch_channel import TorchChannel
from offload.engine.engine import Engine
from tests.eventually import eventually
from tests.ranks_training.calls import Calls


def fail_alone(calls: Calls) -> None:
    """Let the constructor fail on this rank while the others wait for it."""
    plain = Engine.require_space

    def fail(*_: object) -> NoReturn:
        """Fail once, in the place of an exchange."""
        Engine.require_space = plain  # type: ignore[method-assign]
        raise OSError("injected before an exchange")

    Engine.require_space = fail  # type: ignore[method-assign]


def read_late(calls: Calls, seconds: float) -> None:
    """Let this rank read late how an exchange has ended, as a rank that is scheduled late does."""
    plain = TorchChannel.get

    def get(channel: TorchChannel, key: str) -> str | None:
        """Return the value of a key."""
        if "verdict" in key:
            time.sleep(seconds)
        return plain(channel, key)

    TorchChannel.get = get  # type: ignore[method-assign]


def threads(calls: Calls) -> list[str]:
    """Return the names of this rank's threads for the ranks that do not end."""

    def found() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("offload-")]

    eventually(lambda: not found())
    return found()
