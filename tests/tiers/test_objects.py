"""What every kind of tier must do with objects."""

from __future__ import annotations

import os
import shutil
import socket
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
from offload.tiers.services.address import parse_address
from offload.tiers.services.folder_objects import FolderObjects
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import open_objects
from tests.limits import HANG_S

SIZES = [0, 1, 4095, 4096, 100_000]


@pytest.fixture
def objects(tier: str) -> Iterator[Objects]:
    with open_objects(tier, retry_s=1) as opened:
        yield opened


def test_objects_are_what_was_put(objects: Objects) -> None:
    contents = {f"a/b.{size}": os.urandom(size) for size in SIZES}
    for name, data in contents.items():
        assert objects.size(name) is None
        objects.put(name, data)
        assert objects.get(name, 1 << 20) == data
        assert objects.size(name) == len(data)
    assert objects.sizes_below("a") == {name: len(data) for name, data in contents.items()}
    assert objects.sizes_below("b") == {}
    assert objects.folders("") == ["a"]
    assert objects.folders("a") == objects.folders("none") == []


def test_ranges_end_where_the_object_ends(objects: Objects) -> None:
    data = os.urandom(10_000)
    objects.put("x", memoryview(data))
    assert bytes(objects.get_range("x", 0, 10_000)) == data
    assert bytes(objects.get_range("x", 4097, 100)) == data[4097:4197]
    assert bytes(objects.get_range("x", 9_000, 5_000)) == data[9_000:]
    assert bytes(objects.get_range("x", 20_000, 5)) == b""


def test_pieces_are_the_bytes_of_a_range(objects: Objects) -> None:
    data = os.urandom((9 << 20) + 5)
    objects.put("x", data)
    ranges = [(0, len(data)), (4097, 5 << 20), (len(data) - 10, 100), (2 * len(data), 5)]
    for start, nbytes in ranges:
        found = b"".join(bytes(piece) for piece in objects.pieces("x", start, nbytes))
        assert found == data[start : start + nbytes]
    with pytest.raises(TierNotFoundError, match="no such object"):
        next(objects.pieces("none", 0, 5))


def test_a_put_replaces_and_a_new_put_may_not(objects: Objects) -> None:
    objects.put("x", b"one")
    objects.put("x", b"three")
    assert objects.get("x", 10) == b"three"
    assert objects.put_new("y", b"one")
    if not objects.put_new("y", b"two"):
        assert objects.get("y", 10) == b"one"


@pytest.mark.parametrize("nbytes", [0, 70_000, (65 << 20) + 3], ids=["empty", "small", "parts"])
def test_streams_become_one_object(objects: Objects, nbytes: int) -> None:
    data = os.urandom(nbytes)
    pieces = (memoryview(data)[i : i + (7 << 20)] for i in range(0, nbytes, 7 << 20))
    objects.put_stream("x", pieces, nbytes)
    assert objects.size("x") == nbytes
    assert bytes(objects.get_range("x", max(0, nbytes - 9), 9)) == data[max(0, nbytes - 9) :]


@pytest.mark.parametrize("nbytes", [100, 80 << 20], ids=["small", "parts"])
def test_an_error_of_a_stream_is_raised_and_leaves_no_object(objects: Objects, nbytes: int) -> None:
    def blocks() -> Iterator[bytes]:
        yield bytes(nbytes // 2)
        raise DamagedError("half of it is damaged")

    with pytest.raises(DamagedError, match="half of it is damaged"):
        objects.put_stream("x", blocks(), nbytes)
    assert objects.size("x") is None
    assert objects.sizes_below("") == {}


def test_removed_objects_are_gone_and_missing_ones_are_no_error(objects: Objects) -> None:
    names = [f"a/{number}" for number in range(5)]
    for name in names:
        objects.put(name, b"x")
    objects.delete([*names[1:], "a/none", "none/x"])
    assert objects.sizes_below("") == {"a/0": 1}


def test_settings_of_connections_in_the_environment_hold(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_objects(s3, retry_s=0) as objects:
        objects.put("x", b"one")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("AWS_PROXY_URL", f"http://127.0.0.1:{port}")  # where nobody listens
    with open_objects(s3, retry_s=0) as objects, pytest.raises(TierUnavailableError):
        objects.size("x")


def test_missing_and_large_objects_are_errors_with_names(objects: Objects, tier: str) -> None:
    objects.put("x", bytes(11))
    with pytest.raises(TierNotFoundError, match="no such object") as caught:
        objects.get("none", 10)
    assert caught.value.filename == f"{tier}/none"
    with pytest.raises(TierError, match=r"1[01] bytes, expected at most 10"):
        objects.get("x", 10)


def test_a_folder_has_no_half_written_file_under_an_objects_name(tmp_path: Path) -> None:
    with FolderObjects(str(tmp_path / "tier")) as objects:

        def blocks() -> Iterator[bytes]:
            yield bytes(10)
            (folder,) = (tmp_path / "tier").iterdir()
            assert [p.name[:5] for p in folder.iterdir()] == [".new-"]
            assert objects.sizes_below("") == {}
            yield bytes(10)

        objects.put_stream("a/x", blocks(), 20)
        (tmp_path / "tier" / "a" / ".new-1").write_bytes(b"of a process that was killed")
        assert objects.sizes_below("") == {"a/x": 20}
        objects.drop_unfinished("a")
        assert [p.name for p in (tmp_path / "tier" / "a").iterdir()] == ["x"]


def test_a_folder_whose_drive_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    with FolderObjects(str(tmp_path / "none" / "tier")) as objects:
        with pytest.raises(TierNotFoundError, match="is its drive mounted"):
            objects.sizes_below("")
        with pytest.raises(TierNotFoundError, match="is its drive mounted"):
            objects.put("x", b"")
    assert not (tmp_path / "none").exists()


def test_a_full_folder_is_an_error_with_advice(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    too_many = 2 * shutil.disk_usage(folder).free
    with FolderObjects(str(folder)) as objects, pytest.raises(TierError, match="Free space there"):
        objects.put_stream("x", iter([b""]), too_many)
    assert [*folder.iterdir()] == []


STORE, COPY = "0" * 32, f"{'0' * 32}/gen-00000007/{'a' * 32}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", ("s3", "bucket", "", "", "")),
        ("s3://bucket/", ("s3", "bucket", "", "", "")),
        ("S3://bucket/a//b/", ("s3", "bucket", "a/b", "", "")),
        ("gs://bucket/a", ("gs", "bucket", "a", "", "")),
        ("az://container/a", ("az", "container", "a", "", "")),
        (f"s3://bucket/a/{STORE}", ("s3", "bucket", "a", STORE, "")),
        (f"s3://bucket/{COPY}", ("s3", "bucket", "", STORE, COPY)),
        (f"file:///mnt/a b/{COPY}", ("file", "", "/mnt/a b", STORE, COPY)),
        ("file:///mnt/a%20b/", ("file", "", "/mnt/a b", "", "")),
    ],
)
def test_addresses(url: str, expected: tuple[str, ...]) -> None:
    address = parse_address(url)
    found = (address.scheme, address.bucket, address.folder, address.store_id)
    assert (*found, address.copy) == (expected[0], expected[1], *expected[2:])


@pytest.mark.parametrize(
    "url",
    ["/mnt/a", "ftp://host/a", "s3:///a", "file://host/a", "file://relative",
     "s3://id:passw0rd@bucket/a", "s3://bucket/a?X-Amz-Signature=passw0rd", "s3://bucket/a#b",
     "https://user:passw0rd@host/a", "s3://[::1/a", "s3://bucket/a/../b", "s3://bucket/.",
     "s3://bucket/a\tb", "s3://bucket/a\x00b", "file:///mnt/a%00b", "s3://bucket/\udcff"],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_address_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(TierError) as caught:
        parse_address(url)
    assert "passw0rd" not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "folder", ["a b", "a%20b", "100%", "a~b", "a+b", "ü", "a=b&c", "a'b", "a*b", "a{b}", "a:b@c"]
)
@pytest.mark.parametrize("kind", ["file", "moto"])
def test_folders_of_any_name_have_a_url_that_leads_to_them(
    s3: str, tmp_path: Path, kind: str, folder: str
) -> None:
    """The URL that is shown is the one to give to the next command."""
    given = folder.replace("%", "%25") if kind == "file" else folder
    (tmp_path / folder).mkdir()
    url = f"file://{tmp_path}/{given}/run" if kind == "file" else f"{s3}/{given}"
    with open_objects(url) as objects:
        objects.put("x/y.bin", b"123")
        shown = objects.url
    with open_objects(shown) as objects:
        assert objects.url == shown
        assert objects.sizes_below("x") == {"x/y.bin": 3}
        assert objects.folders("") == ["x"]
        assert objects.get("x/y.bin", 10) == b"123"
    assert kind != "file" or (tmp_path / folder / "run" / "x" / "y.bin").is_file()


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%2Fb"])
def test_a_folder_whose_name_has_a_mark_of_urls_is_shown_as_it_is_given(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    given = name.replace("%", "%25").replace("#", "%23").replace("?", "%3F")
    with open_objects(f"file://{tmp_path}/{given}") as objects:
        objects.put("x", b"123")
        assert parse_address(objects.url).folder == f"{tmp_path}/{name}"
    assert (tmp_path / name / "x").read_bytes() == b"123"


def test_a_missing_bucket_and_wrong_permissions_have_names(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_objects("s3://no-such-bucket/run", retry_s=0) as objects:
        for call in (
            lambda: objects.put("x", b""),
            lambda: objects.sizes_below(""),
            lambda: objects.size("x"),
            lambda: objects.folders(""),
        ):
            with pytest.raises(TierNotFoundError, match="bucket does not exist"):
                call()


def test_without_the_library_the_error_says_what_to_install(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierError, match="or pip install obstore"):
        open_objects(s3)


def test_no_credentials_is_an_error_with_advice(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with (
        open_objects(s3, retry_s=0, timeout_s=HANG_S) as objects,
        pytest.raises(TierAccessError, match="no credentials in the environment"),
    ):
        objects.put("x", b"")
