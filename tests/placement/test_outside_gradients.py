"""Gradients that leave a device: the same bits, no race, and little on its way at once."""

from __future__ import annotations

import pytest
import torch

import offload
from offload.errors import OverlapError
from offload.gradients import mover
from tests.fake_gpu.device import on_device, upload, values
from tests.numerics.reference import Reference, assert_same_bits
from tests.placement.pairs import Network

BOTH = pytest.mark.parametrize("device", [False, True], ids=["at-once", "late"], indirect=True)


@BOTH
@pytest.mark.parametrize("kind", ["host", "drive"])
@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_training_has_the_bits_of_torch(in_flight, kind, device, tmp_path, monkeypatch):
    monkeypatch.setattr(mover, "_IN_FLIGHT_BYTES", in_flight)
    monkeypatch.setattr(mover, "_MIN_SPILLED_BYTES", 1024)
    live, plain = on_device(Network()), Network()
    expected = Reference(torch.optim.AdamW, plain.parameters(), lr=1e-2)
    with offload.AdamW(
        live.parameters(),
        lr=1e-2,
        directory=tmp_path / "run",
        model=live,
        options=offload.Options(gradients=kind, chunk_bytes=8192, allow_volatile=True),
    ) as optimizer:
        for step in range(3):
            for micro in range(step + 1):
                batch = torch.randn(
                    8, 16, generator=torch.Generator().manual_seed(step + 9 * micro)
                )
                live(upload(batch)).square().mean().backward()
                plain(batch).square().mean().backward()
            if step == 0:  # a sum is taken on the host, whose norm the fake device cannot receive
                norms = [
                    torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-2) for m in (live, plain)
                ]
                assert_same_bits(values(norms[0]), norms[1], "norm")
            for model in (live, plain):
                for p in model.parameters():
                    p.grad.mul_(0.3)
            optimizer.step()
            expected.step()
            optimizer.zero_grad()
            plain.zero_grad()
            for (name, p), q in zip(live.named_parameters(), plain.parameters(), strict=True):
                assert_same_bits(values(p), q.detach(), name)


@BOTH
@pytest.mark.parametrize("kind", ["host", "drive"])
def test_views_change_a_gradient_until_a_step_has_taken_it(kind, device, tmp_path, monkeypatch):
    monkeypatch.setattr(mover, "_MIN_SPILLED_BYTES", 1024)
    live, plain = on_device(Network()), Network()
    expected = Reference(torch.optim.AdamW, plain.parameters())
    settings = offload.Options(
        gradients=kind, overlap="forward", chunk_bytes=8192, allow_volatile=True
    )
    with offload.AdamW(
        live.parameters(), directory=tmp_path / "run", model=live, options=settings
    ) as optimizer:
        batch = torch.randn(8, 16)
        live(upload(batch)).square().mean().backward()
        plain(batch).square().mean().backward()
        weights = [max(m.parameters(), key=torch.Tensor.numel) for m in (live, plain)]
        for weight in weights:
            weight.grad.view(-1)[:9].zero_()
            weight.grad.detach().t()[1:].mul_(3)
        kept = [weights[0].grad.detach(), weights[0].grad[0]]
        optimizer.step()
        expected.step()
        for gradient in kept:
            with pytest.raises(OverlapError, match="has taken this gradient"):
                gradient.zero_()
        optimizer.synchronize()
        for (name, p), q in zip(live.named_parameters(), plain.parameters(), strict=True):
            assert_same_bits(values(p), q.detach(), name)


@BOTH
def test_gradients_on_their_way_arrive_although_their_optimizer_is_closed(device, tmp_path):
    live, plain = on_device(Network()), Network()
    expected = Reference(torch.optim.AdamW, plain.parameters())
    settings = offload.Options(gradients="host", chunk_bytes=8192, allow_volatile=True)
    first, second = (
        offload.AdamW(live.parameters(), directory=tmp_path / name, options=settings)
        for name in "ab"
    )
    batch = torch.randn(8, 16)
    live(upload(batch)).square().mean().backward()
    plain(batch).square().mean().backward()
    first.close()
    second.step()
    expected.step()
    second.close()
    for (name, p), q in zip(live.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(values(p), q.detach(), name)
