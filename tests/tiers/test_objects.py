"""What every kind of tier must do with objects; and addresses, of which people give many kinds.

What fails here cannot be told apart through pushes and pulls, so these tests call the objects.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.errors import (
    DamagedError,
    TierAccessError,
    TierError,
    TierNotFoundError,
    TierUnavailableError,
)
from offload.tiers import list_tier, push
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import open_objects
from tests.limits import HANG_S


@pytest.fixture
def objects(tier: str) -> Iterator[Objects]:
    with open_objects(tier, retry_s=1) as opened:
        yield opened


def test_streams_become_one_object_which_comes_back_in_pieces(objects: Objects) -> None:
    """The largest is sent in several parts."""
    for nbytes in (0, 70_000, (65 << 20) + 3):
        data = os.urandom(nbytes)
        pieces = (memoryview(data)[i : i + (7 << 20)] for i in range(0, nbytes, 7 << 20))
        objects.put_stream("x", pieces, nbytes)
        assert objects.size("x") == nbytes
        for start, wanted in [(4097, 9 << 20), (nbytes - 10, 100), (2 * nbytes, 5)]:
            found = b"".join(bytes(piece) for piece in objects.pieces("x", max(0, start), wanted))
            assert found == data[max(0, start) :][:wanted]
    with pytest.raises(TierNotFoundError, match="no such object"):
        next(objects.pieces("none", 0, 5))


@pytest.mark.parametrize("nbytes", [100, 80 << 20], ids=["small", "parts"])
def test_an_error_of_a_stream_is_raised_and_leaves_no_object(objects: Objects, nbytes: int) -> None:
    def blocks() -> Iterator[bytes]:
        yield bytes(nbytes // 2)
        raise DamagedError("half of it is damaged")

    with pytest.raises(DamagedError, match="half of it is damaged"):
        objects.put_stream("x", blocks(), nbytes)
    assert objects.size("x") is None
    assert objects.sizes_below("") == {}


def test_a_folder_has_no_half_written_file_under_an_objects_name(
    folder: str, tmp_path: Path
) -> None:
    place = tmp_path / "mounted" / "tier"
    with open_objects(folder) as objects:

        def blocks() -> Iterator[bytes]:
            yield bytes(10)
            (inside,) = place.iterdir()
            assert [p.name[:5] for p in inside.iterdir()] == [".new-"]
            assert objects.sizes_below("") == {}
            yield bytes(10)

        objects.put_stream("a/x", blocks(), 20)
        (place / "a" / ".new-1").write_bytes(b"of a process that was killed")
        assert objects.sizes_below("") == {"a/x": 20}
        objects.drop_unfinished("a")
        assert [p.name for p in (place / "a").iterdir()] == ["x"]
        too_many = 2 * shutil.disk_usage(place).free
        with pytest.raises(TierError, match="Free space there"):
            objects.put_stream("b", iter([b""]), too_many)
    assert [p.name for p in place.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "url",
    ["/mnt/a", "s3:///a", "file://host/a", "s3://id:passw0rd@bucket/a", "s3://bucket/a/../b",
     "s3://bucket/a?X-Amz-Signature=passw0rd", "https://user:passw0rd@host/a", "s3://[::1/a",
     "s3://bucket/a\x00b", "file:///mnt/a%00b", "s3://bucket/\udcff"],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_address_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(TierError) as caught:
        list_tier(url)
    assert "passw0rd" not in str(caught.value) + repr(caught.value)


NAMES = ["a b", "a%20b", "100%", "a~b", "a+b", "ü", "a=b&c", "a'b", "a*b", "a{b}", "a:b@c"]


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_folders_of_any_name_have_a_url_that_leads_to_them(
    s3: str, tmp_path: Path, kind: str
) -> None:
    """The URL that is shown is the one to give to the next command."""
    for name in [*NAMES, *(["a#b", "a?b", "a%2Fb"] if kind == "file" else [])]:
        (tmp_path / name).mkdir()
        given = name if kind == "s3" else name.replace("%", "%25")
        given = given.replace("#", "%23").replace("?", "%3F") if kind == "file" else given
        with open_objects(f"file://{tmp_path}/{given}" if kind == "file" else f"{s3}/{given}") as o:
            o.put("x/y.bin", b"123")
            shown = o.url
        with open_objects(shown) as o:
            assert o.url == shown
            assert o.sizes_below("x") == {"x/y.bin": 3}
            assert o.folders("") == ["x"]
            assert o.get("x/y.bin", 10) == b"123"
        assert kind == "s3" or (tmp_path / name / "x" / "y.bin").is_file()


def test_what_the_environment_says_of_connections_holds(
    s3: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store / "step-00000002", s3)
    with monkeypatch.context() as patched, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.close()
        patched.setenv("AWS_PROXY_URL", f"http://127.0.0.1:{port}")  # where nobody listens
        with pytest.raises(TierUnavailableError):
            push(store, s3, retry_s=0)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(TierAccessError, match="no credentials in the environment"):
        push(store, s3, retry_s=0, timeout_s=HANG_S)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierError, match="or pip install obstore"):
        push(store, s3)
