"""Which of two places is chosen, for machines whose answer is plain."""

from __future__ import annotations

import dataclasses

import pytest

from offload.placement import Rates, StepBytes, choose_placement, device_s, host_s

# 7 B parameters in bf16 with Adam
STEP = StepBytes(state=84 * 10**9, gradients=14 * 10**9, parameters=14 * 10**9)
WORKSTATION = Rates(drive_gbps=7, update_gbps=30, to_host_gbps=25, to_device_gbps=25, direct=False)


def changed(**rates: float) -> Rates:
    return dataclasses.replace(WORKSTATION, **rates)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (WORKSTATION, "host"),
        (changed(direct=True), "host"),
        (changed(drive_gbps=60, direct=True, to_host_gbps=55, to_device_gbps=55), "device"),
        (changed(update_gbps=4, direct=True), "device"),
        (changed(update_gbps=6.8, direct=True), "host"),
        (changed(update_gbps=4), "host"),
        (changed(drive_gbps=60, to_host_gbps=12, to_device_gbps=12, direct=True), "host"),
    ],
    ids=[
        "one drive is the limit in both places",
        "also with GPUDirect Storage",
        "eight drives, GPUDirect Storage, and a wide link",
        "a slow CPU",
        "a CPU that is hardly slower than the drive",
        "a slow CPU that would have to copy the state instead",
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
