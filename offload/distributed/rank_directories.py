"""What the writer of a store is told of the directories of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from offload.distributed.agreement.opening import Plan
from offload.store.shared import SharedStore


def directories_of_owners(plan: Plan) -> dict[int, str]:
    """Return the store's directory on the node of each owner that is not the writer's."""
    pairs = enumerate(zip(plan.homes, plan.directories, strict=True))
    return {owner: directory for rank, (owner, directory) in pairs if rank != plan.writer}


def shared_store(plan: Plan, others: Sequence[str]) -> SharedStore:
    """Return what the writer knows of the owners that other ranks serve."""
    seen: dict[int, dict[str, str]] = {}
    for owner, name, digest in plan.parts:
        seen.setdefault(owner, {})[name] = digest
    elsewhere = frozenset(
        owner for owner, near in zip(plan.homes, plan.near, strict=True) if not near
    )
    return SharedStore(directories_of_owners(plan), seen, tuple(others), elsewhere)
