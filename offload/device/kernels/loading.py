"""Compiling kernels and launching them, through CuPy; which is imported by that, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.device.kernels.sources import OPTIONS


class Handle:
    """A stream by its raw handle: all that CuPy reads of one. Its own class for that goes away."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Kernel:
    """A function of a device.

    Args:
        function: CuPy's.
        device: Number of the device.
    """

    def __init__(self, function: Any, device: int) -> None:
        self._function = function
        self._device = device

    def launch(self, grid: int, block: int, arguments: tuple[Any, ...], *, stream: int) -> None:
        """Enqueue the function on a stream.

        Args:
            grid: Blocks.
            block: Threads of each.
            arguments: numpy scalars, and arrays of one structure, which is passed by value.
            stream: As torch's ``Stream.cuda_stream``.
        """
        import cupy

        with cupy.cuda.Device(self._device):
            self._function((grid,), (block,), arguments, stream=Handle(stream))


def load(
    source: str, names: Sequence[str], device: int, options: Sequence[str] = ()
) -> list[Kernel]:
    """Compile a source for a device, and return functions of it by their names.

    Not with CuPy's ``RawModule``: that adds ``-ftz=true`` behind all other options, which makes
    denormal numbers zero (cupy issue 9576).

    Args:
        source: CUDA C++.
        names: Of ``extern "C"`` functions.
        device: Number of the device.
        options: Beside `OPTIONS`.
    """
    import cupy
    from cupy.cuda.compiler import compile_using_nvrtc

    with cupy.cuda.Device(device):
        binary, _ = compile_using_nvrtc(source, options=(*OPTIONS, *options))
        module = cupy.cuda.Module()
        module.load(binary)
        return [Kernel(module.get_function(name), device) for name in names]
