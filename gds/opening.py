"""Making a backend: by its name, or by the path that bytes are to take."""

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
    """Return a new backend, to be closed.

    Args:
        name: ``"posix"`` moves host memory; ``"kvikio"`` moves that and a GPU's.
        hybrid: Choose between direct and buffered for each request of host memory; see
            `PosixBackend`.
        settings: Further arguments of `PosixBackend`, or of `gds.kvikio.KvikioBackend`.

    Raises:
        RefusedError: A library that the backend needs is missing; names the remedy.
        ValueError: There is no such backend, or a setting is none that it can have.
    """
    if name == "posix":
        return PosixBackend(hybrid=hybrid, **settings)
    if name != "kvikio":
        raise ValueError(f"there is no backend {name!r}: take 'posix' or 'kvikio'")
    from gds.backends.kvikio import KvikioBackend  # needs a driver and libraries that few have

    return KvikioBackend(hybrid=hybrid, **settings)


def given_or_local(backend: Backend | None) -> AbstractContextManager[Backend]:
    """Return a context with the backend of a caller, or with a new one if that gave none.

    Only the new one, which is that of the local file system, is closed at the end of the context.
    """
    return PosixBackend() if backend is None else nullcontext(backend)


def open_path(name: PathName, threads: int, *, no_driver: str = "") -> Backend:
    """Return a new backend that takes the path `name`.

    Args:
        name: Of the path.
        threads: Transfers that it runs at once, in each direction.
        no_driver: Why there is no CUDA driver; empty where there is one.

    Raises:
        RefusedError: It cannot be taken here; says why, and what to do.
    """
    path = PATHS[name]
    if path.memory == "device" and no_driver:
        raise RefusedError(
            f"path {name!r} moves memory of a GPU, and there is no CUDA driver here: {no_driver}"
        )
    if path.memory == "host":
        return PosixBackend(read_threads=threads, write_threads=threads, direct=name == "direct")
    from gds.backends.kvikio import KvikioBackend  # needs a driver and libraries that few have

    return KvikioBackend(path=cast(DevicePath, name), read_threads=threads, write_threads=threads)
