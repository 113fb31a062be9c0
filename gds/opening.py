"""Constructors of backends, by the backend's name or by the path that bytes take."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

from gds.backends.hybrid import HybridPolicy
from gds.backends.posix import PosixBackend
from gds.contract import Backend
from gds.errors import RefusedError
from gds.paths import PATHS, DevicePath, PathName

BackendName = Literal["posix", "kvikio"]


def open_backend(
    name: BackendName = "posix", *, hybrid: bool | HybridPolicy = False, **settings: Any
) -> Backend:
    """Return a new backend, which the caller closes.

    Args:
        name: ``"posix"`` moves host memory; ``"kvikio"`` moves host memory and GPU memory.
        hybrid: Whether to choose between direct and buffered I/O for each request of host memory,
            or the policy for that choice; see `PosixBackend`.
        settings: Further arguments of `PosixBackend`, or of `gds.kvikio.KvikioBackend`.

    Raises:
        RefusedError: A library that the backend needs is missing; the message names the remedy.
        ValueError: The name is unknown, or the value of a setting is out of range.
        TypeError: The backend has no such setting.
    """
    if name == "posix":
        return PosixBackend(hybrid=hybrid, **settings)
    if name != "kvikio":
        raise ValueError(f"unknown backend {name!r}: use 'posix' or 'kvikio'")
    from gds.backends.kvikio import KvikioBackend  # only this backend loads GPU libraries

    return KvikioBackend(hybrid=hybrid, **settings)


def given_or_local(backend: Backend | None) -> AbstractContextManager[Backend]:
    """Return a context with the backend of a caller, or with a new one if that gave none.

    Only the new one, which is that of the local file system, is closed at the end of the context.
    """
    return PosixBackend() if backend is None else nullcontext(backend)


def open_path(name: PathName, threads: int, *, no_driver: str = "") -> Backend:
    """Return a new backend that takes the path `name`; the caller closes it.

    Args:
        name: Name of the path.
        threads: Number of transfers that the backend runs at once, in each direction.
        no_driver: Reason why the CUDA driver cannot be used; empty if it can.
    """
    path = PATHS[name]
    if path.memory == "device" and no_driver:
        raise RefusedError(
            f"path {name!r} transfers GPU memory, but the CUDA driver cannot be used: {no_driver}"
        )
    if path.memory == "host":
        return PosixBackend(read_threads=threads, write_threads=threads, direct=name == "direct")
    from gds.backends.kvikio import KvikioBackend  # only this backend loads GPU libraries

    return KvikioBackend(path=cast(DevicePath, name), read_threads=threads, write_threads=threads)
