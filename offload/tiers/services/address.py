"""Addresses of tiers: which service, which bucket, which folder, and perhaps which copy in it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from offload.errors import TierError

CLOUD_SCHEMES: Final = ("s3", "gs", "az")
"""Schemes that the library `obstore` serves."""

SCHEMES: Final = (*CLOUD_SCHEMES, "file")

_STORE_ID = re.compile(r"[0-9a-f]{32}")
_COPY = re.compile(r"(?:(?P<before>.*)/)?(?P<copy>[0-9a-f]{32}/gen-[0-9]{8,19}/[0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class TierAddress:
    """Place of a tier. It never contains credentials."""

    scheme: str
    """One of `SCHEMES`."""

    bucket: str
    """Bucket or container; empty for ``file``."""

    folder: str
    """Folder in the bucket without slashes at its ends, or an absolute path for ``file``."""

    store_id: str = ""
    """Identity of the store whose copies are meant; empty for those of all stores."""

    copy: str = ""
    """Name of the one copy that is meant; empty for all copies."""

    @property
    def url(self) -> str:
        """URL of the tier, without the store or the copy."""
        if self.scheme == "file":
            folder = self.folder
            for mark in "%?#":  # which would mean something else in a URL
                folder = folder.replace(mark, f"%{ord(mark):02X}")
            return f"file://{folder}"
        return f"{self.scheme}://{self.bucket}{'/' if self.folder else ''}{self.folder}"


def url_digest(url: str) -> str:
    """Return what the files that a store keeps about a tier are named by."""
    return hashlib.blake2b(url.encode(), digest_size=8).hexdigest()


def is_tier_url(text: str) -> bool:
    """Return whether an argument is the URL of a tier, and not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def parse_address(url: str) -> TierAddress:
    """Return the place that a URL names.

    Args:
        url: URL of a tier, ``s3://bucket/folder``; of the copies of one store in it,
            ``s3://bucket/folder/<store>``; or of one copy,
            ``s3://bucket/folder/<store>/gen-<generation>/<writer>``.

    Raises:
        TierError: The URL is not one, has another scheme, or contains credentials.
    """
    scheme = url.partition("://")[0].lower()
    if not is_tier_url(url) or scheme not in SCHEMES:
        named = f"the scheme {scheme!r}" if is_tier_url(url) else "no scheme"
        raise TierError(
            errno.EINVAL,
            f"not the URL of a tier: it has {named}, expected one of "
            f"{', '.join(f'{one}://' for one in SCHEMES)}",
            # A URL of another kind may contain a password.
            f"{scheme}://..." if is_tier_url(url) else url,
        )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise TierError(
            errno.EINVAL, f"not a URL: expected {scheme}://bucket/folder", f"{scheme}://..."
        ) from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise TierError(
            errno.EINVAL,
            "the URL of a tier has no user, password or parameters. Credentials come from the "
            "environment (AWS_ACCESS_KEY_ID and so on), so that they are in no list of processes "
            "and in no log",
            f"{scheme}://...",
        )
    path = unquote(parts.path) if scheme == "file" else parts.path
    if not (url + path).isprintable():
        raise TierError(
            errno.EINVAL, "the URL of a tier has no control characters", f"{scheme}://..."
        )
    if scheme == "file":
        return _file_address(parts.netloc, path)
    if {".", ".."} & {*path.split("/")}:
        raise TierError(errno.EINVAL, "a folder of a bucket cannot be named . or ..", url)
    folder = "/".join(part for part in parts.path.split("/") if part)
    if not parts.netloc:
        raise TierError(errno.EINVAL, f"no bucket: expected {scheme}://bucket/folder", url)
    return TierAddress(scheme, parts.netloc, *_split(folder))


def require_folder(address: TierAddress) -> None:
    """Check that an address is of a tier, to which something is to be sent.

    A folder whose name is that of a store's identity is taken for the copies of that store, so
    copies in such a folder would not be found again.
    """
    if address.store_id:
        name = address.copy or address.store_id
        raise TierError(
            errno.EINVAL,
            f"{name!r} at the end of the URL is taken for a store's copies: leave it out, or, if "
            "the name is your own, add a folder below it",
            address.url,
        )


def require_apart(address: TierAddress, directories: Iterable[str | os.PathLike[str]]) -> None:
    """Check that a tier is in no directory of a store, and contains none."""
    if address.scheme != "file":
        return
    folder = os.path.realpath(address.folder)
    for one in directories:
        directory = os.path.realpath(one)
        common = os.path.commonpath([folder, directory])
        if common in (folder, directory):
            where = "is in" if common == directory else "contains"
            raise TierError(
                errno.EINVAL,
                f"this tier {where} the store's directory {os.fspath(one)}: the store would remove "
                "what is the tier's, or be lost with it; name a folder of its own for the tier",
                address.url,
            )


def _file_address(host: str, path: str) -> TierAddress:
    if host not in ("", "localhost") or not path.startswith("/"):
        raise TierError(
            errno.EINVAL,
            "the path of a file:// tier is absolute, with three slashes: file:///mnt/tier",
            f"file://{host}{path}",
        )
    folder, store_id, copy = _split(os.path.abspath(path))
    return TierAddress("file", "", folder or "/", store_id, copy)


def _split(folder: str) -> tuple[str, str, str]:
    """Return the tier's own folder, and the store and the copy that the path goes on to."""
    match = _COPY.fullmatch(folder)
    if match is not None:
        return match["before"] or "", match["copy"][:32], match["copy"]
    before, _, last = folder.rpartition("/")
    if _STORE_ID.fullmatch(last):
        return before, last, ""
    return folder, "", ""
