"""What needs a device says so where there is none, and nothing else does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bench import kernel
from bench._harness import BenchError


def test_modules_import_neither_cupy_nor_compile_anything():
    code = (
        "import sys, offload.device.kernels.update, offload.device.kernels.digest;"
        "sys.exit('cupy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_measurement_refuses_to_measure_something_else(tmp_path):
    with pytest.raises(BenchError, match="no CUDA device"):
        kernel.main(["--quick", "--directory", str(tmp_path), "--output", str(tmp_path)])
