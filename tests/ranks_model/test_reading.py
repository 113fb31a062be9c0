"""Model files are read back into live tensors: the same boxes, or others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from gds import Buffer, File, IOFuture
from gds.backends.wrapper import WrapperFile
from offload.errors import CheckpointError, DamagedError, MismatchError
from offload.format.boxes import Box
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.header import DTYPE_BYTES
from offload.format.shares.model_shares import ModelShares, TensorBox, divide
from offload.model.model_reading import LiveBox, ModelReading, StoredModel
from offload.update.dtypes import DTYPES
from tests.ranks_model.cuts import (
    COLUMNS,
    CONTEXT,
    OTHERS,
    ROWS,
    SHAPES,
    bytes_of,
    divided,
    random_tiling,
    random_values,
    rows,
    some_shares,
    values,
)
from tests.ranks_model.ranks import KINDS, Ranks, content_of, header_of

Wanted = list[tuple[TensorBox, torch.Tensor]]


class Reads(WrapperFile):
    """Counts how often each byte of the file is read."""

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self.counts = np.zeros(inner.size_bytes, dtype=int)

    def read(self, into: Buffer, offset: int) -> IOFuture:
        self.counts[offset : offset + into.nbytes] += 1
        return super().read(into, offset)


class Written:
    """A model file of some ranks, with its digests."""

    def __init__(self, path: Path, num_ranks: int, piece_bytes: int, kind: str = "direct") -> None:
        self.live = values(0)
        self.header = header_of(self.live)
        self.shares = some_shares(self.header, piece_bytes, num_ranks)
        self.file = Ranks(kind, path, self.shares, lambda _, file: Reads(file))
        self.ranks = self.file.ranks
        self.digests = self.file.seal(self.live)

    @property
    def stored(self) -> list:
        return [(self.shares.share(rank), d) for rank, d in enumerate(self.digests)]

    def check(self, wanted: Wanted) -> None:
        for one, tensor in wanted:
            assert bytes_of(tensor) == bytes_of(self.live[one.name][one.box.slices]), one

    def flip(self, at: int, bit: int = 0) -> None:
        file = self.ranks[0].file
        file.write_bytes(bytes([file.read_bytes(at, 1)[0] ^ 1 << bit]), at)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Written]:
    return lambda *args: Written(tmp_path / "m", *args)


def empty_boxes(boxes: Sequence[TensorBox]) -> Wanted:
    """Return live memory of boxes, with other values."""
    every = {**ROWS, **OTHERS}
    return [(one, torch.ones(one.box.sizes).to(every[one.name][0])) for one in boxes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "piece_bytes"), [(1, 8192), (3, 512), (7, 1 << 24)])
def test_each_rank_reads_its_own_bytes_and_all_of_them_each_byte_once(
    num_ranks: int, piece_bytes: int, kind: str, written: Callable[..., Written]
) -> None:
    """It needs the digests of no other rank, and its next seal knows what it has read."""
    one = written(num_ranks, piece_bytes, kind)
    counts = np.zeros(one.header.file_bytes, dtype=int)
    for rank in one.ranks:
        share = one.shares.share(rank.rank)
        rank.known = KnownLeaves(readable=False)
        wanted = empty_boxes(one.shares.boxes[rank.rank])
        reading = rank.read([one.stored[rank.rank]], wanted, known=True)
        one.check(wanted)
        assert reading.num_bytes == share.nbytes
        counts += rank.file.counts
        rank.seal(share, one.live)
        assert rank.written.written_bytes == 0
    assert (counts[: one.header.data_start] == 0).all()
    assert (counts[one.header.data_start :] == 1).all()


@pytest.mark.parametrize("piece_bytes", [512, 8192])
@pytest.mark.parametrize(
    ("before", "after", "dims"),
    [(3, 1, {}), (2, 5, {}), (7, 3, {}), (3, 4, COLUMNS)],
    ids=["fewer", "more", "others", "columns"],
)
def test_what_was_written_in_rows_is_read_by_other_ranks(
    before: int, after: int, dims: dict, piece_bytes: int, written: Callable[..., Written]
) -> None:
    one = written(before, piece_bytes)
    now = some_shares(one.header, piece_bytes, after, dims=dims)
    for boxes in now.boxes:
        wanted = empty_boxes(boxes)
        one.ranks[0].read(one.stored, wanted)
        one.check(wanted)


@pytest.mark.parametrize("seed", range(4))
def test_any_boxes_are_read_and_only_pieces_that_hold_their_elements(
    seed: int, written: Callable[..., Written]
) -> None:
    chance = random.Random(seed)
    one = written(seed % 3 + 1, 512, "buffered")
    wanted: Wanted = []
    masks = {name: np.zeros(shape, dtype=bool) for name, shape in SHAPES.items()}
    for name, (dtype, shape) in ROWS.items():
        for box in random_tiling(shape, chance) if chance.random() < 0.8 else []:
            if chance.random() < 0.3:
                tensor = torch.ones(box.sizes, dtype=dtype)
                if chance.random() < 0.5 and tensor.dim() > 1:
                    tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
                wanted.append((TensorBox(name, box), tensor))
                masks[name][box.slices] = True
    rank = one.ranks[0]
    rank.read(one.stored, wanted)
    one.check(wanted)
    assert rank.file.counts.max(initial=0) <= 1
    for name, mask in masks.items():
        entry = one.header.entries[name]
        needed = np.repeat(mask.reshape(-1), DTYPE_BYTES[entry.dtype])
        start = one.header.data_start + entry.start
        read = rank.file.counts[start : start + entry.nbytes] > 0
        assert not (needed & ~read).any()
        if len(at := np.flatnonzero(needed)):  # and nothing far from the wanted elements
            around = slice(max(0, at[0] - 512), at[-1] + 512)
            assert read[around].sum() == read.sum()
        else:
            assert not read.any()


def test_a_flipped_byte_is_found_by_the_rank_that_owns_it_and_no_other(
    written: Callable[..., Written],
) -> None:
    one = written(3, 8192)
    chance = random.Random(1)
    for _ in range(8):
        at = chance.randrange(one.header.data_start, one.header.file_bytes)
        bit = chance.randrange(8)
        one.flip(at, bit)
        found = []
        for rank in one.ranks:
            wanted = empty_boxes(one.shares.boxes[rank.rank])
            try:
                rank.read(one.stored, wanted)
                one.check(wanted)
            except DamagedError:
                found.append(rank.rank)
        pieces = [(rank, p) for rank in range(3) for p in one.shares.share(rank).pieces]
        assert found == [rank for rank, piece in pieces if piece.start <= at < piece.stop]
        one.flip(at, bit)


def test_no_element_of_a_damaged_piece_reaches_a_live_tensor(
    written: Callable[..., Written],
) -> None:
    one = written(1, 64)
    start = one.header.data_start + one.header.entries["cube"].start + 3 * 64
    one.flip(start + 5)
    live = torch.ones(SHAPES["cube"])
    with pytest.raises(DamagedError, match=f"bytes {start} to {start + 64} are damaged"):
        one.ranks[0].read(one.stored, [(TensorBox("cube", Box.whole(live.shape)), live)])
    flat, expected = live.reshape(-1), one.live["cube"].reshape(-1)
    assert bytes_of(flat[:48]) == bytes_of(expected[:48])
    assert bool((flat[48:64] == 1).all())


@pytest.mark.parametrize("generation", [6, 8])
def test_bytes_of_another_generation_are_damaged(
    generation: int, written: Callable[..., Written]
) -> None:
    one = written(2, 8192)
    context = DigestContext(CONTEXT.store_id, generation)
    with pytest.raises(DamagedError):
        one.ranks[1].read(one.stored, empty_boxes(one.shares.boxes[1]), context=context)


@pytest.mark.parametrize("apart", [64, 512], ids=["pieces", "boxes"])
def test_boxes_and_pieces_that_have_changed_places_are_damaged(apart: int, tmp_path: Path) -> None:
    """Two rows of 512 bytes, which two ranks have written in pieces of 64 bytes."""
    live = {"a": random_values((2, 512), torch.uint8, 1)}
    shares = divide(header_of(live), divided({"a": (2, 512)}, 2), piece_bytes=64)
    ranks = Ranks("direct", tmp_path / "m", shares)
    moved = ranks.seal(live)
    file, start = ranks.ranks[0].file, shares.header.data_start
    first, second = (file.read_bytes(start + at, apart) for at in (0, apart))
    file.write_bytes(second, start)
    file.write_bytes(first, start + apart)
    changed = moved if apart == 512 else moved[0]  # the digests change places as well
    changed[0], changed[1] = changed[1], changed[0]
    stored = [(shares.share(rank), moved[rank]) for rank in range(2)]
    tensor = torch.zeros(1, 512, dtype=torch.uint8)
    with pytest.raises(DamagedError):
        ranks.ranks[0].read(stored, [(shares.boxes[0][0], tensor)])


def test_a_read_that_goes_wrong_once_is_read_again(
    written: Callable[..., Written], caplog: pytest.LogCaptureFixture
) -> None:
    class Once(WrapperFile):
        def read(self, into: Buffer, offset: int) -> IOFuture:
            future = super().read(into, offset)
            future.result()
            into.memoryview()[0] ^= 4
            return future

    one = written(2, 8192)
    rank = one.ranks[1]
    rank.file = Once(rank.file)
    wanted = empty_boxes(one.shares.boxes[1])
    rank.read(one.stored, wanted)
    one.check(wanted)
    assert "one read returned other data" in caplog.text


def stored_of(shares: ModelShares, file: File, num_missing: int = 0) -> list[StoredModel]:
    """Return shares whose digests are of no importance."""
    found = []
    for rank in range(3):
        share = shares.share(rank)
        digests = ["0"] * (len(share.pieces) - num_missing)
        found.append(StoredModel(file, content_of(share, digests)))
    return found


def box(name: str, start: int, num: int, tensor: torch.Tensor) -> LiveBox:
    return LiveBox(name, Box((start,), (num,)), tensor)


def test_what_was_not_written_is_refused_by_name(written: Callable[..., Written]) -> None:
    one = written(3, 8192)
    stored = stored_of(one.shares, one.ranks[0].file)
    for want, message in (
        (box("none", 0, 2, torch.ones(2)), r"\[0:2,\] of 'none' was written 0"),
        (box("a vector", 1000, 2, torch.ones(2)), r"F32 with shape \[1001\]"),
        (box("a vector", 0, 2, torch.ones(2).half()), "is torch.float16 in the"),
        (box("a vector", 0, 2, torch.ones(3)), r"the live tensor's shape is"),
    ):
        with pytest.raises(MismatchError, match=message):
            ModelReading(stored, [want])
    with pytest.raises(MismatchError) as error:  # one of three shares is missing
        ModelReading(stored[::2], [box("a vector", 0, 1001, torch.ones(1001))])
    assert f"{rows((1001,), 3)[1].notation()} of 'a vector' was written 0" in str(error.value)
    last = one.shares.share(0).entries[-1]
    with pytest.raises(CheckpointError, match=r"byte \d+ of the model has no digest"):
        ModelReading(
            stored_of(one.shares, one.ranks[0].file, 1),
            [LiveBox(last.name, last.box, torch.ones(last.box.sizes).to(DTYPES[last.dtype]))],
        )
    empty = LiveBox("empty", Box((0, 0), (0, 3)), torch.ones(0, 3))
    assert ModelReading(stored, [empty]).num_bytes == 0, "no elements, nothing to refuse"
