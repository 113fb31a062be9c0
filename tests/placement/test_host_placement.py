"""Parameters on a device, state beside the drive: the same bits, and no race."""

from __future__ import annotations

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import UnsupportedParameterError
from tests.fake_gpu.device import OnDevice, on_device, upload, values
from tests.numerics.models import Mixed, trainable
from tests.numerics.pairs import CASES, ON_DRIVE, Case, Cut
from tests.numerics.reference import assert_same_bits
from tests.placement.pairs import (
    FORMATS,
    STEPS,
    DevicePair,
    Network,
    checkpoint_files,
    give_device_gradients,
    train,
)
from tests.placement.pairs import host_pair as device_pair

BOTH = pytest.mark.parametrize("device", [False, True], ids=["at-once", "late"], indirect=True)
ADAMW, CUT = CASES["adamw"], Cut(3 * 4096, 2)


@BOTH
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("adamw", Cut(2 * 4096, 2)),
        ("sgd-momentum-in-some-groups", Cut(20480, 2)),
        ("rprop", Cut(1 << 20, 2)),
        ("adam-coupled-decay", Cut(3 * 4096, 2, settings={"host_memory": 100_000})),
        ("adamw", ON_DRIVE),
    ],
    ids=str,
)
def test_parameters_and_state_equal_those_of_state_in_memory(name, cut, device):
    pair = device_pair(CASES[name], cut)
    train(pair)
    pair.assert_same_state()
    pair.optimizer.close()
    assert device.num_fetched > 0
    assert device.num_sent > 0
    assert device.locked, "the buffers of a seal are page-locked"


@pytest.mark.parametrize("settings", FORMATS, ids=["split", "bfloat16", "int8"])
def test_compressed_state_has_the_bits_that_it_has_for_parameters_in_host_memory(settings, device):
    options = Cut(3 * 4096, 2, settings=settings)
    found = []
    for model in (on_device(Mixed()), Mixed()):
        backend = MemoryBackend()
        with offload.AdamW(
            model.parameters(), model=model, directory="/s", options=options.options(backend)
        ) as optimizer:
            for step in (0, 1):
                give_device_gradients(step, model)
                optimizer.step()
            found.append(checkpoint_files(optimizer, backend))
    assert len(found[0]) >= 3
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []


def test_training_goes_on_from_a_checkpoint(device):
    pair = device_pair(ADAMW, CUT)
    train(pair, STEPS[:2])
    path = pair.optimizer.checkpoint().result().path
    pair.reopen(live=on_device(Mixed(seed=99)))
    before = pair.optimizer.stats()
    restored = pair.optimizer.restore()
    after = pair.optimizer.stats()
    assert restored.step == 2
    pair.assert_same_parameters()
    model_bytes = sum(p.nbytes for p in pair.live.parameters())
    assert after.to_device_bytes - before.to_device_bytes == model_bytes
    assert after.to_host_bytes == before.to_host_bytes
    live, pair.live = pair.live, on_device(Mixed(seed=98))
    assert offload.load_parameters(pair.live, path, backend=pair.backend) == 2
    pair.assert_same_parameters()  # without an optimizer as well
    pair.live = live
    train(pair, STEPS[2:])
    pair.assert_same_state()


def test_gradients_cross_once_and_parameters_once_each_way(device):
    pair = device_pair(ADAMW, CUT)
    train(pair, range(2))
    before = pair.optimizer.stats()
    pair.step(2)
    after = pair.optimizer.stats()
    stepped = [p for p in pair.live.parameters() if p.grad is not None]
    gradients = sum(p.grad.nbytes for p in stepped)
    parameters = sum(p.nbytes for p in stepped)
    # those without state yet are looked at, in case they have it some day, only as the slot moves
    new = sum(p.nbytes for n, p in trainable(pair.live).items() if n.startswith(("never", "late")))
    crossed = after.to_host_bytes - before.to_host_bytes
    assert gradients + parameters <= crossed <= gradients + parameters + new
    assert after.to_device_bytes - before.to_device_bytes == parameters
    pair.optimizer.checkpoint().result()
    stats = pair.optimizer.stats()
    model_bytes = sum(p.nbytes for p in pair.live.parameters())
    assert stats.to_host_bytes - after.to_host_bytes == model_bytes
    assert stats.to_device_bytes == after.to_device_bytes
    assert stats.wait_device_s > 0
    assert "waiting for device" in stats.summary()
    assert (stats.to_host_bytes, stats.to_device_bytes) == (device.num_fetched, device.num_sent)


def test_memory_for_crossing_depends_on_chunks_and_allocator_alone(device, monkeypatch):
    peaks = []
    for num, factor in ((8, 1), (16, 1), (8, 2)):
        monkeypatch.setattr(device, "held_bytes", lambda nbytes, factor=factor: factor * nbytes)
        model = torch.nn.ParameterList(OnDevice(torch.randn(1024).bfloat16()) for _ in range(num))
        options = Cut(4096, 2).options(MemoryBackend())
        with offload.AdamW(model.parameters(), directory="/store", options=options) as optimizer:
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = upload(torch.randn(1024).bfloat16())
                optimizer.step()
            peaks.append(optimizer.stats().crossing_bytes)
    assert 0 < peaks[0] == peaks[1] <= 6 * 2048
    assert peaks[2] == 2 * peaks[0]


def test_edited_and_added_parameters(device):
    torch.manual_seed(1)
    models = [torch.nn.ParameterList(torch.randn(n) for n in (3000, 50, 700)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    on_device(models[0])
    optimizers = [
        offload.AdamW([*model][:2], directory="/s", options=Cut(4096, 2).options(MemoryBackend()))
        for model in models
    ]

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for group in zip(*models, strict=True):
            gradient = torch.randn(group[0].shape, generator=generator)
            for parameter in group:
                on = isinstance(parameter, OnDevice)
                parameter.grad = upload(gradient.clone()) if on else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        for found, expected in zip(*models, strict=True):
            assert_same_bits(values(found), expected.detach(), f"after step {number}")

    step(0)
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.add_param_group({"params": [model[2]]})
    step(1)
    with torch.no_grad():
        for model in models:
            model[1].clamp_(-0.5, 0.5)
            model[0].data.mul_(0.5)  # which leaves no trace on the parameter
    step(2)


def test_some_parameters_on_the_device_and_some_in_host_memory(device):
    def is_on(name: str) -> bool:
        return "full" in name or "matrix" in name or "strided" in name

    live = on_device(Mixed(), is_on)
    pair = DevicePair(ADAMW, CUT, MemoryBackend(), live=live)
    assert 0 < sum(isinstance(p, OnDevice) for p in live.parameters()) < len([*live.parameters()])
    train(pair)
    pair.assert_same_state()


def on_one_storage(*cuts: slice) -> list[torch.nn.Parameter]:
    memory = torch.linspace(0, 1, 3000)
    return [torch.nn.Parameter(OnDevice(memory[cut])) for cut in cuts]


def sgd(parameters: list[torch.nn.Parameter]) -> offload.OffloadedOptimizer:
    options = Cut(4096, 2).options(MemoryBackend())
    return offload.SGD(parameters, lr=0.1, directory="/store", options=options)


def test_views_of_one_storage_of_a_device_are_trained(device):
    parameters = on_one_storage(slice(0, 1000), slice(1000, 3000, 2), slice(1001, 3000, 2))
    expected = [torch.nn.Parameter(values(p).clone()) for p in parameters]
    reference = torch.optim.SGD(expected, lr=0.1)
    with sgd(parameters) as optimizer:
        for step in range(3):
            for parameter, twin in zip(parameters, expected, strict=True):
                twin.grad = torch.full_like(twin, 0.5 * step)
                parameter.grad = upload(twin.grad.clone())
            optimizer.step()
            reference.step()
        for parameter, twin in zip(parameters, expected, strict=True):
            assert_same_bits(values(parameter), twin.detach(), "parameter")


def test_parameters_that_share_memory_of_a_device_are_refused_without_reading_it(device):
    parameters = on_one_storage(slice(0, 1000), slice(999, 2000))
    before = device.num_kernels, device.num_fetched, device.num_sent
    share = r"group0\.param0.*group0\.param1.* share"
    with pytest.raises(UnsupportedParameterError, match=share):
        sgd(parameters)
    apart = on_one_storage(slice(0, 1000), slice(1000, 2000))
    optimizer = sgd(apart)
    apart[1].held = apart[0].held  # what assigning .data does on a device
    for parameter in apart:
        parameter.grad = upload(torch.ones(1000))
    with pytest.raises(UnsupportedParameterError, match=share):
        optimizer.step()
    made = 2  # the gradients
    assert (device.num_kernels - made, device.num_fetched, device.num_sent) == before
    memory = torch.zeros(1000)  # the same address on another device is other memory
    sgd([torch.nn.Parameter(OnDevice(memory)), torch.nn.Parameter(memory)]).close()


def test_state_is_taken_out_and_put_in(device):
    pair = device_pair(ADAMW, CUT)
    train(pair, STEPS[:2])
    state = pair.optimizer.full_state_dict()
    other = device_pair(ADAMW, Cut(20480, 2))
    with torch.no_grad():
        for mine, theirs in zip(other.live.parameters(), pair.live.parameters(), strict=True):
            mine.copy_(theirs)
    other.optimizer.load_state_dict(state)
    pair.optimizer.close()
    pair.optimizer, pair.live, pair.backend = other.optimizer, other.live, other.backend
    train(pair, STEPS[2:])
    pair.assert_same_state()


def test_a_learning_rate_on_the_device_is_read_at_each_step(device):
    pair = device_pair(Case(torch.optim.AdamW, {}, ({}, {"weight_decay": 0.3})), CUT)
    for step, rate in zip(STEPS, (1e-3, 2e-3, 5e-4, 1e-4), strict=True):
        for group in pair.optimizer.param_groups:
            group["lr"] = upload(torch.tensor(rate))
        for group in pair.reference.inner.param_groups:
            group["lr"] = torch.tensor(rate)
        train(pair, [step])


@BOTH
@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_overlapping_steps_are_ordered_with_the_training_stream(overlap, device):
    """Losses, parameters, and a checkpoint of the moment at which it was asked for."""
    losses: list[list[float]] = []
    finals = []
    for where in (lambda m: m, on_device):
        model, backend = where(Network()), MemoryBackend()
        options = Cut(4096, 2, settings={"overlap": overlap}).options(backend)
        optimizer = offload.AdamW(
            model.parameters(), lr=1e-2, model=model, directory="/store", options=options
        )
        generator = torch.Generator().manual_seed(7)
        losses.append([])
        for step in range(4):
            batch = torch.randn(8, 16, generator=generator)
            if where is on_device:
                batch = upload(batch)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(values(loss).item())
            if step == 2:
                handle = optimizer.checkpoint()
        path = handle.result().path
        optimizer.synchronize()
        file = backend.open(f"{path}/model.safetensors")
        finals.append([file.read_bytes(0, file.size_bytes), *map(values, model.parameters())])
        optimizer.close()
        loaded = where(Network())
        offload.load_parameters(loaded, path, backend=backend)
        assert (values(loaded.seen).item(), values(model.seen).item()) == (3, 4)
    assert losses[0] == losses[1]
    assert finals[0][0] == finals[1][0], "the checkpoint"
    for found, expected in zip(finals[1][1:], finals[0][1:], strict=True):
        assert_same_bits(found, expected, "parameter")


class DeviceMemory(MemoryBackend):
    """A backend whose buffers the host cannot read."""

    def allocate(self, nbytes):
        buffer = super().allocate(nbytes)
        return type("DeviceBuffer", (), {"kind": "device", "nbytes": buffer.nbytes})()


def test_what_cannot_be_reached_is_refused_by_name():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    options = Cut(4096, 2).options(DeviceMemory())
    optimizer = offload.SGD([parameter], lr=1.0, momentum=0.9, directory="/s", options=options)
    with pytest.raises(ValueError, match=r"the memory backend .* allocates device memory"):
        optimizer.step()
    assert not parameter.detach().any()
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(UnsupportedParameterError, match=r"'group0.param0' is on meta"):
        offload.AdamW([parameter], directory="/s", options=Cut(4096, 2).options(MemoryBackend()))
