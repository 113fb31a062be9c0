"""What ranks that do not see the store's first directory are told of its checkpoints.

Such a rank is *far*: it is on another host than the first directory. It has the parts of its own
owner. Manifests and train states come from the writer, in the messages of the agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from gds import Backend
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories
from offload.distributed.agreement.messages import Json
from offload.errors import RanksError
from offload.format.manifest import Manifest, decode
from offload.format.names import MANIFEST_NAME, part_name
from offload.format.shares.owners import OwnerReference
from offload.format.train_state import EncodedState
from offload.store.opening import StoredCheckpoint


class FarCheckpoint(Checkpoint):
    """A checkpoint whose directory is on another host.

    Args:
        backend: Backend of the parts.
        path: Path of the checkpoint on its own host.
        manifest: Manifest of the checkpoint.
        parts: Directories of the store on this host.
        state: Train states of all ranks; None if this rank has not been told them.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        manifest: Manifest,
        parts: PartDirectories,
        state: EncodedState | None,
        *,
        rank: int,
        num_ranks: int,
    ) -> None:
        super().__init__(
            backend,
            path,
            manifest,
            parts,
            resources=ExitStack(),
            rank=rank,
            num_ranks=num_ranks,
        )
        self._state = state

    def read_train_state(self) -> EncodedState:
        """Return the train states as they are stored.

        Raises:
            RanksError: This rank has not been told them.
        """
        if self._state is None:
            raise RanksError(
                f"{self.path} is on another host, and its train state has not been sent here: "
                "restore() sends it, or ask on a rank that sees the directory"
            )
        return self._state


def manifest_texts(backend: Backend, checkpoints: Sequence[StoredCheckpoint]) -> Json:
    """Return the manifests of checkpoints for a message, by path."""
    texts = {}
    for checkpoint in checkpoints:
        with backend.open(f"{checkpoint.path}/{MANIFEST_NAME}") as file:
            texts[checkpoint.path] = file.read_bytes(0, file.size_bytes).decode().rstrip()
    return texts


def manifest_of_message(texts: Any, path: str) -> Manifest:
    """Return the manifest of a checkpoint out of a message; see `manifest_texts`."""
    text = texts.get(path) if isinstance(texts, dict) else None
    if not isinstance(text, str):
        raise RanksError(f"the writer has not sent the manifest of {path}: restart the job")
    return decode(text.encode(), path)


def sealed_manifest(
    manifest: Manifest, reference: OwnerReference, owners: Sequence[int]
) -> Manifest:
    """Return what a far rank knows of a manifest that has just been published.

    It knows the reference to its own part only; those of the others have no digests.
    """
    return replace(
        manifest,
        owners=tuple(
            reference
            if owner == reference.owner
            else OwnerReference(owner, "", part_name(1), manifest.generation, "0" * 32)
            for owner in owners
        ),
    )
