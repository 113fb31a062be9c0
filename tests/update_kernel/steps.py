"""The kernel, for tests that judge its results by themselves."""

from __future__ import annotations

import pytest
import torch

from offload.update.kernel import UpdateKernel, find_library, torchs_root


def kernel_for(
    optimizer: type[torch.optim.Optimizer], state_dtype: str = "float32"
) -> UpdateKernel:
    """Return the kernel without its self-check, so that tests judge it by themselves."""
    library = find_library()
    if isinstance(library, str):
        pytest.skip(f"updates here run torch's code: {library}")
    if optimizer is torch.optim.SGD or state_dtype != "float32":
        return UpdateKernel(library, 0, optimizer)
    root = torchs_root(library)
    if root is None:
        pytest.skip("the kernel does not have the square root of this torch on this processor")
    return UpdateKernel(library, root, optimizer)
