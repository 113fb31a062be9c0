"""Faults of the link and of the server, put in by a proxy, and processes that are killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
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
from offload.tiers import list_tier, pull, push, verify_tier
from tests.dying import dying
from tests.limits import HANG_S, SHORT_ANSWER_S
from tests.stores.files import steps, tree
from tests.stores.small import options, train
from tests.tiers.conftest import SETTINGS, optimizer_in
from tests.tiers.proxy import KEY_ID, SECRET, Proxy, Request

SMALL = 8192


def is_part(name: str) -> bool:
    """Whether an object is one of those that are not to be sent twice."""
    return name.endswith("safetensors") or name.startswith("state/") or name == "manifest.json"


def test_errors_that_pass_are_passed_over(store: Path, s3: str, proxy: Proxy) -> None:
    """Every third request is answered with 503, broken off or lost, once."""
    faults = ["503", "cut", "lost", "503:SlowDown"]
    proxy.rule = lambda r: faults[r.number // 3 % 4] if r.number % 3 == 2 else ""
    push(store, s3, object_bytes=SMALL)
    pull(s3, store.parent / "back")
    proxy.rule = lambda _: ""
    assert [report.ok for report in verify_tier(s3)] == [True]
    assert {r.fault for r in proxy.requests} >= {*faults}
    before, after = (tree(p / "step-00000003") for p in (store, store.parent / "back"))
    assert [*before.values()] == [*after.values()]


ONCE = {
    "list": lambda r: r.method == "GET" and "list-type" in r.path,
    "conditional put": lambda r: r.method == "PUT" and "WRITER" in r.path,
    "put": lambda r: r.method == "PUT" and "/state/" in r.path,
    "read": lambda r: r.method == "GET" and "/state/" in r.path,
    "marker of the tier": lambda r: r.method == "PUT" and "TIER.json" in r.path,
    "marker": lambda r: r.method == "PUT" and "COMPLETE" in r.path,
}


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("list", "truncate"), ("list", "hang"), ("list", "409:OperationAborted"),
        ("conditional put", "hang"), ("conditional put", "lost"),
        ("conditional put", "409:ConditionalRequestConflict"),
        ("conditional put", "400:RequestTimeout"), ("put", "lost"), ("put", "409:OperationAborted"),
        ("read", "truncate"), ("read", "hang"), ("read", "429:SlowDown"),
        ("marker of the tier", "lost"), ("marker of the tier", "409:OperationAborted"),
        ("marker", "lost"), ("marker", "409:ConditionalRequestConflict"),
    ],
)  # fmt: skip
def test_a_fault_that_happens_once_is_passed_over(
    store: Path, s3: str, proxy: Proxy, what: str, fault: str
) -> None:
    """Whatever the request was, and whether or not the server has carried it out."""
    hit: list[Request] = []

    def once(request: Request) -> str:
        if hit or not ONCE[what](request):
            return ""
        hit.append(request)
        return fault

    proxy.rule = once
    more = {"timeout_s": SHORT_ANSWER_S} if fault == "hang" else {}
    report = push(store, s3, object_bytes=SMALL, retry_s=HANG_S, **more)
    assert hit
    assert report.refuses_overwriting
    assert [report.ok for report in verify_tier(s3)] == [True]
    assert len(list_tier(s3)) == 1


@pytest.mark.parametrize("fault", ["503", "cut", "lost"])
def test_errors_that_stay_are_named_and_what_was_sent_stays(
    store: Path, s3: str, proxy: Proxy, fault: str
) -> None:
    proxy.rule = lambda r: fault if r.number >= 17 else ""
    with pytest.raises(TierUnavailableError, match="repeat this later"):
        push(store, s3, object_bytes=SMALL, num_transfers=1, retry_s=0.2)
    proxy.rule = lambda _: ""
    assert [copy.marker for copy in list_tier(s3)] == [None]
    with pytest.raises(TierNotFoundError, match="no complete copy"):
        pull(s3, store.parent / "back")
    again = push(store, s3, object_bytes=SMALL)
    assert again.num_kept >= 2
    # What the server took and did not acknowledge is found in its list, and checked.
    assert max(Counter(n for n in proxy.puts() if is_part(n)).values()) == 1
    assert [report.ok for report in verify_tier(s3)] == [True]


def test_a_server_that_never_answers_is_given_up(store: Path, s3: str, proxy: Proxy) -> None:
    proxy.rule = lambda r: "hang" if r.method == "PUT" else ""
    with pytest.raises(TierUnavailableError, match="does not answer"):
        push(store, s3, timeout_s=SHORT_ANSWER_S, retry_s=0)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("403:ExpiredToken", TierAccessError, "have expired"),
        ("400:ExpiredToken", TierAccessError, "have expired"),
        ("403:InvalidAccessKeyId", TierAccessError, "are wrong, or do not allow"),
        ("403:SignatureDoesNotMatch", TierAccessError, "are wrong, or do not allow"),
        ("403:AccessDenied", TierAccessError, "are wrong, or do not allow"),
        ("403:RequestTimeTooSkewed", TierAccessError, "clock"),
        ("404:NoSuchBucket", TierNotFoundError, "bucket does not exist"),
        ("500:InternalError", TierUnavailableError, "status 500 InternalError"),
        ("301:PermanentRedirect", TierError, "another region, or at another endpoint"),
        ("400:AuthorizationHeaderMalformed", TierError, "another region, or at another endpoint"),
        ("507:XMinioStorageFull", TierError, "full, or its quota is used up"),
        ("403:QuotaExceeded", TierError, "full, or its quota is used up"),
        ("409:OperationAborted", TierUnavailableError, "were changing the same object"),
    ],
)
@pytest.mark.parametrize("first", [0, 9])
def test_refusals_have_names_and_say_no_secrets(
    store: Path,
    s3: str,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    kind: type[OffloadError],
    said: str,
    first: int,
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.rule = lambda r: fault if r.number >= first else ""
    with pytest.raises(kind, match=said) as caught:
        push(store, s3, object_bytes=SMALL, retry_s=0)
    chain: list[BaseException | None] = [caught.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    places = [repr(error) + str(error) for error in chain if error is not None]
    places += [record.getMessage() for record in caplog.records]
    places += [data.decode("latin1") for data in tree(store).values()]
    assert not [text for text in places if KEY_ID in text or SECRET in text]


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://no-such-host.invalid", "the name of the server is not known"),
        ("https://127.0.0.1:{port}", "does not speak TLS"),
        ("http://127.0.0.1:9", "nothing answers at the address"),
        *[
            (endpoint, "AWS_ENDPOINT_URL is not the address of a server")
            for endpoint in ("127.0.0.1:9000", "localhost:9000", "http://", "http://h:99999",
                             "ftp://host", "//host", "http://a b")
        ],
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
    with optimizer_in(store, options=options(tier=s3, **SETTINGS)) as optimizer:
        optimizer.restore()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a\nb")  # which is no header
        train(optimizer, 1)
        assert optimizer._uploads is not None
        assert optimizer._uploads.wait(60)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        train(optimizer, 1)
        assert optimizer._uploads.wait(60)
        stats = optimizer.stats().tier
    assert stats is not None
    assert [event.outcome for event in stats.events][-2:] == ["failed", "complete"]


RESTORE = """
import torch, offload
model = torch.nn.Linear(8, 8)
optimizer = offload.AdamW(model.parameters(), directory={!r}, model=model,
                          options=offload.Options(tier={!r}, allow_volatile=True))
optimizer.restore()
"""


@pytest.mark.parametrize("what", ["ls", "pull", "push", "restore"])
def test_an_interrupt_ends_what_waits_for_an_answer(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, what: str
) -> None:
    asked = threading.Event()

    def rule(_: Request) -> str:
        asked.set()
        return "hang"

    proxy.rule = rule
    commands = {
        "ls": ["-m", "offload.cli", "ls", s3],
        "pull": ["-m", "offload.cli", "pull", s3, str(tmp_path / "back")],
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


def test_no_object_contains_credentials(store: Path, s3: str, proxy: Proxy, tmp_path: Path) -> None:
    push(store, s3)
    pull(s3, tmp_path / "back")
    assert not [p for p, data in tree(tmp_path).items() if SECRET.encode() in data]
    from offload.tiers.services.opening import open_objects

    with open_objects(s3) as objects:
        for name, nbytes in objects.sizes_below("").items():
            data = bytes(objects.get_range(name, 0, nbytes))
            assert SECRET.encode() not in data
            assert KEY_ID.encode() not in data


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
    assert max(Counter(n for n in proxy.puts() if is_part(n)).values()) == 1
    seen.clear()
    pull(s3, tmp_path / "back")
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
    assert [report.ok for report in verify_tier(s3)] == [True]


@pytest.mark.parametrize("name", ["/state/", "/model", "COMPLETE", "/manifest", "/train", "WRITER"])
def test_a_server_that_changes_what_it_stores_gets_no_marker_that_counts(
    store: Path, s3: str, proxy: Proxy, name: str
) -> None:
    proxy.rule = lambda r: "flip-up" if r.method == "PUT" and name in r.path else ""
    with pytest.raises(DamagedError):
        push(store, s3, object_bytes=SMALL)
    proxy.rule = lambda _: ""
    assert [copy.marker for copy in list_tier(s3)] in ([], [None])
    push(store, s3, object_bytes=SMALL)
    assert [report.ok for report in verify_tier(s3)] == [True]


def test_wrong_bytes_are_never_published(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    push(store, s3, object_bytes=SMALL)
    proxy.rule = lambda r: "flip" if r.method == "GET" and "/state/exp_avg_sq" in r.path else ""
    with pytest.raises(DamagedError, match="exp_avg_sq"):
        pull(s3, tmp_path / "back")
    assert steps(tmp_path / "back") == []
    proxy.rule = lambda _: ""
    got = pull(s3, tmp_path / "back")
    assert got.bytes_kept > 0
    with offload.open_checkpoint(tmp_path / "back") as checkpoint:
        assert checkpoint.verify().ok


def test_a_slow_link_is_only_slow(store: Path, s3: str, proxy: Proxy, tmp_path: Path) -> None:
    proxy.bytes_per_s = 500_000.0
    began_s = time.monotonic()
    push(store, s3, check="size")
    pull(s3, tmp_path / "back")
    moved = sum(r.bytes_up + r.bytes_down for r in proxy.requests)
    assert moved > 100_000
    assert time.monotonic() - began_s >= 0.9 * moved / proxy.bytes_per_s  # the fault fired


def run_and_kill(proxy: Proxy, at: int, command: list[str], *, when: str) -> int:
    """Run a command, and kill it at its request of a number.

    Args:
        proxy: Proxy that the process uses.
        at: Number of the request, from 0.
        command: Arguments of `killed.py`.
        when: "before" the server sees the request, or "after" the client has its answer.

    Returns:
        Exit status.
    """
    first = len(proxy.requests)
    process: subprocess.Popen[bytes] | None = None

    def kill() -> None:
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def rule(request: Request) -> str:
        if when == "before" and request.number - first == at:
            kill()
            return "cut"
        return ""

    def after(request: Request) -> None:
        if when == "after" and request.number - first == at:
            kill()

    proxy.rule, proxy.after = rule, after
    process = subprocess.Popen(dying([sys.executable, "-m", "tests.tiers.killed", *command]))
    try:
        return process.wait(60)
    finally:
        process.kill()
        proxy.rule, proxy.after = (lambda _: ""), (lambda _: None)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(40))
def test_a_killed_push_offers_nothing_and_goes_on(
    store: Path, s3: str, proxy: Proxy, at: int, when: str, record_property: pytest.RecordProperty
) -> None:
    status = run_and_kill(proxy, at, ["push", str(store), s3], when=when)
    copies = list_tier(s3)
    if status == 0:
        assert len(proxy.requests) < at + 20, "more requests than are tried"
    else:
        assert status == -signal.SIGKILL
        record_property("kills", 1)
    for copy in copies:  # whatever is offered is whole
        assert copy.marker is None or verify_tier(copy.url)[0].ok
    push(store, s3, object_bytes=SMALL)
    twice = {n: k for n, k in Counter(filter(is_part, proxy.puts())).items() if k > 1}
    assert not twice
    assert [report.ok for report in verify_tier(s3)] == [True]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(24))
def test_a_killed_pull_offers_nothing_and_goes_on(
    store: Path,
    s3: str,
    proxy: Proxy,
    tmp_path: Path,
    at: int,
    when: str,
    record_property: pytest.RecordProperty,
) -> None:
    push(store, s3, object_bytes=SMALL)
    back = tmp_path / "back"
    before = len(proxy.requests)
    status = run_and_kill(proxy, at, ["pull", s3, str(back)], when=when)
    if status == 0:
        assert steps(back) == [3]
    else:
        assert status == -signal.SIGKILL
        record_property("kills", 1)
        assert not back.exists() or steps(back) in ([], [3])
    got = pull(s3, back)
    asked = Counter(
        (r.path, r.bytes_down) for r in proxy.requests[before:]
        if r.method == "GET" and r.status == 206 and "/state/" in r.path
    )  # fmt: skip
    sealed = tree(store / "step-00000003")
    assert [*tree(back / "step-00000003").values()] == [*sealed.values()]
    if status == 0:
        assert got.already_there
    # At most those transfers are repeated that were in progress.
    repeated = sum(asked.values()) - got_once(store)
    assert repeated <= 2
    assert os.environ["AWS_ENDPOINT_URL"] == proxy.url


def got_once(store: Path) -> int:
    """Return the number of chunks of state of the newest checkpoint."""
    with offload.open_checkpoint(store) as checkpoint:
        return sum(
            digest is not None
            for digests in checkpoint.manifest.digests.values()
            for digest in digests
        )
