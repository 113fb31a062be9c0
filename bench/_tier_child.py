"""Processes of `bench.tier_costs`: they move a checkpoint, or as many bytes, train, or send."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.dying import let_forks_die

_OBJECT_BYTES = 32 << 20
_SOCKET_BYTES = 256 << 10
"""Handed to a socket at once."""


def _memory_bytes(what: str) -> int:
    """Return a field of this process's memory: VmRSS now, or VmHWM at most."""
    with open("/proc/self/status") as status:
        found = re.search(rf"{what}:\s+(\d+) kB", status.read())
    return int(found[1]) << 10 if found else 0


def move(what: str, source: str, target: str, check: str) -> dict[str, float]:
    """Upload or download a checkpoint; return its size, processor time, seconds and memory."""
    from offload.tiers import pull, push

    if not source.startswith("file:") and not target.startswith("file:"):
        import obstore  # noqa: F401  (its import is no part of the transfer)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before, cpu_s, began_s = _memory_bytes("VmRSS"), time.process_time(), time.perf_counter()
    if what == "push":
        nbytes = push(source, target, check="size" if check == "size" else "read").bytes_sent
    else:
        nbytes = pull(source, target).bytes_fetched
    return {
        "bytes": nbytes,
        "cpu_s": time.process_time() - cpu_s,
        "seconds": time.perf_counter() - began_s,
        "memory_bytes": _memory_bytes("VmHWM") - before,
    }


def sockets(nbytes: int) -> dict[str, float]:
    """Send bytes to another process and receive as many; return this process's processor time.

    This is what the kernel takes for an upload that is read back, with no library around it. On one
    machine the sender's time has a part of the receiver's.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    data = memoryview(bytearray(os.urandom(_SOCKET_BYTES)))
    times = -(-nbytes // len(data))
    let_forks_die()
    other = os.fork()
    if other == 0:
        try:
            with listener.accept()[0] as connection:
                _receive(connection, times * len(data))
                for _ in range(times):
                    connection.sendall(data)
        finally:
            os._exit(0)
    with socket.create_connection(listener.getsockname()) as connection:
        before_s = time.process_time()
        for _ in range(times):
            connection.sendall(data)
        _receive(connection, times * len(data))
        cpu_s = time.process_time() - before_s
    os.waitpid(other, 0)
    return {"bytes": times * len(data), "cpu_s": cpu_s}


def _receive(connection: socket.socket, nbytes: int) -> None:
    memory = bytearray(_SOCKET_BYTES)
    while nbytes:
        received = connection.recv_into(memory, min(nbytes, len(memory)))
        if not received:
            raise ConnectionError("the other process has closed the connection")
        nbytes -= received


def train(directory: str, tier: str, parameters: int, steps: int, seal_every: int) -> Any:
    """Train, and return the seconds of each step and the peak of the memory."""
    import offload
    from bench._model import make_gradients, make_parameters

    live = make_parameters(parameters, 8)
    for parameter, gradient in zip(live, make_gradients(live), strict=True):
        parameter.grad = gradient
    settings: dict[str, Any] = {"drives": offload.DriveTuning(calibrate=False)}
    if tier:
        settings["tier"] = offload.Tier(tier, max_slowdown=1e6, finish_s=0)
    seconds = []
    with offload.AdamW(
        live, directory=directory, keep=2, options=offload.Options(**settings)
    ) as optimizer:
        for number in range(steps + 2):
            began_s = time.perf_counter()
            optimizer.step()
            if number >= 2:
                seconds.append(time.perf_counter() - began_s)
            if number % seal_every == 0:
                optimizer.checkpoint()
        stats = optimizer.stats().tier
    return {
        "step_s": seconds,
        "memory_bytes": _memory_bytes("VmHWM"),
        "num_complete": 0 if stats is None else stats.num_complete,
    }


def send(bucket: str) -> None:
    """Write objects and read them back, for ever: what an upload moves, by a process of its own."""
    import obstore
    from obstore.store import from_url

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    store: Any = from_url(
        bucket,
        config={"endpoint": endpoint, "unsigned_payload": True},
        client_options={"allow_http": True, "timeout": "3600s"},
    )
    data = os.urandom(_OBJECT_BYTES)
    while True:
        obstore.put(store, "control/object", data, use_multipart=False)
        for _ in obstore.get(store, "control/object").stream(min_chunk_size=256 << 10):
            pass


if __name__ == "__main__":
    what, *given = json.loads(sys.argv[1])
    actions: dict[str, Callable[..., object]] = {
        "move": move,
        "sockets": sockets,
        "train": train,
        "send": send,
    }
    print(json.dumps(actions[what](*given)))
