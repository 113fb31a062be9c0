"""Tiers: copies of sealed checkpoints in object stores and on parallel file systems.

This wing may know `checkpoint`, `retention`, `format`, `gds`, and how `store` seals. It never
imports torch, the engine, or `stream`.
"""

from offload.tiers.catalog import TierCopy
from offload.tiers.maintenance import (
    CopyReport,
    TierPruneReport,
    list_tier,
    prune_tier,
    verify_tier,
)
from offload.tiers.pull import PullReport, pull
from offload.tiers.upload import PushReport, push

__all__ = [
    "CopyReport",
    "PullReport",
    "PushReport",
    "TierCopy",
    "TierPruneReport",
    "list_tier",
    "prune_tier",
    "pull",
    "push",
    "verify_tier",
]
