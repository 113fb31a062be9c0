"""Ranks whose tensors are on a device: the same bytes, and no memory that is used too early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import offload.device.boundary
from offload.format.boxes import Box
from offload.format.shares.model_shares import TensorBox, divide
from offload.model.tensor_image import TensorImage
from tests.fake_gpu import device as fake_device
from tests.fake_gpu.device import upload
from tests.fake_gpu.device import values as values_on
from tests.ranks_model.cuts import divided, random_values
from tests.ranks_model.model import CONTEXT, OTHERS, ROWS, bytes_of, some_shares, values
from tests.ranks_model.ranks import Ranks, header_of, save_oracle


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fake_device.FakeDevice]:
    made = fake_device.FakeDevice(late=request.param)
    fake_device.use(made)
    monkeypatch.setitem(offload.device.boundary.BOUNDARIES, "meta", lambda _: made)
    monkeypatch.setattr(offload.device.boundary, "_made", {})
    yield made
    made.forget()


def uploaded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: upload(tensor) for name, tensor in tensors.items()}


def test_a_tensor_that_is_not_contiguous_is_sent_block_by_block(device):
    """Its old values, which are made contiguous first, do not take the place of the new ones."""
    expected = random_values((64, 8), torch.bfloat16, 1)
    live = upload(torch.zeros(8, 64, dtype=torch.bfloat16).t())
    image = TensorImage([live], names=["live"])
    data = torch.frombuffer(bytearray(bytes_of(expected)), dtype=torch.uint8)
    for start in range(0, 1024, 256):
        image.scatter(start, start + 256, data[start : start + 256])
    assert bytes_of(values_on(live).contiguous()) == bytes_of(expected)


def test_a_shard_that_is_not_contiguous_is_read(device, tmp_path: Path):
    expected = {"a": random_values((64, 8), torch.bfloat16, 1)}
    shares = divide(header_of(expected), divided({"a": (64, 8)}, 2), piece_bytes=64)
    ranks = Ranks("direct", tmp_path / "m", shares)
    digests = ranks.seal([expected] * 2, CONTEXT)
    live = upload(torch.zeros(8, 64, dtype=torch.bfloat16).t())
    stored = [(shares.share(rank), digests[rank]) for rank in range(2)]
    ranks.ranks[0].read(stored, [(TensorBox("a", Box.whole((64, 8))), live)], CONTEXT)
    assert bytes_of(values_on(live).contiguous()) == bytes_of(expected["a"])
    ranks.close()


@pytest.mark.parametrize("piece_bytes", [512, 1 << 24])
def test_boxes_are_fetched_and_sent(piece_bytes, device, tmp_path: Path):
    header = header_of(values(0))
    shares = some_shares(header, piece_bytes)
    ranks = Ranks("direct", tmp_path / "m", shares)
    for seed in range(2):
        live = uploaded(values(seed))
        digests = [rank.seal(shares.share(rank.rank), live, CONTEXT, None) for rank in ranks.ranks]
        assert ranks.content() == save_oracle(values(seed), header, tmp_path / "oracle")
    assert device.num_fetched
    stored = [(shares.share(rank), digests[rank]) for rank in range(3)]
    dtypes = {name: dtype for name, (dtype, _) in {**ROWS, **OTHERS}.items()}
    shapes = {name: shape for name, (_, shape) in ROWS.items()}
    columns = divided(shapes, 2, {name: len(shape) - 1 for name, shape in shapes.items()})
    for boxes in (*shares.boxes, *divide(header, columns).boxes):
        wanted = [
            (TensorBox(one.name, one.box), upload(torch.ones(one.box.sizes).to(dtypes[one.name])))
            for one in boxes
        ]
        ranks.ranks[0].read(stored, wanted, CONTEXT)
        for one, tensor in wanted:
            expected = values(1)[one.name][one.box.slices].contiguous()
            assert bytes_of(values_on(tensor).contiguous()) == bytes_of(expected)
    assert device.num_sent
    ranks.close()
