"""One call that makes a backend, for who does not want to know which there are."""

from __future__ import annotations

from typing import Any, Literal

from gds._backend import Backend
from gds._hybrid import HybridPolicy
from gds._posix import PosixBackend

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
    from gds._kvikio import KvikioBackend  # needs a driver and libraries that few have

    return KvikioBackend(hybrid=hybrid, **settings)
