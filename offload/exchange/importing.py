"""``offload import``: a new store from the checkpoint of another program, streamed.

The store gets one sealed checkpoint, which `restore` continues from as if it had been trained here.
Nothing is executed that a file says: pickles are read with ``weights_only=True``.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from offload.ambient import called_as_user, in_neutral
from offload.checkpoint.checkpoint import Checkpoint, train_state_header
from offload.errors import MismatchError, StoreError
from offload.exchange.foreign_checks import check_model, count_of_steps, hyperparameters
from offload.exchange.torch_dicts import NO_ENTRY, num_steps, read_parameter_state, scalar_template
from offload.format.arrays import MASTER_LOW
from offload.format.header import Header
from offload.format.layout import (
    Layout,
    ModelTensor,
    ParameterSpec,
    element_space_order,
    model_order,
)
from offload.format.manifest import Manifest
from offload.format.train_state import encode, pack_encoded
from offload.model.model_file import BlockBuffers, ModelImage
from offload.model.model_writing import write_model
from offload.options import Options
from offload.retention.policy import as_retention
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
class Foreign:
    """A checkpoint of another program; its tensors are read when they are needed."""

    path: str
    model: Mapping[str, TensorSource]
    """Every tensor of the model's state dict, tied ones once."""

    optimizer: Mapping[str, Any]
    """torch's state dict, by numbers or by names."""

    masters: Mapping[Any, TensorSource] = field(default_factory=dict)
    """FP32 parameters, by the same numbers or names."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied tensors, and the name in `model`."""

    step: Any = None
    """Optimizer steps taken, if it says so; not checked."""

    step_from: str = ""
    """What says so, for people."""

    is_ordered: bool = False
    """Whether `model` is in the order of the model's own state dict."""


@dataclass(slots=True)
class _Parameter:
    spec: ParameterSpec
    state: ParameterState
    value: TensorSource
    """What the live parameter is rounded from."""


@in_neutral
def import_checkpoint(
    foreign: Foreign,
    directory: Directory | Sequence[Directory],
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    names: Sequence[str] | None = None,
    frozen: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
    keep: int = 2,
    fresh: bool = False,
    step: int | None = None,
    train_state: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> Checkpoint:
    """Make a store whose one checkpoint is another program's.

    Memory is a ring of chunks and a constant, whatever the size of the state.

    Args:
        foreign: What `foreign.open_foreign` returned.
        directory: The store, or its directories on several drives.
        optimizer_class: The class that the state is of.
        names: Of all parameters, in the order of the optimizer's groups, where the source does
            not say them.
        frozen: Names of parameters of the optimizer that have ``requires_grad=False``.
        tied: Other names of tied tensors, and the name that the model's ``named_parameters()`` has,
            where the source has them twice: distributed checkpoints do.
        dtype: Of the live parameters that the optimizer has; None for the source's. FP32 ones that
            become 16-bit stay as masters.
        options: As for the optimizer that will go on.
        keep: Checkpoints to keep, as for the optimizer that will go on.
        fresh: Replace the checkpoints of a store that has some, when the new one is durable.
        step: Optimizer steps that it has seen; None for what the source says.
        train_state: What `restore` is to give back.
        progress: Called with the bytes of state written so far, and in all.

    Raises:
        StoreError: There are checkpoints already.
        MismatchError: The source is of another class, or contradicts itself; names the parameter.
        CheckpointError: The source is damaged.
    """
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
    drives = Drives(directories, options, None)
    try:
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
        try:
            if (store.checkpoints or store.refused) and not fresh:
                raise StoreError(
                    errno.EEXIST,
                    "this store has checkpoints already: import into another directory, or pass "
                    "--fresh (fresh=True in Python) to replace them",
                    directories[0],
                )
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
                scalars = _fill(drives, slot, parameters, steps, options, progress)
                manifest = Manifest(
                    store_id=store.store_id,
                    generation=slot.context.generation,
                    step=steps,
                    created=datetime.now(UTC).isoformat(timespec="seconds"),
                    torch_version=torch.__version__,
                    optimizer=rule.class_name,
                    groups=tuple(groups),
                    layout=layout,
                    scalars=tuple(scalars),
                    digests={name: tuple(values) for name, values in slot.digests.items()},
                    model_digests=_write_model(drives, slot, foreign, parameters),
                    parts=slot.part_references,
                    order=tuple(tuple(positions[name] for name in group) for group in order),
                )
                packed = pack_encoded(
                    encode(train_state),
                    capacity_bytes=slot.train_state.size_bytes,
                    header=train_state_header(manifest),
                )
                slot.train_state.write_bytes(packed, 0)
                encoded = manifest.encode(slot.manifest.size_bytes)
                store.begin_seal(manifest)
                stored = store.commit(slot, manifest, encoded)
            except BaseException:
                store.end_seal()
                store.release(slot)
                raise
            return Checkpoint(backends[0], stored.path, manifest, store.directories[1:])
        finally:
            store.close()
    finally:
        drives.close()


def _with_ties(foreign: Foreign, tied: Mapping[str, str]) -> Foreign:
    """Take tensors that are one in the model once."""
    for alias, name in tied.items():
        first, second = foreign.model.get(name), foreign.model.get(alias)
        if first is None or (second is not None and second.shape != first.shape):
            raise MismatchError(
                f"{foreign.path}: {alias!r} and {name!r} are not the same tensor there: they have "
                "other shapes, or the second is missing"
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
    """Find for each parameter of the optimizer its name, its tensor and its state."""
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
            f"{foreign.path}: the optimizer has a parameter {name!r}, and the model has none of "
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
    """Return the names of each group's parameters."""
    members = [list(group["params"]) for group in saved]
    if names is not None:
        if len(names) != sum(map(len, members)):
            raise MismatchError(
                f"{foreign.path}: the optimizer has {sum(map(len, members))} parameters, and "
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
        f"{foreign.path}: the optimizer's parameters have numbers only, and which of the model's "
        f"{len(foreign.model)} tensors they are cannot be told: give their names with --names "
        "(names= in Python), in the order of the optimizer's groups, or save param_names by "
        "constructing the optimizer with named_parameters()"
    )


def _check_class(foreign: Foreign, index: int, hyper: Mapping[str, Any], rule: UpdateRule) -> None:
    """Refuse Adam for AdamW, whose state looks the same."""
    flag = "decoupled_weight_decay"
    expected = rule.defaults.get(flag)
    if rule.class_name.endswith((".Adam", ".AdamW")) and hyper.get(flag) != expected:
        raise MismatchError(
            f"{foreign.path}: group {index} has {flag}={hyper.get(flag)}, and "
            f"{rule.optimizer_class.__name__} has {flag}={expected}: import it as the other one "
            "of Adam and AdamW"
        )


def _steps(given: int | None, foreign: Foreign, parameters: Sequence[_Parameter]) -> int:
    """Return the optimizer steps that the state has seen: what was given, or what is said of it."""
    by_state = num_steps([p.state.scalars for p in parameters])
    if given is not None:
        return count_of_steps(given, "step")
    if foreign.step is not None:
        return count_of_steps(foreign.step, foreign.step_from)
    return by_state or 0


class _SourceParameters:
    """Live parameters that are read from where they come."""

    def __init__(self, parameters: Sequence[_Parameter]) -> None:
        self._parameters = parameters
        self._scratch = codecs.Scratch()

    def view(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Return a range of a parameter in its live dtype."""
        parameter = self._parameters[index]
        master = parameter.state.master
        values = (master or parameter.value).read(start, stop)
        live = values.to(DTYPES[parameter.spec.dtype])
        if MASTER_LOW in parameter.spec.arrays:
            low = torch.empty(len(live), dtype=torch.int16, device="cpu")
            codecs.split_master(values.float(), live, low, scratch=self._scratch)
        return live

    def finish(self, index: int, num_elements: int) -> None:
        """Nothing is kept."""


def _fill(
    drives: Drives,
    slot: Slot,
    parameters: Sequence[_Parameter],
    step: int,
    options: Options,
    progress: Callable[[int, int], object] | None,
) -> list[Scalars | None]:
    """Write all state arrays."""
    layout = slot.layout
    done, per_element = 0, layout.state_bytes / max(layout.num_elements, 1)

    def advance(num_elements: int) -> None:
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
    """The bytes of a model file whose tensors are read from where they come."""

    def __init__(self, header: Header, foreign: Foreign, parameters: Sequence[_Parameter]) -> None:
        self._entries = [e for e in header.entries.values() if e.nbytes]
        self._model = foreign.model
        self._live = _SourceParameters(parameters)
        self._numbers = {p.spec.name: i for i, p in enumerate(parameters)}
        self.data_start = header.data_start
        self.data_bytes = header.file_bytes - header.data_start

    def gather(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Read the bytes of a range of the data into `out`."""
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
                    data = self._live.view(number, *elements)
                out[begin - start : end - start].copy_(data.view(torch.uint8))
