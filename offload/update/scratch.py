"""Working memory of the codecs."""

from __future__ import annotations

import math

import torch

ROUNDER = 1.5 * 2.0**23
"""Number whose addition rounds a float to an integer, ties to even. The low bits of the sum's
mantissa are that integer."""

_MAX_VIEWS = 256


def constant(value: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a 0-d tensor. With a Python number, an operation takes 2 to 3 us longer to start."""
    return torch.tensor(value, dtype=dtype, device="cpu")


class Scratch:
    """Buffers on the CPU that are kept between calls and grow if needed.

    Holds at most 14 bytes per element of the largest call. Not for two threads at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        # Views are cached: making one takes a microsecond, and a call of a codec needs 5 to 10.
        self._views: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return named memory of arbitrary content."""
        key = (name, dtype, shape)
        view = self._views.get(key)
        if view is None:
            view = self._flat(name, dtype, math.prod(shape)).view(shape)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def rounders(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return `ROUNDER`s; torch does not vectorise an operation with two broadcast operands."""
        return self.view("rounders", torch.float32, shape)

    def counter(self, num_elements: int) -> torch.Tensor:
        """Return 0, 1, 2, ... as int32, of shape (num_elements,)."""
        return self.view("counter", torch.int32, (num_elements,))

    def _flat(self, name: str, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
        num_words = -(-num_elements * dtype.itemsize // 4)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_words:
            self._views.clear()
            if name == "counter":
                buffer = torch.arange(num_words, dtype=torch.int32, device="cpu")
            else:
                buffer = torch.empty(num_words, dtype=torch.int32, device="cpu")
                if name == "rounders":
                    buffer.view(torch.float32).fill_(ROUNDER)
            self._buffers[name] = buffer
        return buffer.view(dtype)[:num_elements]
