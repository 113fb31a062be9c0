"""Upload of one checkpoint on request, also beside a process that trains."""

from __future__ import annotations

import os

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.opening import open_checkpoint
from offload.format.names import LOCK_NAME
from offload.tiers.contents import OBJECT_BYTES
from offload.tiers.sending import NUM_TRANSFERS, Check, Progress
from offload.tiers.services.address import parse_address, require_apart
from offload.tiers.services.opening import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, open_objects
from offload.tiers.upload import PushReport, Upload


def push(
    path: str | os.PathLike[str],
    url: str,
    *,
    parts: PartDirectories = None,
    check: Check = "read",
    object_bytes: int = OBJECT_BYTES,
    num_transfers: int = NUM_TRANSFERS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retry_s: float = DEFAULT_RETRY_S,
    progress: Progress | None = None,
    backend: Backend | None = None,
) -> PushReport:
    """Upload a checkpoint to a tier. An upload that was interrupted goes on where it ended.

    The call may run beside a process that trains in the store, and never delays a step. If training
    recycles the checkpoint meanwhile, the upload ends with `RecycledError` and removes what it has
    sent; pin the checkpoint first to prevent that.

    Args:
        path: Directory of a checkpoint, or of a store, which means its newest checkpoint.
        url: URL of the tier.
        parts: Directories of the state on several drives, as for `open_checkpoint`.
        check: How each object is checked in the tier before the copy counts as complete.
        object_bytes: Size in bytes up to which whole chunks are put together to one object.
        num_transfers: Number of objects that are sent at a time. Each takes memory for one object.
        timeout_s: Seconds after which one request is given up.
        retry_s: Seconds for which a request that failed is tried again.
        progress: Function that is called with the bytes done and the total.
        backend: Storage backend of the checkpoint; the local file system by default.

    Raises:
        TierError: The tier cannot be used. The message says what to do; what was sent stays, and
            the next call goes on from it.
        RecycledError: Training has recycled the checkpoint.
        DamagedError: The checkpoint is damaged, or the tier returns other bytes than it was sent.
        CheckpointError: There is no usable checkpoint, or a part of it is not seen here.
        gds.StorageError: The checkpoint cannot be read.
    """
    with (
        given_or_local(backend) as storage,
        open_objects(url, timeout_s=timeout_s, retry_s=retry_s) as objects,
    ):
        with open_checkpoint(path, parts=parts, backend=storage) as opened:
            require_apart(parse_address(url), _directories(opened))
            # Without its lock: see `Source`.
            checkpoint = Checkpoint(storage, opened.path, opened.manifest, parts)
        upload = Upload(
            objects,
            checkpoint,
            check=check,
            object_bytes=object_bytes,
            num_transfers=num_transfers,
            progress=progress,
        )
        return upload.run()


def _directories(checkpoint: Checkpoint) -> list[str]:
    """Return the directories of a checkpoint, and of its store if it is in one."""
    directory = os.path.dirname(os.path.abspath(checkpoint.path))
    is_store = os.path.exists(f"{directory}/{LOCK_NAME}")
    parts = [part.directory for part in checkpoint.manifest.parts]
    return [directory if is_store else checkpoint.path, *parts]
