"""Answers to those who only want to read: what a store has, and whether its bytes are as written.

They take no lock, as `offload ls`, `show` and `verify` take none, and may run beside a training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from offload.checkpoint.opening import open_checkpoint
from offload.checkpoint.overview import describe, overview
from offload.format._manifest_fields import count, encode_group
from offload.format.names import step_of
from offload.near.place import run_name
from offload.near.rate import FRAME_BYTES, MAX_FRAMES
from offload.near.wire import Kind, Wire
from offload.store.verification import Verification


def answer(
    question: Mapping[str, Any], directory: str, at_work: Callable[[], None]
) -> dict[str, Any]:
    """Return the answer to a question of `offload.near.reading`, as a document.

    Args:
        question: What is asked about which run, and which checkpoint of it.
        directory: First directory of the server.
        at_work: Function that is called time and again while bytes are read, and may raise an
            error to end that.

    Raises:
        ValueError, TypeError, KeyError: It is no question.
        OffloadError: There is no such store or checkpoint, or it cannot be read.
    """
    what, path = question["what"], os.path.join(directory, run_name(question["run"]))
    if what == "overview":
        return asdict(overview(path))
    name = question["checkpoint"]
    if name is not None:
        if not isinstance(name, str) or step_of(name) is None:
            raise ValueError(f"{name!r:.60} is not the name of a checkpoint")
        path = os.path.join(path, name)
    if what == "describe":
        with open_checkpoint(path) as checkpoint:
            found = describe(checkpoint)
        groups = enumerate(found["hyperparameters"])
        return {**found, "hyperparameters": [encode_group(n, group) for n, group in groups]}
    if what == "verify":

        def progress(_: str) -> AbstractContextManager[Callable[[int, int], None]]:
            """Return a function that says that bytes are read."""
            return nullcontext(lambda *_: at_work())

        work = Verification(None, mark=False, progress=progress)
        work.verify(path, may_be_empty=False)
        return {"results": [asdict(one) for one in work.results], "recycled": work.recycled}
    raise ValueError(f"{what!r:.60} is no question")


def exchange_frames(question: Mapping[str, Any], wire: Wire) -> dict[str, Any]:
    """Receive and send as many frames as `offload.near.rate` asks for, in turn.

    Raises:
        ValueError, TypeError, KeyError: It is no question.
        NearError: The client is lost.
    """
    up, down = count(question["up"]), count(question["down"])
    if max(up, down) > MAX_FRAMES:
        raise ValueError(f"{max(up, down)} frames, at most {MAX_FRAMES}")
    content = memoryview(bytearray(FRAME_BYTES))
    for number in range(max(up, down)):
        if number < up:
            wire.read_into(wire.receive((Kind.BLOB,), 0), [content])
        if number < down:
            wire.send(Kind.BLOB, 0, [content])
    return {}
