"""Helpers of scripts that measure a GPU: presence, description and versions of libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata

import torch

from bench._harness import BenchError, Result
from gds.errors import RefusedError

_PACKAGES = ("cupy-cuda13x", "kvikio-cu13", "libkvikio-cu13", "nvidia-cufile")


def require_device() -> None:
    """Refuse to measure on a machine without a GPU.

    Raises:
        BenchError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise BenchError("there is no CUDA device, and this measures one")


def describe_device(result: Result) -> None:
    """Record the device, and the libraries that compute on it and move data to it."""
    properties = torch.cuda.get_device_properties(0)
    result.fact("device", properties.name)
    result.fact("device_memory_bytes", properties.total_memory)
    result.fact("cuda", torch.version.cuda)
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            result.versions[name] = metadata.version(name)


@contextlib.contextmanager
def needing_libraries() -> Iterator[None]:
    """Turn the error of a missing library or driver into a refusal of the script.

    Raises:
        BenchError: A library or a driver is missing.
    """
    try:
        yield
    except RefusedError as error:
        raise BenchError(str(error)) from error
