"""Several ranks write one model file: byte by byte what safetensors itself writes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gds import ALIGNMENT, Buffer, File, IOFuture, StorageError
from gds.backends.wrapper import WrapperFile
from offload.format.digests import LEAF_BYTES, KnownLeaves
from offload.format.shares.model_blocks import SharePlan
from offload.format.shares.model_shares import ModelShares, divide
from offload.model.model_sharing import digest_share
from tests.ranks_model.cuts import (
    ROWS,
    bytes_of,
    divided,
    owner_of_bytes,
    random_values,
    some_shares,
    values,
)
from tests.ranks_model.ranks import CONTEXT, KINDS, Ranks, Tensors, header_of, save_oracle

by_kind = pytest.mark.parametrize("kind", KINDS)
HEADER = header_of(values(0))


def with_garbage(shares: ModelShares, tensors: Tensors) -> list[dict[str, torch.Tensor]]:
    """Return what each rank holds: its own boxes, and other values where it owns nothing."""
    found = []
    for rank in range(len(shares.boxes)):
        live = {n: torch.full_like(t, 1) for n, t in tensors.items()}
        for one in shares.boxes[rank]:
            live[one.name][one.box.slices] = tensors[one.name][one.box.slices]
        found.append(live)
    return found


@by_kind
@pytest.mark.parametrize(
    ("piece_bytes", "within_a_block"), [(512, True), (10000, False), (1 << 24, True)]
)
def test_seals_in_a_row_of_any_number_of_ranks_are_what_safetensors_writes(
    kind: str, piece_bytes: int, within_a_block: bool, tmp_path: Path
) -> None:
    """A block that one rank has written directly is shared at the next seal, and again.

    With a header that ends within a block, as safetensors itself lays files out, the writer's
    header is in a shared block.
    """
    header = HEADER
    if within_a_block:
        header = header_of(values(0), -(-(8 + len(HEADER.encoded[8:].rstrip())) // 8) * 8)
        assert header.data_start % ALIGNMENT
    ranks = None
    for seed, num_ranks in enumerate([3, 1, 40, 2, 7, 1]):
        shares = some_shares(header, piece_bytes, num_ranks, writer=seed % num_ranks)
        ranks = Ranks(kind, tmp_path / "model.safetensors", shares, before=ranks)
        for live in (values(seed), values(seed + 10)):
            ranks.seal(*with_garbage(shares, live), barrier=bool(seed % 2))
            assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        ranks.close()
    if kind != "memory":
        assert all(bytes_of(t) == bytes_of(live[n]) for n, t in load_file(ranks.path).items())


class Journal(WrapperFile):
    """Notes what a rank does, and refuses to touch the bytes of others."""

    def __init__(self, rank: int, inner: File, owners: np.ndarray) -> None:
        super().__init__(inner)
        self.rank, self.owners = rank, owners
        self.events: list[tuple[str, int, int]] = []

    def write(self, source: Buffer, offset: int) -> IOFuture:
        assert offset % ALIGNMENT == source.nbytes % ALIGNMENT == source.address % ALIGNMENT == 0
        self._note("blocks", offset, source.nbytes)
        return super().write(source, offset)

    def write_bytes(self, data: bytes, offset: int) -> None:
        self._note("edge", offset, len(data))
        super().write_bytes(data, offset)

    def read(self, into: Buffer, offset: int) -> IOFuture:
        raise AssertionError("a seal reads nothing")

    def sync(self) -> None:
        self._note("sync", 0, 0)
        super().sync()

    def _note(self, what: str, offset: int, nbytes: int) -> None:
        assert (self.owners[offset : offset + nbytes] == self.rank).all()
        self.events.append((what, offset, nbytes))


def some_model(seed: int) -> dict[str, torch.Tensor]:
    """Return random tensors, with rows from 2 bytes to 4,094 and more."""
    chance = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]
    found = {}
    for number in range(chance.randrange(1, 12)):
        dtype = chance.choice(dtypes)
        width = chance.choice([1, 2, 3, 511, 1023, 2047, 4094, 5000]) // dtype.itemsize + 1
        found[f"t{number}"] = random_values((chance.randrange(1, 9), width), dtype, number)
    return found


@pytest.mark.parametrize("piece_bytes", [64, 5000, 8192, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_whole_blocks_of_a_rank_are_direct_then_edges_go_through_the_page_cache_then_a_sync(
    seed: int, piece_bytes: int, tmp_path: Path
) -> None:
    live = some_model(seed)
    chance = random.Random(seed)
    header = header_of(live, chance.choice([None, 4096 + 8, 8192 - 8]))
    listed = {name: tuple(t.shape) for name, t in live.items() if chance.random() < 0.9}
    shares = divide(header, divided(listed, 3), piece_bytes=piece_bytes)
    owners = owner_of_bytes(shares)
    ranks = Ranks("direct", tmp_path / "m", shares, lambda rank, file: Journal(rank, file, owners))
    ranks.seal(live)
    for rank in ranks.ranks:
        events = rank.file.events
        kinds = [what for what, _, _ in events]
        assert kinds == sorted(kinds), "blocks, then edges, then the sync"
        assert kinds.count("sync") == 1
        written = [
            block
            for what, offset, nbytes in events
            if what == "blocks"
            for block in range(offset // ALIGNMENT, (offset + nbytes) // ALIGNMENT)
        ]
        own = owners[: len(owners) // ALIGNMENT * ALIGNMENT].reshape(-1, ALIGNMENT) == rank.rank
        assert sorted(written) == np.flatnonzero(own.all(1)).tolist(), "each whole block once"
        for what, offset, nbytes in events:
            last = (offset + nbytes - 1) // ALIGNMENT
            assert what != "edge" or offset // ALIGNMENT == last, "within one block"
        assert sum(nbytes for _, _, nbytes in events) == int((owners == rank.rank).sum())
    assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
    ranks.close()


def test_a_rank_without_bytes_syncs_as_well(tmp_path: Path) -> None:
    live = {"one row": random_values((1, 3), torch.float32, 1)}
    shares = divide(header_of(live), divided({"one row": (1, 3)}, 2))
    owners = owner_of_bytes(shares)
    ranks = Ranks("direct", tmp_path / "m", shares, lambda rank, file: Journal(rank, file, owners))
    ranks.seal(live)
    assert ranks.ranks[1].file.events == [("sync", 0, 0)]
    ranks.close()


@by_kind
def test_tensors_may_change_as_soon_as_they_are_said_to_be_copied(
    kind: str, tmp_path: Path
) -> None:
    """A rank overwrites each box as soon as its end has been copied, as a step does."""
    shares = some_shares(HEADER, 512)
    ranks = Ranks(kind, tmp_path / "m", shares)
    for rank in ranks.ranks:
        live, share = values(3), shares.share(rank.rank)
        left = [*share.entries]

        def overwrite(copied: int, live=live, share=share, left=left) -> None:
            while left and share.stop_of(left[0].name, left[0].box) <= copied:
                entry = left.pop(0)
                live[entry.name][entry.box.slices].zero_()

        rank.seal(share, live, copied=overwrite)
        assert not left, "everything was said to be copied"
    assert ranks.content() == save_oracle(values(3), HEADER, tmp_path / "oracle")
    ranks.close()


class Late:
    """A write that takes its bytes when it is waited for, and not before, and may fail."""

    def __init__(self, file: File, source: Buffer, offset: int, fails: bool) -> None:
        self.transfer, self.fails = (file, source, offset), fails
        self.found: int | None = None
        self.waited = False

    def done(self) -> bool:
        return self.waited

    def result(self, timeout: float | None = None) -> int:
        if not self.waited:
            self.waited = True
            file, source, offset = self.transfer
            self.found = file.write(source, offset).result(timeout)
        if self.fails:
            raise StorageError(5, "write", "m", offset=0)
        return self.found


class LateFile(WrapperFile):
    """A file with late writes, one of which fails; -1 for none."""

    def __init__(self, inner: File, failing: int = -1) -> None:
        super().__init__(inner)
        self.failing = failing
        self.writes: list[Late] = []

    def write(self, source: Buffer, offset: int) -> IOFuture:
        fails = len(self.writes) == self.failing
        self.writes.append(Late(self.inner, source, offset, fails))
        return self.writes[-1]  # type: ignore[return-value]


def test_memory_is_not_filled_again_before_its_writes_have_ended(tmp_path: Path) -> None:
    shares = some_shares(HEADER, 512)
    ranks = Ranks("direct", tmp_path / "m", shares, lambda _, file: LateFile(file))
    assert min(len(SharePlan(shares.share(rank)).batches) for rank in range(3)) > 4
    ranks.seal(values(1))
    assert ranks.content() == save_oracle(values(1), HEADER, tmp_path / "oracle")
    ranks.close()


@pytest.mark.parametrize("failing", [0, 4])
def test_after_a_failed_write_no_other_write_is_under_way(failing: int, tmp_path: Path) -> None:
    shares = some_shares(HEADER, 8192)
    ranks = Ranks("direct", tmp_path / "m", shares, lambda _, file: LateFile(file, failing))
    with pytest.raises(StorageError):
        ranks.ranks[0].seal(shares.share(0), values(1))
    writes = ranks.ranks[0].file.writes
    assert len(writes) > failing
    assert all(late.waited for late in writes)
    ranks.close()


@pytest.mark.parametrize("name", ["", *ROWS, "frozen", "mask"])
def test_only_the_tensor_that_changes_is_written_again(name: str, tmp_path: Path) -> None:
    ranks = Ranks("direct", tmp_path / "m", some_shares(HEADER, 8192))
    live = values(1)
    first = ranks.seal(live)
    if name:
        live[name] = values(2)[name]
    again = ranks.seal(live)
    assert ranks.content() == save_oracle(live, HEADER, tmp_path / "oracle")
    num_written = sum(rank.written.written_bytes for rank in ranks.ranks)
    if name:
        assert 0 < num_written < live[name].nbytes + 6 * (ALIGNMENT + 8192)
    else:
        assert (again, num_written) == (first, 0)
        assert not any(rank.written.edges for rank in ranks.ranks)
    ranks.close()


def test_a_change_in_one_of_two_batches_with_a_common_block(tmp_path: Path) -> None:
    """The block is written with the second batch, whichever of its bytes have changed."""
    live = {"a": random_values((40_000,), torch.uint8, 1)}
    header = header_of(live)
    ranks = Ranks("direct", tmp_path / "m", divide(header, [[]], piece_bytes=9000))
    ranks.seal(live)
    for at in range(0, 40_000, 1777):
        live["a"][at] ^= 1
        ranks.seal(live)
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        assert ranks.ranks[0].written.written_bytes <= 9000 + 2 * ALIGNMENT
    ranks.close()


def test_a_change_within_a_large_box_writes_the_leaf_and_not_the_box(tmp_path: Path) -> None:
    live = {"big": random_values((2, 6 * LEAF_BYTES + 50), torch.uint8, 1)}
    header = header_of(live, header_bytes=4096 + 24)
    ranks = Ranks(
        "direct", tmp_path / "m", divide(header, divided({"big": tuple(live["big"].shape)}, 2))
    )
    ranks.seal(live)
    live["big"][1, 2 * LEAF_BYTES + 5] ^= 1
    ranks.seal(live)
    assert ranks.ranks[0].written.written_bytes == 0
    assert ranks.ranks[1].written.written_bytes == LEAF_BYTES + ALIGNMENT
    assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
    ranks.close()


CHANGING = {*values(0)} - {"frozen", "mask"}


def other_ranks(kind: str, path: Path, shares: ModelShares) -> Ranks:
    """Let ranks write a file, and return ranks of a later process, which may read it back."""
    first = Ranks(kind, path, shares)
    first.seal(values(1))
    first.close()
    ranks = Ranks(kind, path, shares, before=first)
    for rank in ranks.ranks:
        rank.known, rank.changing = KnownLeaves(readable=True), CHANGING
    return ranks


@by_kind
@pytest.mark.parametrize("at", [0, 0.5, -1])
def test_what_is_frozen_is_read_back_and_a_byte_that_is_wrong_is_mended(
    at: float, kind: str, tmp_path: Path
) -> None:
    """At an end of the tensor it shares a block with what is written; in the middle not."""
    ranks = other_ranks(kind, tmp_path / "m", some_shares(HEADER, 8192))
    entry = HEADER.entries["frozen"]
    within = {-1: entry.stop - 1, 0.5: (entry.start + entry.stop) // 2}
    offset = HEADER.data_start + within.get(at, entry.start + int(at))
    with ranks.ranks[0].backend.open(ranks.path, writable=True) as file:
        file.write_bytes(bytes([file.read_bytes(offset, 1)[0] ^ 4]), offset)
        file.sync()
    live = {n: t if n in CHANGING else values(1)[n] for n, t in values(2).items()}
    ranks.seal(live)
    assert ranks.content() == save_oracle(live, HEADER, tmp_path / "oracle")
    frozen = sum(t.nbytes for n, t in live.items() if n not in CHANGING)
    assert sum(rank.written.read_bytes for rank in ranks.ranks) == frozen, "and not written"
    ranks.seal(live)
    assert [rank.written.read_bytes for rank in ranks.ranks] == [0] * 3
    ranks.close()


def test_a_box_has_the_same_digests_in_whatever_share_it_is(tmp_path: Path) -> None:
    """A rank needs the bytes of no other rank to compute its own, nor a file to write."""
    found = []
    for writer in (0, 1):
        shares = some_shares(HEADER, 4096, 2, writer)
        ranks = Ranks("buffered", tmp_path / str(writer), shares)
        digests = ranks.seal(values(6))
        by_box = {}
        for rank in ranks.ranks:
            share, its = shares.share(rank.rank), digests[rank.rank]
            image = rank.image(share, values(6))
            assert digest_share(image, rank.buffers(image.plan.buffer_bytes), CONTEXT) == its
            for piece, digest in zip(share.pieces, its, strict=True):
                entry = share.entries[piece.entry]
                by_box[entry.name, entry.box, piece.number] = digest
        found.append(by_box)
        ranks.close()
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(found[0])


def test_shards_need_not_be_contiguous_in_memory(tmp_path: Path) -> None:
    """One element of a transposed tensor counts as contiguous, although its stride is not 1."""
    one = torch.empty(9, 4).t()[2:3, 5:6].fill_(0.7)
    assert one.is_contiguous()
    live = {"a": random_values((6, 1030), torch.float32, 1), "b": one}
    header = header_of(live)
    shares = divide(header, divided({"a": (6, 1030), "b": (1, 1)}, 3))
    ranks = Ranks("direct", tmp_path / "m", shares)
    ranks.seal({"a": live["a"].t().contiguous().t(), "b": one})
    assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
    ranks.close()


def test_ranks_that_write_at_very_different_times(tmp_path: Path) -> None:
    """An edge that is written long after the neighbour's does not undo the neighbour's bytes."""
    shares = some_shares(HEADER)
    ranks = Ranks("direct", tmp_path / "m", shares)
    for seed, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2])):
        for rank in order:
            ranks.ranks[rank].seal(shares.share(rank), values(seed))
        assert ranks.content() == save_oracle(values(seed), HEADER, tmp_path / "oracle")
    ranks.close()
