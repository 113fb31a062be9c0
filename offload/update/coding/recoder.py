"""Encoder of 8-bit values that are put into other blocks; see `offload.checkpoint.recut`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from offload.format.arrays import BLOCK_ELEMENTS
from offload.update.coding.blocks8 import decode_elements, encode_blocks
from offload.update.scratch import Scratch

Values: TypeAlias = "np.ndarray[Any, Any]"


class BlockRecoder:
    """Decodes 8-bit values to FP32, and encodes them in new blocks as a step does."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, codes: Values, scales: Values) -> tuple[Values, Values]:
        """Encode values anew, in blocks that begin at the first of them."""
        scale_bits = torch.from_numpy(scales.view(np.int16))
        old = torch.from_numpy(codes)
        values = torch.empty(len(codes), dtype=torch.float32, device="cpu")
        decode_elements(old, scale_bits.view(torch.bfloat16), values, scratch=self._scratch)
        new = torch.empty_like(old)
        num_blocks = -(-len(codes) // BLOCK_ELEMENTS)
        found = torch.empty(num_blocks, dtype=torch.bfloat16, device="cpu")
        encode_blocks(values, new, found, scratch=self._scratch)
        return new.numpy(), found.view(torch.int16).numpy().view(np.uint16)
