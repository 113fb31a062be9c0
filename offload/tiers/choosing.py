"""Choice of a copy in a tier: the one named, the one of a step, or the newest that is whole."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import NamedTuple

from offload.errors import DamagedError, TierError, TierNotFoundError
from offload.format.manifest import Manifest
from offload.tiers.catalog import (
    GENERATION,
    UNFINISHED,
    TierCopy,
    list_copies,
    read_manifest,
    what_is_missing,
)
from offload.tiers.services.address import TierAddress, parse_address
from offload.tiers.services.objects import Objects
from offload.tiers.services.presence import damaged_copies, require_there


def find_copy(
    objects: Objects,
    address: TierAddress,
    step: int | None = None,
    without: Collection[str] = (),
) -> TierCopy:
    """Return the complete copy that is meant: the one named, the one of a step, or the newest.

    If a checkpoint has several copies, a copy that still has all its objects is preferred.
    """
    copies = [copy for copy in list_copies(objects, address) if copy.url not in without]
    complete = [copy for copy in copies if copy.marker is not None]
    wanted = [c for c in complete if c.marker and (step is None or c.marker.step == step)]
    url = f"{objects.url}/{address.copy or address.store_id}".rstrip("/")
    if not wanted:
        what = "no complete copy of a checkpoint here" + (
            f" of step {step} (there are: "
            f"{', '.join(str(c.marker.step) for c in complete if c.marker)})"
            if step is not None and complete
            else ""
        )
        others = [f"{copy.url}: {copy.reason}" for copy in copies if copy.marker is None]
        raise TierNotFoundError(errno.ENOENT, "; ".join([what, *others]), url)
    stores = sorted({copy.identity.store_id for copy in wanted})
    if len(stores) > 1:
        raise TierError(
            errno.EINVAL,
            f"copies of {len(stores)} stores are here; name one of them: "
            + ", ".join(f"{objects.url}/{store}" for store in stores),
            url,
        )
    newest = max(copy.identity.generation for copy in wanted)
    equal = [copy for copy in wanted if copy.identity.generation == newest]
    if len(equal) > 1:
        equal = [copy for copy in equal if not whats_wrong(objects, copy)] or equal
    if len({copy.marker.content for copy in equal if copy.marker}) > 1:
        raise TierError(
            errno.EINVAL,
            f"generation {newest} is here from two runs that went on from the same store, and they "
            f"differ; name one of them: {', '.join(copy.url for copy in equal)}",
            url,
        )
    return equal[0]


def whats_wrong(objects: Objects, copy: TierCopy) -> str:
    """Return what a copy lacks, as far as names and sizes of objects tell; empty for nothing."""
    if copy.marker is None:
        return copy.reason
    wrong = what_is_missing(objects, copy.folder, copy.marker, may_be_longer=True)
    return f"not whole any more: {'; '.join(wrong[:3])}" if wrong else ""


class WholeCopy(NamedTuple):
    """The newest copy that is whole, as far as it has been looked at."""

    copy: TierCopy
    manifest: Manifest

    passed_over: str
    """What is wrong with newer copies, for people; empty if there is nothing."""


def _find_whole(
    objects: Objects,
    address: TierAddress,
    damaged: Mapping[str, str],
    tried: Mapping[str, str],
) -> WholeCopy:
    """Return the newest copy that has all its objects, by their sizes, and the right manifest."""
    passed = {**tried}
    for doubtful in (damaged, {}) if damaged else ({},):
        while True:
            try:
                copy = find_copy(objects, address, without={*passed, *doubtful})
            except TierNotFoundError:
                if not passed and not doubtful:
                    raise
                break
            wrong = whats_wrong(objects, copy)
            try:
                if not wrong:
                    manifest = read_manifest(objects, copy)
                    newer = {**passed, **doubtful, **_damaged_markers(objects, copy)}
                    return WholeCopy(copy, manifest, _sentences(newer, copy))
            except DamagedError as error:
                wrong = str(error)
            passed[copy.url] = wrong
    raise DamagedError(f"no copy of a checkpoint here is whole: {_sentences(passed)}")


def _damaged_markers(objects: Objects, chosen: TierCopy) -> dict[str, str]:
    """Return newer copies of the same store that have a marker, which cannot be read."""
    address = TierAddress("", "", "", chosen.identity.store_id)
    return {
        copy.url: copy.reason
        for copy in list_copies(objects, address)
        if copy.marker is None and copy.parameters is None and copy.reason != UNFINISHED
    }


def _sentences(passed: Mapping[str, str], chosen: TierCopy | None = None) -> str:
    """Return what is wrong with copies, or with those of them that are newer than the chosen."""
    found = []
    for url, reason in sorted(passed.items()):
        number = parse_address(url).copy.split("/")[1].removeprefix("gen-")
        if chosen is None or int(number) >= chosen.identity.generation:
            found.append(reason if url in reason else f"{url}: {reason}")
    return "; ".join(found)


def find_newest_whole(
    objects: Objects, url: str, store: str, tried: Mapping[str, str]
) -> tuple[WholeCopy | None, str]:
    """Return the newest whole copy of a tier, and a warning; None if it has no complete copy.

    "None is there" is believed only of a tier that says that it is one; see `require_there`.
    """
    address = parse_address(url)
    copies = list_copies(objects, address)
    if not any(copy.marker is not None for copy in copies):
        require_there(objects, store)
        copies = list_copies(objects, address)
    if any(copy.marker is not None for copy in copies):
        noted = damaged_copies(store, objects.url)
        found = _find_whole(objects, address, noted, tried)
        return found, found.passed_over and (
            f"{found.passed_over}. Restoring the copy before it, {found.copy.url}. `offload verify "
            f"{url}` reads all copies"
        )
    return None, (
        f"{url}: no complete copy of a checkpoint, so training starts from the beginning "
        f"({copies[-1].url}: {copies[-1].reason})"
        if copies
        else ""
    )


def newest_generation(objects: Objects, store_id: str) -> int:
    """Return the newest generation that a tier has anything of; 0 if there is none."""
    matches = [GENERATION.fullmatch(name) for name in objects.folders(store_id)]
    return max((int(match[1]) for match in matches if match is not None), default=0)
