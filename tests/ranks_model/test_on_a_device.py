"""Ranks whose tensors are on a device: the same bytes, and no memory that is used too early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import offload.device.boundary
from offload.device.staging import Traffic
from offload.distributed.gathering.step_agreement import Replicas
from offload.format.boxes import Box
from offload.format.shares.model_shares import TensorBox, divide
from tests.fake_gpu import device as fake_device
from tests.fake_gpu.device import upload
from tests.fake_gpu.device import values as values_on
from tests.ranks_model.cuts import (
    COLUMNS,
    OTHERS,
    ROWS,
    bytes_of,
    divided,
    random_values,
    some_shares,
    values,
)
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


@pytest.mark.parametrize("piece_bytes", [5000, 1 << 24])
def test_boxes_are_fetched_and_sent(
    piece_bytes: int, device: fake_device.FakeDevice, tmp_path: Path
) -> None:
    header = header_of(values(0))
    shares = some_shares(header, piece_bytes)
    ranks = Ranks("direct", tmp_path / "m", shares)
    for seed in range(2):
        live = {name: upload(tensor) for name, tensor in values(seed).items()}
        digests = [rank.seal(shares.share(rank.rank), live) for rank in ranks.ranks]
        assert ranks.content() == save_oracle(values(seed), header, tmp_path / "oracle")
    assert device.num_fetched
    stored = [(shares.share(rank), digests[rank]) for rank in range(3)]
    dtypes = {name: dtype for name, (dtype, _) in {**ROWS, **OTHERS}.items()}
    for boxes in (*shares.boxes, *some_shares(header, num_ranks=2, dims=COLUMNS).boxes):
        wanted = [(one, upload(torch.ones(one.box.sizes).to(dtypes[one.name]))) for one in boxes]
        ranks.ranks[0].read(stored, wanted)
        for one, tensor in wanted:
            expected = values(1)[one.name][one.box.slices]
            assert bytes_of(values_on(tensor)) == bytes_of(expected)
    assert device.num_sent
    ranks.close()


def test_a_shard_that_is_not_contiguous_is_read_piece_by_piece(
    device: fake_device.FakeDevice, tmp_path: Path
) -> None:
    """Its old values, which are made contiguous first, do not take the place of the new ones."""
    expected = {"a": random_values((64, 8), torch.bfloat16, 1)}
    shares = divide(header_of(expected), divided({"a": (64, 8)}, 2), piece_bytes=64)
    ranks = Ranks("direct", tmp_path / "m", shares)
    digests = ranks.seal(expected)
    live = upload(torch.zeros(8, 64, dtype=torch.bfloat16).t())
    stored = [(shares.share(rank), digests[rank]) for rank in range(2)]
    ranks.ranks[0].read(stored, [(TensorBox("a", Box.whole((64, 8))), live)])
    assert bytes_of(values_on(live)) == bytes_of(expected["a"])
    ranks.close()


def test_what_ranks_compare_of_their_values_is_the_same_in_any_memory(
    device: fake_device.FakeDevice,
) -> None:
    expected = random_values((64, 40_000), torch.bfloat16, 1)  # more than is copied at once
    strided = expected.t().contiguous().t()
    forms = {
        "host": expected,
        "strided": strided,
        "device": upload(expected),
        "strided on the device": upload(strided),
    }
    replicas = Replicas(0, forms.get, Traffic(), lambda: None)
    replicas.know({(name, Box.whole((64, 40_000))): (0, 1) for name in forms})
    names, _, digests = zip(*replicas.digests(), strict=True)
    assert [*names] == replicas.changed() == [*forms]
    assert len({*digests}) == 1
    replicas.note()
    expected[63, -1] += 1
    assert replicas.changed() == ["host"]
    ((_, _, digest),) = replicas.digests(["host"])
    assert digest not in digests
