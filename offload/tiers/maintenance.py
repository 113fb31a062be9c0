"""What is done with the copies in a tier: they are listed, verified, and removed by policies.

Verifying reads every byte and compares it with its digest. Removing begins with a copy's marker.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from gds import Buffer
from gds.buffers.host import HostBuffer
from offload.checkpoint.owner_parts import check_cover
from offload.errors import CheckpointError, DamagedError, MetricError
from offload.format.manifest import Manifest
from offload.format.shares.part_table import OwnerTable
from offload.retention.policy import BestBy, Record, Retention, kept_generations
from offload.tiers.catalog import (
    TierCopy,
    find_copy,
    list_copies,
    read_manifest,
    read_table,
    remove_copy,
    sizes_in,
    whats_wrong,
)
from offload.tiers.checking import Advance, Fetcher, check_model, check_whole
from offload.tiers.contents import (
    MARKER_NAME,
    PARAMETERS_NAME,
    WRITER_NAME,
    model_object,
    shard_object,
    state_objects,
    wrong_sizes,
)
from offload.tiers.sending import NUM_TRANSFERS, Progress, Tally, Task, run_all
from offload.tiers.services.address import parse_address
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
        copies = [copy for copy in list_copies(objects, address) if copy.marker is not None]
        copies = copies or [find_copy(objects, address)]  # which says what is there instead
        total = sum(copy.marker.nbytes for copy in copies if copy.marker)
        tally = Tally(progress, total)
        return [_verify(objects, copy, num_transfers, tally) for copy in copies]


def verify_copy(objects: Objects, copy: TierCopy) -> CopyReport:
    """Read every byte of one copy, and compare it with its digest; see `verify_tier`."""
    return _verify(objects, copy, NUM_TRANSFERS, Tally(None, 0))


def _verify(objects: Objects, copy: TierCopy, num_transfers: int, tally: Tally) -> CopyReport:
    marker = copy.marker
    if marker is None:
        return CopyReport(copy.url, 0, (copy.reason,), 0, ())
    found = sizes_in(objects, copy.folder)
    foreign = sorted({*found} - {*marker.sizes, MARKER_NAME, PARAMETERS_NAME, WRITER_NAME})
    before = tally.done
    problems = [f"{copy.url}/{text}" for text in wrong_sizes(marker.sizes, found)]
    try:
        manifest = read_manifest(objects, copy)
        tables = [read_table(objects, copy, manifest, one) for one in manifest.owners]
        if tables:
            check_cover(copy.url, manifest, tables)
        models = [model_object(manifest, tables), *map(shard_object, tables)]
    except CheckpointError as error:
        problems.append(str(error))
        return CopyReport(copy.url, marker.step, tuple(problems), 0, tuple(foreign))
    fetcher = Fetcher(objects, copy.folder, manifest)
    lock = threading.Lock()

    def noting(check: Callable[[Advance], None]) -> Task:
        """Return a task that notes damage and goes on."""

        def task(_: Buffer) -> None:
            try:
                check(tally.add)
            except DamagedError as error:
                with lock:
                    problems.append(str(error))

        return task

    def tasks() -> Iterator[Task]:
        yield noting(partial(check_whole, fetcher, marker.sizes, marker.digests))
        for model in filter(None, models):
            yield noting(partial(check_model, fetcher, model))
        sealed_of_owners: list[Manifest | OwnerTable] = [manifest, *tables]
        for sealed in sealed_of_owners:
            for one in state_objects(sealed, marker.object_bytes):
                yield noting(partial(fetcher.check, one.name, 0, one.chunks))

    run_all(tasks(), num_transfers, lambda: HostBuffer(1))
    return CopyReport(copy.url, marker.step, tuple(problems), tally.done - before, tuple(foreign))


@dataclass(frozen=True, slots=True)
class TierPruneReport:
    """Copies that pruning removed, or would remove, and copies that stay."""

    removed: tuple[TierCopy, ...]
    unfinished: tuple[TierCopy, ...]
    """Copies without a valid marker, or that are not whole any more, that were removed."""

    kept: tuple[TierCopy, ...]
    """Complete copies that stay, and by which the policy goes."""

    left_alone: tuple[TierCopy, ...]
    """Copies without a valid marker that stay, because an upload may be writing them; and copies
    that are not whole any more. Each has its reason."""


def prune_tier(
    url: str,
    policy: Retention | None = None,
    *,
    unfinished: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retry_s: float = DEFAULT_RETRY_S,
) -> TierPruneReport:
    """Remove the complete copies that a policy does not keep, for each store in the tier by itself.

    The newest copy of each store stays, and so does everything that this library has not written.
    The marker of a copy is removed first, so that nobody is offered a copy with missing objects.
    Before anything is removed, the tier must list every object of the copies that stay. A copy that
    has lost some does not count: the policy then chooses among the others.

    Args:
        url: URL of a tier, of the copies of one store in it, or of one copy.
        policy: Policy that selects the copies to keep; None keeps all.
        unfinished: Whether to remove copies that are not complete, and copies of a store that has a
            whole one which are not whole. No upload to this tier may be running, and those that
            were interrupted then begin anew.
        verify: Whether to read every byte of the copies that stay, and not only the list.
        dry_run: Change nothing, and only report what would be removed.
        timeout_s: Seconds after which one request is given up.
        retry_s: Seconds for which a request that failed is tried again.

    Raises:
        MetricError: The policy goes by a metric that no copy has.
        TierError: The tier cannot be used.
    """
    address = parse_address(url)
    with open_objects(address, timeout_s=timeout_s, retry_s=retry_s) as objects:
        found = list_copies(objects, address)
        complete = [copy for copy in found if copy.marker is not None]
        partial = [copy for copy in found if copy.marker is None]
        kept, damaged = _kept(objects, complete, policy, verify=verify)
        whole = {copy.identity.store_id for copy in kept}
        lost = [copy for copy in damaged if copy.identity.store_id not in whole]
        partial += [copy for copy in damaged if copy not in lost]
        out = {copy.url for copy in (*kept, *damaged)}
        removed = [copy for copy in complete if copy.url not in out]
        if not dry_run:
            for copy in removed + (partial if unfinished else []):
                remove_copy(objects, copy)
    return TierPruneReport(
        tuple(removed),
        tuple(partial if unfinished else ()),
        tuple(kept),
        tuple(lost if unfinished else [*partial, *lost]),
    )


def _kept(
    objects: Objects, complete: list[TierCopy], policy: Retention | None, *, verify: bool
) -> tuple[list[TierCopy], list[TierCopy]]:
    """Return the whole copies that the policy keeps, and those that are not whole, with reasons."""
    damaged: dict[str, TierCopy] = {}
    whole = set[str]()
    while True:
        kept = _chosen([copy for copy in complete if copy.url not in damaged], policy)
        if policy is None and not verify:
            return kept, []
        for copy in kept:
            if copy.url not in whole:
                wrong = whats_wrong(objects, copy)
                if verify and not wrong:
                    wrong = "; ".join(verify_copy(objects, copy).problems[:3])
                if wrong:
                    damaged[copy.url] = replace(copy, reason=wrong)
                whole.add(copy.url)
        if not any(copy.url in damaged for copy in kept):
            return kept, [*damaged.values()]


def _chosen(complete: list[TierCopy], policy: Retention | None) -> list[TierCopy]:
    if policy is None:
        return complete
    by_store = defaultdict[str, list[TierCopy]](list)
    for copy in complete:
        by_store[copy.identity.store_id].append(copy)
    _require_metrics(complete, policy)
    kept: list[TierCopy] = []
    for copies in by_store.values():
        records = {copy.identity.generation: _record(copy) for copy in copies}
        generations = kept_generations(policy, records.values())
        kept += [copy for copy in copies if copy.identity.generation in generations]
    return kept


def _require_metrics(complete: list[TierCopy], policy: Retention) -> None:
    known = {name for copy in complete if copy.marker for name in copy.marker.metrics}
    for part in policy.parts:
        if isinstance(part, BestBy) and complete and part.metric not in known:
            raise MetricError(
                f"no copy in this tier has the metric {part.metric!r} (they have: "
                f"{', '.join(sorted(known)) or 'none'})"
            )


def _record(copy: TierCopy) -> Record:
    marker = copy.marker
    if marker is None:
        return Record(0, copy.identity.generation)
    return Record(marker.step, copy.identity.generation, marker.created, dict(marker.metrics))
