"""The kernels' sources and compiler options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""Options of NVRTC. The update uses intrinsics, whose rounding depends on no option but ``-ftz``.
The other options keep `powf` exact."""

_UPDATE = ("values.cuh", "arguments.cuh", "quads.cuh", "rules.cuh", "update.cu")
"""Files of the kernel ``update``, each of which uses those before it."""


@cache
def update_source() -> str:
    """Return the source of the kernel ``update``; `Form.macros` select the variant."""
    return "".join(map(text, _UPDATE))


@cache
def digest_source() -> str:
    """Return the source of ``digest_blocks``, ``digest_scan`` and ``digest_merge``."""
    return text("digest.cu")


def defines(macros: Mapping[str, int]) -> tuple[str, ...]:
    """Return macros as compiler options."""
    return tuple(f"-D{name}={value}" for name, value in macros.items())


def text(name: str) -> str:
    """Return a source file of this package."""
    return files(__package__).joinpath(name).read_text("ascii")
