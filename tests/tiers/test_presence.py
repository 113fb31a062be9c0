"""An empty place is a tier only if something says so: not a page of a proxy, nor a mount point."""

from __future__ import annotations

import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import offload
from offload.errors import TierError, TierNotFoundError
from offload.tiers import list_tier, pull, push
from offload.tiers.services.opening import open_objects
from tests.tiers.copies import new_in, train_and_send, whole
from tests.tiers.proxy import Proxy


@pytest.fixture(params=["html", "empty", "not found"])
def portal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a tier at whose endpoint a server has the same answer to everything."""
    status, page = {
        "html": (200, b"<html><body>please log in</body></html>"),
        "empty": (200, b""),
        "not found": (404, b"<html>no such page</html>"),
    }[request.param]

    class Answer(http.server.BaseHTTPRequestHandler):
        def go(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(page)))
            self.send_header("etag", '"1"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = go  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield "s3://bucket/run"
        server.shutdown()


def test_a_page_of_a_proxy_is_no_empty_tier(portal: str, store: Path, tmp_path: Path) -> None:
    with new_in(tmp_path / "new", portal) as optimizer:
        for _ in range(2):  # nor is it one later
            with pytest.raises(TierError):
                optimizer.restore()
    with pytest.raises(TierError):
        push(store, portal, retry_s=0)
    with pytest.raises(TierError):
        pull(portal, tmp_path / "back", retry_s=0)


def test_a_tier_that_becomes_a_page_of_a_proxy_meanwhile_has_not_lost_its_copies(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    """The first requests of a restore are answered, and the others with another page."""
    push(store, s3)
    with new_in(tmp_path / "new", s3) as optimizer:
        for first in range(6):
            before = len(proxy.requests) + first
            proxy.rule = lambda r, n=before: "200:Page" if r.number >= n else ""
            with pytest.raises(offload.OffloadError):
                optimizer.restore()
        proxy.rule = lambda _: ""
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == 3


def test_a_new_tier_needs_no_ceremony_and_is_known_from_then_on(
    s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    with new_in(tmp_path / "store", s3) as optimizer:
        assert optimizer.restore() is None
        train_and_send(optimizer, 1)
    with open_objects(s3) as objects:
        marker = objects.get("TIER.json", 1 << 20)
        objects.delete([*objects.sizes_below("")])
    with pytest.raises(TierNotFoundError, match=r"has been here.*remove (.*\.tier)") as caught:
        push(tmp_path / "store", s3)
    with open_objects(s3) as objects:
        assert objects.sizes_below("") == {}  # nothing is sent to a place that is another one
    os.remove(str(caught.value).rpartition("remove ")[2])
    push(tmp_path / "store", s3)
    with open_objects(s3) as objects:
        assert objects.get("TIER.json", 1 << 20) != marker


@pytest.mark.parametrize("marker", [None, b'{"format": 1, "digest": "'])
def test_copies_of_a_tier_without_a_whole_marker_are_found_and_it_gets_one(
    store: Path, s3: str, tmp_path: Path, marker: bytes | None
) -> None:
    push(store / "step-00000002", s3)
    with open_objects(s3) as objects:
        objects.delete(["TIER.json"])
        if marker is not None:
            objects.put("TIER.json", marker)
    with new_in(tmp_path / "new", s3) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == 2
    push(store / "step-00000003", s3)
    with open_objects(s3) as objects:
        assert b"tier_id" in objects.get("TIER.json", 1 << 20)


@pytest.mark.parametrize("folder", ["", "/run"])
def test_a_drive_that_is_not_mounted_is_no_new_tier(
    store: Path, tmp_path: Path, folder: str
) -> None:
    """A mount point is empty while its drive is not there."""
    mount = tmp_path / "mnt"
    (mount / "lost+found").mkdir(parents=True)
    tier = f"file://{mount}{folder}"
    push(store, tier)
    mount.rename(tmp_path / "unplugged")
    mount.mkdir()
    with pytest.raises(TierNotFoundError, match="is its drive mounted"):
        push(store, tier)
    with pytest.raises(TierNotFoundError, match="is its drive mounted"):
        new_in(tmp_path / "new", tier)  # and so one that has other checkpoints
    with new_in(store, tier) as optimizer:  # training goes on, and says what is wrong
        assert optimizer.restore() is not None
        stats = train_and_send(optimizer, 1)
        assert {event.outcome for event in stats.events} == {"failed"}
    assert [*mount.iterdir()] == []
    mount.rmdir()
    (tmp_path / "unplugged").rename(mount)
    with new_in(tmp_path / "new", tier) as optimizer:
        assert optimizer.restore() is not None


def test_a_new_tier_in_an_empty_folder_is_made_by_name(store: Path, tmp_path: Path) -> None:
    tmp_path /= "a folder's name"
    tier = f"file://{tmp_path}/mnt/run"
    (tmp_path / "mnt").mkdir(parents=True)
    with pytest.raises(TierNotFoundError, match="touch") as caught:
        push(store, tier)
    advice = str(caught.value).rpartition("run: ")[2]
    assert os.system(advice) == 0
    push(store, tier)
    assert whole(tier) == [True]
    shutil.rmtree(tmp_path / "mnt")  # by somebody, who then makes the folder above it again
    (tmp_path / "mnt" / "x").mkdir(parents=True)
    push(store, tier)
    assert len(list_tier(tier)) == 1


@pytest.mark.parametrize("place", ["store/tier", "store/step-00000003", "link/x", "."])
def test_a_tier_that_shares_a_directory_with_its_store_is_refused(
    store: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "link").symlink_to(store)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    tier = f"file://{tmp_path / place}"
    calls: list[Callable[[], object]] = [
        lambda: new_in(store, tier),
        lambda: push(store / "step-00000003", tier),
        lambda: pull(tier, store),
    ]
    for call in calls:
        with pytest.raises(TierError, match=r"this tier (is in|contains) the store's directory"):
            call()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
