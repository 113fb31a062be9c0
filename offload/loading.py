"""Loading a checkpoint's parameters into a model, in a process that has no optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from gds import Backend
from offload.ambient import in_neutral
from offload.checkpoint import open_for_parameters
from offload.digests import DigestContext
from offload.errors import MismatchError
from offload.model_file import BlockBuffers, ModelImage, read_model
from offload.parameters import describe_model
from offload.slot import MODEL_NAME
from offload.unreadable import reading


@in_neutral
def load_parameters(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    backend: Backend | None = None,
) -> int:
    """Load a checkpoint's parameters and buffers into a model, checking their digests.

    Reads ``model.safetensors`` only, block by block: 2 bytes per bf16 parameter. What a store
    has on drives other than the first is not needed.

    Args:
        model: Changed in place; nothing is changed if names, shapes or dtypes differ.
        checkpoint: A checkpoint directory, or a store, which means its newest. Where that is
            damaged the one before it is taken, with a warning.
        backend: Where it is; the local file system by default.

    Returns:
        The number of optimizer steps that the parameters had seen.

    Raises:
        MismatchError: The model's state dict differs from the checkpoint's; lists how.
        CheckpointError: It is damaged.
        UnreadableError: It could not be read, which says nothing about what it holds; the model
            may hold parts of it.
    """
    with open_for_parameters(checkpoint, backend=backend) as opened:
        manifest = opened.manifest
        header = manifest.layout.model_header
        stored = describe_model(model, [], [])
        wanted = {t.name: (t.dtype, t.shape) for t in manifest.layout.model}
        # A tied tensor may be stored under another of its names.
        tensors = {}
        for entry in stored:
            names = (entry.spec.name, *entry.spec.aliases)
            name = next((n for n in names if n in wanted), entry.spec.name)
            tensors[name] = (entry.tensor, (entry.spec.dtype, entry.spec.shape))
        check_same(wanted, {n: what for n, (_, what) in tensors.items()}, opened.path)
        image = ModelImage(header, {n: tensor for n, (tensor, _) in tensors.items()})
        source = opened.backend
        with reading(opened.path):
            file = source.open(f"{opened.path}/{MODEL_NAME}")
            try:
                buffers = BlockBuffers(source, image.data_bytes)
                context = DigestContext(manifest.store_id, manifest.generation)
                read_model(image, file, buffers, context, manifest.model_digests)
            finally:
                file.close()
        return manifest.step


def check_same(
    stored: Mapping[str, tuple[str, tuple[int, ...]]],
    live: Mapping[str, tuple[str, tuple[int, ...]]],
    path: str,
) -> None:
    """Compare dtype and shape of every tensor by name.

    Raises:
        MismatchError: They differ; lists the first few differences.
    """
    differences = [f"{n!r} is only in the checkpoint" for n in stored if n not in live]
    differences += [f"{n!r} is only in the model" for n in live if n not in stored]
    differences += [
        f"{n!r} is {_what(stored[n])} in the checkpoint and {_what(live[n])} in the model"
        for n in stored
        if n in live and stored[n] != live[n]
    ]
    if differences:
        hint = ""
        if not stored.keys() & live.keys():
            hint = (
                " No name is the same on both sides: pass model= as it was passed when the "
                "checkpoint was made, and the module itself rather than a wrapper of it "
                "(torch.compile and DistributedDataParallel put a prefix before every name)."
            )
        more = f", and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise MismatchError(
            f"{path}: the model differs from the one that was saved: "
            f"{'; '.join(differences[:5])}{more}. Build the model as it was then, with the same "
            f"configuration and dtype, and convert it afterwards.{hint}"
        )


def _what(tensor: tuple[str, tuple[int, ...]]) -> str:
    return f"{tensor[0]} {list(tensor[1])}"
