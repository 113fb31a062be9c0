"""NVRTC and the disassembler, found where CUDA or its wheels put them.

They compile the kernels for a device, and print what they became; neither needs a device or a
driver. ``make integration`` installs both, and there a missing one is a failure.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tests.campaigns import FULL

_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc", "nvidia.cu12")


@dataclass(frozen=True)
class Binary:
    """Machine code of a source, and what the assembler says of it."""

    content: bytes
    num_registers: int
    """Most registers of a thread of any of its kernels."""

    num_spilled_bytes: int
    """Bytes that are stored in or loaded from memory for want of registers, and of stack frames."""


class Nvrtc:
    """The compiler.

    Args:
        library: Its path or name.
    """

    def __init__(self, library: str) -> None:
        for builtins in sorted(Path(library).parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))  # which the compiler looks for by its name alone
        self._library = ctypes.CDLL(library)

    def refusal(self, source: str, architecture: str, options: Sequence[str]) -> str:
        """Return what the compiler says of a source that it does not take; empty if it does."""
        result, log, _ = self._compile(source, architecture, options, "PTX")
        return log if result else ""

    def ptx(self, source: str, architecture: str, options: Sequence[str]) -> str:
        """Compile CUDA C++ to PTX; fails the test with the compiler's messages."""
        result, log, content = self._compile(source, architecture, options, "PTX")
        assert result == 0, log
        # a warning here is a mistake: nothing but the kernels is compiled
        assert not log.strip("\0\n "), log
        return content.decode().rstrip("\0")

    def binary(self, source: str, architecture: str, options: Sequence[str]) -> Binary:
        """Compile CUDA C++ to machine code; fails the test with the compiler's messages."""
        options = (*options, "--ptxas-options=-v")
        result, log, content = self._compile(source, architecture, options, "CUBIN")
        assert result == 0, log
        registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
        spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
        assert registers, log
        assert len(spilled) >= 3 * len(registers), log
        return Binary(content, max(registers), sum(map(int, spilled)))

    def _compile(
        self, source: str, architecture: str, options: Sequence[str], what: str
    ) -> tuple[int, str, bytes]:
        """Return NVRTC's result, its messages, and the code, which is empty after an error."""
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
            log = self._bytes(program, "ProgramLog").decode().rstrip("\0")
            return result, log, b"" if result else self._bytes(program, what)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert getattr(self._library, f"nvrtcGet{what}")(program, text) == 0
        return text.raw


def find() -> Nvrtc:
    """Return the compiler, or skip the test."""
    tried = []
    for candidate in _candidates():
        try:
            return Nvrtc(candidate)
        except OSError as error:
            tried.append(str(error))
    return _missing(
        "no NVRTC to compile the kernels for a device with: it comes with CUDA, or in the package "
        f"nvidia-cuda-nvrtc; NVRTC_LIBRARY names it elsewhere ({'; '.join(tried) or 'none found'})"
    )


def find_disassembler() -> str:
    """Return the path of ``nvdisasm``, or skip the test."""
    for root in _roots():
        if (path := root / "bin" / "nvdisasm").exists():
            path.chmod(path.stat().st_mode | 0o111)  # which some installers leave out
            return str(path)
    if found := os.environ.get("NVDISASM") or shutil.which("nvdisasm"):
        return found
    return _missing(
        "no nvdisasm to look into the kernels with: it comes with CUDA, or in the package "
        "nvidia-cuda-nvdisasm; NVDISASM names it elsewhere"
    )


def disassembled(disassembler: str, binary: Binary, directory: Path) -> str:
    """Return machine code as text."""
    path = directory / "kernel.cubin"
    path.write_bytes(binary.content)
    command = [disassembler, "--print-code", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _missing(what: str) -> NoReturn:
    if FULL:
        pytest.fail(f"{what}. All tests were asked for, and these cannot do without it")
    pytest.skip(what)


def _roots() -> Iterator[Path]:
    """Yield the folders in which wheels put what belongs to CUDA."""
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        yield from map(Path, (spec.submodule_search_locations or []) if spec else [])


def _candidates() -> Iterator[str]:
    if named := os.environ.get("NVRTC_LIBRARY"):
        yield named
        return
    for root in _roots():
        yield from sorted(str(p) for p in root.glob("lib/libnvrtc.so*"))
    if found := ctypes.util.find_library("nvrtc"):
        yield found
