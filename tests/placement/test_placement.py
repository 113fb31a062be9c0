"""Which of two places is chosen, for machines whose answer is plain."""

from __future__ import annotations

import dataclasses

import pytest

from offload.placement.model import Rates, choose_placement, decide, device_s, host_s
from offload.sizing.step_time import StepBytes

# 7 B parameters in bf16 with Adam
STEP = StepBytes(state=84 * 10**9, gradients=14 * 10**9, parameters=14 * 10**9)
WORKSTATION = Rates(
    drive_gbps=7,
    update_gbps=30,
    to_host_gbps=25,
    to_device_gbps=25,
    memory_gbps=40,
    direct=False,
)


def changed(**rates: float) -> Rates:
    return dataclasses.replace(WORKSTATION, **rates)


NARROW = changed(drive_gbps=60, to_host_gbps=12, to_device_gbps=12, memory_gbps=100, direct=True)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (WORKSTATION, "host"),
        (changed(direct=True), "host"),
        (changed(drive_gbps=60, direct=True, to_host_gbps=55, to_device_gbps=55), "device"),
        (changed(update_gbps=4, direct=True), "device"),
        (changed(update_gbps=6.8, direct=True), "host"),
        (changed(update_gbps=4), "device"),
        (changed(update_gbps=4, memory_gbps=8), "host"),
        (changed(drive_gbps=28, update_gbps=10, to_host_gbps=50, to_device_gbps=50), "device"),
        (changed(drive_gbps=28, update_gbps=27, memory_gbps=50), "host"),
        (NARROW, "host"),
    ],
    ids=[
        "one drive is the limit in both places",
        "also with GPUDirect Storage",
        "eight drives, GPUDirect Storage, and a wide link",
        "a slow CPU",
        "a CPU that is hardly slower than the drive",
        "a slow CPU, with copies through the host",
        "a slow CPU with slow memory, which both ways of a step pass through",
        "four drives and few cores, with copies through the host",
        "four drives, cores that nearly keep up, and memory that limits both places",
        "many drives behind a narrow link",
    ],
)
def test_the_place_whose_slowest_part_is_faster(rates, expected):
    assert choose_placement(STEP, rates) == expected


def test_a_step_on_the_host_takes_the_time_of_the_drive_where_that_is_the_limit():
    assert host_s(STEP, WORKSTATION) == pytest.approx(2 * 84 / 7)
    assert device_s(STEP, WORKSTATION) == pytest.approx(2 * 84 / 7)


def test_a_link_slower_than_all_else_shows_in_both_places():
    slow = changed(to_host_gbps=1)
    assert host_s(STEP, slow) == pytest.approx(28)
    assert device_s(STEP, slow) == pytest.approx(84)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_what_is_no_rate_is_refused(value):
    with pytest.raises(ValueError, match="update_gbps must be a rate"):
        changed(update_gbps=value)


def test_each_byte_of_state_crosses_the_hosts_memory_four_times():
    # The drives and the link, or the drives and the CPU, write and read it once in each direction.
    slow = changed(memory_gbps=5)
    assert host_s(STEP, slow) == device_s(STEP, slow) == pytest.approx(4 * 84 / 5)
    kept = dataclasses.replace(STEP, kept_on_host=STEP.state, kept_on_device=STEP.state)
    assert host_s(kept, slow) == pytest.approx(2 * 84 / 5), "the CPU's own accesses are left"
    direct = dataclasses.replace(slow, direct=True)
    assert device_s(STEP, direct) == pytest.approx(2 * 84 / 7)


def test_state_that_stays_in_memory_is_not_waited_for():
    on_host = dataclasses.replace(STEP, kept_on_host=STEP.state // 2)
    assert host_s(on_host, WORKSTATION) == pytest.approx(84 / 7)
    assert device_s(on_host, WORKSTATION) == device_s(STEP, WORKSTATION)
    on_device = dataclasses.replace(STEP, kept_on_device=STEP.state // 2)
    assert device_s(on_device, WORKSTATION) == pytest.approx(84 / 7)
    assert choose_placement(on_device, WORKSTATION) == "device"
    assert choose_placement(on_host, WORKSTATION) == "host"


@pytest.mark.parametrize(
    ("rates", "place", "reason"),
    [
        (
            WORKSTATION,
            "host",
            (
                "steps are taken on the CPU rather than on the device: a step is expected to take "
                "24 s on the device (limited by the drives), and 24 s on the CPU (limited by the "
                "drives); state is kept in device memory only if a step then takes at most "
                "95% of the time"
            ),
        ),
        (
            changed(update_gbps=4, direct=True),
            "device",
            (
                "steps are taken on the device: a step is expected to take 24 s on the device "
                "(limited by the drives), and 42 s on the CPU (limited by the CPU)"
            ),
        ),
        (
            "the drives have not been measured",
            "host",
            "steps are taken on the CPU, because the drives have not been measured",
        ),
    ],
    ids=["host", "device", "unknown"],
)
def test_the_reason_names_the_times_and_what_they_are_spent_on(rates, place, reason):
    assert decide(STEP, rates) == (place, reason)


@pytest.mark.parametrize(
    ("rates", "slowest"),
    [
        (changed(to_host_gbps=1), ("the link to the host", "the link to the host")),
        (changed(to_device_gbps=0.5), ("the link to the device", "the link to the device")),
        (changed(update_gbps=3), ("the drives", "the CPU")),
        (changed(memory_gbps=5), ("the host's memory", "the host's memory")),
    ],
    ids=["to-host", "to-device", "cpu", "memory"],
)
def test_the_slowest_part_is_named(rates, slowest):
    there, here = (f"(limited by {name})" for name in slowest)
    reason = decide(STEP, rates).reason
    assert there in reason
    assert here in reason


def test_whether_the_way_is_direct_is_yes_or_no():
    with pytest.raises(ValueError, match="direct must be True or False"):
        changed(direct=1)
