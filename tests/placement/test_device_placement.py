"""State in device memory: the bits of torch's arithmetic there, no race, and nothing crosses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import offload
import offload.model.table
from gds import MemoryBackend
from offload.errors import UnsupportedOptimizerError, UnsupportedParameterError
from tests.fake_gpu.backend import DeviceBackend
from tests.fake_gpu.device import FakeDevice, on_device, upload, values
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Cut
from tests.numerics.reference import assert_same_bits
from tests.placement.pairs import (
    FORMATS,
    ON_DEVICE,
    STEPS,
    checkpoint_files,
    device_pair,
    give_device_gradients,
    train,
)

CUT = Cut(3 * 4096, 2)


def options_on(device: FakeDevice, backend: Any = None, **settings: Any) -> offload.Options:
    backend = backend or DeviceBackend(MemoryBackend(), device)
    return Cut(4096, 2, settings={**ON_DEVICE, **settings}).options(backend)


@pytest.mark.parametrize(
    ("name", "cut", "device"),
    [
        ("adamw", Cut(2 * 4096, 2), True),
        ("adamw-amsgrad-in-one-group", Cut(1 << 20, 2), False),
        ("adam-coupled-decay", Cut(3 * 4096, 2, settings={"device_memory": 100_000}), True),
        ("sgd", Cut(20480, 2), False),
        ("sgd-momentum-in-some-groups", Cut(4096, 3, settings={"verify": "always"}), True),
    ],
    ids=str,
    indirect=["device"],
)
def test_kernels_give_the_bits_of_torchs_arithmetic_on_a_device(
    name, cut, device, compute, torch_arithmetic
):
    pair = device_pair(CASES[name], cut, device, torch_arithmetic)
    train(pair)
    pair.assert_same_state()
    stats = pair.optimizer.stats()
    pair.optimizer.close()
    assert compute.num_updates > 0
    assert stats.update_code == "kernels (meta)"
    assert pair.backend.device_bytes == stats.ring_bytes + stats.resident_bytes > 0
    if cut.settings.get("device_memory"):
        assert stats.resident_bytes > 0


@pytest.mark.parametrize("name", ["rmsprop-centered-momentum", "nadam", "adagrad", "adamax"])
def test_other_classes_run_torchs_own_step_there(name, device, compute):
    pair = device_pair(CASES[name], CUT, device)
    train(pair)
    pair.assert_same_state()
    pair.optimizer.close()
    assert compute.num_updates == 0
    assert device.num_computed > 0


@pytest.mark.parametrize("settings", FORMATS, ids=["split", "bfloat16", "int8"])
def test_compressed_state_decodes_to_what_the_codecs_of_the_cpu_make(settings, device, compute):
    # SGD's arithmetic is that of the CPU to the bit, and bf16 state is rounded by the same numbers
    hyper = {"lr": 1e-2, "momentum": 0.9, "nesterov": True}
    found = []
    residents = {**ON_DEVICE, "device_memory": 30_000}
    for model, place in ((on_device(Mixed()), residents), (Mixed(), {"placement": "host"})):
        backend = DeviceBackend(MemoryBackend(), device)
        options = Cut(3 * 4096, 2, settings={**settings, **place}).options(backend)
        with offload.SGD(
            model.parameters(), model=model, directory="/s", options=options, **hyper
        ) as optimizer:
            for step in (0, 1, 2):
                give_device_gradients(step, model)
                optimizer.step()
            found.append(checkpoint_files(optimizer, backend))
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []


def test_fused_is_honoured_there(device, compute, torch_arithmetic):
    parameter = on_device(torch.nn.ParameterList([torch.randn(3000)]))[0]
    master, gradient = values(parameter).clone(), torch.randn(3000)
    moments = [torch.zeros(3000), torch.zeros(3000)]
    backend = DeviceBackend(MemoryBackend(), device)
    options = options_on(device, backend)
    with offload.AdamW([parameter], directory="/s", fused=True, options=options) as optimizer:
        for step in (1, 2):
            parameter.grad = upload(gradient.clone())
            optimizer.step()
            group = {**optimizer.param_groups[0]}
            torch_arithmetic.adam([master, gradient, *moments], group, decoupled=True, step=step)
        optimizer.checkpoint().result()
    assert_same_bits(values(parameter), master, "parameter")
    resumed, options = torch.nn.Parameter(torch.zeros(3000)), Cut(4096, 2).options(backend)
    with offload.AdamW([resumed], directory="/s", options=options) as optimizer:
        optimizer.restore()
        assert optimizer.param_groups[0]["fused"] is None
        resumed.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("there_first", [False, True], ids=["host-first", "device-first"])
def test_a_store_goes_from_one_placement_to_the_other(there_first, device, compute):
    places = [{"placement": "host"}, ON_DEVICE]
    if there_first:
        places.reverse()
    pair = device_pair(CASES["sgd-nesterov"], CUT, device)
    pair.optimizer.close()
    pair.backend = DeviceBackend(MemoryBackend(), device)
    for place, steps in zip(places, (STEPS[:2], STEPS[2:]), strict=True):
        pair.cut = Cut(3 * 4096, 2, settings=place)
        pair.optimizer = pair._offloaded({})
        pair.optimizer.restore()
        train(pair, steps)
        pair.assert_same_state()
        pair.optimizer.close()
        pair.backend = pair.backend.reopened()
    assert compute.num_updates > 0


def test_a_flipped_bit_is_found_by_the_device(device, compute):
    pair = device_pair(CASES["sgd-nesterov"], CUT, device)
    train(pair, STEPS[:2])
    path = pair.optimizer.checkpoint().result().path
    pair.optimizer.close()
    pair.backend = pair.backend.reopened()
    file = pair.backend.open(f"{path}/momentum_buffer.safetensors", writable=True)
    byte = file.read_bytes(file.size_bytes - 100, 1)
    file.write_bytes(bytes([byte[0] ^ 1]), file.size_bytes - 100)
    file.close()
    pair.live = on_device(Mixed(seed=99))
    pair.optimizer = pair._offloaded({})
    pair.optimizer.restore()
    give_device_gradients(2, pair.live)
    with pytest.raises(offload.errors.DamagedError, match=r"momentum_buffer.*are damaged"):
        pair.optimizer.step()


def test_only_parameters_cross_and_only_when_sealed_or_restored(device, compute):
    pair = device_pair(CASES["sgd-nesterov"], CUT, device)
    train(pair, (0,))  # before which the kernels are compared with torch's step
    sent, fetched = compute.num_sent, compute.num_fetched
    train(pair, (1, 2))
    stats = pair.optimizer.stats()
    assert (stats.to_host_bytes, stats.to_device_bytes, stats.crossing_bytes) == (0, 0, 0)
    assert (device.num_fetched, device.num_sent) == (0, 0)
    # Digests do: 8 bytes for each MiB that is written.
    assert compute.num_sent == sent
    chunks = pair.optimizer.stats().state_bytes // (3 * 4096) + 2
    assert compute.num_fetched - fetched <= 3 * 8 * chunks
    pair.optimizer.checkpoint().result()
    after = pair.optimizer.stats()
    model_bytes = sum(p.nbytes for p in pair.live.parameters())
    assert (after.to_host_bytes, after.to_device_bytes) == (model_bytes, 0)
    assert device.num_fetched == model_bytes


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_a_step_beside_the_model_gives_the_same_bits(overlap, device, compute):
    found = []
    for settings in ({}, {"overlap": overlap}):
        torch.manual_seed(5)
        model = on_device(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
        options = options_on(device, **settings)
        with offload.AdamW(
            model.parameters(), model=model, directory="/s", options=options
        ) as optimizer:
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                batch = upload(torch.randn(8, 64, generator=generator))
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            optimizer.synchronize()
            found.append([values(p).clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other, overlap)


def test_gradients_are_scaled_there(device, compute):
    results = []
    for make in (on_device, lambda model: model):
        model = make(torch.nn.ParameterList([torch.ones(3000)]))
        options = options_on(device, placement="device" if make is on_device else "host")
        with offload.SGD(model.parameters(), directory="/s", lr=0.1, options=options) as optimizer:
            gradient = torch.linspace(-1, 1, 3000)
            model[0].grad = upload(gradient) if make is on_device else gradient
            # What a scaler and clipping leave for the step, without a real scaler on the device.
            optimizer._live_engine().state.gradient_factors = (1 / 3, 0.7)
            optimizer.step()
        results.append(values(model[0]))
    assert_same_bits(*results, "parameter")


def test_parameters_that_are_added_are_updated_there(device, compute):
    model = on_device(torch.nn.ParameterList(torch.ones(n) for n in (3000, 50, 700)))
    optimizer = offload.SGD([*model][:2], lr=1.0, directory="/s", options=options_on(device))
    for parameter in model:
        parameter.grad = upload(torch.ones(parameter.shape))
    versions = [p._version for p in model]
    optimizer.step()
    # else a backward that saved a parameter would go on with other values, without a word
    assert [p._version > v for p, v in zip(model, versions, strict=True)] == [True, True, False]
    optimizer.add_param_group({"params": [model[2]]})
    optimizer.step()
    assert [values(p)[0].item() for p in model] == [-1, -1, 0]
    with pytest.raises(UnsupportedParameterError, match=r"'group2.param0' is in host memory"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    optimizer.step()
    assert [values(p)[0].item() for p in model] == [-2, -2, -1]


@pytest.mark.parametrize(
    ("optimizer_class", "hyper", "settings", "said"),
    [
        (torch.optim.RMSprop, {}, {"state_dtype": "int8"}, r"no kernel for RMSprop.*FP32.*int8"),
        (torch.optim.AdamW, {"foreach": False}, {"master": "split"}, r"foreach=False.*split"),
        (torch.optim.ASGD, {}, {}, r"ASGD.*on the device"),
    ],
    ids=["no kernel", "single-tensor", "another class"],
)
def test_what_cannot_be_stepped_there_is_refused_before_anything_is_made(
    optimizer_class, hyper, settings, said, device, compute
):
    backend = DeviceBackend(MemoryBackend(), device)
    parameter = on_device(torch.nn.ParameterList([torch.ones(30)]))[0]
    options = options_on(device, backend, **settings)
    with pytest.raises(UnsupportedOptimizerError, match=said):
        offload.OffloadedOptimizer(
            optimizer_class, [parameter], directory="/s", options=options, **hyper
        )
    assert backend.list_dir("/") == []


def test_parameters_elsewhere_are_refused_by_name(device, compute):
    parameter = torch.nn.Parameter(torch.ones(30))
    optimizer = offload.AdamW([parameter], directory="/s", options=options_on(device))
    parameter.grad = torch.ones(30)
    with pytest.raises(UnsupportedParameterError, match=r"'group0.param0' is in host memory"):
        optimizer.step()
    assert parameter.detach().eq(1).all()


@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("name", ["adamw", "adamax"])
def test_gradients_are_held_until_the_device_has_read_them(
    name, overlap, device, compute, monkeypatch
):
    # torch gives freed memory to the training's stream, which does not wait for ours
    pair = device_pair(CASES[name], Cut(4096, 2, settings={"overlap": overlap}), device)
    gradients: dict[str, StorageWeakRef] = {}  # a reference to the tensor would have it copied
    queue, wait = compute.queue, compute.wait
    freed: list[str] = []
    before: set[str] = set()

    def alive() -> set[str]:
        return {n for n, gradient in gradients.items() if not gradient.expired()}

    @contextlib.contextmanager
    def watched_queue(after):
        with queue(after):
            before.clear()
            before.update(alive())
            yield

    def watched_wait(event):
        freed.extend(before - alive())
        wait(event)

    monkeypatch.setattr(compute, "queue", watched_queue)
    monkeypatch.setattr(compute, "wait", watched_wait)
    for step in range(2):
        give_device_gradients(step, pair.live)
        for n, parameter in pair.live.named_parameters():
            if parameter.grad is not None:
                gradients[n] = StorageWeakRef(parameter.grad.untyped_storage())
        pair.optimizer.step()
    pair.optimizer.close()
    assert len(gradients) > 10
    assert freed == []


def wrong_in_a_bit(compute, monkeypatch) -> None:
    """Make every launch of a kernel give a wrong bit, in one element of one array."""
    update = compute.update

    def wrong(optimizer_class, group, run, **options) -> None:
        update(optimizer_class, group, run, **options)
        found = next(iter(run.arrays.values())).held.view(torch.uint8)
        compute._launch(lambda: found[0].bitwise_xor_(1))

    monkeypatch.setattr(compute, "update", wrong)


def test_a_kernel_that_is_wrong_in_a_bit_is_not_used(device, compute, monkeypatch, caplog):
    wrong_in_a_bit(compute, monkeypatch)
    pair = device_pair(CASES["sgd-nesterov"], CUT, device)
    train(pair)
    pair.assert_same_state()
    reason = "the kernel of SGD does not give the bits of torch"
    assert f"torch ({reason}" in pair.optimizer.stats().update_code
    assert reason in caplog.text
    checks = compute.num_updates
    train(pair, [len(STEPS)])
    assert compute.num_updates == checks  # it is not tried again


def test_a_kernel_that_nothing_can_replace_is_used_and_the_difference_is_said(
    device, compute, monkeypatch, caplog
):
    wrong_in_a_bit(compute, monkeypatch)
    model = on_device(torch.nn.ParameterList([torch.ones(3000)]))
    options = options_on(device, state_dtype="int8")
    with offload.AdamW(model.parameters(), directory="/s", options=options) as optimizer:
        model[0].grad = upload(torch.ones(3000))
        optimizer.step()
        code = optimizer.stats().update_code
    assert code.startswith("kernels (meta), although the kernel of AdamW does not give the bits")
    assert compute.num_updates > 2
    assert caplog.text.count("does not give the bits") == 1
