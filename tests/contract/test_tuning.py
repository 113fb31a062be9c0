"""Which setting is chosen from which rates; nothing is measured here."""

import random

import pytest

from gds.calibration.tuning import (
    DEFAULT,
    MIB,
    MOST_IN_FLIGHT_BYTES,
    NUM_THREADS,
    REQUEST_BYTES,
    Setting,
    candidates,
    choose,
    survivors,
)


def sata(setting):
    return 0.5


def nvme(setting):
    return {1: 3.3, 2: 4.0}.get(setting.threads, 4.0)


def four_drives(setting):
    return min(13.0, 4.0 * setting.threads, 13.0 * setting.in_flight_bytes / (60 * MIB))


def small_requests(setting):
    """Something that chokes on large requests."""
    return 2.0 if setting.request_bytes <= 8 * MIB else 1.0


def measured(drive, *, noise=0.0, drift=0.0, seed=0, num_rounds=4):
    """Return the rounds that a drive of these rates gives, each rate off by `noise` or so."""
    draw = random.Random(seed)
    settings, rounds = candidates(MOST_IN_FLIGHT_BYTES), []
    for _ in range(num_rounds):
        level = 1 + draw.uniform(-drift, drift)
        rounds.append({s: drive(s) * level * (1 + draw.gauss(0, noise)) for s in settings})
        settings = survivors(rounds)
    return rounds


@pytest.mark.parametrize(
    ("drive", "expected"),
    [
        pytest.param(sata, Setting(1, 32 * MIB), id="sata-is-flat"),
        pytest.param(nvme, Setting(2, 32 * MIB), id="nvme-needs-two"),
        pytest.param(four_drives, Setting(4, 16 * MIB), id="four-drives-need-more-in-flight"),
        pytest.param(small_requests, Setting(1, 8 * MIB), id="smaller-requests-if-they-help"),
    ],
)
def test_the_simplest_setting_that_is_fastest_is_chosen(drive, expected):
    assert choose(measured(drive)) == expected
    noisy = [choose(measured(drive, noise=0.02, drift=0.3, seed=seed)) for seed in range(100)]
    assert noisy.count(expected) >= 95


@pytest.mark.parametrize("drive", [sata, nvme, four_drives, small_requests])
def test_noise_costs_little_speed(drive):
    best = max(map(drive, candidates(MOST_IN_FLIGHT_BYTES)))
    chosen = [choose(measured(drive, noise=0.1, drift=0.3, seed=seed)) for seed in range(200)]
    assert sum(map(drive, chosen)) / len(chosen) > 0.95 * best


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.15])
def test_noise_does_not_make_a_flat_drive_exotic(noise):
    chosen = [choose(measured(sata, noise=noise, seed=seed)) for seed in range(200)]
    assert sum(setting.threads <= 2 for setting in chosen) >= 180


def test_ties_go_to_fewer_threads_and_larger_requests():
    simple, more, smaller = Setting(1, 8 * MIB), Setting(2, 8 * MIB), Setting(1, 4 * MIB)
    assert choose([{more: 1.04, smaller: 1.04, simple: 1.0}] * 3) == simple
    assert choose([{more: 1.06, smaller: 1.0, simple: 1.0}] * 3) == more
    assert choose([{more: 1.06, smaller: 1.06, simple: 1.0}] * 3) == smaller
    assert choose([{more: 1.0}]) == more


def test_a_drive_that_changes_from_round_to_round_does_not_hide_a_difference():
    slower, faster = Setting(1, 8 * MIB), Setting(2, 8 * MIB)
    assert choose([{slower: x, faster: 1.1 * x} for x in (1.0, 0.5, 2.0)]) == faster


def test_a_lucky_rate_of_what_was_given_up_does_not_count():
    steady, lucky = Setting(2, 8 * MIB), Setting(1, 8 * MIB)
    assert choose([{steady: 1.0, lucky: 5.0}, {steady: 1.0}, {steady: 1.0}]) == steady


def test_the_first_candidates_are_one_for_each_number_of_threads():
    found = candidates(MOST_IN_FLIGHT_BYTES)
    assert [setting.threads for setting in found[:4]] == list(NUM_THREADS)
    assert len(set(found)) == len(found)
    assert all(setting.in_flight_bytes <= MOST_IN_FLIGHT_BYTES for setting in found)
    assert {setting.request_bytes for setting in found} == set(REQUEST_BYTES)
    assert DEFAULT in found
    assert candidates(4 * MIB) == [Setting(1, 4 * MIB)]
