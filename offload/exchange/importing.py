"""Streaming import of another program's checkpoint into a new store (``offload import``).

The store gets one sealed checkpoint. `restore` continues from it as if the model had been trained
with this library. Nothing in a file is executed: `pickle_reading` reads pickles.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.ambient import called_as_user, in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import MismatchError, StoreError
from offload.exchange.foreign import Foreign, open_foreign
from offload.exchange.foreign_checks import check_model, count_of_steps, hyperparameters
from offload.exchange.torch_dicts import NO_ENTRY, num_steps, read_parameter_state, scalar_template
from offload.format.arrays import MASTER_LOW
from offload.format.chunk_plan import Piece
from offload.format.header import Header
from offload.format.layout import (
    Layout,
    ModelTensor,
    ParameterSpec,
    element_space_order,
    model_order,
)
from offload.format.train_state import encode
from offload.model.model_file import BlockBuffers, ModelImage
from offload.model.model_writing import write_model
from offload.options import Options
from offload.retention.policy import Retention, as_retention
from offload.store.sealing import compose
from offload.store.slot import Slot
from offload.store.store import Store
from offload.stream.drives import Directory, Drives, as_directories
from offload.stream.passes import RingPass, ring_for_one_pass
from offload.update import codecs
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.filler import ParameterState, StateFiller, TensorSource
from offload.update.rules import Rule, Scalars, UpdateRule

_READ_ELEMENTS = 512 << 10


@dataclass(slots=True)
class _Parameter:
    """A trainable parameter of the source."""

    spec: ParameterSpec
    """Description of the parameter in the new store's layout."""

    state: ParameterState
    """State of the parameter in the source."""

    value: TensorSource
    """Values that the live parameter is rounded from."""


@in_neutral
def import_checkpoint(
    source: str | os.PathLike[str],
    directory: Directory | Sequence[Directory],
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    model: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
    frozen: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
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
    - a directory of `torch.distributed.checkpoint`.

    The import takes the memory of a ring of chunks and a constant, whatever the size of the state.
    Pickles are read with ``weights_only=True``.

    Args:
        source: Path of the file or directory to import.
        directory: Directory of the store, or its directories on several drives.
        optimizer_class: Optimizer class that the state belongs to.
        model: Path of a file with the model, of safetensors or `torch.save`; None if the source
            holds the model.
        names: Names of all parameters, in the order of the optimizer's groups, if the source does
            not contain them.
        frozen: Names of the optimizer's parameters that have ``requires_grad=False``.
        tied: Other names of tied tensors, each with the name in the model's
            ``named_parameters()``. Needed if the source stores tied tensors twice, as distributed
            checkpoints do.
        dtype: Dtype of the optimizer's live parameters; None for the source's. The values of FP32
            parameters that become 16-bit are kept as masters.
        options: Options of the optimizer that will continue from the checkpoint.
        keep: Number of checkpoints to keep, or a policy, as for the optimizer that will continue.
        fresh: Replace the checkpoints of a store that has some, once the new one is durable.
        step: Number of optimizer steps that the state has seen; None to read it from the source.
        train_state: Value that `restore` returns as the train state.
        progress: Function that is called with the bytes of state written so far and in total.

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
    foreign = open_foreign(os.fspath(source), None if model is None else os.fspath(model))
    progress = called_as_user(progress) if progress is not None else None
    rule = UpdateRule(optimizer_class, {})
    if tied:
        foreign = _with_ties(foreign, tied)
    groups, found, order = _match(foreign, rule, names, frozen, dtype, options)
    steps = _steps(step, foreign, found)
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
                optimizer=rule.class_name,
                groups=groups,
                scalars=_fill(drives, slot, parameters, steps, options, progress),
                order=[[positions[name] for name in group] for group in order],
            )
            model_digests = _write_model(drives, slot, foreign, parameters)
            store.sealing.begin(composition.manifest)
            with store.sealing.prepare(slot, composition, model_digests) as prepared:
                stored = store.sealing.publish(prepared)
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
    """Open the store that a checkpoint is imported into.

    Raises:
        StoreError: The store has checkpoints already, and `fresh` is False.
    """
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


def _with_ties(foreign: Foreign, tied: Mapping[str, str]) -> Foreign:
    """Return `foreign` with only one copy of each group of tensors that are tied in the model."""
    for alias, name in tied.items():
        first, second = foreign.model.get(name), foreign.model.get(alias)
        if first is None or (second is not None and second.shape != first.shape):
            raise MismatchError(
                f"{foreign.path}: {alias!r} and {name!r} cannot be tied: their shapes differ, or "
                f"the source has no {name!r}"
            )
    model = {name: source for name, source in foreign.model.items() if name not in tied}
    return replace(foreign, model=model, aliases={**foreign.aliases, **tied})


def _match(
    foreign: Foreign,
    rule: UpdateRule,
    names: Sequence[str] | None,
    frozen: Collection[str],
    dtype: torch.dtype | None,
    options: Options,
) -> tuple[list[dict[str, Any]], list[_Parameter], list[list[str]]]:
    """Find the name, the tensor and the state of each parameter of the optimizer.

    Returns:
        The hyper-parameters of each group; the parameters that are not frozen; and the names of the
        parameters in each group.
    """
    saved = foreign.optimizer["param_groups"]
    order = _names(foreign, saved, names)
    groups, found = [], []
    seen: set[str] = set()
    for index, (values, members) in enumerate(zip(saved, order, strict=True)):
        hyper = hyperparameters(foreign.path, index, values, rule.defaults)
        _check_class(foreign, index, hyper, rule)
        kept = rule.rule(hyper)
        template = scalar_template(rule, hyper, kept)
        groups.append(hyper)
        for key, name in zip(values["params"], members, strict=True):
            if name in seen:
                raise MismatchError(f"{foreign.path}: parameter {name!r} is in two groups")
            seen.add(name)
            if name in frozen:
                continue
            found.append(_parameter(foreign, key, name, index, kept, template, dtype, options))
    return groups, found, order


def _parameter(
    foreign: Foreign,
    key: Any,
    name: str,
    group: int,
    kept: Rule,
    template: Scalars,
    dtype: torch.dtype | None,
    options: Options,
) -> _Parameter:
    name_in_model = foreign.aliases.get(name, name)
    value = foreign.model.get(name_in_model)
    if value is None:
        raise MismatchError(
            f"{foreign.path}: the optimizer has a parameter {name!r}, but the model has none of "
            "that name"
        )
    wanted = dtype or value.dtype
    code = DTYPE_CODES.get(wanted, str(wanted))
    if code not in ("F32", "BF16", "F16"):
        raise MismatchError(f"{foreign.path}: parameter {name!r} is {wanted}; expected a float")
    master = foreign.masters.get(key)
    if master is None and value.dtype == torch.float32 != wanted:
        master = value
    if code == "F32":
        value, master = master or value, None
    state = read_parameter_state(
        f"state of {name!r} in {foreign.path}",
        foreign.optimizer["state"].get(key, NO_ENTRY),
        master,
        value.shape,
        kept,
        template,
    )
    arrays = options.state_format.stored_arrays(code, kept.arrays)
    spec = ParameterSpec(name_in_model, code, value.shape, group, arrays)
    return _Parameter(spec, state, value)


def _names(
    foreign: Foreign, saved: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[list[str]]:
    """Return the names of each group's parameters.

    They are the names given, the keys of the state dict, its ``param_names``, or the order of the
    model.

    Raises:
        MismatchError: The names are unknown, or their number is wrong.
    """
    members = [list(group["params"]) for group in saved]
    if names is not None:
        if len(names) != sum(map(len, members)):
            raise MismatchError(
                f"{foreign.path}: the optimizer has {sum(map(len, members))} parameters, but "
                f"{len(names)} names were given"
            )
        rest = iter(names)
        return [[next(rest) for _ in group] for group in members]
    if all(isinstance(key, str) for group in members for key in group):
        return members
    if all(len(g.get("param_names", ())) == len(m) for g, m in zip(saved, members, strict=True)):
        return [list(group["param_names"]) for group in saved]
    if len(members) == 1 and len(members[0]) == len(foreign.model) and foreign.is_ordered:
        return [list(foreign.model)]
    raise MismatchError(
        f"{foreign.path}: the optimizer's parameters have numbers only, which cannot be matched "
        f"with the model's {len(foreign.model)} tensors: give their names with --names (names= in "
        "Python), in the order of the optimizer's groups, or save param_names by constructing the "
        "optimizer with named_parameters()"
    )


def _check_class(foreign: Foreign, index: int, hyper: Mapping[str, Any], rule: UpdateRule) -> None:
    """Refuse to import state of Adam as AdamW or the reverse, although both look the same."""
    flag = "decoupled_weight_decay"
    expected = rule.defaults.get(flag)
    if rule.class_name.endswith((".Adam", ".AdamW")) and hyper.get(flag) != expected:
        raise MismatchError(
            f"{foreign.path}: group {index} has {flag}={hyper.get(flag)}, and "
            f"{rule.optimizer_class.__name__} has {flag}={expected}: pass the other one of Adam "
            "and AdamW as the class"
        )


def _steps(given: int | None, foreign: Foreign, parameters: Sequence[_Parameter]) -> int:
    """Return the number of optimizer steps that the state has seen.

    It is `given`, or else the number in the source, or else the largest ``step`` of a parameter.
    """
    by_state = num_steps([p.state.scalars for p in parameters])
    if given is not None:
        return count_of_steps(given, "step")
    if foreign.step is not None:
        return count_of_steps(foreign.step, foreign.step_from)
    return by_state or 0


class _SourceParameters:
    """Live parameters, computed from the source at each read; implements `ParameterViews`."""

    def __init__(self, parameters: Sequence[_Parameter]) -> None:
        self._parameters = parameters
        self._scratch = codecs.Scratch()

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
            codecs.split_master(values.float(), live, low, scratch=self._scratch)
        return live

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Do nothing: no parameter is held in memory."""


def _fill(
    drives: Drives,
    slot: Slot,
    parameters: Sequence[_Parameter],
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
    drives: Drives, slot: Slot, foreign: Foreign, parameters: Sequence[_Parameter]
) -> tuple[str, ...]:
    header = slot.layout.model_header
    image = _SourceImage(header, foreign, parameters)
    buffers = BlockBuffers(drives.backends[0], image.data_bytes)
    written = write_model(
        image, slot.model, buffers, slot.context, slot.model_leaves, lambda _: None
    )
    return tuple(written.digests)


class _SourceImage(ModelImage):
    """Content of a model file, computed from the source's tensors."""

    def __init__(self, header: Header, foreign: Foreign, parameters: Sequence[_Parameter]) -> None:
        self._entries = [e for e in header.entries.values() if e.nbytes]
        self._model = foreign.model
        self._live = _SourceParameters(parameters)
        self._numbers = {p.spec.name: i for i, p in enumerate(parameters)}
        self.data_start = header.data_start
        self.data_bytes = header.file_bytes - header.data_start

    def gather(self, start: int, stop: int, out: torch.Tensor) -> None:
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
