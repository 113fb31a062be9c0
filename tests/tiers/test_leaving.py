"""Checkpoints that are being sent stay on the drive while there is room, and else give way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import offload
from gds import PosixBackend, WrapperBackend
from offload.tiers import background, list_tier, verify_tier
from tests.stores.files import steps
from tests.stores.small import make_model, make_optimizer, train
from tests.tiers.conftest import SETTINGS
from tests.tiers.proxy import Proxy, Request


class Drive(WrapperBackend):
    """A drive of this machine, which may say that it is full."""

    is_full = False

    def free_bytes(self, path: str) -> int:
        return 0 if self.is_full else super().free_bytes(path)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that fail are given up soon."""
    monkeypatch.setattr(background, "RETRY_S", 0.2)


@pytest.fixture
def drive() -> Drive:
    """The drive of the store."""
    return Drive(PosixBackend())


def optimizer_with(
    store: Path, tier: str, drive: Drive, *, keep: int
) -> offload.OffloadedOptimizer:
    settings = {**SETTINGS, "tier": tier}
    model = make_model(64, 40)
    return make_optimizer(model, drive, settings=settings, directory=store, keep=keep)


def hold_state(proxy: Proxy) -> tuple[threading.Event, Callable[[], None]]:
    """Let no object of state pass; return an event that one waits, and what lets all pass."""
    waiting, go_on = threading.Event(), threading.Event()

    def rule(request: Request) -> str:
        if "/state/" in request.path and not go_on.is_set():
            waiting.set()
            assert go_on.wait(60)
        return ""

    proxy.rule = rule
    return waiting, go_on.set


def num_slots(store: Path) -> int:
    return len([p for p in store.iterdir() if p.name.startswith(("step-", ".slot-"))])


def test_a_checkpoint_that_is_being_sent_is_kept_while_there_is_room(
    tmp_path: Path, s3: str, proxy: Proxy, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="offload")
    waiting, let_pass = hold_state(proxy)
    store = tmp_path / "store"
    with optimizer_with(store, s3, drive, keep=1) as optimizer:
        assert optimizer._uploads is not None
        train(optimizer, 1)
        assert waiting.wait(60)
        train(optimizer, 6)
        assert 1 in steps(store)
        assert num_slots(store) <= 4  # what keep=1 needs, one that is sent, and one that was spare
        let_pass()
        assert optimizer._uploads.wait(60)
        train(optimizer, 2)
        assert optimizer._uploads.wait(60)
        train(optimizer, 2)
        stats = optimizer.stats().tier
    assert stats is not None
    outcomes = {event.step: event.outcome for event in stats.events if event.choice == "upload"}
    assert outcomes[1] == "complete"
    assert "recycled" not in outcomes.values()
    assert 1 not in steps(store)
    assert "leaving for the tier, so the store has one more slot" in caplog.text
    assert all(report.ok for report in verify_tier(s3))


def test_an_upload_gives_way_if_there_is_no_room_and_the_next_checkpoint_arrives(
    tmp_path: Path, s3: str, proxy: Proxy, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="offload")
    waiting, let_pass = hold_state(proxy)
    store = tmp_path / "store"
    with optimizer_with(store, s3, drive, keep=1) as optimizer:
        assert optimizer._uploads is not None
        train(optimizer, 1)
        assert waiting.wait(60)
        drive.is_full = True
        train(optimizer, 3)  # the checkpoint of step 1 is recycled while it is being sent
        assert 1 not in steps(store)
        let_pass()
        for _ in range(2):  # what was measured last says that the link is too slow
            assert optimizer._uploads.wait(60)
            train(optimizer, 1)
        assert optimizer._uploads.wait(60)
        stats = optimizer.stats().tier
    assert stats is not None
    outcomes = {(e.step, e.choice): e.outcome for e in stats.events}
    assert outcomes[1, "upload"] == "recycled"
    assert "complete" in outcomes.values()
    said = caplog.text
    assert "step 1 is being sent to the tier, and gives way: the next step needs its slot" in said
    assert "gave way to a step that needed its slot" in said
    assert list_tier(s3)[-1].marker is not None
    assert all(report.ok for report in verify_tier(s3))


@pytest.mark.parametrize("keep", [1, 2])
def test_nothing_is_recycled_before_its_copy_is_verified(
    tmp_path: Path, s3: str, proxy: Proxy, drive: Drive, keep: int
) -> None:
    """A slow link, and many checkpoints: whatever was begun is completed, in bounded space."""
    proxy.bytes_per_s = 2e5
    store, most = tmp_path / "store", 0
    pauses = random.Random(keep)
    with optimizer_with(store, s3, drive, keep=keep) as optimizer:
        for _ in range(12):
            train(optimizer, 1)
            most = max(most, num_slots(store))
            threading.Event().wait(pauses.uniform(0, 0.2))
        proxy.bytes_per_s = None
        assert optimizer._uploads is not None
        assert optimizer._uploads.wait(60)
        stats = optimizer.stats().tier
    assert stats is not None
    sent = [event.outcome for event in stats.events if event.choice == "upload"]
    assert {*sent} == {"complete"}
    assert most <= keep + 3
    assert all(report.ok for report in verify_tier(s3))
