"""NVRTC, which compiles the kernels for a device: found where CUDA or its wheels put it."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc", "nvidia.cu12")


class Nvrtc:
    """The compiler.

    Args:
        library: Its path or name.
    """

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def refusal(self, source: str, architecture: str, options: Sequence[str]) -> str:
        """Return what the compiler says of a source that it does not take; empty if it does."""
        library, program = self._library, ctypes.c_void_p()
        assert not library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        )
        try:
            arguments = [o.encode() for o in (f"--gpu-architecture={architecture}", *options)]
            result = library.nvrtcCompileProgram(
                program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)
            )
            return self._text(program, "ProgramLog") if result else ""
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def ptx(self, source: str, architecture: str, options: Sequence[str]) -> str:
        """Compile CUDA C++ to PTX; fails the test with the compiler's messages."""
        library, program = self._library, ctypes.c_void_p()
        created = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        )
        assert created == 0
        try:
            arguments = [o.encode() for o in (f"--gpu-architecture={architecture}", *options)]
            result = library.nvrtcCompileProgram(
                program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)
            )
            log = self._text(program, "ProgramLog")
            assert result == 0, log
            # a warning here is a mistake: nothing but the kernels is compiled
            assert not log.strip("\0\n "), log
            return self._text(program, "PTX")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        assert getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert getattr(self._library, f"nvrtcGet{what}")(program, text) == 0
        return text.value.decode()


def find() -> Nvrtc:
    """Return the compiler, or skip the test."""
    tried = []
    for candidate in _candidates():
        try:
            return Nvrtc(candidate)
        except OSError as error:
            tried.append(str(error))
    pytest.skip(
        "no NVRTC to compile the kernels for a device with: it comes with CUDA, or in the package "
        f"nvidia-cuda-nvrtc; NVRTC_LIBRARY names it elsewhere ({'; '.join(tried) or 'none found'})"
    )


def _candidates() -> Iterator[str]:
    if named := os.environ.get("NVRTC_LIBRARY"):
        yield named
        return
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for root in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(str(p) for p in Path(root).glob("lib/libnvrtc.so*"))
    if found := ctypes.util.find_library("nvrtc"):
        yield found
