"""Links that are slower than checkpoints: what is kept for them, what goes first, what is left.

Checkpoints that are being sent stay on the drive while there is room, and else give way;
parameters go before state; what failed uploads have sent goes when nobody needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gds import PosixBackend, WrapperBackend
from offload.errors import OffloadError, TierError, TierNotFoundError
from offload.options import Tier
from offload.tiers import list_tier, pull, push, verify_tier
from offload.tiers.services.opening import open_objects
from tests.command_line import Run
from tests.limits import HANG_S
from tests.stores.files import steps
from tests.stores.small import train
from tests.tiers.copies import (
    SMALL,
    SlowLink,
    new_in,
    optimizer_in,
    steps_in,
    train_and_send,
    until_parameters,
    wait_for_uploads,
    whole,
)
from tests.tiers.proxy import Proxy, Request

pytestmark = pytest.mark.usefixtures("impatient")


class Drive(WrapperBackend):
    """A drive of this machine, which may say that it is full."""

    is_full = False

    def free_bytes(self, path: str) -> int:
        return 0 if self.is_full else super().free_bytes(path)


@pytest.fixture
def drive() -> Drive:
    """The drive of the store."""
    return Drive(PosixBackend())


def hold_state(proxy: Proxy) -> tuple[threading.Event, Callable[[], None]]:
    """Let no object of state pass; return an event that one waits, and what lets all pass."""
    waiting, go_on = threading.Event(), threading.Event()

    def rule(request: Request) -> str:
        if "/state/" in request.path and request.method == "PUT" and not go_on.is_set():
            waiting.set()
            assert go_on.wait(HANG_S)
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
    with optimizer_in(store, s3, backend=drive, keep=1) as optimizer:
        train(optimizer, 1)
        assert waiting.wait(HANG_S)
        train(optimizer, 6)
        assert 1 in steps(store)
        assert num_slots(store) <= 4  # what keep=1 needs, one that is sent, and one that was spare
        let_pass()
        wait_for_uploads(optimizer)
        train(optimizer, 2)
        wait_for_uploads(optimizer)
        train(optimizer, 2)
        stats = wait_for_uploads(optimizer)
    outcomes = {event.step: event.outcome for event in stats.events if event.choice == "upload"}
    assert outcomes[1] == "complete"
    assert "recycled" not in outcomes.values()
    assert 1 not in steps(store)
    assert "leaving for the tier, so the store has one more slot" in caplog.text
    assert all(whole(s3))


def test_an_upload_gives_way_if_there_is_no_room_and_the_next_checkpoint_arrives(
    tmp_path: Path, s3: str, proxy: Proxy, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="offload")
    waiting, let_pass = hold_state(proxy)
    store = tmp_path / "store"
    with optimizer_in(store, s3, backend=drive, keep=1) as optimizer:
        train(optimizer, 1)
        assert waiting.wait(HANG_S)
        drive.is_full = True
        train(optimizer, 3)  # the checkpoint of step 1 is recycled while it is being sent
        assert 1 not in steps(store)
        let_pass()
        wait_for_uploads(optimizer)
        stats = train_and_send(optimizer, 2)  # what was measured says that the link is too slow
    outcomes = {(e.step, e.choice): e.outcome for e in stats.events}
    assert outcomes[1, "upload"] == "recycled"
    assert "complete" in outcomes.values()
    said = caplog.text
    assert "step 1 is being sent to the tier, and gives way: the next step needs its slot" in said
    assert "gave way to a step that needed its slot" in said
    assert list_tier(s3)[-1].marker is not None
    assert all(whole(s3))


def test_parameters_arrive_although_the_link_is_too_slow_for_all(
    tmp_path: Path, s3: str, proxy: Proxy, run: Run
) -> None:
    """It takes 12 s for a checkpoint, of which one is made every 10 s."""
    store = tmp_path / "store"
    with optimizer_in(store, Tier(s3, max_age_s=20.0), keep=2) as optimizer:
        assert optimizer._uploads is not None
        optimizer._uploads.measured = link = SlowLink()
        train_and_send(optimizer, 1)
        waiting, let_pass = hold_state(proxy)
        (first,) = list_tier(s3)
        assert first.marker is not None
        sizes = first.marker.sizes.items()
        link.rate = sum(n for name, n in sizes if name.startswith(("state/", "model."))) / 12
        for number in (2, 3, 4):
            link.now_s += 10
            train(optimizer, 1)
            if number == 2:
                assert waiting.wait(HANG_S)
                continue
            until_parameters(s3, number)
        copies = {c.parameters.step: c for c in list_tier(s3) if c.parameters is not None}
        assert copies.keys() == {2, 4}  # those of step 3 are of no use any more
        assert [c.marker.step for c in list_tier(s3) if c.marker is not None] == [1]
        with pytest.raises(TierNotFoundError, match=r"only its parameters are complete"):
            pull(s3, tmp_path / "back", step=4)
        assert pull(s3, tmp_path / "newest").step == 1  # a copy of parameters is no checkpoint
        status, shown, _ = run("ls", s3)
        assert status == 0
        assert "parameters only" in shown
        assert "only its parameters are complete" in shown
        let_pass()
        link.rate = None
        stats = wait_for_uploads(optimizer)
    events = [(e.step, e.choice, e.outcome) for e in stats.events]
    assert events[0] == (1, "upload", "complete")
    assert (2, "parameters", "complete") in events
    assert (3, "parameters", "parameters") in events
    _, shown, _ = run("ls", str(store))
    assert f"tier {s3}:" in shown
    assert "step 1: upload -> complete (the rate of the link is not known yet)" in shown
    assert "step 2: parameters -> complete (it takes 12 s" in shown
    assert "step 3: parameters -> parameters (those in the tier become too old" in shown
    assert all(report.ok and not report.foreign for report in verify_tier(s3))
    assert {*steps_in(s3)} >= {1, 2}


def test_parameters_arrive_although_the_link_became_slow_during_an_upload(
    tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """The upload began as one of everything, which takes 1 s. Nothing passes for 20 s."""
    with optimizer_in(tmp_path / "store", Tier(s3, max_age_s=40.0), keep=2) as optimizer:
        assert optimizer._uploads is not None
        optimizer._uploads.measured = link = SlowLink()
        train_and_send(optimizer, 1)
        waiting, let_pass = hold_state(proxy)
        (first,) = list_tier(s3)
        assert first.marker is not None
        link.rate = float(first.marker.nbytes)
        for _ in (2, 3):  # young enough
            link.now_s += 10
            train_and_send(optimizer, 1)
        link.now_s += 10
        train(optimizer, 1)  # step 4, the upload that is held up
        assert waiting.wait(HANG_S)
        link.now_s += 20
        train(optimizer, 1)  # step 5: 20 s for a checkpoint are too long
        until_parameters(s3, 5)
        let_pass()
        stats = wait_for_uploads(optimizer)
    assert [(e.step, e.choice, e.outcome) for e in stats.events] == [
        (1, "upload", "complete"), (2, "keep", ""), (3, "keep", ""), (4, "upload", "complete"),
        (5, "parameters", "parameters"),
    ]  # fmt: skip


def records(store: Path) -> list[str]:
    return [path.name for path in (store / "tiers").glob("*.upload")]


def test_uploads_that_fail_leave_as_much_as_the_store_keeps(
    s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    """The tier is away, then refuses objects that come late; then it takes everything again."""
    store, foreign = tmp_path / "store", f"{'a' * 32}/gen-00000001/{'b' * 32}/WRITER.json"
    with open_objects(s3) as objects:
        objects.put(foreign, b"{}")  # of another store
    late = "/state/exp_avg_sq"
    with new_in(store, s3, keep=2, fresh=True) as optimizer:
        proxy.rule = lambda _: "cut"
        train_and_send(optimizer, 6)
        assert records(store) == []
        proxy.rule = lambda r: "403:AccessDenied" if r.method == "PUT" and late in r.path else ""
        train_and_send(optimizer, 8)
        mine = [copy for copy in list_tier(s3) if not foreign.startswith(copy.identity.store_id)]
        assert [copy.marker for copy in mine] == [None] * len(mine)
        assert 1 <= len(mine) <= 4
        assert len(records(store)) == len(mine)
        proxy.rule = lambda _: ""
        train_and_send(optimizer, 4)
    assert records(store) == []
    assert steps_in(s3).count(None) == 1
    with open_objects(s3) as objects:
        assert objects.size(foreign) == 2


def test_an_upload_that_runs_is_nobodys_leftover(store: Path, s3: str) -> None:
    """Its checkpoint is recycled, but it holds the lock of its record, and ends by itself."""
    seen: list[int] = []

    def progress(done: int, _: int) -> None:
        if seen:
            return
        with new_in(store, s3, keep=1) as optimizer:
            optimizer.restore()
            train_and_send(optimizer, 3)
        seen.append(steps_in(s3).count(None))

    with pytest.raises(OffloadError, match="recycled"):
        push(store / "step-00000002", s3, object_bytes=1, num_transfers=1, progress=progress)
    assert seen == [1]
    assert None not in steps_in(s3)


def test_what_an_interrupted_upload_had_checked_is_checked_again(
    store: Path, s3: str, proxy: Proxy
) -> None:
    """Somebody may have exchanged objects meanwhile, and no size tells."""
    proxy.rule = lambda r: "403:Denied" if r.method == "PUT" and "COMPLETE" in r.path else ""
    with pytest.raises(TierError):
        push(store, s3, object_bytes=SMALL)
    proxy.rule = lambda _: ""
    with open_objects(s3) as objects:
        one, two = (
            next(name for name in objects.sizes_below("") if name.endswith(f"state/{array}.000000"))
            for array in ("exp_avg", "exp_avg_sq")
        )
        data = [objects.get(name, 1 << 20) for name in (one, two)]
        objects.put(one, data[1])
        objects.put(two, data[0])
    assert push(store, s3, object_bytes=SMALL).num_sent == 2
    assert whole(s3) == [True]
