"""The compiled update kernel: finding the library for this processor, and calling it."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from functools import cache
from pathlib import Path
from typing import Final

import torch

from offload.update.kernel.forms import Job
from offload.update.kernel.sources import source_digest

_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = _FOLDER / "source"
_LIBRARIES: Final = {"AVX2": "update_avx2.so", "AVX512": "update_avx512.so"}
"""Names of the libraries by torch's name of the processor's instructions."""

_MACHINE: Final = "x86_64"
"""The only kind of processor on which the kernel has been run."""

TURNED_OFF: Final = "OFFLOAD_UPDATE=torch"
"""Setting of an environment variable that turns the kernel off."""

ROOTS: Final = {0: "correctly rounded", 1: "MKL, SSE", 2: "MKL, AVX2", 3: "MKL, AVX-512"}
"""Kinds of square roots that the kernel has, by their numbers."""


class Library:
    """A loaded library.

    Calls let go of the interpreter lock. They compute on the calling thread, with its setting for
    denormal numbers.
    """

    def __init__(self, path: Path, instructions: str) -> None:
        self.instructions = instructions
        _require_whole(path)
        library = ctypes.CDLL(os.fspath(path))
        self._update = library.offload_kernel_update
        self._update.argtypes, self._update.restype = [ctypes.c_void_p], ctypes.c_int
        self._roots = library.offload_kernel_roots
        self._roots.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        library.offload_kernel_source.restype = ctypes.c_char_p
        self.source: str = library.offload_kernel_source().decode()
        """Digest of the sources that it was built from."""

    def update(self, job: Job) -> None:
        """Step all runs of a job."""
        if self._update(ctypes.addressof(job)):
            raise RuntimeError(
                "the update kernel was given a form that it does not have, or lacks an array of it"
            )

    def roots(self, kind: int, values: torch.Tensor) -> torch.Tensor | None:
        """Return square roots of one kind; None if this library does not have the kind."""
        out = torch.empty_like(values)
        if self._roots(kind, values.data_ptr(), out.data_ptr(), len(values)):
            return None
        return out


def _require_whole(path: Path) -> None:
    """Check that an ELF file reaches to the end of its section table, which linkers write last.

    The loader does not check it, and reading a page that a truncated file lacks would end this
    process with a bus error.
    """
    with path.open("rb") as file:
        header = file.read(_ELF_HEADER_BYTES)
        num_bytes = file.seek(0, os.SEEK_END)
    if len(header) < _ELF_HEADER_BYTES or not header.startswith(b"\x7fELF"):
        return  # the loader refuses such a file
    (table,) = struct.unpack_from("<Q", header, 0x28)
    entry_bytes, num_entries = struct.unpack_from("<HH", header, 0x3A)
    if num_bytes < (expected := table + entry_bytes * num_entries):
        raise OSError(f"the file has {num_bytes} of {expected} bytes: install the package again")


_ELF_HEADER_BYTES = 64


@cache
def find_library() -> Library | str:
    """Return the library for the instructions that torch uses here, or why there is none."""
    name, _, value = TURNED_OFF.partition("=")
    if os.environ.get(name) == value:
        return TURNED_OFF
    if (machine := platform.machine()) != _MACHINE:
        return f"the kernel is written for {_MACHINE}, and this processor is {machine}"
    instructions = torch.backends.cpu.get_cpu_capability()
    if instructions not in _LIBRARIES:
        return f"torch runs its {instructions} code, and the kernel needs AVX2 or AVX-512"
    path = _FOLDER / "lib" / _LIBRARIES[instructions]
    if not path.exists():
        return "the kernel was not built when this package was installed"
    try:
        library = Library(path, instructions)
    except (OSError, AttributeError) as error:  # no library, or one without these functions
        return f"{path} cannot be loaded: {error}"
    if (_SOURCES / "update.cpp").exists() and library.source != source_digest(_SOURCES):
        return f"{path} was built from other sources: install the package again"
    return library


@cache
def torchs_root(library: Library) -> int | None:
    """Return the kind of torch's FP32 square root here; None if the library does not have it.

    torch itself is asked, with random bits and with the smallest and the largest numbers. The first
    square root of a process must not run on several threads at once (pytorch issue 188792), and
    this one runs on one.
    """
    generator = torch.Generator("cpu").manual_seed(20260101)
    bits = torch.empty(_NUM_ROOTS, dtype=torch.int32, device="cpu")
    bits.random_(-(1 << 31), 1 << 31, generator=generator)
    for number, first in enumerate(_EDGES):  # kinds differ in where they treat numbers as special
        run = torch.arange(first, first + _SLICE, dtype=torch.int32, device="cpu")
        bits[number * _SLICE : (number + 1) * _SLICE] = run
    values = bits.view(torch.float32)
    # Short slices keep torch on this thread.
    parts = torch.split(values, _SLICE)
    expected = torch.cat([part.sqrt() for part in parts]).view(torch.int32)
    for kind in ROOTS:
        found = library.roots(kind, values)
        if found is not None and torch.equal(found.view(torch.int32), expected):
            return kind
    return None


_NUM_ROOTS, _SLICE = 1 << 17, 1 << 14

_EDGES: Final = (0, 0x00800000 - _SLICE // 2, 0x7F800000 - _SLICE // 2)
"""First bits of slices around zero, the smallest normal number and infinity."""
