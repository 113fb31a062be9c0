"""Ranks read boxes of a model file into live tensors: the same boxes, or others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from gds import Buffer, File, IOFuture
from gds.backends.wrapper import WrapperFile
from offload.errors import CheckpointError, DamagedError, MismatchError
from offload.format.boxes import Box
from offload.format.digests import DigestContext
from offload.format.header import DTYPE_BYTES
from offload.format.known_leaves import KnownLeaves
from offload.format.shares.model_shares import ModelShares, TensorBox, divide
from offload.model.live_boxes import LiveBox
from offload.model.share_reading import ShareReading, StoredShare
from tests.ranks_model.cuts import divided, random_tiling, random_values, rows
from tests.ranks_model.ranks import Ranks, header_of, together

CONTEXT = DigestContext("0" * 32, 7)

SHAPES = {
    "rows of 2 bytes": (torch.bfloat16, (10, 1)),
    "rows of 4094 bytes": (torch.bfloat16, (8, 2047)),
    "fewer rows than ranks": (torch.float32, (2, 77)),
    "cube": (torch.float32, (5, 6, 70)),
    "a vector": (torch.float32, (1001,)),
}
OTHERS = {"scalar": (torch.float32, ()), "empty": (torch.float32, (0, 3)),
          "mask": (torch.bool, (13,))}  # fmt: skip


def values() -> dict[str, torch.Tensor]:
    every = {**SHAPES, **OTHERS}
    return {n: random_values(s, d, i) for i, (n, (d, s)) in enumerate(every.items())}


def owned_by(num_ranks: int, dims: dict[str, int] | None = None) -> list[list[TensorBox]]:
    return divided({name: shape for name, (_, shape) in SHAPES.items()}, num_ranks, dims)


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

    def __init__(self, kind: str, path: Path, num_ranks: int, piece_bytes: int) -> None:
        self.live = values()
        self.header = header_of(self.live)
        self.shares = divide(self.header, owned_by(num_ranks), piece_bytes=piece_bytes)
        self.ranks = Ranks(kind, path, self.shares, lambda _, file: Reads(file))
        self.digests = self.ranks.seal([self.live] * num_ranks, CONTEXT)

    @property
    def stored(self) -> list:
        return [(self.shares.share(rank), d) for rank, d in enumerate(self.digests)]

    def check(self, wanted: Sequence[tuple[TensorBox, torch.Tensor]]) -> None:
        for one, tensor in wanted:
            expected = self.live[one.name][one.box.slices]
            assert bytes_of(tensor) == bytes_of(expected), one


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def empty_boxes(shares: ModelShares, rank: int) -> list[tuple[TensorBox, torch.Tensor]]:
    """Return live memory of a rank's boxes, with other values."""
    every = {**SHAPES, **OTHERS}
    return [
        (one, torch.ones(one.box.sizes, dtype=every[one.name][0])) for one in shares.boxes[rank]
    ]


KINDS = ["direct", "buffered", "memory"]
PIECES = [64, 8192, 1 << 24]


class TestTheSameRanks:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("piece_bytes", PIECES)
    @pytest.mark.parametrize("num_ranks", [1, 3, 7])
    def test_each_reads_its_own_bytes_and_all_of_them_each_byte_once(
        self, kind, piece_bytes, num_ranks, tmp_path
    ):
        written = Written(kind, tmp_path / "m", num_ranks, piece_bytes)

        def read(rank, _):
            wanted = empty_boxes(written.shares, rank)
            reading = written.ranks.ranks[rank].read(written.stored, wanted, CONTEXT)
            written.check(wanted)
            assert reading.num_bytes == written.shares.share(rank).nbytes

        together(num_ranks, read)
        counts = sum(rank.file.counts for rank in written.ranks.ranks)
        assert (counts[: written.header.data_start] == 0).all()
        assert (counts[written.header.data_start :] == 1).all()
        written.ranks.close()

    def test_a_rank_may_be_given_its_own_share_only(self, tmp_path):
        """Then it needs the digests of no other rank."""
        written = Written("direct", tmp_path / "m", 3, 4096)
        for rank in written.ranks.ranks:
            wanted = empty_boxes(written.shares, rank.rank)
            rank.read([written.stored[rank.rank]], wanted, CONTEXT)
            written.check(wanted)
        written.ranks.close()

    def test_what_has_been_read_is_known_to_the_next_seal(self, tmp_path):
        written = Written("direct", tmp_path / "m", 3, 4096)
        for rank in written.ranks.ranks:
            share = written.shares.share(rank.rank)
            rank.known = KnownLeaves(readable=False)
            wanted = empty_boxes(written.shares, rank.rank)
            rank.read([written.stored[rank.rank]], wanted, CONTEXT, known=True)
            rank.seal(share, written.live, CONTEXT, None)
            assert rank.written.written_bytes == 0
        written.ranks.close()


def columns(name: str) -> int:
    return max(range(len(SHAPES[name][1])), key=lambda d: SHAPES[name][1][d])


class TestOtherRanks:
    @pytest.mark.parametrize("piece_bytes", PIECES)
    @pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 2), (2, 5), (7, 3)])
    def test_rows_are_read_by_another_number_of_ranks(self, before, after, piece_bytes, tmp_path):
        written = Written("direct", tmp_path / "m", before, piece_bytes)
        now = divide(written.header, owned_by(after), piece_bytes=piece_bytes)
        for rank in range(after):
            wanted = empty_boxes(now, rank)
            written.ranks.ranks[0].read(written.stored, wanted, CONTEXT)
            written.check(wanted)
        written.ranks.close()

    @pytest.mark.parametrize("piece_bytes", PIECES)
    def test_columns_are_read_of_what_was_written_in_rows(self, piece_bytes, tmp_path):
        written = Written("direct", tmp_path / "m", 3, piece_bytes)
        now = divide(written.header, owned_by(4, {name: columns(name) for name in SHAPES}))
        assert now.needs_shard_files
        for rank in range(4):
            wanted = empty_boxes(now, rank)
            written.ranks.ranks[0].read(written.stored, wanted, CONTEXT)
            written.check(wanted)
        written.ranks.close()

    @pytest.mark.parametrize("seed", range(8))
    def test_any_boxes_are_read_and_only_pieces_that_hold_their_elements(self, seed, tmp_path):
        chance = random.Random(seed)
        written = Written("buffered", tmp_path / "m", chance.choice([1, 2, 3]), 64)
        wanted = []
        for name, (dtype, shape) in SHAPES.items():
            for box in random_tiling(shape, chance):
                if chance.random() < 0.3:
                    tensor = torch.ones(box.sizes, dtype=dtype)
                    if chance.random() < 0.5 and tensor.dim() > 1:
                        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
                    wanted.append((TensorBox(name, box), tensor))
        file = written.ranks.ranks[0].file
        written.ranks.ranks[0].read(written.stored, wanted, CONTEXT)
        written.check(wanted)
        assert file.counts.max(initial=0) <= 1
        for name, (_, shape) in SHAPES.items():
            entry = written.header.entries[name]
            mask = np.zeros(shape, dtype=bool)
            for one, _ in wanted:
                if one.name == name:
                    mask[one.box.slices] = True
            size = DTYPE_BYTES[entry.dtype]
            start = written.header.data_start + entry.start
            needed = np.repeat(mask.reshape(-1), size)
            read = file.counts[start : start + entry.nbytes] > 0
            assert not (needed & ~read).any()
            if not needed.any():
                assert not read.any()
        written.ranks.close()

    def test_a_whole_tensor_is_read_by_every_rank_that_wants_it(self, tmp_path):
        written = Written("direct", tmp_path / "m", 3, 8192)
        every = {**SHAPES, **OTHERS}
        wanted = [
            (TensorBox(n, Box.whole(s)), torch.ones(s, dtype=d)) for n, (d, s) in every.items()
        ]
        for rank in written.ranks.ranks:
            rank.read(written.stored, wanted, CONTEXT)
            written.check(wanted)
        written.ranks.close()


class TestDamage:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seed", range(6))
    def test_a_flipped_byte_is_found_by_the_rank_that_owns_it_and_no_other(
        self, kind, seed, tmp_path
    ):
        written = Written(kind, tmp_path / "m", 3, 8192)
        chance = random.Random(seed)
        at = chance.randrange(written.header.data_start, written.header.file_bytes)
        file = written.ranks.ranks[0].file
        file.write_bytes(bytes([file.read_bytes(at, 1)[0] ^ 1 << chance.randrange(8)]), at)
        owners = [
            rank
            for rank in range(3)
            for piece in written.shares.share(rank).pieces
            if piece.start <= at < piece.stop
        ]
        assert len(owners) == 1
        found = []
        for rank in written.ranks.ranks:
            wanted = empty_boxes(written.shares, rank.rank)
            try:
                rank.read(written.stored, wanted, CONTEXT)
                written.check(wanted)
            except DamagedError:
                found.append(rank.rank)
        assert found == owners
        written.ranks.close()

    def test_no_element_of_a_damaged_piece_reaches_a_live_tensor(self, tmp_path):
        written = Written("direct", tmp_path / "m", 1, 64)
        entry = written.header.entries["cube"]
        at = written.header.data_start + entry.start + 3 * 64 + 5
        file = written.ranks.ranks[0].file
        file.write_bytes(bytes([file.read_bytes(at, 1)[0] ^ 1]), at)
        live = torch.ones(SHAPES["cube"][1])
        with pytest.raises(DamagedError, match=f"bytes {at - 5} to {at - 5 + 64} are damaged"):
            written.ranks.ranks[0].read(
                written.stored, [(TensorBox("cube", Box.whole(live.shape)), live)], CONTEXT
            )
        flat, expected = live.reshape(-1), written.live["cube"].reshape(-1)
        assert bytes_of(flat[:48]) == bytes_of(expected[:48])
        assert bool((flat[48:64] == 1).all())
        written.ranks.close()

    @pytest.mark.parametrize("generation", [6, 8])
    def test_bytes_of_another_generation_are_damaged(self, generation, tmp_path):
        written = Written("direct", tmp_path / "m", 2, 8192)
        with pytest.raises(DamagedError):
            written.ranks.ranks[1].read(
                written.stored, empty_boxes(written.shares, 1), DigestContext("0" * 32, generation)
            )
        written.ranks.close()

    @pytest.mark.parametrize("apart", [64, 512], ids=["pieces", "boxes"])
    def test_boxes_and_pieces_that_have_changed_places_are_damaged(self, apart, tmp_path):
        """Two rows of 512 bytes, which two ranks have written in pieces of 64 bytes."""
        live = {"a": random_values((2, 512), torch.uint8, 1)}
        shares = divide(header_of(live), divided({"a": (2, 512)}, 2), piece_bytes=64)
        ranks = Ranks("direct", tmp_path / "m", shares)
        digests = ranks.seal([live] * 2, CONTEXT)
        file, start = ranks.ranks[0].file, shares.header.data_start
        first, second = (file.read_bytes(start + at, apart) for at in (0, apart))
        file.write_bytes(second, start)
        file.write_bytes(first, start + apart)
        moved = [list(found) for found in digests]
        if apart == 512:  # the digests change places as well, as those of two ranks could
            moved[0], moved[1] = digests[1], digests[0]
        else:
            moved[0][0], moved[0][1] = digests[0][1], digests[0][0]
        stored = [(shares.share(rank), moved[rank]) for rank in range(2)]
        tensor = torch.zeros(1, 512, dtype=torch.uint8)
        with pytest.raises(DamagedError):
            ranks.ranks[0].read(stored, [(shares.boxes[0][0], tensor)], CONTEXT)
        ranks.close()

    def test_a_read_that_goes_wrong_once_is_read_again(self, tmp_path, caplog):
        written = Written("direct", tmp_path / "m", 2, 8192)
        rank = written.ranks.ranks[1]

        class Once(WrapperFile):
            def read(self, into: Buffer, offset: int) -> IOFuture:
                future = super().read(into, offset)
                future.result()
                into.memoryview()[0] ^= 4
                return future

        rank.file = Once(rank.file)
        wanted = empty_boxes(written.shares, 1)
        rank.read(written.stored, wanted, CONTEXT)
        written.check(wanted)
        assert "one read returned other data" in caplog.text
        written.ranks.close()


class TestRefusals:
    @pytest.fixture
    def stored(self, tmp_path):
        header = header_of(values())
        shares = divide(header, owned_by(3), piece_bytes=8192)
        ranks = Ranks("buffered", tmp_path / "m", shares)
        file = ranks.ranks[0].file
        yield [
            StoredShare(shares.share(r), file, ["0"] * len(shares.share(r).pieces))
            for r in range(3)
        ]
        ranks.close()

    @pytest.mark.parametrize(
        ("want", "message"),
        [
            (LiveBox("none", Box((0,), (2,)), torch.ones(2)), r"\[0:2,\] of 'none' was written 0"),
            (LiveBox("a vector", Box((1000,), (2,)), torch.ones(2)), r"F32 with shape \[1001\]"),
            (LiveBox("a vector", Box((0,), (2,)), torch.ones(2).half()), "is torch.float16 in the"),
            (LiveBox("a vector", Box((0,), (2,)), torch.ones(3)), r"the live tensor's shape is"),
        ],
        ids=["name", "shape", "dtype", "tensor"],
    )
    def test_a_box_that_was_not_written_is_refused(self, stored, want, message):
        with pytest.raises(MismatchError, match=message):
            ShareReading(stored, [want])

    def test_a_share_that_is_missing_is_named_by_what_it_held(self, stored):
        box = rows((1001,), 3)[1]
        want = LiveBox("a vector", Box((0,), (1001,)), torch.ones(1001))
        with pytest.raises(MismatchError) as error:
            ShareReading([stored[0], stored[2]], [want])
        assert f"{box.notation()} of 'a vector' was written 0 times" in str(error.value)

    def test_a_list_of_digests_that_does_not_fit_is_refused(self, stored):
        short = StoredShare(stored[0].share, stored[0].file, stored[0].digests[:-1])
        with pytest.raises(CheckpointError, match="digests for the"):
            ShareReading([short], [])

    def test_boxes_without_elements_need_nothing(self, stored):
        reading = ShareReading(stored, [LiveBox("empty", Box((0, 0), (0, 3)), torch.ones(0, 3))])
        assert reading.num_bytes == 0
