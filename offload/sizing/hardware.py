"""Hardware that people have or may buy: the memory of GPUs by name, and rates of typical drives.

The rates are assumptions, for a first answer before anything was measured.
"""

from __future__ import annotations

import difflib
import re
from typing import Final, NamedTuple

from offload.errors import SizingError
from offload.options import parse_bytes
from offload.sizing.checks import shown

CARDS: Final[dict[str, int]] = {
    "RTX 3060": 12,
    "RTX 3090": 24,
    "RTX 4060": 8,
    "RTX 4070": 12,
    "RTX 4080": 16,
    "RTX 4090": 24,
    "RTX 5070": 12,
    "RTX 5080": 16,
    "RTX 5090": 32,
    "RTX A4000": 16,
    "RTX A5000": 24,
    "RTX A6000": 48,
    "RTX 6000 Ada": 48,
    "RTX PRO 6000": 96,
    "T4": 16,
    "V100 16GB": 16,
    "V100 32GB": 32,
    "A10": 24,
    "A10G": 24,
    "A40": 48,
    "A100 40GB": 40,
    "A100 80GB": 80,
    "L4": 24,
    "L40S": 48,
    "H100": 80,
    "H100 NVL": 94,
    "H200": 141,
    "B200": 180,
}
"""Memory of GPUs in GB, as they are sold. Programs see a few percent more bytes in GB of 1e9, of
which the driver takes a few hundred MB."""

TYPICAL_DRIVES: Final[dict[str, float]] = {
    "one PCIe 4 NVMe": 5.0,
    "one PCIe 5 NVMe": 10.0,
    "four PCIe 5 NVMe in RAID 0": 22.0,
}
"""Rates in GB/s of reads and writes of equal size at the same time, both added up.

A drive for servers sustains about 70 % of what its data sheet promises, and writes are what bounds
it. Those of four are from a published measurement, 27 GB/s read and 11 written. A drive for
desktops falls to half of this or less when its cache for writes is full, as after a few steps of a
large model.
"""

_NOISE: Final = re.compile(r"\b(nvidia|geforce|tesla|generation|pcie|sxm\d|hbm\de?)\b|[^a-z0-9]")
"""What a driver's name of a GPU has besides the name that people use."""


class Card(NamedTuple):
    """A GPU that was named, or one of which only the memory was given."""

    name: str | None
    """Name in the table; None if the memory was given."""

    memory: int
    """Bytes of memory."""


def card(text: str) -> Card:
    """Return the GPU that a text means: ``RTX 4090``, ``4090``, ``nvidia-a10g`` or ``24GB``.

    Case, spaces and hyphens do not matter; names of the driver are known, such as ``NVIDIA
    A100-SXM4-80GB``.

    Raises:
        SizingError: It is neither a name in `CARDS` nor a size with a unit.
    """
    known = {_plain(name): name for name in CARDS}
    known |= {f"{_plain(name)}{gb}gb": name for name, gb in CARDS.items()}
    plain = _plain(text)
    name = known.get(plain) or known.get(f"rtx{plain}")
    if name is not None:
        return Card(name, CARDS[name] * 10**9)
    if (number := text.strip()).replace(".", "", 1).isdecimal():
        raise SizingError(f"the card {shown(text)} has no unit: write {number[:20]}GB")
    try:
        return Card(None, parse_bytes(text, "the memory"))
    except ValueError:
        close = [name for name in CARDS if plain and plain in _plain(name)]
        close = close or [known[one] for one in difflib.get_close_matches(plain, known)]
        close = list(dict.fromkeys(close))
        meant = f"; did you mean {' or '.join(close[:3])}?" if close else ""
        raise SizingError(
            f"the card {shown(text)} is not in the list: give its memory, as 24GB{meant}"
        ) from None


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())
