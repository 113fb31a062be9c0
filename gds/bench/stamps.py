"""Contents of scratch files that identify their place, to detect wrong, stale or damaged blocks.

Every block of 4 KiB holds its offset, the number of times it has been rewritten (its generation),
and a number of the file. Each of the remaining 8-byte words depends on offset and generation. So a
block at a wrong place, or a block that a write did not reach, differs in nearly all words. A
flipped bit changes one word.
"""

from __future__ import annotations

import errno
from typing import Final, TypeAlias

import numpy as np

from gds.contract import ALIGNMENT
from gds.errors import WrongDataError

Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_WORDS: Final = ALIGNMENT // 8
# Odd, so that no two blocks, and no two generations of a block, have the same words.
_PLACE: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_AGE: Final = np.uint64(0xBF58_476D_1CE4_E5B9)


class Stamps:
    """Writes and checks the content of one file."""

    def __init__(self, seed: int) -> None:
        """Draw the random words that all blocks share, so that no drive can compress a block."""
        generator = np.random.default_rng(seed)
        self._base: Words = generator.integers(0, 1 << 64, _WORDS, dtype=np.uint64)
        self._number = np.uint64(generator.integers(0, 1 << 64, dtype=np.uint64))

    def fill(self, view: memoryview, offset: int, generations: Words) -> None:
        """Fill memory with the data that belongs at `offset`.

        Args:
            view: Memory to fill, in whole blocks of 4 KiB.
            offset: Position of the first byte in the file, a multiple of 4096.
            generations: Generation that each block has after the coming write, dtype uint64.
        """
        words = np.frombuffer(view, dtype=np.uint64).reshape(-1, _WORDS)
        offsets = np.arange(offset, offset + len(view), ALIGNMENT, dtype=np.uint64)
        key = offsets * _PLACE + generations * _AGE
        np.add(self._base, key[:, None], out=words)
        words[:, 0] = offsets
        words[:, 1] = generations
        words[:, 2] = self._number

    def check(self, view: memoryview, offset: int, generations: Words, path: str) -> None:
        """Compare memory with the data that belongs at `offset`.

        Args:
            view: Memory to compare, in whole blocks of 4 KiB.
            offset: Position of the first byte in the file, a multiple of 4096.
            generations: Expected generation of each block, dtype uint64.
            path: Path of the file, for messages.

        Raises:
            WrongDataError: The data differs; the error describes the first wrong block.
        """
        expected = bytearray(len(view))
        self.fill(memoryview(expected), offset, generations)
        if view == expected:  # compares single bytes, because both have the format "B"
            return
        found = np.frombuffer(view, dtype=np.uint64).reshape(-1, _WORDS)
        right = np.frombuffer(expected, dtype=np.uint64).reshape(-1, _WORDS)
        wrong = np.flatnonzero((found != right).any(axis=1))
        first = int(wrong[0])
        what = self._describe(found[first], right[first])
        raise WrongDataError(
            errno.EBADMSG,
            f"wrong data in {len(wrong)} of {len(found)} blocks; the first {what},",
            path,
            offset=offset + first * ALIGNMENT,
        )

    def _describe(self, found: Words, right: Words) -> str:
        """Return what a wrong block holds, as text."""
        offset, generation = int(found[0]), int(found[1])
        if found[2] == self._number and offset % ALIGNMENT == 0:
            claimed = bytearray(ALIGNMENT)
            one = np.array([generation], dtype=np.uint64)
            self.fill(memoryview(claimed), offset, one)
            if found.tobytes() == claimed:
                if offset != int(right[0]):
                    return f"holds the data of byte {offset}"
                return f"holds write {generation} of it, but {int(right[1])} was the last"
        return f"differs in {int(np.count_nonzero(found != right))} of {_WORDS} words"
