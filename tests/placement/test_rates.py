"""What is measured for `placement="auto"`: rates that are made up, never those of this machine.

What measures is called directly: through an optimizer, real rates would decide.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
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
from offload.placement.choose import decide
from offload.placement.rates import MeasurementSetup, Rates, find_rates, load_rates, save_rates
from offload.update.kernel import KernelCall
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from tests.fake_gpu.device import Event
from tests.fake_gpu.machine import installed

DEVICE = torch.device("meta")
TO_HOST, TO_DEVICE, UPDATE, DRIVE, MEMORY = 20.0, 25.0, 8.0, 6.5, 40.0
GDS = {"read": Used("gds", ""), "write": Used("gds", "")}
HALF = {"read": Used("gds", ""), "write": Used("bounce", "no nvidia-fs")}
NUM = 1024
EXACT = StateFormat()


class Clock:
    """A clock that only moves when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class PacedBoundary:
    """A link with rates of its own. The first copy each way is slow, as a real one may be."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
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
            self.clock.now_s += event

    def _copy(self, name: str, copies: Any, gbps: float) -> float:
        seconds = sum(source.nbytes for source, _ in copies) / 1e9 / gbps
        if name not in self.log:
            seconds *= 10
        self.log.append(name)
        return seconds


class PacedPool(UpdatePool):
    """Really updates; how long that took is made up. The first pass is slow, as a real one is."""

    def __init__(self, rule: UpdateRule, clock: Clock) -> None:
        super().__init__(rule)
        self.clock = clock
        self.passes = {UPDATE: 0, MEMORY: 0}
        self.bytes_per_element = 0.0

    def run(self, function: Callable[..., object], items: Any) -> None:
        super().run(function, items)
        moved = {UPDATE: 0.0, MEMORY: 0.0}
        for item in items:
            if isinstance(item, partial):  # a block that torch's code steps
                moved[UPDATE] += sum(array.nbytes for array in item.args[0].stored.values())
            elif isinstance(call := getattr(item, "__self__", None), KernelCall):
                moved[UPDATE] += int(call.runs["num_elements"].sum()) * self.bytes_per_element
            elif isinstance(item, tuple):  # source and target of a copy
                moved[MEMORY] += item[0].nbytes
        for gbps, nbytes in moved.items():
            if nbytes:
                first = 10 if self.passes[gbps] == 0 else 1
                self.clock.now_s += 2 * nbytes / 1e9 / gbps * first
                self.passes[gbps] += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def boundary(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PacedBoundary:
    made = PacedBoundary(clock)
    monkeypatch.setitem(offload.device.boundary.BOUNDARIES, "meta", lambda _: made)
    monkeypatch.setattr(offload.device.boundary, "_made", {})
    monkeypatch.setattr(rates, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(rates, "_MEMORY_BYTES", 1 << 16)
    return made


@pytest.fixture
def make_setup(
    clock: Clock, boundary: PacedBoundary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        pool = PacedPool(rule, clock)
        backend = gds.kvikio.KvikioBackend(memory="host", examine=lambda _: dict(found))
        made.extend((pool, backend))
        specs = (
            ParameterSpec("small", "BF16", (7,), 0, arrays),
            ParameterSpec("large", "BF16", (5000, 3), 1, arrays),
        )
        layout = Layout(
            parameters=specs,
            model=tuple(ModelTensor(s.name, s.dtype, s.shape) for s in specs),
            chunk_elements=NUM,
            state_dtype=state_format.state_dtype,
        )
        forms = layout.formats.values()
        pool.bytes_per_element = sum(form.nbytes / form.block for form in forms)
        setup = MeasurementSetup(
            backends=[backend],
            directories=[str(tmp_path)],
            drive_gbps=DRIVE,
            device=DEVICE,
            pool=pool,
            rule=rule,
            groups=[rule.defaults, {**rule.defaults, "lr": 0.1}],
            layout=layout,
        )
        return dataclasses.replace(setup, **changes)

    with installed(monkeypatch):
        yield make
        for one in made:
            one.close()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"found": HALF},
        {"state_format": StateFormat("split", "int8")},
        {"state_format": StateFormat("float32", "bfloat16")},
        {"optimizer": torch.optim.SGD},
    ],
    ids=["exact", "half-direct", "split-int8", "bfloat16", "sgd"],
)
def test_each_rate_is_that_of_its_part(given, make_setup, clock, boundary) -> None:
    setup = make_setup(**given)
    found = rates.measure_rates(setup, clock=clock)
    assert isinstance(found, Rates)
    assert dataclasses.astuple(found) == (
        *(DRIVE, *map(pytest.approx, (UPDATE, TO_HOST, TO_DEVICE, MEMORY))),
        given.get("found") is None,
    )
    assert setup.pool.passes == {UPDATE: 6, MEMORY: 4}, "one of each is not counted"
    assert boundary.log[0] == "wait", "memory of a tensor that is gone may still be used"
    assert boundary.log.count("fetch") == boundary.log.count("send") >= 3


class NoDeviceMemory(PosixBackend):
    """Finds out that what was demanded of it is not there."""

    def paths_in(self, directory: str) -> Any:
        raise StorageError(95, "path='gds', but there is none", directory)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drive_gbps": 0.0}, "the drives have not been measured"),
        ({"device": torch.device("xpu")}, "between xpu and host memory are not supported"),
        ({"backends": PosixBackend}, "the posix backend does not transfer device memory"),
        ({"backends": NoDeviceMemory}, "device memory cannot be transferred .*there is none"),
        (
            {"layout": Layout((ParameterSpec("w", "F32", (9,), 0, ()),), (), NUM)},
            "there is no optimizer state",
        ),
        ({"memory": torch.OutOfMemoryError("out of memory.\nmore")}, "out of memory. more"),
    ],
    ids=["drives", "device", "backend", "path", "state", "memory"],
)
def test_where_nothing_can_be_measured_the_host_is_the_place(
    make_setup, clock, boundary, tmp_path, changes, why, monkeypatch
) -> None:
    if "backends" in changes:
        changes = {"backends": [changes["backends"]()]}
    if full := changes.get("memory"):

        def allocate(_: int) -> torch.Tensor:
            raise full

        monkeypatch.setattr(boundary, "allocate", allocate)
        changes = {}
    setup = make_setup(**changes)
    found = find_rates(setup, clock=clock)
    decision = decide(rates.step_bytes(setup.layout), found)
    assert decision == ("host", f"steps are taken on the CPU, because {found}")
    assert re.search(why, decision.reason)
    assert boundary.log == []
    assert list(tmp_path.iterdir()) == []


# Remembering.


def test_what_was_measured_is_believed_again_under_the_same_conditions_alone(
    make_setup, clock, boundary, tmp_path, monkeypatch
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580\nmore\n")
    monkeypatch.setattr(rates, "_PLATFORM_FILES", (str(driver),))

    def measures(**changes: Any) -> bool:
        before = len(boundary.log)
        found = find_rates(make_setup(**changes), clock=clock)
        assert isinstance(found, Rates)
        assert found.drive_gbps == changes.get("drive_gbps", DRIVE)
        return len(boundary.log) > before

    assert measures()
    assert {path.name for path in tmp_path.iterdir()} == {rates.RATES_NAME, "version"}
    for changes in (
        {"drive_gbps": DRIVE + 1},
        {"optimizer": torch.optim.SGD},
        {"state_format": StateFormat("float32", "bfloat16")},
    ):
        assert measures(**changes)
        assert not measures(**changes)
    assert measures()
    driver.write_text("NVRM version: 590\nmore\n")
    assert measures(), "another driver"
    assert not measures()


GOOD = Rates(
    drive_gbps=7, update_gbps=30.5, to_host_gbps=25, to_device_gbps=24, memory_gbps=60, direct=False
)


def damaged() -> dict[str, bytes]:
    content = {"format_version": 2, "conditions": {"a": 1}, "rates": dataclasses.asdict(GOOD)}

    def with_rates(**changes: Any) -> bytes:
        return json.dumps({**content, "rates": {**content["rates"], **changes}}).encode()

    whole = json.dumps(content).encode()
    return {
        "empty": b"",
        "torn": whole[:-9],
        "deep": b"[" * 50_000,
        "long": b" " * (1 << 20),
        "version": whole.replace(b'"format_version": 2', b'"format_version": 1'),
        "conditions": whole.replace(b'{"a": 1}', b'{"a": 2}'),
        "rates-list": whole.replace(b'"rates": {', b'"rates": [{').replace(b"}}", b"}]}"),
        "nan": with_rates(drive_gbps=float("nan")),
        "digits": with_rates(update_gbps=10**400),
        "direct": with_rates(direct="no"),
    }


@pytest.mark.parametrize("data", damaged().values(), ids=damaged())
def test_a_damaged_file_is_measured_again(tmp_path, data) -> None:
    path = tmp_path / rates.RATES_NAME
    save_rates(str(path), {"a": 1}, GOOD)
    assert load_rates(str(path), {"a": 1}) == GOOD
    path.write_bytes(data)
    assert load_rates(str(path), {"a": 1}) is None
    path.unlink()
    os.mkfifo(path)
    assert load_rates(str(path), {"a": 1}) is None


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
    for gbps in rates.link_gbps(device):
        assert 0.1 < gbps < 2000
    assert bool((kept == 7).all())
