"""Three ranks write one model file: byte by byte what safetensors itself writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gds import ALIGNMENT, Buffer, File, IOFuture, MemoryBackend, StorageError
from gds.backends.wrapper import WrapperFile
from offload.errors import MismatchError
from offload.format.digests import LEAF_BYTES
from offload.format.known_leaves import KnownLeaves
from offload.format.shares.model_blocks import SharePlan
from offload.format.shares.model_shares import ModelShares, divide
from offload.model.live_boxes import views_of
from offload.model.model_sharing import ShareImage, digest_share, write_share
from tests.ranks_model.cuts import divided, owner_of_bytes, random_values
from tests.ranks_model.model import CONTEXT, ROWS, bytes_of, some_shares, values
from tests.ranks_model.ranks import Ranks, header_of, save_oracle, whole
from tests.threads import since

KINDS = ["direct", "buffered", "memory"]


def with_garbage(
    shares: ModelShares, tensors: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Return what each rank holds: its own boxes, and other values where it owns nothing."""
    found = []
    for rank in range(len(shares.boxes)):
        live = {n: torch.full_like(t, 1) for n, t in tensors.items()}
        for one in shares.boxes[rank]:
            live[one.name][one.box.slices] = tensors[one.name][one.box.slices]
        found.append(live)
    return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class TestTheFile:
    @pytest.mark.parametrize("piece_bytes", [512, 8192, 10000, 1 << 24])
    @pytest.mark.parametrize("barrier", [True, False], ids=["in two phases", "in one"])
    def test_seals_in_a_row_are_what_safetensors_writes(self, kind, piece_bytes, barrier, tmp_path):
        header = header_of(values(0))
        shares = some_shares(header, piece_bytes)
        ranks = Ranks(kind, tmp_path / "model.safetensors", shares)
        for seed in range(4):
            live = values(seed)
            ranks.seal(with_garbage(shares, live), CONTEXT, barrier=barrier)
            assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        ranks.close()
        if kind != "memory":
            loaded = load_file(ranks.path)
            assert all(bytes_of(loaded[n]) == bytes_of(t) for n, t in live.items())

    @pytest.mark.parametrize("seed", range(3))
    def test_with_a_header_that_ends_within_a_block(self, kind, seed, tmp_path):
        """As safetensors itself lays files out: then the writer's header is in a shared block."""
        live = values(seed)
        probe = header_of(live)
        size = -(-(8 + len(probe.encoded[8:].rstrip())) // 8) * 8
        header = header_of(live, header_bytes=size)
        shares = some_shares(header, 8192, writer=2)
        ranks = Ranks(kind, tmp_path / "model.safetensors", shares)
        ranks.seal(with_garbage(shares, live), CONTEXT)
        save_oracle(live, header, tmp_path / "oracle")
        assert ranks.content() == (tmp_path / "oracle").read_bytes()
        ranks.close()

    @pytest.mark.parametrize("num_ranks", [1, 2, 7, 40])
    def test_for_any_number_of_ranks(self, kind, num_ranks, tmp_path):
        live = values(5)
        header = header_of(live)
        shares = some_shares(header, 1 << 24, num_ranks, writer=num_ranks - 1)
        ranks = Ranks(kind, tmp_path / "model.safetensors", shares)
        ranks.seal(with_garbage(shares, live), CONTEXT)
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        ranks.close()

    def test_of_large_tensors_whose_boxes_have_several_pieces(self, tmp_path):
        """The pieces have their real size, and the third one is in a batch of its own."""
        live = {
            "big": random_values((21, 500_009), torch.float32, 1),
            "small": random_values((3, 5), torch.bfloat16, 2),
        }
        header = header_of(live)
        shares = divide(header, divided({n: tuple(t.shape) for n, t in live.items()}, 2))
        share = shares.share(0)
        assert [p.nbytes for p in share.pieces] == [1 << 24, 22000396 - (1 << 24), 20]
        ranks = Ranks("direct", tmp_path / "model.safetensors", shares)
        ranks.seal([live, live], CONTEXT)
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        ranks.close()

    def test_of_ranks_whose_number_changes_between_seals(self, kind, tmp_path):
        """A block that one rank has written directly is shared at the next seal, and again."""
        header = header_of(values(0))
        path, backend = tmp_path / "model.safetensors", MemoryBackend()
        for seed, num_ranks in enumerate([3, 1, 4, 2, 3, 1]):
            shares = some_shares(header, 8192, num_ranks, writer=seed % num_ranks)
            ranks = Ranks(kind, path, shares, is_new=not seed, memory=backend)
            live = values(seed)
            ranks.seal(with_garbage(shares, live), CONTEXT, barrier=bool(seed % 2))
            assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
            ranks.close_files()
        backend.close()


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


class TestTheTransfers:
    @pytest.fixture
    def ranks(self, tmp_path: Path) -> Iterator[Ranks]:
        header = header_of(values(0))
        shares = some_shares(header, 10000)
        owners = owner_of_bytes(header, [list(boxes) for boxes in shares.boxes])
        journaled = Ranks(
            "direct", tmp_path / "m", shares, lambda rank, file: Journal(rank, file, owners)
        )
        yield journaled
        journaled.close()

    def test_whole_blocks_of_a_rank_are_direct_and_edges_go_through_the_page_cache(self, ranks):
        ranks.seal([values(1)] * 3, CONTEXT)
        for rank in ranks.ranks:
            owners = rank.file.owners
            blocks = {
                block
                for what, offset, nbytes in rank.file.events
                if what == "blocks"
                for block in range(offset // ALIGNMENT, (offset + nbytes) // ALIGNMENT)
            }
            whole = range(len(owners) // ALIGNMENT)
            own = [owners[b * ALIGNMENT : (b + 1) * ALIGNMENT] == rank.rank for b in whole]
            assert blocks == {b for b in whole if own[b].all()}
            assert max(n for what, _, n in rank.file.events if what == "edge") < ALIGNMENT
            assert rank.written.written_bytes == int((owners == rank.rank).sum())

    def test_edges_follow_all_blocks_and_the_sync_is_last(self, ranks):
        ranks.seal([values(1)] * 3, CONTEXT)
        for rank in ranks.ranks:
            kinds = [what for what, _, _ in rank.file.events]
            assert kinds == sorted(kinds), "blocks, then edges, then the sync"
            assert kinds.count("sync") == 1
            assert set(kinds) == {"blocks", "edge", "sync"}

    def test_a_rank_without_bytes_syncs_as_well(self, tmp_path):
        live = {"one row": random_values((1, 3), torch.float32, 1)}
        shares = divide(header_of(live), divided({"one row": (1, 3)}, 2))
        owners = owner_of_bytes(shares.header, [list(boxes) for boxes in shares.boxes])
        ranks = Ranks(
            "direct", tmp_path / "m", shares, lambda rank, file: Journal(rank, file, owners)
        )
        ranks.seal([live, live], CONTEXT)
        assert ranks.ranks[1].file.events == [("sync", 0, 0)]
        ranks.close()

    def test_tensors_may_change_as_soon_as_they_are_said_to_be_copied(self, kind, tmp_path):
        """A rank overwrites each box as soon as its end has been copied, as a step does."""
        expected = values(3)
        header = header_of(expected)
        shares = some_shares(header, 512)
        ranks = Ranks(kind, tmp_path / "m", shares)
        for rank in ranks.ranks:
            live = values(3)
            share = shares.share(rank.rank)
            plan = SharePlan(share)
            views = views_of(share, whole(live))
            left = list(zip(share.entries, views, strict=True))

            def overwrite(copied: int, share=share, left=left) -> None:
                while left and share.stop_of(left[0][0].name, left[0][0].box) <= copied:
                    left.pop(0)[1].zero_()

            image = ShareImage(plan, views)
            buffers = rank.buffers(plan.buffer_bytes)
            written = write_share(image, rank.file, buffers, CONTEXT, rank.known, overwrite)
            assert not left, "everything was said to be copied"
            for offset, data in written.edges:
                rank.file.write_bytes(data, offset)
        assert ranks.content() == save_oracle(expected, header, tmp_path / "oracle")
        ranks.close()

    def test_memory_is_not_filled_again_before_its_writes_have_ended(self, tmp_path):
        header = header_of(values(0))
        shares = some_shares(header, 512)
        ranks = Ranks("direct", tmp_path / "m", shares, lambda _, file: Slow(file))
        assert min(len(SharePlan(shares.share(rank)).batches) for rank in range(3)) > 4
        ranks.seal([values(1)] * 3, CONTEXT)
        assert ranks.content() == save_oracle(values(1), header, tmp_path / "oracle")
        ranks.close()


class TestWhatIsKnown:
    def test_the_same_values_are_not_written_again(self, tmp_path):
        header = header_of(values(0))
        shares = some_shares(header, 8192)
        ranks = Ranks("direct", tmp_path / "m", shares)
        first = ranks.seal([values(1)] * 3, CONTEXT)
        again = ranks.seal([values(1)] * 3, CONTEXT)
        assert first == again
        assert [(r.written.written_bytes, r.written.edges) for r in ranks.ranks] == [(0, [])] * 3
        ranks.close()

    @pytest.mark.parametrize("name", [*ROWS, "frozen", "mask"])
    def test_one_tensor_that_changes_is_written(self, name, tmp_path):
        header = header_of(values(0))
        shares = some_shares(header, 8192)
        ranks = Ranks("direct", tmp_path / "m", shares)
        live = values(1)
        ranks.seal([live] * 3, CONTEXT)
        live[name] = values(2)[name]
        ranks.seal([live] * 3, CONTEXT)
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        most = live[name].nbytes + 6 * (ALIGNMENT + 8192)
        assert 0 < sum(rank.written.written_bytes for rank in ranks.ranks) < most
        ranks.close()

    def test_a_change_in_one_of_two_batches_with_a_common_block(self, tmp_path):
        """The block is written with the second batch, whichever of its bytes have changed."""
        live = {"a": random_values((40_000,), torch.uint8, 1)}
        header = header_of(live)
        shares = divide(header, [[]], piece_bytes=9000)
        ranks = Ranks("direct", tmp_path / "m", shares)
        ranks.seal([live], CONTEXT)
        for at in range(0, 40_000, 1777):
            live["a"][at] ^= 1
            ranks.seal([live], CONTEXT)
            assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
            assert ranks.ranks[0].written.written_bytes <= 9000 + 2 * ALIGNMENT
        ranks.close()

    def test_a_change_within_a_large_box_writes_the_leaf_and_not_the_box(self, tmp_path):
        live = {"big": random_values((2, 6 * LEAF_BYTES + 50), torch.uint8, 1)}
        header = header_of(live, header_bytes=4096 + 24)
        shares = divide(header, divided({"big": tuple(live["big"].shape)}, 2))
        ranks = Ranks("direct", tmp_path / "m", shares)
        ranks.seal([live] * 2, CONTEXT)
        live["big"][1, 2 * LEAF_BYTES + 5] ^= 1
        ranks.seal([live] * 2, CONTEXT)
        assert ranks.ranks[0].written.written_bytes == 0
        assert ranks.ranks[1].written.written_bytes == LEAF_BYTES + ALIGNMENT
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        ranks.close()


class TestWhatAnEarlierProcessLeft:
    """Ranks that open a file which others have written."""

    CHANGING = frozenset(n for n in values(0) if n not in {"frozen", "mask"})

    def left(self, kind: str, path: Path, shares: ModelShares, memory: MemoryBackend) -> Ranks:
        """Let ranks write a file, and return other ranks that may read it back."""
        first = Ranks(kind, path, shares, memory=memory)
        first.seal([values(1)] * 3, CONTEXT)
        first.close_files()
        ranks = Ranks(kind, path, shares, is_new=False, memory=memory)
        for rank in ranks.ranks:
            rank.known, rank.changing = KnownLeaves(readable=True), set(self.CHANGING)
        return ranks

    @pytest.mark.parametrize("piece_bytes", [512, 8192, 1 << 24])
    def test_what_is_frozen_is_read_back_and_not_written(self, kind, piece_bytes, tmp_path):
        header = header_of(values(0))
        shares = some_shares(header, piece_bytes)
        ranks = self.left(kind, tmp_path / "model.safetensors", shares, MemoryBackend())
        live = {n: t if n in self.CHANGING else values(1)[n] for n, t in values(2).items()}
        ranks.seal([live] * 3, CONTEXT)
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        frozen = sum(t.nbytes for n, t in live.items() if n not in self.CHANGING)
        assert sum(rank.written.read_bytes for rank in ranks.ranks) == frozen
        trained = sum(t.nbytes for n, t in live.items() if n in self.CHANGING)
        most = trained + 3 * 2 * len(live) * (ALIGNMENT if piece_bytes > 4096 else piece_bytes)
        assert sum(rank.written.written_bytes for rank in ranks.ranks) <= most
        ranks.seal([live] * 3, CONTEXT)
        assert [rank.written.read_bytes for rank in ranks.ranks] == [0] * 3
        ranks.close()

    @pytest.mark.parametrize("at", [0, 1, 0.5, -1])
    def test_a_byte_that_is_wrong_is_mended(self, kind, at, tmp_path):
        """At an end of the tensor it shares a block with what is written; in the middle not."""
        header = header_of(values(0))
        shares, memory = some_shares(header, 8192), MemoryBackend()
        ranks = self.left(kind, tmp_path / "model.safetensors", shares, memory)
        entry = header.entries["frozen"]
        within = {-1: entry.stop - 1, 0.5: (entry.start + entry.stop) // 2}
        offset = header.data_start + within.get(at, entry.start + int(at))
        backend = ranks.ranks[0].backend
        with backend.open(ranks.path, writable=True) as file:
            file.write_bytes(bytes([file.read_bytes(offset, 1)[0] ^ 4]), offset)
            file.sync()
        ranks.seal([values(1)] * 3, CONTEXT)
        assert ranks.content() == save_oracle(values(1), header, tmp_path / "oracle")
        ranks.close()

    def test_nothing_is_read_if_it_may_not_be(self, tmp_path):
        header = header_of(values(0))
        shares = some_shares(header, 8192)
        ranks = self.left("direct", tmp_path / "m", shares, MemoryBackend())
        for rank in ranks.ranks:
            rank.known = KnownLeaves(readable=False)
        ranks.seal([values(1)] * 3, CONTEXT)
        assert [rank.written.read_bytes for rank in ranks.ranks] == [0] * 3
        total = sum(rank.written.written_bytes for rank in ranks.ranks)
        assert total == header.file_bytes - header.data_start
        ranks.close()


class Failing(WrapperFile):
    """Fails one of its writes, and notes whether others were still under way at the end."""

    def __init__(self, inner: File, failing: int) -> None:
        super().__init__(inner)
        self.failing, self.started = failing, 0
        self.pending: list[Late] = []

    def write(self, source: Buffer, offset: int) -> IOFuture:
        self.started += 1
        late = Late(super().write(source, offset), self.started == self.failing)
        self.pending.append(late)
        return late  # type: ignore[return-value]


class Late:
    def __init__(self, inner: IOFuture, fails: bool) -> None:
        self.inner, self.fails, self.waited = inner, fails, False

    def done(self) -> bool:
        return self.waited

    def result(self, timeout: float | None = None) -> int:
        self.waited = True
        if self.fails:
            raise StorageError(5, "write", "m", offset=0)
        return self.inner.result(timeout)


class Slow(WrapperFile):
    """Its writes take their bytes when they are waited for, and not before."""

    def write(self, source: Buffer, offset: int) -> IOFuture:
        return Waiting(self.inner, source, offset)  # type: ignore[return-value]


class Waiting:
    def __init__(self, *transfer: object) -> None:
        self.transfer, self.found = transfer, None

    def done(self) -> bool:
        return self.found is not None

    def result(self, timeout: float | None = None) -> int:
        if self.found is None:
            file, source, offset = self.transfer
            self.found = file.write(source, offset).result(timeout)
        return self.found


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_after_a_failed_write_no_other_write_is_under_way(failing, tmp_path):
    header = header_of(values(0))
    shares = some_shares(header, 8192)
    ranks = Ranks("direct", tmp_path / "m", shares, lambda _, file: Failing(file, failing))
    rank = ranks.ranks[0]
    with pytest.raises(StorageError):
        rank.seal(shares.share(0), values(1), CONTEXT, None)
    assert rank.file.started >= failing
    assert all(late.waited for late in rank.file.pending)
    ranks.close()


class TestImages:
    def test_digests_without_writing_are_those_of_the_seal(self, tmp_path):
        header = header_of(values(0))
        shares = some_shares(header, 4096)
        ranks = Ranks("buffered", tmp_path / "m", shares)
        digests = ranks.seal([values(4)] * 3, CONTEXT)
        for rank in ranks.ranks:
            share = shares.share(rank.rank)
            image = rank.image(share, values(4))
            buffers = rank.buffers(image.plan.buffer_bytes)
            assert digest_share(image, buffers, CONTEXT) == digests[rank.rank]
            assert len(digests[rank.rank]) == len(share.pieces)
        ranks.close()

    def test_a_box_has_the_same_digests_in_whatever_share_it_is(self, tmp_path):
        """A rank needs the bytes of no other rank to compute its own digests."""
        live = values(6)
        header = header_of(live)
        few, many = some_shares(header, 4096, 2), some_shares(header, 4096, 2, writer=1)
        found = []
        for name, shares in (("few", few), ("many", many)):
            ranks = Ranks("buffered", tmp_path / name, shares)
            digests = ranks.seal([live] * 2, CONTEXT)
            ranks.close()
            found.append(
                {
                    (entry.name, entry.box, piece.number): digest
                    for rank in range(2)
                    for piece, digest in zip(shares.share(rank).pieces, digests[rank], strict=True)
                    for entry in [shares.share(rank).entries[piece.entry]]
                }
            )
        assert found[0] == found[1]
        assert len(set(found[0].values())) == len(found[0])

    @pytest.mark.parametrize(
        "wrong", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16)], ids=str
    )
    def test_a_tensor_that_is_not_the_box_is_refused(self, wrong):
        header = header_of({"a": torch.zeros(4, 3)})
        share = divide(header, divided({"a": (4, 3)}, 2)).share(1)
        with pytest.raises(MismatchError, match=r"the box \[2:4, 0:3\] of 'a' is torch.float"):
            ShareImage(SharePlan(share), [wrong])

    def test_shards_need_not_be_contiguous_in_memory(self, tmp_path):
        live = {"a": random_values((6, 1030), torch.float32, 1)}
        header = header_of(live)
        shares = divide(header, divided({"a": (6, 1030)}, 3))
        turned = {"a": live["a"].t().contiguous().t()}
        ranks = Ranks("direct", tmp_path / "m", shares)
        ranks.seal([turned] * 3, CONTEXT)
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
        ranks.close()


def test_a_box_of_one_element_of_a_transposed_tensor():
    """Such a view counts as contiguous, although its stride is not 1."""
    value = random_values((1, 1), torch.float32, 1)
    turned = torch.empty(9, 4).t()[2:3, 5:6]
    assert turned.is_contiguous()
    turned.copy_(value)
    header = header_of({"b": turned})
    share = divide(header, [[]]).share(0)
    image = ShareImage(SharePlan(share), [turned])
    out = torch.zeros(4, dtype=torch.uint8)
    image.gather(0, 4, out)
    assert bytes_of(out) == bytes_of(value)
    image.scatter(0, 4, torch.zeros(4, dtype=torch.uint8))
    assert float(turned) == 0


def test_ranks_that_write_at_very_different_times(tmp_path):
    """An edge that is written long after the neighbour's does not undo the neighbour's bytes."""
    others = threading.enumerate()
    live = values(8)
    header = header_of(live)
    shares = some_shares(header, 1 << 24)
    ranks = Ranks("direct", tmp_path / "m", shares)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        live = values(order[0] + 9)
        for rank in order:
            ranks.ranks[rank].seal(shares.share(rank), live, CONTEXT, None)
        assert ranks.content() == save_oracle(live, header, tmp_path / "oracle")
    ranks.close()
    assert len(since(others)) < 50
