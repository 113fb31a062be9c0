"""Streaming import of another program's checkpoint into a new store (``offload import``).

The store gets one sealed checkpoint. `restore` continues from it as if the model had been trained
with this library. Nothing in a file is executed: torch's restricted loader reads pickles.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from gds import File
from offload.ambient import called_as_user, in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import StoreError
from offload.exchange.foreign import ForeignCheckpoint, open_foreign
from offload.exchange.foreign_parameters import (
    ForeignParameter,
    check_model,
    match_parameters,
    step_count,
    with_ties,
)
from offload.exchange.weights import chosen_weights, named_as_in
from offload.format.arrays import MASTER_LOW
from offload.format.chunk_plan import Piece
from offload.format.header import Header
from offload.format.layout import Layout, ModelTensor, element_space_order, model_order
from offload.format.train_state import encode
from offload.model.model_file import BlockBuffers, ModelImage
from offload.model.model_writing import write_model
from offload.options import Options
from offload.retention.policy import Retention, as_retention
from offload.store.sealing import compose
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.stream.drives import Directory, Drives, as_directories
from offload.stream.passes import RingPass, ring_for_one_pass
from offload.update.coding import rounding
from offload.update.coding.filler import StateFiller
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.kept_state import Scalars
from offload.update.rules import UpdateRule
from offload.update.scratch import Scratch

_READ_ELEMENTS = 512 << 10


@in_neutral
def import_checkpoint(
    source: str | os.PathLike[str],
    directory: Directory | Sequence[Directory],
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    model: str | os.PathLike[str] | torch.nn.Module | None = None,
    names: Sequence[str] | None = None,
    frozen: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
    keep: int | Retention = 2,
    fresh: bool = False,
    step: int | None = None,
    train_state: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> Checkpoint:
    """Make a store with one checkpoint, imported from another program's.

    `OffloadedOptimizer.restore` continues from the checkpoint as if it had been trained here. The
    source is one of these:

    - a file of `torch.save` with the state dicts of a model and an optimizer, or of an optimizer
      alone;
    - a directory of the Hugging Face Trainer, with ``optimizer.pt`` and ``model.safetensors``;
    - a directory of `torch.distributed.checkpoint`;
    - weights alone: a directory of a Hugging Face model, a ``.safetensors`` file, or the
      ``.index.json`` of several. Any optimizer can begin with them: the one that restores gives the
      class, the groups and the hyper-parameters, and its state begins as that of a new one.

    The import takes the memory of a ring of chunks and a constant, whatever the size of the state.
    A pickle is loaded as far as torch trusts one (``weights_only=True``): none of its code is run.

    Args:
        source: Path of the file or directory to import.
        directory: Directory of the store, or its directories on several drives.
        optimizer_class: Optimizer class that the state belongs to; not used for weights alone.
        model: Path of a file with the model, of safetensors or `torch.save`; None if the source
            holds the model. For weights alone, the module that will be trained: the checkpoint
            gets its names, and its values of tensors that the source lacks. So the weights of a
            base model are imported for a model with an adapter of peft. Its other parameters may
            have no values (`outside_memory`).
        names: Names of all parameters, in the order of the optimizer's groups, if the source does
            not contain them.
        frozen: Names of the optimizer's parameters that have ``requires_grad=False``.
        tied: Other names of tied tensors, each with the name in the model's
            ``named_parameters()``. Needed if the source stores tied tensors twice, as distributed
            checkpoints do.
        skip: Patterns of names, as in a shell, of tensors that are not imported because the model
            does not have them; for weights alone.
        dtype: Dtype of the optimizer's live parameters; None for the source's. The values of FP32
            parameters that become 16-bit are kept as masters. Of weights alone, all floating-point
            tensors get this dtype, and are rounded.
        options: Options of the optimizer that will continue from the checkpoint.
        keep: Number of checkpoints to keep, or a policy, as for the optimizer that will continue.
        fresh: Whether the store may have checkpoints already. They are replaced once the new one is
            durable.
        step: Number of optimizer steps that the state has seen; None to read it from the source.
        train_state: Value that `restore` returns as the train state.
        progress: Function that is called with the bytes of state written so far and in total; of
            weights alone, with the bytes of these.

    Returns:
        The sealed, durable checkpoint.

    Raises:
        StoreError: The store has checkpoints already, or cannot be used.
        StoreFullError: There is no room for the store.
        MismatchError: The source belongs to another class, or contradicts itself. The message names
            the parameter or the group.
        CheckpointError: The source is damaged, is none of the known formats, or contains objects
            that would have to be executed.
        gds.StorageError: Writing the store failed.
    """
    module = model if isinstance(model, torch.nn.Module) else None
    file = None if model is None or isinstance(model, torch.nn.Module) else os.fsdecode(model)
    foreign = open_foreign(os.fsdecode(source), file)
    progress = called_as_user(progress) if progress is not None else None
    rule = UpdateRule(optimizer_class, {})
    if tied:
        foreign = with_ties(foreign, tied)
    groups: list[dict[str, Any]] = []
    found: list[ForeignParameter] = []
    order: list[list[str]] = []
    if foreign.optimizer:
        if module is not None:
            raise ValueError("model= is a module, which is for weights without optimizer state")
        if skip:
            raise ValueError(f"skip={list(skip)!r:.80} is for weights without optimizer state")
        groups, found, order = match_parameters(foreign, rule, names, frozen, dtype, options)
    else:
        if names is not None or frozen:
            raise ValueError(
                f"{foreign.path}: weights without optimizer state, which names= and frozen= "
                "(--names, --frozen) describe: leave them out"
            )
        foreign.model = chosen_weights(foreign.path, foreign.model, skip, dtype)
        if module is not None:
            foreign.model = named_as_in(foreign.path, module, foreign.model)
    steps = step_count(step, foreign, found)
    by_name = {p.spec.name: p for p in found}
    specs = element_space_order([p.spec for p in found])
    parameters = [by_name[spec.name] for spec in specs]
    aliases: dict[str, list[str]] = {}
    for alias, name in foreign.aliases.items():
        aliases.setdefault(name, []).append(alias)
    check_model(foreign.path, foreign.model)
    tensors = {
        **{spec.name: (spec.dtype, spec.shape) for spec in specs},
        **{
            name: (DTYPE_CODES[source.dtype], source.shape)
            for name, source in foreign.model.items()
            if name not in by_name
        },
    }
    listed = [
        ModelTensor(name, code, shape, tuple(aliases.get(name, ())))
        for name, (code, shape) in tensors.items()
    ]
    directories = as_directories(directory)
    with (
        closing(Drives(directories, options, None)) as drives,
        closing(_open_store(drives, directories, options, keep, fresh=fresh)) as store,
    ):
        layout = Layout(
            tuple(specs),
            model_order(listed[: len(specs)], listed[len(specs) :]),
            options.chunk_elements,
            options.state_dtype,
            drives.shares(),
        )
        store.require_space(layout, len(groups))
        positions = {tensor.name: i for i, tensor in enumerate(layout.model)}
        slot = store.acquire(layout, len(groups))
        try:
            composition = compose(
                slot,
                encode(train_state),
                step=steps,
                torch_version=torch.__version__,
                optimizer=rule.class_name if groups else "",
                groups=groups,
                scalars=_fill(drives, slot, parameters, steps, options, progress)
                if parameters
                else [],
                order=[[positions[name] for name in group] for group in order],
            )
            told = None if parameters else progress  # the larger part of the bytes
            model_digests = _write_model(drives, slot, foreign, parameters, told)
            store.sealing.begin(composition.manifest)
            stored = store.sealing.seal(slot, composition, model_digests)
        except BaseException:
            store.sealing.end()
            store.release(slot)
            raise
        parts = store.directories[1:]
        return Checkpoint(store.backend, stored.path, stored.manifest, parts)


def _open_store(
    drives: Drives,
    directories: Sequence[str],
    options: Options,
    keep: int | Retention,
    *,
    fresh: bool,
) -> Store:
    """Open the store that a checkpoint is imported into."""
    backends = drives.backends
    store = Store(
        backends[0],
        directories[0],
        list(zip(backends, directories, strict=True))[1:],
        keep=as_retention(keep),
        fresh=fresh,
        train_state_bytes=options.train_state_bytes,
        reader_timeout_s=options.reader_timeout_s,
        allow_volatile=options.allow_volatile,
        allow_remote=options.allow_remote,
    )
    if (store.checkpoints or store.refused) and not fresh:
        store.close()
        raise StoreError(
            errno.EEXIST,
            "this store has checkpoints already: import into another directory, or pass "
            "--fresh (fresh=True in Python) to replace them",
            directories[0],
        )
    return store


class _SourceParameters:
    """Live parameters, computed from the source at each read; implements `ParameterViews`."""

    def __init__(self, parameters: Sequence[ForeignParameter]) -> None:
        self._parameters = parameters
        self._scratch = Scratch()

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the elements of each piece, flat, in the parameter's live dtype."""
        return [self.read(piece.parameter, piece.start, piece.stop) for piece in pieces]

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a parameter, flat, in its live dtype."""
        parameter = self._parameters[index]
        master = parameter.state.master
        values = (master or parameter.value).read(start, stop)
        live = values.to(DTYPES[parameter.spec.dtype])
        if MASTER_LOW in parameter.spec.arrays:
            low = torch.empty(len(live), dtype=torch.int16, device="cpu")
            rounding.split_master(values.float(), live, low, scratch=self._scratch)
        return live

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Do nothing: no parameter is held in memory."""


def _fill(
    drives: Drives,
    slot: Slot,
    parameters: Sequence[ForeignParameter],
    step: int,
    options: Options,
    progress: Callable[[int, int], object] | None,
) -> list[Scalars | None]:
    """Write all state arrays to a slot, and return the scalar state of each parameter."""
    layout = slot.layout
    done, per_element = 0, layout.state_bytes / max(layout.num_elements, 1)

    def advance(num_elements: int) -> None:
        """Report progress in bytes of state, given a number of elements that were filled."""
        nonlocal done
        done += num_elements
        if progress is not None:
            progress(int(done * per_element), layout.state_bytes)

    work = StateFiller(
        layout,
        [p.state for p in parameters],
        _SourceParameters(parameters),
        step=step,
        seed=options.rounding_seed,
        progress=advance,
    )
    chunks = range(layout.num_chunks)
    with ring_for_one_pass(drives.backends[0], layout) as streamer:
        filling = RingPass(streamer, source=None, target=slot)
        filling.announce(chunks)
        for chunk in chunks:
            with filling.taken(chunk) as frame:
                work.update(chunk, frame.tensors())
        streamer.synchronize()
    return work.finish()


def _write_model(
    drives: Drives,
    slot: Slot,
    foreign: ForeignCheckpoint,
    parameters: Sequence[ForeignParameter],
    progress: Callable[[int, int], object] | None,
) -> tuple[str, ...]:
    """Write the model file of a slot, and return the digests of its blocks."""
    header = slot.layout.model_header
    image = _SourceImage(header, foreign, parameters)
    buffers = BlockBuffers(drives.backends[0], image.data_bytes)

    def copied(num_bytes: int) -> None:
        """Report progress in bytes of the model."""
        if progress is not None:
            progress(num_bytes, image.data_bytes)

    written = write_model(image, slot.model, buffers, slot.context, slot.model_leaves, copied)
    return tuple(written.digests)


class _SourceImage(ModelImage):
    """Content of a model file, computed from the source's tensors."""

    def __init__(
        self, header: Header, foreign: ForeignCheckpoint, parameters: Sequence[ForeignParameter]
    ) -> None:
        self._entries = [e for e in header.entries.values() if e.nbytes]
        self._model = foreign.model
        self._live = _SourceParameters(parameters)
        self._numbers = {p.spec.name: i for i, p in enumerate(parameters)}
        self.data_start = header.data_start
        self.data_bytes = header.file_bytes - header.data_start

    def is_in_file(self, start: int, stop: int) -> bool:  # noqa: ARG002
        """Return False: all values come from the source."""
        return False

    is_elsewhere = is_in_file

    def reads_only(self, file: File) -> bool:  # noqa: ARG002
        """Return False, as `is_in_file`."""
        return False

    def gather(
        self,
        start: int,
        stop: int,
        out: torch.Tensor,
        *,
        on_one_thread: bool = False,  # noqa: ARG002  (the source is read for this)
    ) -> None:
        """Write bytes `start` to `stop` of the file's data to `out`, a flat uint8 tensor."""
        for entry in self._entries:
            first, last = max(start, entry.start), min(stop, entry.stop)
            itemsize = entry.nbytes // max(math.prod(entry.shape), 1)
            for begin in range(first, last, _READ_ELEMENTS * itemsize):
                end = min(begin + _READ_ELEMENTS * itemsize, last)
                elements = ((begin - entry.start) // itemsize, (end - entry.start) // itemsize)
                number = self._numbers.get(entry.name)
                if number is None:
                    data = self._model[entry.name].read(*elements)
                else:
                    data = self._live.read(number, *elements)
                out[begin - start : end - start].copy_(data.view(torch.uint8))
