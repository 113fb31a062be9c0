"""What is measured for `placement="auto"`: rates that are made up, never those of this machine."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gds.kvikio
import offload.device.boundary
from gds import PosixBackend, StorageError
from gds.backends.kvikio_file import Used
from offload.format.arrays import StateFormat
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.placement import rates
from offload.placement.model import Rates, decide
from offload.placement.rates import (
    MeasurementSetup,
    MemoryCopy,
    find_rates,
    load_rates,
    save_rates,
    step_bytes,
)
from offload.sizing.step_time import StepBytes
from offload.update.kernel import KernelCall
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.torch_step import TorchCall
from tests.fake_gpu.device import Event
from tests.fake_gpu.machine import installed

DEVICE = torch.device("meta")
TO_HOST, TO_DEVICE, UPDATE, DRIVE, MEMORY = 20.0, 25.0, 8.0, 6.5, 40.0
GDS = {"read": Used("gds", ""), "write": Used("gds", "")}
HALF = {"read": Used("gds", ""), "write": Used("bounce", "no nvidia-fs")}
NUM = 1024
EXACT = StateFormat()


class Time:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class PacedBoundary:
    """A link with rates of its own. The first copy each way is slow, as a real one may be."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.log: list[str] = []

    def now(self) -> Event:
        return Event("training", 0)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def fetch(self, copies: Any, after: Any) -> float:
        assert all(s.device == DEVICE and t.device.type == "cpu" for s, t in copies)
        return self._copy("fetch", copies, TO_HOST)

    def send(self, copies: Any, after: Any) -> float:
        assert all(s.device.type == "cpu" and t.device == DEVICE for s, t in copies)
        return self._copy("send", copies, TO_DEVICE)

    def wait(self, event: Any) -> None:
        if isinstance(event, Event):
            self.log.append("wait")
        else:
            self.time.now_s += event

    def _copy(self, name: str, copies: Any, gbps: float) -> float:
        seconds = sum(source.nbytes for source, _ in copies) / 1e9 / gbps
        if name not in self.log:
            seconds *= 10
        self.log.append(name)
        return seconds


class PacedPool(UpdatePool):
    """Really updates; how long that took is made up. The first pass is slow, as a real one is."""

    def __init__(self, rule: UpdateRule, time: Time) -> None:
        super().__init__(rule)
        self.time = time
        self.passes = self.copies = 0
        self.bytes_per_element = 0.0

    def run(self, function: Callable[..., object], items: Any) -> None:
        super().run(function, items)
        nbytes = sum(
            array.nbytes
            for item in items
            if isinstance(item, TorchCall)
            for array in item.block.stored.values()
        )
        elements = sum(
            int(item.runs["num_elements"].sum()) for item in items if isinstance(item, KernelCall)
        )
        nbytes += elements * self.bytes_per_element
        copied = sum(item.source.nbytes for item in items if isinstance(item, MemoryCopy))
        if copied:
            self.time.now_s += 2 * copied / 1e9 / MEMORY * (10 if self.copies == 0 else 1)
            self.copies += 1
        if nbytes:
            self.time.now_s += 2 * nbytes / 1e9 / UPDATE * (10 if self.passes == 0 else 1)
            self.passes += 1


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def boundary(time: Time, monkeypatch: pytest.MonkeyPatch) -> PacedBoundary:
    made = PacedBoundary(time)
    monkeypatch.setitem(offload.device.boundary.BOUNDARIES, "meta", lambda _: made)
    monkeypatch.setattr(offload.device.boundary, "_made", {})
    monkeypatch.setattr(rates, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(rates, "_MEMORY_BYTES", 1 << 16)
    return made


@pytest.fixture
def make_setup(
    time: Time, boundary: PacedBoundary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., MeasurementSetup]]:
    made: list[Any] = []

    def make(
        found: Any = GDS,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        state_format: StateFormat = EXACT,
        **changes: Any,
    ) -> MeasurementSetup:
        hyper = {"lr": 1e-3, "momentum": 0.9} if optimizer is torch.optim.SGD else {"lr": 1e-3}
        rule = UpdateRule(optimizer, hyper)
        arrays = state_format.stored_arrays("BF16", rule.rule(rule.defaults).arrays)
        pool = PacedPool(rule, time)
        backend = gds.kvikio.KvikioBackend(memory="host", examine=lambda _: dict(found))
        made.extend((pool, backend))
        specs = (
            ParameterSpec("small", "BF16", (7,), 0, arrays),
            ParameterSpec("large", "BF16", (5000, 3), 1, arrays),
        )
        setup = MeasurementSetup(
            backends=[backend],
            directories=[str(tmp_path)],
            drive_gbps=DRIVE,
            device=DEVICE,
            pool=pool,
            rule=rule,
            groups=[rule.defaults, {**rule.defaults, "lr": 0.1}],
            layout=Layout(
                parameters=specs,
                model=tuple(ModelTensor(s.name, s.dtype, s.shape) for s in specs),
                chunk_elements=NUM,
                state_dtype=state_format.state_dtype,
            ),
        )
        forms = setup.layout.formats.values()
        pool.bytes_per_element = sum(form.nbytes / form.block for form in forms)
        return dataclasses.replace(setup, **changes)

    with installed(monkeypatch):
        yield make
        for one in made:
            one.close()


def test_each_rate_is_that_of_its_part(make_setup, time, boundary) -> None:
    found = rates.measure_rates(make_setup(), clock=time)
    assert isinstance(found, Rates)
    assert found.drive_gbps == DRIVE
    assert found.update_gbps == pytest.approx(UPDATE)
    assert found.to_host_gbps == pytest.approx(TO_HOST)
    assert found.to_device_gbps == pytest.approx(TO_DEVICE)
    assert found.memory_gbps == pytest.approx(MEMORY)
    assert found.direct is True
    assert boundary.log[0] == "wait", "memory of a tensor that is gone may still be used"
    assert boundary.log.count("fetch") == boundary.log.count("send") >= 3


@pytest.mark.parametrize(
    ("optimizer", "state_format"),
    [
        (torch.optim.AdamW, StateFormat("split", "int8")),
        (torch.optim.AdamW, StateFormat("float32", "bfloat16")),
        (torch.optim.SGD, StateFormat()),
    ],
    ids=["split-int8", "bfloat16", "sgd"],
)
def test_bytes_are_those_that_are_stored(make_setup, time, optimizer, state_format) -> None:
    setup = make_setup(optimizer=optimizer, state_format=state_format)
    found = rates.update_gbps(setup.pool, setup.rule, setup.groups, setup.layout, clock=time)
    assert found == pytest.approx(UPDATE)
    assert setup.pool.passes == 6, "one that is not counted, and five that are"


def test_a_slow_cpu_is_not_measured_for_long(make_setup, time, monkeypatch) -> None:
    setup = make_setup()
    monkeypatch.setattr(rates, "_TRIAL_S", 0.0)
    rates.update_gbps(setup.pool, setup.rule, setup.groups, setup.layout, clock=time)
    assert setup.pool.passes == 2


def test_one_direction_through_the_host_is_not_direct(make_setup, time) -> None:
    found = rates.measure_rates(make_setup(HALF), clock=time)
    assert isinstance(found, Rates)
    assert found.direct is False


class NoDeviceMemory(PosixBackend):
    """Finds out that what was demanded of it is not there."""

    def paths_in(self, directory: str) -> Any:
        raise StorageError(95, "path='gds', but there is none", directory)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drive_gbps": 0.0}, "the drives have not been measured"),
        (
            {"device": torch.device("xpu")},
            "transfers between xpu and host memory are not supported",
        ),
        ({"backends": PosixBackend}, "the posix backend does not transfer device memory"),
        (
            {"backends": NoDeviceMemory},
            "device memory cannot be transferred to the drives: .*there is none",
        ),
        (
            {"layout": Layout((ParameterSpec("w", "F32", (9,), 0, ()),), (), NUM)},
            "there is no optimizer state",
        ),
    ],
    ids=["drives", "device", "backend", "path", "state"],
)
def test_where_nothing_can_be_measured_the_host_is_the_place(
    make_setup, time, boundary, tmp_path, changes, why
) -> None:
    if "backends" in changes:
        changes = {"backends": [changes["backends"]()]}
    setup = make_setup(**changes)
    for function in (rates.measure_rates, find_rates):
        found = function(setup, clock=time)
        assert isinstance(found, str)
        decision = decide(step_bytes(setup.layout), found)
        assert decision.place == "host"
        assert decision.reason == f"steps are taken on the CPU, because {found}"
        assert re.search(why, found)
    assert boundary.log == []
    assert list(tmp_path.iterdir()) == []


def test_no_memory_on_the_device_is_a_reason(make_setup, time, boundary, monkeypatch) -> None:
    def allocate(_: int) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(boundary, "allocate", allocate)
    found = rates.measure_rates(make_setup(), clock=time)
    assert found == (
        "the link to meta could not be measured: CUDA out of memory. Tried to allocate"
    )


# Remembering.


def test_what_was_measured_is_believed_again_under_the_same_conditions(
    make_setup, time, boundary, tmp_path
) -> None:
    first = find_rates(make_setup(), clock=time)
    assert [path.name for path in tmp_path.iterdir()] == [rates.RATES_NAME]
    measured = len(boundary.log)
    assert find_rates(make_setup(), clock=time) == first
    assert len(boundary.log) == measured, "nothing is measured again"


@pytest.mark.parametrize(
    "changes",
    [
        {"drive_gbps": DRIVE + 1},
        {"optimizer": torch.optim.SGD},
        {"state_format": StateFormat("float32", "bfloat16")},
    ],
    ids=["drives", "optimizer", "format"],
)
def test_other_conditions_are_measured_anew(make_setup, time, boundary, changes) -> None:
    find_rates(make_setup(), clock=time)
    measured = len(boundary.log)
    again = find_rates(make_setup(**changes), clock=time)
    assert isinstance(again, Rates)
    assert again.drive_gbps == changes.get("drive_gbps", DRIVE)
    assert len(boundary.log) > measured


def test_another_driver_is_another_condition(make_setup, time, boundary, tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580\nmore\n")
    monkeypatch.setattr(rates, "_PLATFORM_FILES", (str(driver),))
    setup = make_setup()
    before = rates.conditions_of(setup)
    assert before["drivers"] == ["NVRM version: 580"]
    driver.write_text("NVRM version: 590\nmore\n")
    assert rates.conditions_of(setup) != before


def test_what_cannot_be_kept_is_used_all_the_same(
    make_setup, time, tmp_path, caplog, monkeypatch
) -> None:
    (tmp_path / f"{rates.RATES_NAME}.new").mkdir()
    with caplog.at_level(logging.WARNING, "offload"):
        assert isinstance(find_rates(make_setup(), clock=time), Rates)
    assert "the measured rates could not be saved" in caplog.text


GOOD = Rates(
    drive_gbps=7,
    update_gbps=30.5,
    to_host_gbps=25,
    to_device_gbps=24,
    memory_gbps=60,
    direct=False,
)


def damaged() -> dict[str, bytes]:
    content = {"format_version": 2, "conditions": {"a": 1}, "rates": dataclasses.asdict(GOOD)}

    def with_rates(**changes: Any) -> bytes:
        return json.dumps({**content, "rates": {**content["rates"], **changes}}).encode()

    whole = json.dumps(content).encode()
    return {
        "empty": b"",
        "torn": whole[:-9],
        "list": b"[1]",
        "null": b"null",
        "deep": b"[" * 50_000,
        "long": b" " * (1 << 20),
        "no-text": b"\xff",
        "version": whole.replace(b'"format_version": 2', b'"format_version": 1'),
        "conditions": whole.replace(b'{"a": 1}', b'{"a": 2}'),
        "no-conditions": b'{"format_version": 2, "rates": {}}',
        "rates-list": whole.replace(b'"rates": {', b'"rates": [{').replace(b"}}", b"}]}"),
        "nan": with_rates(drive_gbps=float("nan")),
        "infinite": with_rates(drive_gbps=float("inf")),
        "zero": with_rates(to_host_gbps=0),
        "negative": with_rates(to_device_gbps=-1.0),
        "true": with_rates(update_gbps=True),
        "text": with_rates(update_gbps="7"),
        "digits": with_rates(update_gbps=10**400),
        "direct": with_rates(direct="no"),
        "unknown": with_rates(surprise=1),
    }


@pytest.mark.parametrize("data", damaged().values(), ids=damaged())
def test_a_damaged_file_is_measured_again(tmp_path, data) -> None:
    path = tmp_path / rates.RATES_NAME
    save_rates(str(path), {"a": 1}, GOOD)
    assert load_rates(str(path), {"a": 1}) == GOOD
    path.write_bytes(data)
    assert load_rates(str(path), {"a": 1}) is None


def test_what_is_not_a_file_is_ignored(tmp_path) -> None:
    save_rates(f"{tmp_path}/real", {}, GOOD)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "directory", "pipe", "missing", "real/below"):
        assert load_rates(f"{tmp_path}/{name}", {}) is None


def test_the_whole_memory_is_copied_by_all_threads_at_once(make_setup, time) -> None:
    pool = make_setup().pool
    assert rates.memory_gbps(pool, clock=time) == pytest.approx(MEMORY)
    assert pool.copies == 4, "one that is not counted, and three that are"


def test_a_machine_without_gpudirect_storage_may_be_given_the_device(make_setup, time) -> None:
    """Everything as it is measured: few cores, fast drives, and copies through the host."""
    setup = make_setup(HALF, drive_gbps=28.0)
    found = find_rates(setup, clock=time)
    assert isinstance(found, Rates)
    assert not found.direct
    step = StepBytes(state=84 * 10**9, gradients=14 * 10**9, parameters=14 * 10**9)
    assert decide(step, found).place == "device"


# What follows from it.


def test_bytes_of_a_step_are_those_of_the_layout(make_setup) -> None:
    num = 7 + 15_000
    step = step_bytes(make_setup().layout, kept_on_host=5000, kept_on_device=1 << 40)
    assert (step.state, step.gradients, step.parameters) == (12 * num, 2 * num, 2 * num)
    assert (step.kept_on_host, step.kept_on_device) == (5000, 12 * num)
    split = step_bytes(make_setup(state_format=StateFormat("split", "bfloat16")).layout)
    assert split.state == 6 * num


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_real_link_is_measured_and_nothing_queued_is_disturbed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    # Memory that is let go of while a kernel that writes it is still queued.
    matrix = torch.ones(4096, 4096, device=device)
    for _ in range(20):
        matrix = (matrix @ matrix).clamp_(0, 1)
    kept = torch.zeros(rates._COPY_BYTES, dtype=torch.uint8, device=device)
    source = torch.full_like(kept, 7)
    kept.copy_(source)
    del source
    to_host, to_device = rates.link_gbps(device)
    assert 0.1 < to_host < 2000
    assert 0.1 < to_device < 2000
    assert bool((kept == 7).all())
