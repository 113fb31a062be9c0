"""Objects of S3, Google Cloud Storage and Azure, by way of the library `obstore`."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gds import Buffer
from offload.errors import TierError, TierNotFoundError, TierUnavailableError
from offload.tiers.services.address import TierAddress
from offload.tiers.services.objects import Data, Objects
from offload.tiers.services.requests import Requests, is_conflict, is_panic

_T = TypeVar("_T")

_LEAST_PART_BYTES = 16 << 20
_MOST_PARTS = 9_000
"""Services accept at most 10,000 parts for one object."""

_SINGLE_PUT_BYTES = 64 << 20
"""Largest size in bytes of an object from a stream that is sent in one request."""


_PIECE_BYTES = 128 << 10
"""Least size in bytes of the pieces in which an answer is read."""

_NUM_REPEATS = 4
"""Number of times that the rest of an answer is asked for, if it breaks off."""


_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables of the environment that have the address of a server, by scheme; the first one wins."""

_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_SWITCHES = ("allow_http", "allow_invalid_certificates")
_TEXTS = ("proxy_url", "proxy_ca_certificate", "proxy_excludes")


class CloudObjects(Objects):
    """Objects of a bucket.

    Credentials, the region and the endpoint come from the environment, by the names that the
    services' own tools use: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
    ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, and so on. Payloads sent to
    S3 are not signed, which saves processor time: the connection, and the digests that are read
    back, protect them.

    Raises:
        TierError: The library is not installed, or a setting in the environment is not valid.
    """

    def __init__(self, address: TierAddress, *, timeout_s: float, retry_s: float) -> None:
        self._obstore = _library(address.url)
        self._url = address.url
        _check_endpoint(address)
        self._requests = Requests(self._obstore, address.url, retry_s)
        self._call = self._requests.call
        self._num_repeats = _NUM_REPEATS if retry_s else 0
        self._prefix = f"{address.folder}/" if address.folder else ""
        from obstore.store import from_url

        settings: dict[str, Any] = {}
        if address.scheme == "s3":
            # JuiceFS answers a request to remove many objects in a way that the library refuses.
            settings = {"unsigned_payload": True, "disable_bulk_delete": True}
            if endpoint := _first_of(_ENDPOINTS["s3"][:2]):
                settings["endpoint"] = endpoint
        connect: Any = from_url  # typed for each service by itself
        failed = ""
        try:
            self._store = connect(
                f"{address.scheme}://{address.bucket}",
                config=settings,
                client_options={
                    "timeout": timedelta(seconds=timeout_s),
                    **_client_options(address.scheme),
                },
                retry_config={
                    "max_retries": 1000 if retry_s else 0,
                    "retry_timeout": timedelta(seconds=retry_s),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=min(max(retry_s / 4, 0.1), 15)),
                        "base": 2,
                    },
                },
            )
        except BaseException as error:  # its text may contain settings
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            failed = type(error).__name__
        if failed:
            raise TierError(
                errno.EINVAL,
                f"cannot be opened with the settings in the environment ({failed}): check the "
                "variables AWS_*, GOOGLE_* or AZURE_*",
                self._url,
            )

    @property
    def url(self) -> str:
        """URL of the tier, for messages."""
        return self._url

    def put(self, name: str, data: Data) -> None:
        """Make an object; see `Objects.put`."""
        self._call(
            name,
            "write it",
            lambda: self._obstore.put(
                self._store, self._prefix + name, memoryview(data), use_multipart=False
            ),
        )

    def put_new(self, name: str, data: Data) -> bool:
        """Make an object unless one has the name; see `Objects.put_new`."""
        is_supported, is_first = True, True

        def put() -> bool:
            nonlocal is_supported, is_first
            was_first, is_first = is_first, False
            try:
                self._obstore.put(
                    self._store,
                    self._prefix + name,
                    memoryview(data),
                    mode="create",
                    use_multipart=False,
                )
            except self._obstore.exceptions.AlreadyExistsError as error:
                if is_conflict(error):
                    raise
                # An attempt that was not answered may have made it.
                return not was_first and self.get(name, _SINGLE_PUT_BYTES) == data
            except self._obstore.exceptions.NotSupportedError:
                is_supported = False
            return True

        made = self._call(name, "write it", put)
        if not is_supported:
            self.put(name, data)
        return made

    def put_stream(self, name: str, blocks: Iterator[Data], nbytes: int) -> None:
        """Make an object from blocks; see `Objects.put_stream`.

        Large objects go up in parts of at least 16 MiB, two at a time. If the process dies in
        between, the service keeps the parts, invisible, until a rule of the bucket removes them.
        """
        if nbytes <= _SINGLE_PUT_BYTES:
            self.put(name, b"".join(blocks))
            return
        part_bytes = max(_LEAST_PART_BYTES, -(-nbytes // _MOST_PARTS))
        self._call(
            name,
            "write it",
            lambda: self._obstore.put(
                self._store,
                self._prefix + name,
                blocks,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=2,
            ),
            repeatable=False,  # the blocks come once
        )

    def get(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a small object; see `Objects.get`."""
        found = b"".join(bytes(piece) for piece in self.pieces(name, 0, most_bytes + 1))
        if len(found) > most_bytes:
            raise TierError(
                errno.EFBIG,
                f"more than {most_bytes} bytes, expected at most {most_bytes}: not written by this "
                "library",
                f"{self._url}/{name}",
            )
        return found

    def get_range(self, name: str, start: int, nbytes: int, into: Buffer) -> memoryview:
        """Return bytes of an object; see `Objects.get_range`."""
        memory = into.slice(0, nbytes).memoryview()
        end = 0
        for piece in self.pieces(name, start, nbytes):
            end += len(piece)
            memory[end - len(piece) : end] = piece
        return memory[:end]

    def pieces(self, name: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield bytes of an object; see `Objects.pieces`.

        As one piece an answer would take new memory for every request, which costs twice the time.
        """
        end = start + nbytes

        def ask() -> Iterator[bytes]:
            """Ask for the rest of the range."""
            answer = self._obstore.get(
                self._store, self._prefix + name, options={"range": (start, end)}
            )
            return iter(answer.stream(min_chunk_size=_PIECE_BYTES))

        for num_left in range(self._num_repeats, -1, -1):
            try:
                answer = self._call(name, "read it", ask)
                while (piece := self._next(name, answer)) is not None:
                    start += len(piece)
                    yield memoryview(piece)
            except TierUnavailableError:  # the answer has broken off
                if not num_left:
                    raise
            except TierError as error:
                if error.errno != errno.ERANGE:
                    raise
                return  # the object ends before the range begins
            else:
                return

    def _next(self, name: str, answer: Iterator[bytes]) -> bytes | None:
        return self._call(name, "read it", lambda: next(answer, None), repeatable=False)

    def size(self, name: str) -> int | None:
        """Return the size of an object; see `Objects.size`."""
        try:
            found = self._call(
                name, "look at it", lambda: self._obstore.head(self._store, self._prefix + name)
            )
        except TierNotFoundError:
            # Without a body, the answer does not say whether the object is missing or the bucket.
            self._require_bucket()
            return None
        return int(found["size"])

    def sizes_below(self, folder: str) -> dict[str, int]:
        """Return the objects below a folder; see `Objects.sizes_below`."""

        def found() -> dict[str, int]:
            pages = self._obstore.list(self._store, self._folder(folder), chunk_size=1000)
            return {
                one["path"].removeprefix(self._prefix): int(one["size"])
                for page in pages
                for one in page
            }

        return self._list(folder, found)

    def folders(self, folder: str) -> list[str]:
        """Return the folders in a folder; see `Objects.folders`."""
        found = self._list(folder, lambda: self._top_of(folder)["common_prefixes"])
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def _top_of(self, folder: str) -> Any:
        return self._obstore.list_with_delimiter(self._store, self._folder(folder))

    def _list(self, folder: str, look: Callable[[], _T]) -> _T:
        """Return a list of the server. It is believed to be empty if that of the tier is not.

        The library takes an answer that is no list at all, such as the page of a proxy, for an
        empty one.
        """
        found = self._call(folder, "list it", look)
        if found or not folder:
            return found
        whole = self._call("", "list it", lambda: self._top_of(""))
        if not whole["objects"] and not whole["common_prefixes"]:
            raise TierNotFoundError(
                errno.ENOENT,
                "nothing is in this tier, according to the server: is this the right endpoint?",
                self._url,
            )
        return self._call(folder, "list it", look)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; see `Objects.delete`."""
        paths = [self._prefix + name for name in names]
        for start in range(0, len(paths), 1000):
            batch = paths[start : start + 1000]
            try:
                self._call("", "remove objects", partial(self._remove, batch))
            except TierNotFoundError:
                for path in batch:  # a service that reports the missing ones: one by one
                    try:
                        self._call("", "remove objects", partial(self._remove, [path]))
                    except TierNotFoundError:
                        continue

    def _remove(self, paths: list[str]) -> None:
        self._obstore.delete(self._store, paths)

    def _folder(self, folder: str) -> str | None:
        return (self._prefix + folder).rstrip("/") or None

    def _require_bucket(self) -> None:
        self._call(
            "", "list it", lambda: self._obstore.list_with_delimiter(self._store, "no-such-folder")
        )


def _first_of(names: Iterable[str]) -> str | None:
    """Return the first variable of the environment that is set and not empty."""
    return next((found for name in names if (found := os.environ.get(name))), None)


def _check_endpoint(address: TierAddress) -> None:
    """Check the address of the server in the environment, at which the library would panic."""
    name = next((one for one in _ENDPOINTS[address.scheme] if os.environ.get(one)), None)
    if name is None:
        return
    try:
        parts = urlsplit(os.environ[name])
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_good = is_good and not re.search(r"\s", os.environ[name])
    except ValueError:
        is_good = False
    if not is_good:
        raise TierError(
            errno.EINVAL,
            f"the variable {name} is not the address of a server: expected http://host:port or "
            "https://host:port",
            address.url,
        )


def _client_options(scheme: str) -> dict[str, Any]:
    """Return settings of connections from the environment, such as ``AZURE_ALLOW_HTTP``.

    The library reads them by itself only if it is given no such settings at all, not even a time
    limit. An endpoint of ``http://`` needs no further permission.
    """
    options: dict[str, Any] = {}
    for name in (*_SWITCHES, *_TEXTS):
        if value := os.environ.get(f"{_PREFIXES[scheme]}_{name.upper()}"):
            options[name] = value.lower() in ("1", "true", "yes") if name in _SWITCHES else value
    if (_first_of(_ENDPOINTS[scheme]) or "").startswith("http://"):
        options["allow_http"] = True
    return options


def _library(url: str) -> Any:  # untyped if the library is not installed
    """Import `obstore`, which not everybody has."""
    try:
        import obstore
        import obstore.exceptions
    except ImportError:
        raise TierError(
            errno.ENOPKG,
            "this needs obstore: pip install --constraint constraints.txt '.[tier]' in a checkout "
            "of ssd-offload, or pip install obstore. Tiers of file:// need nothing",
            url,
        ) from None
    return obstore
