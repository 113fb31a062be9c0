"""The parts of `gds bench` that measure nothing: workloads, sweeps, percentiles, fio's job."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds.bench.compare import AGREEMENT, Comparison, fio_arguments
from gds.bench.fio import FioError
from gds.bench.latency import percentile
from gds.bench.workload import Workload, expand, parse_size, parse_sweep, size_text
from gds.errors import RefusedError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("64K", 65536), ("64k", 65536), ("1MiB", 1 << 20), ("1MB", 1 << 20),
     ("2G", 2 << 30), ("1T", 1 << 40)],
)  # fmt: skip
def test_sizes_are_powers_of_1024(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-1", "1X", "1 K K"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RefusedError):
        parse_size(text)


@given(st.integers(1, 1 << 45))
def test_sizes_are_shown_as_they_can_be_typed(nbytes):
    assert parse_size(size_text(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("size=64K..1M", "size", [65536, 131072, 262144, 524288, 1048576]),
        ("size=64K,1M", "size", [65536, 1048576]),
        ("threads=1..8", "threads", [1, 2, 4, 8]),
        ("threads=3..10", "threads", [3, 6]),
        ("rw=read, write", "rw", ["read", "write"]),
        ("path=direct,buffered", "path", ["direct", "buffered"]),
    ],
)
def test_sweeps(text, name, values):
    assert parse_sweep(text) == (name, values)


def test_sweeps_are_combined_the_last_one_fastest():
    found = expand(Workload(), [("rw", ["read", "write"]), ("threads", [1, 4])])
    assert [(each.rw, each.threads, each.in_flight) for each in found] == [
        ("read", 1, 1), ("read", 4, 4), ("write", 1, 1), ("write", 4, 4),
    ]  # fmt: skip
    assert expand(Workload(), []) == [Workload()]


@pytest.mark.parametrize("rw", ["mixed", "randmixed"])
@pytest.mark.parametrize("mix", [1, 33, 50, 99])
def test_the_mix_is_that_of_the_requests(rw, mix):
    workload = Workload(rw=rw, mix=mix, size=4096, file_bytes=100 * 4096 + 4095)
    assert (workload.num_requests, workload.num_reads) == (100, mix)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.sampled_from([1, 50, 99, 99.9, 100])
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, percent):
    found = percentile(sorted(values), percent)
    enough = round(len(values) * percent / 100, 6)
    assert sum(value <= found for value in values) >= enough
    assert sum(value < found for value in values) < enough or math.isclose(enough, 0)


def test_fio_is_asked_for_the_same_requests():
    workload = Workload(
        rw="randmixed", mix=30, size=1 << 20, threads=4, depth=32, file_bytes=(64 << 20) + 5
    )
    job = fio_arguments(workload, "a:b", "io_uring")
    for argument in (
        "--direct=1", "--ioengine=io_uring", "--iodepth=8", "--size=67108864", "--bs=1048576",
        "--rw=randrw", "--rwmixread=30", "--filename=a\\:b", "--allow_file_create=0",
    ):  # fmt: skip
        assert argument in job
    assert "--readonly" not in job


def test_through_the_page_cache_fio_has_as_many_threads_each_with_its_part():
    workload = Workload(rw="read", path="buffered", size=1 << 20, threads=3, file_bytes=64 << 20)
    job = fio_arguments(workload, "file", "io_uring")
    for argument in (
        "--direct=0", "--ioengine=psync", "--numjobs=3", f"--size={21 << 20}",
        f"--offset_increment={21 << 20}", "--readonly", "--rw=read",
    ):  # fmt: skip
        assert argument in job


def test_fio_has_no_path_to_a_gpu():
    with pytest.raises(FioError, match="gds"):
        fio_arguments(Workload(path="gds"), "file", "io_uring")


@pytest.mark.parametrize(
    ("ratios", "agrees", "words"),
    [
        ([1.0] * 11, True, "agrees within 15%"),
        ([1 - AGREEMENT + 0.001] * 11, True, "agrees within 15%"),
        ([1.2] * 11, False, "does NOT agree within 15%: gds is faster"),
        ([0.8] * 11, False, "does NOT agree within 15%: gds is slower"),
        ([0.8] * 6 + [1.0] * 5, True, "agrees within 15% and noise (gds is slower)"),
        ([1.0] * 10, None, "too few pairs to say (10 of 11)"),
    ],
)
def test_agreement_with_fio_is_that_of_the_median(ratios, agrees, words):
    found = Comparison(
        workload=Workload(),
        engine="io_uring",
        huge_bytes=0,
        gds_bytes_per_s=[2e9 * ratio for ratio in ratios],
        fio_bytes_per_s=[2e9] * len(ratios),
    )
    assert found.agrees is agrees
    assert found.words == words
