"""Parameters before state: what a link that is too slow for whole checkpoints still brings."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from offload.errors import TierNotFoundError
from offload.options import Tier
from offload.tiers import background, list_tier, pull, verify_tier
from offload.tiers.measuring import Measurements
from tests.command_line import Run
from tests.limits import HANG_S
from tests.stores.small import make_model, make_optimizer, train
from tests.tiers.conftest import SETTINGS
from tests.tiers.proxy import Proxy, Request


class SlowLink(Measurements):
    """A link that takes 12 s for a checkpoint, of which one is made every 10 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(lambda: self.now_s)
        self.rate: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        return self.rate


def test_parameters_arrive_although_the_link_is_too_slow_for_all(
    tmp_path: Path, s3: str, proxy: Proxy, run: Run
) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def rule(request: Request) -> str:
        if request.method == "PUT" and "/state/" in request.path and not go_on.is_set():
            waiting.set()
            assert go_on.wait(HANG_S)
        return ""

    model = make_model(64, 40)
    settings = {**SETTINGS, "tier": Tier(s3, max_age_s=20.0)}
    with make_optimizer(
        model, settings=settings, directory=tmp_path / "store", keep=2
    ) as optimizer:
        uploads = optimizer._uploads
        assert uploads is not None
        uploads.measured = link = SlowLink()
        train(optimizer, 1)
        assert uploads.wait(60)
        proxy.rule = rule
        (first,) = list_tier(s3)
        assert first.marker is not None
        sizes = first.marker.sizes.items()
        link.rate = sum(n for name, n in sizes if name.startswith(("state/", "model."))) / 12
        for number in (2, 3, 4):
            link.now_s += 10
            train(optimizer, 1)
            if number == 2:
                assert waiting.wait(60)
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
        go_on.set()
        link.rate = None
        assert uploads.wait(60)
        stats = optimizer.stats().tier
    assert stats is not None
    events = [(e.step, e.choice, e.outcome) for e in stats.events]
    assert events[0] == (1, "upload", "complete")
    assert (2, "parameters", "complete") in events
    assert (3, "parameters", "parameters") in events
    _, shown, _ = run("ls", str(tmp_path / "store"))
    assert f"tier {s3}:" in shown
    assert "step 1: upload -> complete (the rate of the link is not known yet)" in shown
    assert "step 2: parameters -> complete (it takes 12 s" in shown
    assert "step 3: parameters -> parameters (those in the tier become too old" in shown
    assert all(report.ok and not report.foreign for report in verify_tier(s3))
    assert {c.marker.step for c in list_tier(s3) if c.marker is not None} >= {1, 2}


def until_parameters(tier: str, step: int) -> None:
    """Wait until the tier has the parameters of a step."""
    for _ in range(100):
        if step in {c.parameters.step for c in list_tier(tier) if c.parameters is not None}:
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"no parameters of step {step}")


def test_parameters_arrive_although_the_link_became_slow_during_an_upload(
    tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    """The upload began as one of everything, which takes 1 s. Nothing passes for 20 s."""
    waiting, go_on = threading.Event(), threading.Event()

    def rule(request: Request) -> str:
        if request.method == "PUT" and "/state/" in request.path and not go_on.is_set():
            waiting.set()
            assert go_on.wait(60)
        return ""

    model = make_model(64, 40)
    settings = {**SETTINGS, "tier": Tier(s3, max_age_s=40.0)}
    with make_optimizer(
        model, settings=settings, directory=tmp_path / "store", keep=2
    ) as optimizer:
        uploads = optimizer._uploads
        assert uploads is not None
        uploads.measured = link = SlowLink()
        train(optimizer, 1)
        assert uploads.wait(60)
        proxy.rule = rule
        (first,) = list_tier(s3)
        assert first.marker is not None
        link.rate = float(first.marker.nbytes)
        for _ in (2, 3):  # young enough
            link.now_s += 10
            train(optimizer, 1)
            assert uploads.wait(60)
        link.now_s += 10
        train(optimizer, 1)  # step 4, the upload that is held up
        assert waiting.wait(60)
        link.now_s += 20
        train(optimizer, 1)  # step 5: 20 s for a checkpoint are too long
        until_parameters(s3, 5)
        go_on.set()
        assert uploads.wait(60)
        stats = optimizer.stats().tier
    assert stats is not None
    assert [(e.step, e.choice, e.outcome) for e in stats.events] == [
        (1, "upload", "complete"), (2, "keep", ""), (3, "keep", ""), (4, "upload", "complete"),
        (5, "parameters", "parameters"),
    ]  # fmt: skip


def test_an_upload_that_failed_counts_what_it_has_sent_itself(
    tmp_path: Path, s3: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier process had sent says nothing about the link."""
    monkeypatch.setattr(background, "RETRY_S", 0.2)
    proxy.rule = lambda r: "503" if r.method == "PUT" and "/state/exp_avg_sq" in r.path else ""
    sent = []
    for number in range(2):
        settings = {**SETTINGS, "tier": s3}
        model = make_model(64, 40)
        with make_optimizer(model, settings=settings, directory=tmp_path / "store") as optimizer:
            if number:
                assert optimizer.restore() is not None
            else:
                train(optimizer, 1)
            assert optimizer._uploads is not None
            assert optimizer._uploads.wait(60)
            stats = optimizer.stats().tier
            assert stats is not None
            assert [event.outcome for event in stats.events] == ["failed"]
            sent.append(stats.bytes_sent)
    assert sent[0] > 0
    assert sent[1] == 0
