"""Contents that tell where they belong, so that a misplaced, stale or damaged block is found.

Every 4 KiB holds its own offset, how often it has been written, and a number of the file; each of
the remaining 8-byte words depends on the first two. So a block that lies elsewhere, or that a write
did not reach, differs in all of its words, and one flipped bit in one of them.
"""

from __future__ import annotations

import errno
from typing import Final, TypeAlias

import numpy as np

from gds.contract import ALIGNMENT
from gds.errors import WrongDataError

Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_WORDS: Final = ALIGNMENT // 8
# Odd, so that no two blocks and no two generations of one have the same words.
_PLACE: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_AGE: Final = np.uint64(0xBF58_476D_1CE4_E5B9)


class Stamps:
    """Writes and checks the contents of one file."""

    def __init__(self, seed: int) -> None:
        """Draw what is common to all blocks: random, so that no drive compresses it."""
        generator = np.random.default_rng(seed)
        self._base: Words = generator.integers(0, 1 << 64, _WORDS, dtype=np.uint64)
        self._number = np.uint64(generator.integers(0, 1 << 64, dtype=np.uint64))

    def fill(self, view: memoryview, offset: int, generations: Words) -> None:
        """Write what belongs at `offset` into memory.

        Args:
            view: Whole blocks of 4 KiB.
            offset: Of its first byte in the file, a multiple of 4096.
            generations: How often each block has been written, this time included.
        """
        words = np.frombuffer(view, dtype=np.uint64).reshape(-1, _WORDS)
        offsets = np.arange(offset, offset + len(view), ALIGNMENT, dtype=np.uint64)
        key = offsets * _PLACE + generations * _AGE
        np.add(self._base, key[:, None], out=words)
        words[:, 0] = offsets
        words[:, 1] = generations
        words[:, 2] = self._number

    def check(self, view: memoryview, offset: int, generations: Words, path: str) -> None:
        """Compare memory with what belongs there; arguments are those of `fill`.

        Raises:
            WrongDataError: It is something else; says where it begins, and what it is.
        """
        expected = bytearray(len(view))
        self.fill(memoryview(expected), offset, generations)
        if view == expected:  # compares bytes: both are of format B
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
        offset, generation = int(found[0]), int(found[1])
        if found[2] == self._number and offset % ALIGNMENT == 0:
            claimed = bytearray(ALIGNMENT)
            one = np.array([generation], dtype=np.uint64)
            self.fill(memoryview(claimed), offset, one)
            if found.tobytes() == claimed:
                if offset != int(right[0]):
                    return f"holds what was written for byte {offset}"
                return f"is from write {generation} of it, and {int(right[1])} was the last"
        return f"differs in {int(np.count_nonzero(found != right))} of {_WORDS} words"
