"""Measurement of a link: bytes per second each way, as steps on a server would have them.

The frames are those of a step, with their digests, so the rate is that of both ends and of what is
between them, such as a tunnel. The server stores nothing. Does not import torch.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

from offload.errors import NearError
from offload.near.place import Place, place_of
from offload.near.reading import answered, begin_question
from offload.near.wire import Kind, Wire

FRAME_BYTES: Final = 4 << 20
"""Bytes of a frame: what a chunk of a few million parameters has."""

MAX_FRAMES: Final = 1024
"""Most frames each way in one measurement."""

_TIMEOUT_S: Final = 60.0


def measure_link(url: str, seconds: float = 1.0) -> dict[str, float]:
    """Return the rates of the link to a server in GB/s.

    Args:
        url: Address of a run on the server, which need not exist.
        seconds: Time that each of the three measurements takes, about.

    Returns:
        ``to_server`` and ``from_server``, each alone; and ``both``, the rate in each direction
        while frames go both ways, as in a step.

    Raises:
        NearError: The URL names no run, or the server cannot be reached, or refuses.
    """
    try:
        place = place_of(url)
    except ValueError as error:
        raise NearError(str(error)) from None
    rates = {}
    for name, up, down in (("to_server", 1, 0), ("from_server", 0, 1), ("both", 1, 1)):
        few = 4
        per_frame = _seconds(place, few * up, few * down) / few
        frames = max(few, min(MAX_FRAMES, int(seconds / per_frame)))
        taken = _seconds(place, frames * up, frames * down)
        rates[name] = frames * FRAME_BYTES / taken / 1e9
    return rates


def _seconds(place: Place, up: int, down: int) -> float:
    """Return the seconds that a number of frames each way take."""
    content, received = os.urandom(FRAME_BYTES), memoryview(bytearray(FRAME_BYTES))
    with closing(Wire(place.connect(), place.peer, _TIMEOUT_S)) as wire, ThreadPoolExecutor() as on:
        begin_question(wire, place, {"what": "link", "up": up, "down": down})
        started = time.perf_counter()
        try:
            sent = on.submit(lambda: [wire.send(Kind.BLOB, 0, [content]) for _ in range(up)])
            for _ in range(down):
                wire.read_into(wire.receive((Kind.BLOB,), 0), [received])
            answered(wire)
            sent.result()
        except BaseException:
            wire.shut()  # the other thread may be sending
            raise
        return time.perf_counter() - started
