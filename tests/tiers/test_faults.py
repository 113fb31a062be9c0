"""Faults of the link and of the server, which a proxy puts in."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import offload
from offload.errors import (
    DamagedError,
    OffloadError,
    TierAccessError,
    TierError,
    TierNotFoundError,
    TierUnavailableError,
)
from offload.tiers import pull, push
from offload.tiers.services.opening import open_objects
from tests.dying import dying
from tests.eventually import eventually
from tests.limits import HANG_S, SHORT_ANSWER_S
from tests.stores.files import steps, tree
from tests.threads import since
from tests.tiers.copies import (
    SMALL,
    optimizer_in,
    sent_twice,
    steps_in,
    train_and_send,
    whole,
)
from tests.tiers.proxy import KEY_ID, SECRET, Proxy, Request

ONCE = {
    "list": lambda r: r.method == "GET" and "list-type" in r.path,
    "conditional put": lambda r: r.method == "PUT" and "WRITER" in r.path,
    "put": lambda r: r.method == "PUT" and "/state/" in r.path,
    "read": lambda r: r.method == "GET" and "/state/" in r.path,
    "marker of the tier": lambda r: r.method == "PUT" and "TIER.json" in r.path,
    "marker": lambda r: r.method == "PUT" and "COMPLETE" in r.path,
}


@pytest.mark.parametrize("fault", ["hang", "lost", "cut", "truncate", "409", "429", "503"])
def test_a_fault_that_happens_once_is_passed_over(
    store: Path, s3: str, proxy: Proxy, fault: str
) -> None:
    """It happens once to each kind of request, whether or not the server has carried it out."""
    asks = "hang", "truncate", "429", "503"  # not what a server says of a write
    kinds = [kind for kind in ONCE if ("list" in kind or "read" in kind) == (fault in asks)]
    kinds = [*kinds, "conditional put"] if fault == "hang" else kinds
    fault = {"409": "409:OperationAborted", "429": "429:SlowDown"}.get(fault, fault)
    hit: dict[str, Request] = {}

    def once(request: Request) -> str:
        for kind in kinds:
            if kind not in hit and ONCE[kind](request):
                hit[kind] = request
                return fault
        return ""

    proxy.rule = once
    more = {"timeout_s": SHORT_ANSWER_S} if fault == "hang" else {}
    report = push(store, s3, object_bytes=SMALL, retry_s=HANG_S, **more)
    assert {*hit} == {*kinds}
    assert report.refuses_overwriting
    assert (steps_in(s3), whole(s3)) == ([3], [True])


@pytest.mark.parametrize("fault", ["503", "lost"])
def test_errors_that_stay_are_named_and_what_was_sent_stays(
    store: Path, s3: str, proxy: Proxy, fault: str
) -> None:
    proxy.rule = lambda r: fault if r.number >= 17 else ""
    with pytest.raises(TierUnavailableError, match="repeat this later"):
        push(store, s3, object_bytes=SMALL, num_transfers=1, retry_s=0.2)
    proxy.rule = lambda r: "hang" if r.method == "PUT" else ""
    with pytest.raises(TierUnavailableError, match="does not answer"):
        push(store, s3, object_bytes=SMALL, timeout_s=SHORT_ANSWER_S, retry_s=0)
    proxy.rule = lambda _: ""
    assert steps_in(s3) == [None]
    with pytest.raises(TierNotFoundError, match="no complete copy"):
        pull(s3, store.parent / "back")
    again = push(store, s3, object_bytes=SMALL)
    assert again.num_kept >= 2
    # What the server took and did not acknowledge is found in its list, and checked.
    assert not sent_twice(proxy)
    assert whole(s3) == [True]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("403:ExpiredToken", TierAccessError, "have expired"),
        ("403:InvalidAccessKeyId", TierAccessError, "are wrong, or do not allow"),
        ("403:RequestTimeTooSkewed", TierAccessError, "clock"),
        ("404:NoSuchBucket", TierNotFoundError, "bucket does not exist"),
        ("403:Other", TierAccessError, "are wrong, or do not allow"),
        ("500:InternalError", TierUnavailableError, "status 500 InternalError"),
        ("301:PermanentRedirect", TierError, "another region, or at another endpoint"),
        ("507:XMinioStorageFull", TierError, "full, or its quota is used up"),
        ("409:OperationAborted", TierUnavailableError, "were changing the same object"),
    ],
)
def test_refusals_have_names_and_say_no_secrets(
    store: Path,
    s3: str,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    kind: type[OffloadError],
    said: str,
) -> None:
    """From the first request on, and from one within the upload."""
    caplog.set_level(logging.DEBUG)
    places = []
    for first in (0, 9):
        begun = len(proxy.requests)
        proxy.rule = lambda r, n=first + begun: fault if r.number >= n else ""
        with pytest.raises(kind, match=said) as caught:
            push(store, s3, object_bytes=SMALL, retry_s=0)
        error: BaseException | None = caught.value
        while error is not None:
            places.append(repr(error) + str(error))
            error = error.__cause__ or error.__context__
    places += [record.getMessage() for record in caplog.records]
    places += [data.decode("latin1") for data in tree(store).values()]
    assert not [text for text in places if KEY_ID in text or SECRET in text]


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://no-such-host.invalid", "the name of the server is not known"),
        ("https://127.0.0.1:{port}", "does not speak TLS"),
        ("http://127.0.0.1:9", "nothing answers at the address"),
        ("127.0.0.1:9000", "AWS_ENDPOINT_URL is not the address of a server"),
        ("http://h:99999", "AWS_ENDPOINT_URL is not the address of a server"),
        ("ftp://host", "AWS_ENDPOINT_URL is not the address of a server"),
    ],
)  # fmt: skip
def test_a_server_that_is_not_reached_has_a_reason(
    store: Path,
    s3: str,
    moto: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    said: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.format(port=moto[1]))
    with pytest.raises(TierError, match=said):
        push(store, s3, retry_s=0.1)


def test_a_panic_of_the_library_is_an_error_of_the_tier(
    store: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no `Exception`, and would end the thread of the uploads without a word."""
    with optimizer_in(store, s3) as optimizer:
        optimizer.restore()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a\nb")  # which is no header
        train_and_send(optimizer, 1)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        stats = train_and_send(optimizer, 1)
    assert [event.outcome for event in stats.events][-2:] == ["failed", "complete"]


RESTORE = """
import torch, offload
model = torch.nn.Linear(8, 8)
optimizer = offload.AdamW(model.parameters(), directory={!r}, model=model,
                          options=offload.Options(tier={!r}, allow_volatile=True))
optimizer.restore()
"""


@pytest.mark.parametrize("what", ["push", "restore"])
def test_an_interrupt_ends_what_waits_for_an_answer(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, what: str
) -> None:
    asked = threading.Event()

    def rule(_: Request) -> str:
        asked.set()
        return "hang"

    proxy.rule = rule
    commands = {
        "push": ["-m", "offload.cli", "push", str(store), s3],
        "restore": ["-c", RESTORE.format(str(tmp_path / "new"), s3)],
    }
    process = subprocess.Popen(dying([sys.executable, *commands[what]]), stderr=subprocess.DEVNULL)
    try:
        assert asked.wait(HANG_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) in (130, -signal.SIGINT)
    finally:
        process.kill()


def test_no_object_contains_credentials(store: Path, s3: str, tmp_path: Path) -> None:
    push(store, s3)
    pull(s3, tmp_path / "back")
    assert not [p for p, data in tree(tmp_path).items() if SECRET.encode() in data]
    with open_objects(s3) as objects:
        sent = [objects.get(name, nbytes) for name, nbytes in objects.sizes_below("").items()]
    assert sent
    assert not [data for data in sent if SECRET.encode() in data or KEY_ID.encode() in data]


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_a_wrong_answer_is_asked_for_again(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, how: str
) -> None:
    """A wrong answer costs a second request, and neither a second upload nor an error."""
    seen = Counter[str]()

    def first_answer_is_wrong(request: Request) -> str:
        if request.method == "GET" and ("/state/" in request.path or "/model" in request.path):
            seen[request.path] += 1
            return how if seen[request.path] == 1 else ""
        return ""

    proxy.rule = first_answer_is_wrong
    push(store, s3, object_bytes=SMALL)
    assert not sent_twice(proxy)
    seen.clear()
    proxy.rule = lambda r: "flip" if r.method == "GET" and "/state/exp_avg_sq" in r.path else ""
    with pytest.raises(DamagedError, match="exp_avg_sq"):
        pull(s3, tmp_path / "back")
    assert steps(tmp_path / "back") == [], "wrong bytes are never published"
    proxy.rule = first_answer_is_wrong
    assert pull(s3, tmp_path / "back").bytes_kept > 0
    assert [r.fault for r in proxy.requests].count(how) >= 6
    with offload.open_checkpoint(tmp_path / "back") as checkpoint:
        assert checkpoint.verify().ok


def test_bytes_that_arrive_wrong_are_sent_again(store: Path, s3: str, proxy: Proxy) -> None:
    """The server takes a body of the right size with a flipped bit: reading it back finds that."""
    hit = set[str]()

    def once(request: Request) -> str:
        if request.method == "PUT" and "/state/" in request.path and request.path not in hit:
            hit.add(request.path)
            return "flip-up"
        return ""

    proxy.rule = once
    push(store, s3, object_bytes=SMALL)
    assert len(hit) >= 3
    assert whole(s3) == [True]


def test_a_server_that_changes_what_it_stores_gets_no_marker_that_counts(
    store: Path, s3: str, proxy: Proxy
) -> None:
    for number, name in enumerate(
        ["WRITER", "/model", "/manifest", "/train", "/state/", "COMPLETE"]
    ):
        tier = f"{s3}-{number}"
        proxy.rule = lambda r, n=name: "flip-up" if r.method == "PUT" and n in r.path else ""
        with pytest.raises(DamagedError):
            push(store, tier, object_bytes=SMALL)
        proxy.rule = lambda _: ""
        assert steps_in(tier) in ([], [None]), name
        push(store, tier, object_bytes=SMALL)
        assert whole(tier) == [True]


def test_a_late_answer_is_not_written_to_what_was_released(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    """It comes when the download that asked for it has failed."""
    push(store, s3, object_bytes=SMALL)
    asked, answers = threading.Event(), threading.Event()

    def rule(request: Request) -> str:
        if request.method == "GET" and "/state/" in request.path:
            if not asked.is_set():
                asked.set()
                assert answers.wait(HANG_S)
                return ""
            return "403:AccessDenied"
        return ""

    proxy.rule = rule
    others = threading.enumerate()
    with pytest.raises(TierAccessError):
        pull(s3, tmp_path / "back", num_transfers=2)
    assert asked.is_set()
    before = tree(tmp_path / "back")
    answers.set()
    assert eventually(lambda: not since(others))
    assert tree(tmp_path / "back") == before
