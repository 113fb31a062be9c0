"""Uploads beside training: what is decided, what the tier gets, and that nothing waits for it."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.errors import TierError
from offload.options import Tier
from offload.tiers import pull
from offload.tiers.policy import Situation, decide
from tests.eventually import eventually
from tests.limits import HANG_S
from tests.stores.small import train
from tests.threads import since
from tests.tiers.copies import (
    DOCUMENTS,
    files,
    optimizer_in,
    sent_twice,
    steps_in,
    train_and_send,
    wait_for_uploads,
    whole,
)
from tests.tiers.proxy import Proxy

pytestmark = pytest.mark.usefixtures("impatient")

USUAL = Situation(
    nbytes=1000, parameter_bytes=900, interval_s=10.0, lifetime_s=20.0, bytes_per_s=1000.0,
    unmeasured=0, newest_age_s=10.0, parameters_age_s=10.0, slowdown=None, busy_share=0.1,
    max_slowdown=0.05, max_age_s=None,
)  # fmt: skip


SLOW = {
    "bytes_per_s": 10.0, "parameter_bytes": 140, "max_age_s": 60.0, "lifetime_s": None,
    "parameters_age_s": 40.0,
}  # fmt: skip
"""A link that carries the parameters in 14 s, and all of a checkpoint in 100 s."""


@pytest.mark.parametrize(
    ("changes", "choice", "reason"),
    [
        ({}, "upload", r"it takes 1\.0 s at 1\.00 kB/s"),
        ({"bytes_per_s": None}, "upload", "not known yet"),
        ({"bytes_per_s": 30.0}, "skip", r"takes 33 s .* recycles it after 20 s: a larger keep="),
        ({"bytes_per_s": 30.0, "unmeasured": 1}, "upload", "measured again"),
        ({"max_age_s": 60.0}, "keep", "is 10 s old, and 60 s are allowed"),
        ({"max_age_s": 20.0}, "upload", "would become older than 20 s"),
        ({"slowdown": 0.6}, "thin", r"slow training down by 6\.0%, at most 5\.0% is allowed"),
        (SLOW, "parameters", r"takes 100 s .*, too long for an age of 60 s; the parameters .* 14"),
        ({**SLOW, "max_age_s": 90.0}, "keep", "newest parameters in the tier are 40 s old, and 90"),
        ({**SLOW, "max_age_s": None, "lifetime_s": 20.0}, "parameters", "recycles it after 20 s"),
    ],
)
def test_decisions_and_their_reasons(changes: dict[str, Any], choice: str, reason: str) -> None:
    found = decide(dataclasses.replace(USUAL, **changes))
    assert found.choice == choice
    assert re.search(reason, found.reason)


def test_checkpoints_arrive_in_the_tier_as_they_are_sealed(
    tmp_path: Path, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="offload")
    with optimizer_in(tmp_path / "store", tier) as optimizer:
        stats = train_and_send(optimizer, 3)
        assert (stats.num_complete, stats.newest_step, stats.url) == (3, 3, tier)
        assert [(e.step, e.choice, e.outcome) for e in stats.events] == [
            (number, "upload", "complete") for number in (1, 2, 3)
        ]
        assert whole(tier) == [True] * 3
        train(optimizer, 3, seal_at=[6])  # whose copy the end waits for
    assert steps_in(tier) == [1, 2, 3, 6]
    assert "step-00000003: upload: it takes" in caplog.text
    assert "is complete, after" in caplog.text
    pull(tier, tmp_path / "back")
    ends = [files(tmp_path / name / "step-00000006") for name in ("back", "store")]
    assert ends[0] == ends[1]


def test_training_never_waits_for_a_link_that_hangs(tmp_path: Path, s3: str, proxy: Proxy) -> None:
    """The server does not answer; with keep=1 every slot is needed again at once."""
    hung = threading.Event()

    def rule(request: Any) -> str:
        if "/state/" in request.path:
            hung.set()
            return "hang"
        return ""

    proxy.rule = rule
    tier = Tier(s3, finish_s=0)
    with optimizer_in(tmp_path / "store", tier, keep=1) as optimizer:
        train(optimizer, 1)
        assert hung.wait(HANG_S)
        train(optimizer, 5)
        assert optimizer.num_steps == 6
        stats = optimizer.stats().tier
        assert stats is not None
        assert stats.num_complete == 0
        proxy.close()
    assert offload.list_checkpoints(tmp_path / "store")[-1].step == 6


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what a program shows that has not configured logging."""
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


@pytest.mark.parametrize("answer", ["404:NoSuchBucket", "drive", "503"])
def test_a_tier_that_gets_nothing_is_shown_once_and_at_the_end(
    tmp_path: Path, s3: str, proxy: Proxy, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    """The tier is added to a run that has checkpoints, which never looks for one in a tier."""
    with optimizer_in(tmp_path / "none", s3):
        pass  # nothing was sealed, so nothing is missing
    with optimizer_in(tmp_path / "run") as own:
        train(own, 1)
    tier = f"file://{tmp_path}/mnt/run" if answer == "drive" else s3
    (tmp_path / "mnt" / "other").mkdir(parents=True)
    with optimizer_in(tmp_path / "run", tier) as optimizer:
        optimizer.restore()
        (tmp_path / "mnt" / "other").rmdir()
        proxy.rule = lambda _: answer
        train_and_send(optimizer, 3)
    first, last = warnings_of(caplog)
    assert "failed: " in first
    assert last.startswith(f"{tmp_path}/run/step-00000004: not in the tier: failed: {tier}")
    caplog.clear()
    proxy.rule = lambda _: ""
    (tmp_path / "mnt" / "other").mkdir()
    with optimizer_in(tmp_path / "run", tier) as optimizer:
        optimizer.restore()  # its last checkpoint is sent now
    assert not warnings_of(caplog)
    assert steps_in(tier) == [4]


def test_restore_goes_on_with_an_upload_that_was_interrupted(
    tmp_path: Path, s3: str, proxy: Proxy
) -> None:
    proxy.rule = lambda r: "503" if r.method == "PUT" and "/state/exp_avg_sq" in r.path else ""
    with optimizer_in(tmp_path / "store", s3) as optimizer:
        first = train_and_send(optimizer, 1)
    with optimizer_in(tmp_path / "store", s3) as optimizer:
        assert optimizer.restore() is not None
        second = wait_for_uploads(optimizer)
    assert [event.outcome for event in (*first.events, *second.events)] == ["failed"] * 2
    # What an earlier process had sent says nothing about the link.
    assert (first.bytes_sent > 0, second.bytes_sent) == (True, 0)
    assert steps_in(s3) == [None]
    proxy.rule = lambda _: ""
    with optimizer_in(tmp_path / "store", s3) as optimizer:
        assert optimizer.restore() is not None
        stats = wait_for_uploads(optimizer)
    assert [event.outcome for event in stats.events] == ["complete"]
    assert whole(s3) == [True]
    assert not sent_twice(proxy)
    with optimizer_in(tmp_path / "empty", s3) as optimizer:
        assert optimizer.restore() is not None  # from the tier, to which nothing is sent
        optimizer.synchronize()
        train(optimizer, 1)
    assert whole(s3) == [True, True]


def test_settings_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="not the URL of a tier"):
        optimizer_in(tmp_path / "store", "ftp://host/run")
    assert not (tmp_path / "store").exists()
    for wrong in ({"max_slowdown": -1}, {"max_age_s": 0}, {"finish_s": -1}, {"check": "no"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Tier("s3://bucket/run", **wrong)


def test_a_tier_changes_no_bit_of_the_training(tmp_path: Path, s3: str) -> None:
    others = threading.enumerate()
    ends = []
    for directory, tier in ((tmp_path / "without", None), (tmp_path / "with", s3)):
        with optimizer_in(directory, tier, keep=2) as optimizer:
            train(optimizer, 6)
            assert (optimizer.stats().tier is None) == (tier is None)
        ends.append(files(directory / "step-00000006", *DOCUMENTS))
        assert (directory / "tiers").exists() == (tier is not None)
    assert ends[0] == ends[1]
    assert eventually(lambda: not since(others, "offload-tier"))
