"""Compilation and launches of kernels through CuPy, which is imported at the first use.

An entry is named after the digest of everything that its content depends on. It is written to
another name and then renamed, so that processes may use the directory at the same time. It begins
with the digest of its content, so that a damaged entry is not used. The directory is not used at
all if another user could write to it: a kernel runs with this user's rights.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from gds.buffers.cuda import Handle, is_lost, lost_error
from gds.errors import RefusedError


class Kernel:
    """A compiled function on a device."""

    def __init__(self, function: Any, device: int) -> None:
        self._function = function
        self._device = device

    def launch(self, grid: int, block: int, arguments: tuple[Any, ...], *, stream: int) -> None:
        """Enqueue the function on a stream.

        Args:
            grid: Number of blocks.
            block: Number of threads in each block.
            arguments: numpy scalars, and numpy arrays of one structure, which is passed by value.
            stream: Raw handle of a stream, as in torch's ``Stream.cuda_stream``.
        """
        import cupy

        with cupy.cuda.Device(self._device):
            self._function((grid,), (block,), arguments, stream=Handle(stream))


def load(
    source: str, names: Sequence[str], device: int, options: Sequence[str] = ()
) -> list[Kernel]:
    """Compile a source for a device, or find it compiled; return functions of it by name.

    This does not use CuPy's ``RawModule``, which adds ``-ftz=true`` after all other options and so
    makes denormal numbers zero (cupy issue 9576).

    Raises:
        RefusedError: The compiler or the driver does not take the source for this device, or the
            compiler is missing; names the remedy.
        DeviceLostError: The device does not work any more.
    """
    import cupy
    from cupy.cuda import compiler, nvrtc

    options = (*OPTIONS, *options)
    with cupy.cuda.Device(device) as current:
        # CuPy and its NVRTC decide on what is compiled for an architecture.
        versions = (cupy.__version__, str(nvrtc.getVersion()))
        parts = (source, *options, str(current.compute_capability), *versions)
        cache = BinaryCache(directory())
        module = None
        if (binary := cache.find(parts)) is not None:
            module = _loaded(binary)
        if module is None:
            try:
                binary, _ = compiler.compile_using_nvrtc(source, options=options)
                module = cupy.cuda.Module()
                module.load(binary)
            except (compiler.CompileException, RuntimeError, ImportError, OSError) as error:
                raise _refusal(error, device, str(current.compute_capability)) from error
            cache.keep(parts, binary)
        return [Kernel(module.get_function(name), device) for name in names]


def _refusal(error: Exception, device: int, capability: str) -> Exception:
    """Return the error to raise if kernels cannot be compiled or loaded for a device."""
    name = f"cuda:{device}"
    if is_lost(error):
        return lost_error(error, "load kernels", name)
    said = " ".join(str(error).split())
    return RefusedError(
        f"the kernels that update state cannot be compiled for {name}, of compute capability "
        f"{capability} ({said}). Its architecture may be too old for this CUDA, or NVRTC or the "
        'driver does not fit. Use placement="host", or a torch and CuPy of another CUDA'
    )


def _loaded(binary: bytes) -> Any:
    """Return a module; None if the driver does not take what was kept."""
    import cupy

    module = cupy.cuda.Module()
    try:
        module.load(binary)
    except cupy.cuda.driver.CUDADriverError:
        return None
    return module


_MAGIC = b"ssd-offload kernel 1\n"
_MAX_BYTES = 64 << 20


def directory() -> Path:
    """Return where compiled kernels are kept; it need not exist.

    The path is not absolute if this user has no home directory, and nothing is kept then.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return root / "ssd-offload" / "kernels"


class BinaryCache:
    """Compiled kernels in a directory, which is made when something is kept.

    Whatever is wrong with the directory, nothing is found and nothing is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, parts: Sequence[str]) -> bytes | None:
        """Return the kernel that depends on these parts; None if none can be trusted."""
        try:
            if not _is_private(self._path):
                return None
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(self._path / _name(parts), flags), "rb") as file:
                found = os.fstat(file.fileno())
                if not (stat.S_ISREG(found.st_mode) and _is_only_ours(found)):
                    return None
                content = file.read(_MAX_BYTES)
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        digest, binary = content[len(_MAGIC) : start], content[start:]
        if content.startswith(_MAGIC) and hashlib.sha256(binary).digest() == digest:
            return binary
        return None

    def keep(self, parts: Sequence[str], binary: bytes) -> None:
        """Keep a compiled kernel, in place of an entry that was damaged."""
        if not self._path.is_absolute():
            return
        try:
            missing = [p for p in (self._path, *self._path.parents) if not p.exists()]
            for path in reversed(missing):  # whatever the umask lets others do
                path.mkdir(mode=0o700, exist_ok=True)
            if not _is_private(self._path):
                return
            handle, unfinished = tempfile.mkstemp(dir=self._path, prefix=".new-")
            try:
                with open(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(binary).digest() + binary)
                os.replace(unfinished, self._path / _name(parts))
            except BaseException:
                os.unlink(unfinished)
                raise
        except OSError:
            return


def _name(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _is_private(path: Path) -> bool:
    """Return whether only this user or root can change a directory, or put another in its place."""
    path = path.resolve(strict=True)
    if not _is_only_ours(path.stat()):
        return False
    for parent in path.parents:
        found = parent.stat()
        is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a directory with the sticky bit, such as /tmp, nobody can rename what is not theirs.
        if is_shared and not found.st_mode & stat.S_ISVTX:
            return False
        if found.st_uid not in (0, os.geteuid()):
            return False
    return True


def _is_only_ours(found: os.stat_result) -> bool:
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not is_shared


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
