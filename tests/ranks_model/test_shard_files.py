"""Shard files of ranks: torch's own reader puts them together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from gds import PosixBackend
from offload.errors import MismatchError
from offload.format.boxes import Box
from offload.format.digests import DigestContext
from offload.format.header import Header
from offload.format.known_leaves import KnownLeaves
from offload.format.layout import Layout, ModelTensor
from offload.format.names import SHARD_FOLDER, is_shard_name
from offload.format.shares.model_blocks import SharePlan
from offload.format.shares.model_shares import ModelShare, ModelShares, TensorBox, divide
from offload.format.shares.shard_files import model_shard, shard_share
from offload.model.live_boxes import LiveBox, views_of
from offload.model.model_file import BlockBuffers
from offload.model.model_sharing import (
    ShareImage,
    finish_share,
    write_header,
    write_share,
)
from offload.model.share_reading import ShareReading, StoredShare
from tests.ranks_model.cuts import divided, random_values
from tests.ranks_model.ranks import header_of, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONTEXT = DigestContext("0" * 32, 7)
SHAPES = {
    "rows": (torch.bfloat16, (10, 1)),
    "columns": (torch.bfloat16, (8, 2047)),
    "depth": (torch.float32, (5, 6, 70)),
    "fewer": (torch.float32, (2, 77)),
    "vector": (torch.float32, (1001,)),
}
DIMS = {"columns": 1, "depth": 2}
OTHERS = {"scalar": (torch.float32, ()), "empty": (torch.float32, (0, 3)),
          "count": (torch.int64, (3,))}  # fmt: skip


def values() -> dict[str, torch.Tensor]:
    every = {**SHAPES, **OTHERS}
    return {n: random_values(s, d, i) for i, (n, (d, s)) in enumerate(every.items())}


def some_shares(num_ranks: int = 3) -> ModelShares:
    owned = divided({name: shape for name, (_, shape) in SHAPES.items()}, num_ranks, DIMS)
    return divide(header_of(values()), owned, writer=1)


def layout_of(shares: ModelShares, rank: int) -> Layout:
    """Return a layout without state; owner 0 is the rank that writes all other tensors."""
    entries = shares.header.entries.values()
    model = tuple(ModelTensor(e.name, e.dtype, e.shape) for e in entries)
    shard = model_shard(shares, rank, (rank - shares.writer) % len(shares.boxes))
    return Layout((), model, 1024, shard=shard)


def written(
    folder: Path, shares: ModelShares, live: dict[str, torch.Tensor]
) -> list[tuple[str, Header, ModelShare, list[str]]]:
    """Write the files of all ranks; return name, header, share and digests of each."""
    folder.mkdir()
    found = []
    with PosixBackend() as backend:
        for rank in range(len(shares.boxes)):
            layout = layout_of(shares, rank)
            share, header = shard_share(layout), layout.model_file_header
            name = layout.model_name.removeprefix(f"{SHARD_FOLDER}/")
            plan = SharePlan(share)
            file = backend.create(f"{folder}/{name}", header.file_bytes)
            write_header(file, header)
            image = ShareImage(plan, views_of(share, whole(live)))
            buffers = BlockBuffers(backend, plan.buffer_bytes, block_bytes=plan.buffer_bytes)
            known = KnownLeaves(readable=False)
            result = write_share(image, file, buffers, CONTEXT, known, lambda _: None)
            finish_share(file, result)
            file.close()
            found.append((name, header, share, result.digests))
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_torchs_reader_opens_them(num_ranks, tmp_path):
    live, shares = values(), some_shares(num_ranks)
    assert shares.needs_shard_files
    folder = tmp_path / SHARD_FOLDER
    written(folder, shares, live)
    found = {name: torch.ones_like(tensor) for name, tensor in live.items() if tensor.numel()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in found.items():
        assert bytes_of(tensor) == bytes_of(live[name]), name
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    assert {n: tuple(m.size) for n, m in metadata.items()} == {
        n: tuple(t.shape) for n, t in live.items()
    }


def test_safetensors_opens_each_of_them_and_all_elements_are_there_once(tmp_path):
    live, shares = values(), some_shares()
    files = written(tmp_path / "m", shares, live)
    assert [name for name, *_ in files] == [
        f"shard-{owner + 1:05}-model-00001-of-00001.safetensors" for owner in (2, 0, 1)
    ]
    assert all(is_shard_name(name) for name, *_ in files)
    total = 0
    for rank, (name, _, share, _) in enumerate(files):
        with safe_open(str(tmp_path / "m" / name), "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            names = set(opened.keys())
            assert names == {b.name for b in shares.boxes[rank]} | ({"empty"} & names)
            assert ("empty" in names) == (rank == 1), "the writer lists what has no elements"
            for entry in share.entries:
                tensor = opened.get_tensor(entry.name)
                assert bytes_of(tensor) == bytes_of(live[entry.name][entry.box.slices])
                total += entry.nbytes
    assert total == sum(t.nbytes for t in live.values())


def test_several_boxes_of_one_tensor_are_refused_by_name() -> None:
    live = {"a": random_values((4, 6), torch.float32, 1), "b": torch.zeros(3)}
    boxes = [Box((0, 0), (4, 2)), Box((0, 2), (4, 2)), Box((0, 4), (4, 2))]
    owned = [[TensorBox("a", boxes[0]), TensorBox("a", boxes[2])], [TensorBox("a", boxes[1])]]
    shares = divide(header_of(live), owned)
    with pytest.raises(MismatchError, match=r"rank 0 writes several boxes of 'a'"):
        model_shard(shares, 0, 0)


def test_a_rank_that_has_nothing_of_the_model_has_a_file_without_tensors(tmp_path: Path) -> None:
    live = {"a": random_values((1, 4), torch.float32, 1)}
    shares = divide(header_of(live), divided({"a": (1, 4)}, 3))
    folder = tmp_path / "m"
    assert [len(header.entries) for _, header, *_ in written(folder, shares, live)] == [1, 0, 0]
    found = {"a": torch.ones(1, 4)}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert bytes_of(found["a"]) == bytes_of(live["a"])


def test_they_are_read_in_another_cut(tmp_path):
    """From columns of three ranks to rows of two."""
    live, shares = values(), some_shares()
    files = written(tmp_path / "m", shares, live)
    now = divided({name: shape for name, (_, shape) in SHAPES.items()}, 2)
    with PosixBackend() as backend:
        stored = [
            StoredShare(share, backend.open(f"{tmp_path}/m/{name}"), digests)
            for name, _, share, digests in files
        ]
        for boxes in now:
            wanted = [
                LiveBox(one.name, one.box, torch.ones(one.box.sizes, dtype=SHAPES[one.name][0]))
                for one in boxes
            ]
            reading = ShareReading(stored, wanted)
            nbytes = reading.buffer_bytes
            reading.read(BlockBuffers(backend, nbytes, block_bytes=nbytes), CONTEXT)
            for want in wanted:
                assert bytes_of(want.tensor) == bytes_of(live[want.name][want.box.slices])


def test_digests_are_those_of_a_common_file(tmp_path):
    """They are bound to the box, and not to its place in a file."""
    live = {n: t for n, t in values().items() if n in SHAPES}
    owned = divided({n: tuple(t.shape) for n, t in live.items()}, 3)
    shares = divide(header_of(live), owned)
    digests = {name: digests for name, *_, digests in written(tmp_path / "m", shares, live)}
    with PosixBackend() as backend:
        file = backend.create(f"{tmp_path}/model.safetensors", shares.header.file_bytes)
        for rank, (name, expected) in enumerate(digests.items()):
            plan = SharePlan(shares.share(rank))
            image = ShareImage(plan, views_of(plan.share, whole(live)))
            buffers = BlockBuffers(backend, plan.buffer_bytes, block_bytes=plan.buffer_bytes)
            known = KnownLeaves(readable=False)
            result = write_share(image, file, buffers, CONTEXT, known, lambda _: None)
            assert result.digests == expected, name
