"""Parameters on a device, state beside the drive: the same bits, and no race."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import offload
import offload.update.host_place
from gds import MemoryBackend
from offload.device.flat_tensors import FlatTensors
from offload.device.staging import StagedTensors
from offload.errors import UnsupportedParameterError
from offload.model.model_file import BlockBuffers
from tests.fake_gpu.device import Event, OnDevice, on_device, upload, values
from tests.numerics.models import Mixed, clip, give_gradients, trainable
from tests.numerics.pairs import CASES, MAX_NORM, Case, Cut, Pair
from tests.numerics.reference import assert_same_bits

STEPS = (0, 1, 7, 8)
"""Some parameters have no gradient in two of them, and some get their first in the third."""


def give_device_gradients(step: int, model: torch.nn.Module) -> torch.Tensor:
    """Give a model on the device the gradients that one in host memory would get, clipped."""
    twin = Mixed()
    give_gradients(step, twin)
    norm = clip(twin, MAX_NORM)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        on = isinstance(parameter, OnDevice)
        parameter.grad = upload(other.grad) if on and other.grad is not None else other.grad
    return norm


class DevicePair(Pair):
    """A model on the device whose state is on storage, beside one in host memory."""

    def step_live(self, step: int) -> torch.Tensor:
        norm = give_device_gradients(step, self.live)
        self.optimizer.step()
        return norm

    def assert_same_parameters(self) -> None:
        expected = dict(self.expected.named_parameters())
        for name, parameter in self.live.named_parameters():
            assert_same_bits(values(parameter), expected[name].detach(), name)


def device_pair(case: Case, cut: Cut) -> DevicePair:
    return DevicePair(case, cut, MemoryBackend(), live=on_device(Mixed()))


def train(pair: Pair, steps: Sequence[int] = STEPS) -> None:
    for step in steps:
        pair.step(step)
        pair.assert_same_parameters()


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("adamw", Cut(2 * 4096, 2)),
        ("sgd-momentum-in-some-groups", Cut(20480, 2)),
        ("rprop", Cut(1 << 20, 2)),
        ("adam-coupled-decay", Cut(3 * 4096, 2, settings={"host_memory": 100_000})),
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


@pytest.mark.parametrize(
    "settings",
    [{"master": "split"}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}],
    ids=["split", "bfloat16", "int8"],
)
def test_compressed_state_has_the_bits_that_it_has_for_parameters_in_host_memory(settings, device):
    options = Cut(3 * 4096, 2, settings=settings)
    backends = MemoryBackend(), MemoryBackend()
    models = on_device(Mixed()), Mixed()
    optimizers = [
        offload.AdamW(m.parameters(), model=m, directory="/store", options=options.options(b))
        for m, b in zip(models, backends, strict=True)
    ]
    for step in (0, 1):
        for model, optimizer in zip(models, optimizers, strict=True):
            give_device_gradients(step, model)
            optimizer.step()
    found, expected = (o.checkpoint().result().path for o in optimizers)
    names = [n for n in backends[0].list_dir(found) if n.endswith("safetensors")]
    assert len(names) >= 4
    for name in names:
        pair = [b.open(f"{p}/{name}") for b, p in zip(backends, (found, expected), strict=True)]
        contents = [file.read_bytes(0, file.size_bytes) for file in pair]
        assert contents[0] == contents[1] or name == "train_state.safetensors", name


def test_training_goes_on_from_a_checkpoint(device):
    cut = Cut(3 * 4096, 2)
    pair = device_pair(CASES["adamw"], cut)
    train(pair, STEPS[:2])
    pair.optimizer.checkpoint().result()
    pair.reopen(live=on_device(Mixed(seed=99)))
    before = pair.optimizer.stats()
    restored = pair.optimizer.restore()
    after = pair.optimizer.stats()
    assert restored.step == 2
    pair.assert_same_parameters()
    model_bytes = sum(p.nbytes for p in pair.live.parameters())
    assert after.to_device_bytes - before.to_device_bytes == model_bytes
    assert after.to_host_bytes == before.to_host_bytes
    train(pair, STEPS[2:])
    pair.assert_same_state()


def test_the_third_block_of_a_restore_is_page_locked_as_well(device):
    blocks = BlockBuffers(MemoryBackend(), 1 << 30).page_lock_for([torch.device("meta")])
    memory = blocks.for_reading(3)
    locked = {tensor.data_ptr() for tensor in device.locked}
    assert len(memory) == 3
    assert {block.tensor.data_ptr() for block in memory} == locked


def test_gradients_cross_once_and_parameters_once_each_way(device):
    pair = device_pair(CASES["adamw"], Cut(3 * 4096, 2))
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
    sealed = pair.optimizer.checkpoint().result()
    stats = pair.optimizer.stats()
    model_bytes = sum(p.nbytes for p in pair.live.parameters())
    assert stats.to_host_bytes - after.to_host_bytes == model_bytes, sealed.path
    assert stats.to_device_bytes == after.to_device_bytes
    assert stats.wait_device_s > 0
    assert "waiting for device" in stats.summary()
    assert stats.to_host_bytes == device.num_fetched
    assert stats.to_device_bytes == device.num_sent


def test_memory_for_crossing_does_not_depend_on_the_number_of_chunks(device):
    peaks = []
    for num in (8, 16):
        model = torch.nn.ParameterList(
            OnDevice(torch.randn(1024, dtype=torch.bfloat16)) for _ in range(num)
        )
        options = Cut(4096, 2).options(MemoryBackend())
        with offload.AdamW(model.parameters(), directory="/store", options=options) as optimizer:
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = upload(torch.randn(1024, dtype=torch.bfloat16))
                optimizer.step()
            peaks.append(optimizer.stats().crossing_bytes)
    assert peaks[0] == peaks[1] <= 6 * 2048


def test_memory_for_crossing_is_counted_as_the_allocator_takes_it(device, monkeypatch):
    peaks = []
    for factor in (1, 2):
        monkeypatch.setattr(device, "held_bytes", lambda nbytes, factor=factor: factor * nbytes)
        pair = device_pair(CASES["adamw"], Cut(4096, 2))
        train(pair, STEPS[:1])
        peaks.append(pair.optimizer.stats().crossing_bytes)
        pair.optimizer.close()
    assert peaks[1] == 2 * peaks[0] > 0


def test_an_edited_parameter_wins(device):
    pair = device_pair(CASES["adamw"], Cut(3 * 4096, 2))
    train(pair, STEPS[:2])
    for model in pair.both():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
    train(pair, STEPS[2:])


def test_parameters_that_are_added_and_edited_through_data(device):
    torch.manual_seed(1)
    models = [torch.nn.ParameterList(torch.randn(n) for n in (3000, 50, 700)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    on_device(models[0])
    optimizers = []
    for model in models:
        options = Cut(4096, 2).options(MemoryBackend())
        optimizers.append(offload.AdamW([*model][:2], directory="/s", options=options))

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
    step(2)
    with torch.no_grad():
        for model in models:
            model[0].data.mul_(0.5)  # which leaves no trace on the parameter
    step(3)


def test_some_parameters_on_the_device_and_some_in_host_memory(device):
    def is_on(name: str) -> bool:
        return "full" in name or "matrix" in name or "strided" in name

    live = on_device(Mixed(), is_on)
    pair = DevicePair(CASES["adamw"], Cut(3 * 4096, 2), MemoryBackend(), live=live)
    assert 0 < sum(isinstance(p, OnDevice) for p in live.parameters()) < len([*live.parameters()])
    train(pair)
    pair.assert_same_state()


def on_one_storage(*cuts: slice) -> list[torch.nn.Parameter]:
    memory = torch.linspace(0, 1, 3000)
    return [torch.nn.Parameter(OnDevice(memory[cut])) for cut in cuts]


def test_views_of_one_storage_of_a_device_are_trained(device):
    parameters = on_one_storage(slice(0, 1000), slice(1000, 3000, 2), slice(1001, 3000, 2))
    expected = [torch.nn.Parameter(values(p).clone()) for p in parameters]
    options = Cut(4096, 2).options(MemoryBackend())
    reference = torch.optim.SGD(expected, lr=0.1)
    with offload.SGD(parameters, lr=0.1, directory="/store", options=options) as optimizer:
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
    options = Cut(4096, 2).options(MemoryBackend())
    before = device.num_kernels, device.num_fetched, device.num_sent
    with pytest.raises(UnsupportedParameterError, match=r"group0\.param0.*group0\.param1.* share"):
        offload.SGD(parameters, lr=0.1, directory="/store", options=options)
    apart = on_one_storage(slice(0, 1000), slice(1000, 2000))
    optimizer = offload.SGD(apart, lr=0.1, directory="/store", options=options)
    apart[1].held = apart[0].held  # what assigning .data does on a device
    for parameter in apart:
        parameter.grad = upload(torch.ones(1000))
    with pytest.raises(UnsupportedParameterError, match=r"group0\.param0.*group0\.param1.* share"):
        optimizer.step()
    made = 2  # the gradients
    assert (device.num_kernels - made, device.num_fetched, device.num_sent) == before


def test_the_same_address_on_another_device_is_other_memory(device):
    memory = torch.zeros(1000)
    parameters = [torch.nn.Parameter(OnDevice(memory)), torch.nn.Parameter(memory)]
    assert parameters[0].data_ptr() == parameters[1].data_ptr()
    options = Cut(4096, 2).options(MemoryBackend())
    offload.SGD(parameters, lr=0.1, directory="/store", options=options).close()


def test_state_is_taken_out_and_put_in(device):
    pair = device_pair(CASES["adamw"], Cut(3 * 4096, 2))
    train(pair, STEPS[:2])
    state = pair.optimizer.full_state_dict()
    other = device_pair(CASES["adamw"], Cut(20480, 2))
    with torch.no_grad():
        for mine, theirs in zip(other.live.parameters(), pair.live.parameters(), strict=True):
            mine.copy_(theirs)
    other.optimizer.load_state_dict(state)
    pair.optimizer, before = other.optimizer, pair.optimizer
    pair.live, pair.backend = other.live, other.backend
    train(pair, STEPS[2:])
    pair.assert_same_state()
    before.close()


def test_a_learning_rate_on_the_device_is_read_at_each_step(device):
    pair = device_pair(Case(torch.optim.AdamW, {}, ({}, {"weight_decay": 0.3})), Cut(3 * 4096, 2))
    for step, rate in zip(STEPS, (1e-3, 2e-3, 5e-4, 1e-4), strict=True):
        for group in pair.optimizer.param_groups:
            group["lr"] = upload(torch.tensor(rate))
        for group in pair.reference.inner.param_groups:
            group["lr"] = torch.tensor(rate)
        pair.step(step)
        pair.assert_same_parameters()


def test_parameters_are_loaded_into_a_model_on_the_device_without_an_optimizer(device):
    pair = device_pair(CASES["adamw"], Cut(3 * 4096, 2))
    train(pair, STEPS[:2])
    path = pair.optimizer.checkpoint().result().path
    pair.live = on_device(Mixed(seed=99))
    assert offload.load_parameters(pair.live, path, backend=pair.backend) == 2
    pair.assert_same_parameters()


def test_a_checkpoint_is_of_the_moment_at_which_it_is_asked_for(device):
    model, backend = on_device(Network()), MemoryBackend()
    options = Cut(4096, 2).options(backend)
    optimizer = offload.AdamW(model.parameters(), model=model, directory="/s", options=options)
    batch = upload(torch.ones(2, 16))
    model(batch).square().mean().backward()
    optimizer.step()
    handle = optimizer.checkpoint()
    model(batch)
    assert values(model.seen).item() == 2
    loaded = on_device(Network())
    offload.load_parameters(loaded, handle.result().path, backend=backend)
    assert values(loaded.seen).item() == 1
    optimizer.close()


class Network(torch.nn.Module):
    """Real gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 64),
            torch.nn.Linear(64, 4),
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
        return self.layers(batch)


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_overlapping_steps_are_ordered_with_the_training_stream(overlap, device):
    losses: list[list[float]] = []
    finals = []
    for where in (lambda m: m, on_device):
        model = where(Network())
        backend = MemoryBackend()
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
        finals.append(
            [file.read_bytes(0, file.size_bytes)] + [values(p) for p in model.parameters()]
        )
        optimizer.close()
    assert losses[0] == losses[1]
    assert finals[0][0] == finals[1][0], "the checkpoint"
    for found, expected in zip(finals[1][1:], finals[0][1:], strict=True):
        assert_same_bits(found, expected, "parameter")


@pytest.mark.parametrize(
    ("broken", "what"),
    [("fence", "before its parameter has arrived"), ("arrive", "differ|overwrite")],
)
def test_the_fake_finds_what_is_not_waited_for(broken, what, device, monkeypatch):
    monkeypatch.setattr(StagedTensors, broken, lambda *_: None)
    pair = device_pair(CASES["adamw"], Cut(3 * 4096, 2))
    if broken == "arrive" and not device.streams.late:
        pytest.skip("what arrives at once need not be waited for")
    with pytest.raises(AssertionError, match=what):
        train(pair, range(2))


def test_the_fake_finds_what_is_not_ordered_after_the_training_stream(device, monkeypatch):
    monkeypatch.setattr(device, "now", lambda: Event("training", 0))
    pair = device_pair(CASES["adamw"], Cut(3 * 4096, 2))
    with pytest.raises(AssertionError, match="before its source has been computed"):
        pair.step(0)


def test_the_fake_finds_what_the_library_computes_on_the_device(device, monkeypatch):
    monkeypatch.setattr(
        offload.update.host_place, "flat_tensors", lambda t, **_: FlatTensors(t, writable=True)
    )
    pair = device_pair(CASES["adamw"], Cut(3 * 4096, 2))
    with pytest.raises(
        AssertionError, match=r"the library calls .* in (device/flat_tensors|update/torch_step).py"
    ):
        pair.step(0)


class DeviceMemory(MemoryBackend):
    """A backend whose buffers the host cannot read."""

    def allocate(self, nbytes):
        return DeviceBuffer(super().allocate(nbytes))


class DeviceBuffer:
    kind = "device"

    def __init__(self, buffer):
        self.nbytes = buffer.nbytes


def test_a_backend_that_allocates_device_memory_is_refused_by_name():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    options = Cut(4096, 2).options(DeviceMemory())
    optimizer = offload.SGD([parameter], lr=1.0, momentum=0.9, directory="/s", options=options)
    with pytest.raises(ValueError, match=r"the memory backend .* allocates device memory"):
        optimizer.step()
    assert not parameter.detach().any()


def test_a_device_that_cannot_be_reached_is_refused_by_name():
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(UnsupportedParameterError, match=r"'group0.param0' is on meta"):
        offload.AdamW([parameter], directory="/s", options=Cut(4096, 2).options(MemoryBackend()))
