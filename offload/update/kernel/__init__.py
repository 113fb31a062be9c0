"""The update kernel for CPUs: torch's own arithmetic in one pass over the state.

The source is C++ (`source/`), and is compiled when the package is installed. Nothing depends on
it: where it was not built, or where it does not give torch's own bits, torch's code runs instead.
"""

from offload.update.kernel.kernel_step import KernelCall, KernelStep, UpdateKernel
from offload.update.kernel.loading import find_library, torchs_root

__all__ = [
    "KernelCall",
    "KernelStep",
    "UpdateKernel",
    "find_library",
    "torchs_root",
]
