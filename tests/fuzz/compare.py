"""Comparisons to the bit, with a message that says where two things differ."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tests.fuzz.plain import bits


class FindingError(Exception):
    """The two sides differ, or something that is promised did not happen."""


def require_same(what: str, plain: Any, ours: Any) -> None:
    """Raise `FindingError` unless both are the same, tensors to the bit; NaNs are all alike."""
    if isinstance(plain, Tensor) and isinstance(ours, Tensor):
        if plain.shape != ours.shape or plain.dtype != ours.dtype:
            raise FindingError(
                f"{what}: plain {plain.dtype} {tuple(plain.shape)},"
                f" ours {ours.dtype} {tuple(ours.shape)}"
            )
        different = bits(plain) != bits(ours)
        if plain.is_floating_point():
            different &= ~(plain.isnan() & ours.isnan())
        if different.any():
            a, b = plain.detach()[different], ours.detach()[different]
            raise FindingError(
                f"{what}: {int(different.sum())} of {plain.numel()} elements differ:"
                f" plain {a.flatten()[0].item()!r}, ours {b.flatten()[0].item()!r}"
            )
    elif isinstance(plain, dict) and isinstance(ours, dict):
        if plain.keys() != ours.keys():
            raise FindingError(
                f"{what}: keys differ: {sorted(map(str, plain.keys() ^ ours.keys()))}"
            )
        for key in plain:
            require_same(f"{what}[{key!r}]", plain[key], ours[key])
    elif isinstance(plain, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(plain) != len(ours):
            raise FindingError(f"{what}: {len(plain)} items of plain, {len(ours)} of ours")
        for n, (a, b) in enumerate(zip(plain, ours, strict=True)):
            require_same(f"{what}[{n}]", a, b)
    elif isinstance(plain, float) and isinstance(ours, float) and math.isnan(plain):
        if not math.isnan(ours):
            raise FindingError(f"{what}: plain nan, ours {ours}")
    elif type(plain) is not type(ours) or plain != ours:
        raise FindingError(f"{what}: plain {plain!r}, ours {ours!r}")
