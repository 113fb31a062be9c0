"""Removal of copies from a tier, by the same policies as those of a store."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from offload.errors import MetricError
from offload.retention.policy import BestBy, Record, Retention, kept_generations
from offload.tiers.catalog import TierCopy, list_copies, remove_copy, whats_wrong
from offload.tiers.services.address import parse_address
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, open_objects
from offload.tiers.verification import verify_copy


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
