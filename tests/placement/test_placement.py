"""`placement="auto"`: which of two places is chosen, for machines whose answer is plain."""

from __future__ import annotations

import dataclasses

import pytest

import gds.buffers.cuda
import offload
import offload.placement.choose
from gds.backends.kvikio import KvikioBackend
from gds.errors import RefusedError
from offload.placement.choose import decide
from offload.placement.rates import Rates
from offload.sizing.step_time import StepBytes
from tests.fake_gpu.device import on_device
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Cut
from tests.placement.pairs import DevicePair, train

# 7 B parameters in bf16 with Adam, on a workstation.
STEP = StepBytes(state=84 * 10**9, gradients=14 * 10**9, parameters=14 * 10**9)
WORKSTATION = Rates(
    drive_gbps=7, update_gbps=30, to_host_gbps=25, to_device_gbps=25, memory_gbps=40, direct=False
)
changed = lambda **given: dataclasses.replace(WORKSTATION, **given)  # noqa: E731

MACHINES = {
    "one drive is the limit in both places": ({}, "host"),
    "also with GPUDirect Storage": ({"direct": True}, "host"),
    "eight drives, GPUDirect Storage, and a wide link": (
        {"drive_gbps": 60, "direct": True, "to_host_gbps": 55, "to_device_gbps": 55},
        "device",
    ),
    "a slow CPU": ({"update_gbps": 4, "direct": True}, "device"),
    "a CPU that is hardly slower than the drive": ({"update_gbps": 6.8, "direct": True}, "host"),
    "a slow CPU, with copies through the host": ({"update_gbps": 4}, "device"),
    "a slow CPU with slow memory, which both ways of a step pass through": (
        {"update_gbps": 4, "memory_gbps": 8},
        "host",
    ),
    "four drives, cores that nearly keep up, and memory that limits both places": (
        {"drive_gbps": 28, "update_gbps": 27, "memory_gbps": 50},
        "host",
    ),
    "many drives behind a narrow link": (
        {"drive_gbps": 60, "to_host_gbps": 12, "to_device_gbps": 12, "memory_gbps": 100},
        "host",
    ),
}


@pytest.mark.parametrize(("given", "place"), MACHINES.values(), ids=MACHINES)
def test_the_place_whose_slowest_part_is_faster(given, place):
    assert decide(STEP, changed(**given)).place == place


def auto_pair(directory: str, name: str = "sgd-nesterov") -> DevicePair:
    cut = Cut(3 * 4096, 3, settings={"placement": "auto"})
    return DevicePair(CASES[name], cut, None, directory, live=on_device(Mixed()))


@pytest.mark.parametrize(
    ("rates", "place"),
    [
        (changed(drive_gbps=6, update_gbps=2), "device"),
        (changed(drive_gbps=6, update_gbps=20), "host"),
        ("the drives have not been measured", "host"),
        (None, "host"),
    ],
    ids=["slow-cpu", "fast-cpu", "not-measured", "no-kernel-can-be-compiled"],
)
def test_auto_goes_where_a_step_is_expected_to_take_less(
    rates, place, gpu, directory, device, compute, monkeypatch, caplog
):
    asked = []

    def find(setup):
        asked.append(setup)
        return rates or changed(drive_gbps=6, update_gbps=2)

    def refuse(_):
        raise RefusedError("the kernels cannot be compiled")

    monkeypatch.setattr(offload.placement.choose, "find_rates", find)
    if rates is None:  # as on a GPU that is too old for the compiler: training goes on
        monkeypatch.setattr(offload.placement.choose, "compute_on", refuse)
    pair = auto_pair(directory)
    with caplog.at_level("INFO", "offload"):
        train(pair)
    pair.assert_same_state()
    pair.optimizer.close()
    assert (compute.num_updates > 0) == (place == "device")
    assert len(asked) == 1, "it is decided once"
    assert isinstance(asked[0].backends[0], KvikioBackend)
    assert "steps are taken on the" in caplog.text
    assert caplog.text.count("the kernels cannot be compiled") == (rates is None)


@pytest.mark.parametrize("is_installed", [False, True], ids=["nothing-installed", "no-driver"])
def test_auto_needs_neither_libraries_nor_a_driver(
    is_installed, directory, device, compute, request, monkeypatch, caplog
):
    if is_installed:
        request.getfixturevalue("gpu")
        monkeypatch.setattr(gds.buffers.cuda, "no_driver", lambda: "libcuda.so.1: cannot open")
    with caplog.at_level("INFO", "offload"):
        pair = auto_pair(directory, "adamw")
    train(pair)
    pair.assert_same_state()
    pair.optimizer.close()
    assert compute.num_updates == 0
    if is_installed:
        assert "state is updated on the CPU" in caplog.text
        assert "no CUDA driver" in caplog.text


def test_memory_for_the_wrong_place_is_refused():
    with pytest.raises(ValueError, match="host_memory has no effect"):
        offload.Options(placement="device", host_memory="1GiB")
    with pytest.raises(ValueError, match="device_memory has no effect"):
        offload.Options(placement="host", device_memory="1GiB")
    with pytest.raises(ValueError, match="placement must be one of auto, host, device"):
        offload.Options(placement="gpu")
