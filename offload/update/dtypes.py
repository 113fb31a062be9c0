"""Table of torch dtypes and their codes in safetensors files, in both directions."""

from __future__ import annotations

from typing import Final

import torch

DTYPE_CODES: Final[dict[torch.dtype, str]] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""safetensors codes, by torch dtype."""

DTYPES: Final[dict[str, torch.dtype]] = {code: dtype for dtype, code in DTYPE_CODES.items()}
"""torch dtypes of state arrays and model tensors, by safetensors code."""
