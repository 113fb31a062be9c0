"""Compilation and launches of kernels through CuPy, which is imported at the first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gds.buffers.cuda import is_lost, lost_error
from gds.errors import RefusedError
from offload.device.kernels.binary_cache import BinaryCache, directory
from offload.device.kernels.sources import OPTIONS


class Handle:
    """A stream given by its raw handle, with the one attribute that CuPy reads.

    CuPy's own class for such streams is being removed.
    """

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Kernel:
    """A compiled function on a device.

    Args:
        function: CuPy's function object.
        device: Number of the device.
    """

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

    Args:
        source: CUDA C++.
        names: Names of ``extern "C"`` functions.
        device: Number of the device.
        options: Compiler options in addition to `OPTIONS`.

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
        f"{capability} ({said}): its architecture may be too old for this CUDA, or NVRTC or the "
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
