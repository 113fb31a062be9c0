"""A server in a process of its own, its memory, and the bytes on connections to it."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench._harness import BenchError

_TCP_INFO_BYTES = 136
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128
"""Places of two counters in Linux's struct tcp_info."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    address: str
    """Address of a run, without its name."""

    pid: int

    def peak_bytes(self) -> int:
        """Return the most memory that the server has had since it began, VmHWM."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as file:
            fields = dict(line.rstrip().split(":", 1) for line in file)
        return int(fields["VmHWM"].split()[0]) * 1024


@contextmanager
def serving(directory: str, listen: str) -> Iterator[Served]:
    """Run a server for the runs in a directory.

    Raises:
        BenchError: It cannot be started.
    """
    command = [sys.executable, "-m", "offload", "serve", directory, "--listen", listen]
    if not listen.startswith("unix:"):
        path = os.path.join(directory, "token")
        with open(path, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(16))
        command += ["--token-file", path]
        os.environ["OFFLOAD_TOKEN_FILE"] = path  # the clients are in this process
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise BenchError("the server has ended at once: see what it says above")
            yield Served(line.split('"')[1].rpartition("/")[0], process.pid)
            process.terminate()
            process.wait(60)
        finally:
            process.kill()


def kernel_bytes(port: int) -> int:
    """Return the bytes on this process's TCP connections to a port, both ways, without headers."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family != socket.AF_INET or found.getpeername()[1] != port:
                    continue
                told = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            continue  # closed in the meantime, or it listens
        total += sum(
            struct.unpack_from("=Q", told, at)[0] for at in (_BYTES_ACKED, _BYTES_RECEIVED)
        )
    return total
