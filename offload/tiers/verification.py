"""Verification of copies in a tier: every byte is read and compared with its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from gds import Buffer
from gds.buffers.host import HostBuffer
from offload.checkpoint.owner_parts import check_cover
from offload.errors import CheckpointError, DamagedError
from offload.format.manifest import Manifest
from offload.format.shares.part_table import OwnerTable
from offload.tiers.catalog import (
    TierCopy,
    find_copy,
    list_copies,
    read_manifest,
    read_tables,
    whats_wrong,
)
from offload.tiers.checking import Advance, Fetcher, check_model, check_state, check_whole
from offload.tiers.contents import foreign_names, model_objects, state_objects, wrong_sizes
from offload.tiers.sending import NUM_TRANSFERS, Progress, Task, run_all
from offload.tiers.services.address import TierAddress, parse_address
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, open_objects


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Result of reading one copy completely."""

    url: str
    step: int
    problems: tuple[str, ...]
    """One sentence for each object that is damaged or missing."""

    bytes_checked: int
    foreign: tuple[str, ...]
    """Names of objects in the copy's folder that this library has not written. They are left
    alone."""

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was sent."""
        return not self.problems


def list_tier(
    url: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, retry_s: float = DEFAULT_RETRY_S
) -> list[TierCopy]:
    """Return the copies in a tier, complete or not, the newest of each store last.

    If a complete copy has lost objects, its reason says so. Nothing is read to find that out.

    Raises:
        TierError: The tier cannot be read.
    """
    address = parse_address(url)
    with open_objects(address, timeout_s=timeout_s, retry_s=retry_s) as objects:
        return [
            replace(copy, reason=whats_wrong(objects, copy))
            for copy in list_copies(objects, address)
        ]


def verify_tier(
    url: str,
    *,
    num_transfers: int = NUM_TRANSFERS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retry_s: float = DEFAULT_RETRY_S,
    progress: Progress | None = None,
) -> list[CopyReport]:
    """Read every byte of the complete copies that a URL names, and compare it with its digest.

    Args:
        url: URL of a tier, of the copies of one store in it, or of one copy.
        num_transfers: Number of objects that are read at a time.
        timeout_s: Seconds after which one request is given up.
        retry_s: Seconds for which a request that failed is tried again.
        progress: Function that is called with the bytes done and the total.

    Raises:
        TierNotFoundError: There is no complete copy.
        TierError: The tier cannot be read.
    """
    address = parse_address(url)
    with open_objects(address, timeout_s=timeout_s, retry_s=retry_s) as objects:
        copies = _complete(objects, address)
        total = sum(copy.marker.nbytes for copy in copies if copy.marker)
        advance = _Sum(progress, total)
        return [_verify(objects, copy, num_transfers, advance) for copy in copies]


def verify_copy(objects: Objects, copy: TierCopy) -> CopyReport:
    """Read every byte of one copy, and compare it with its digest; see `verify_tier`."""
    return _verify(objects, copy, NUM_TRANSFERS, _Sum(None, 0))


def _complete(objects: Objects, address: TierAddress) -> list[TierCopy]:
    found = [copy for copy in list_copies(objects, address) if copy.marker is not None]
    return found or [find_copy(objects, address)]  # which says what is there instead


class _Sum:
    """Bytes of all threads together."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._lock = threading.Lock()
        self.done = 0

    def __call__(self, nbytes: int) -> None:
        """Add bytes that were checked."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self._total)


def _verify(objects: Objects, copy: TierCopy, num_transfers: int, advance: _Sum) -> CopyReport:
    marker = copy.marker
    if marker is None:
        return CopyReport(copy.url, 0, (copy.reason,), 0, ())
    listed = objects.sizes_below(copy.folder)
    found = {name.removeprefix(f"{copy.folder}/"): nbytes for name, nbytes in listed.items()}
    foreign = foreign_names(found, [*marker.sizes])
    before = advance.done
    problems = [f"{copy.url}/{text}" for text in wrong_sizes(marker.sizes, found)]
    try:
        manifest = read_manifest(objects, copy)
        tables = read_tables(objects, copy, manifest)
        if tables:
            check_cover(copy.url, manifest, tables)
        models = model_objects(manifest, tables)
    except CheckpointError as error:
        problems.append(str(error))
        return CopyReport(copy.url, marker.step, tuple(problems), 0, tuple(foreign))
    fetcher = Fetcher(objects, copy.folder, manifest)
    lock = threading.Lock()

    def noting(check: Callable[[Advance], None]) -> Task:
        """Return a task that notes damage and goes on."""

        def task(_: Buffer) -> None:
            """Run the check, which needs no buffer, and note the damage that it finds."""
            try:
                check(advance)
            except DamagedError as error:
                with lock:
                    problems.append(str(error))

        return task

    def tasks() -> Iterator[Task]:
        """Yield the checks of everything that the copy has."""
        yield noting(partial(check_whole, fetcher, marker.sizes, marker.digests))
        for model in models:
            yield noting(partial(check_model, fetcher, model))
        sealed_of_owners: list[Manifest | OwnerTable] = [manifest, *tables]
        for sealed in sealed_of_owners:
            for one in state_objects(sealed, marker.object_bytes):
                yield noting(partial(check_state, fetcher, one))

    run_all(tasks(), num_transfers, lambda: HostBuffer(1))
    return CopyReport(copy.url, marker.step, tuple(problems), advance.done - before, tuple(foreign))
