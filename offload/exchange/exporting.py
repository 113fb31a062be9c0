"""Streaming export of a checkpoint to the files of other programs (``offload export``).

Every format has the model in its own dtype, and the optimizer state in FP32, decoded if the store
keeps it in fewer bits. The export appears under its name when it is complete and durable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from gds import Backend, File
from offload.ambient import called_as_user, in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import DamagedError, MismatchError
from offload.exchange.checkpoint_stream import CheckpointStream, Progress, open_stream
from offload.exchange.destination import atomic_output
from offload.exchange.hf_files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_FOLDER,
    ADAPTER_MODEL_NAME,
    PeftNames,
    peft_names,
    read_hf_files,
    require_model_names,
    required_hf_files,
    write_hf_files,
)
from offload.exchange.torch_dicts import MASTERS, NUM_STEPS
from offload.exchange.torch_files import Placeholder, write_structure, write_tensor
from offload.format.arrays import MASTER
from offload.format.header import Header, build_header
from offload.format.layout import array_file_name
from offload.format.manifest import encode_group
from offload.format.names import MODEL_NAME
from offload.update.dtypes import DTYPES

ExportFormat = Literal["hf", "safetensors", "pt", "dcp"]

OPTIMIZER_PT = "optimizer.pt"
OPTIMIZER_JSON = "optimizer.json"

_Key = tuple[int, str]
"""Index of a parameter in the layout, and name of a state array."""


@in_neutral
def export_checkpoint(
    checkpoint: Checkpoint,
    destination: str | os.PathLike[str],
    to: ExportFormat,
    *,
    config: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint in another program's format.

    - ``pt``: one file of `torch.save` with ``model``, ``optimizer`` (torch's state dict, with
      ``master`` in it) and ``step``.
    - ``hf``: a directory with ``model.safetensors`` and ``optimizer.pt`` as the Hugging Face
      Trainer writes them, and ``master.safetensors`` if parameters have 16 bits. Config, generation
      config and tokenizer are added if they lie beside the checkpoint (see `add_hf_files`) or in
      `config`; ``from_pretrained`` then opens the directory. If the model has an adapter of peft,
      ``adapter`` has it as peft writes it, with its config if that lies at the same place, and
      ``model.safetensors`` has the model without it.
    - ``safetensors``: a directory with ``model.safetensors``, one file for each state array, and
      ``optimizer.json`` for hyper-parameters and scalars.
    - ``dcp``: a directory of `torch.distributed.checkpoint` with ``model``, ``optim``, ``step`` and
      ``master``, by parameter names.

    The export takes the memory of three chunks of state and a constant, whatever the size of the
    state. All data is compared with its digests. If several ranks made the checkpoint, the files
    are those of one process that had trained the same; ``dcp`` reads the state twice then. Of a
    checkpoint with parameters only, no format has masters, and ``pt``, ``hf`` and ``dcp`` have no
    optimizer.

    Args:
        checkpoint: The checkpoint. It is kept from being recycled during the export.
        destination: Path of the file or directory to make; its parent must exist.
        to: The format.
        config: With ``hf``, directory that has the model's ``config.json``, and its generation
            config and tokenizer if it has them. By default, those beside the checkpoint are taken.
        progress: Function that is called with the bytes read so far and the bytes in total.

    Raises:
        ValueError: The format is not known, or is not ``hf`` although `config` is given.
        CheckpointNotFoundError: `config` does not exist.
        CheckpointError: `config` has no ``config.json``, the checkpoint does not have the model's
            names, or the part of another rank is missing or not seen on this node.
        RecycledError: The checkpoint was not opened by `open_checkpoint`, and has been recycled.
        StoreFullError: There is no room. The message states the space needed and the free space.
        StoreError: A file or directory exists at `destination` already, or it cannot be written.
        MismatchError: The state cannot be expressed as a state dict of torch.
        DamagedError: The checkpoint is damaged; nothing is left at `destination`.
        gds.StorageError: Reading or writing failed otherwise; nothing is left at `destination`.
    """
    if to not in get_args(ExportFormat):
        raise ValueError(f"to must be one of {', '.join(get_args(ExportFormat))}, got {to!r}")
    if config is not None and to != "hf":
        raise ValueError(f"config= goes with the format hf, got {to!r}")
    files = None
    if config is not None:
        require_model_names(checkpoint)
        files = required_hf_files(config)
    target = os.path.abspath(os.fsdecode(destination))
    backend = checkpoint.backend
    progress = called_as_user(progress) if progress is not None else None
    try:
        _export(checkpoint, backend, target, to, progress, files)
    except DamagedError as error:
        raise DamagedError(
            f"{error}. Nothing was exported. Run `offload verify --quarantine {checkpoint.path}`, "
            "which marks this checkpoint as damaged; an export of the store then uses the newest "
            "of the other checkpoints"
        ) from error


def _export(
    checkpoint: Checkpoint,
    backend: Backend,
    target: str,
    to: ExportFormat,
    progress: Progress | None,
    files: Mapping[str, bytes] | None,
) -> None:
    with (
        open_stream(checkpoint, progress) as stream,
        atomic_output(backend, target, stream.total_bytes) as partial,
    ):
        if to == "pt":
            _export_pt(backend, stream, partial)
        elif to == "hf":
            backend.make_dir(partial)
            _export_hf(backend, stream, partial)
            beside = read_hf_files(backend, checkpoint.path)
            chosen = dict(beside if files is None else files)
            adapter = chosen.pop(ADAPTER_CONFIG_NAME, beside.get(ADAPTER_CONFIG_NAME))
            write_hf_files(backend, partial, chosen)
            if adapter is not None and backend.stat(f"{partial}/{ADAPTER_FOLDER}") is not None:
                write_hf_files(
                    backend, f"{partial}/{ADAPTER_FOLDER}", {ADAPTER_CONFIG_NAME: adapter}
                )
        elif to == "safetensors":
            backend.make_dir(partial)
            _export_safetensors(backend, stream, partial)
        else:
            from offload.exchange.dcp_writer import write_dcp  # imports torch.distributed

            write_dcp(stream, partial, _state_dict)


def _export_pt(backend: Backend, stream: CheckpointStream, path: str) -> None:
    model = {t.name: Placeholder(t.shape, DTYPES[t.dtype]) for t in stream.layout.model}
    aliases = {alias: model[t.name] for t in stream.layout.model for alias in t.aliases}
    placeholders: dict[_Key, Placeholder] = {}
    value: dict[str, Any] = {"model": {**model, **aliases}}
    if stream.has_optimizer:
        optimizer = _state_dict(stream, _placeholder_maker(stream, placeholders), by_name=False)
        value["optimizer"] = {**optimizer, MASTERS: _masters(stream, placeholders)}
    value["step"] = stream.manifest.step
    file, offsets = write_structure(backend, path, value)
    with _synced([file]):
        _write_model(stream, {name: (file, offsets[tensor]) for name, tensor in model.items()})
        _write_state(stream, {key: (file, offsets[tensor]) for key, tensor in placeholders.items()})


def _export_hf(backend: Backend, stream: CheckpointStream, path: str) -> None:
    files: list[File] = []
    places: dict[_Key, tuple[File, int]] = {}
    if stream.has_optimizer:
        placeholders: dict[_Key, Placeholder] = {}
        optimizer = _state_dict(stream, _placeholder_maker(stream, placeholders), by_name=False)
        file, offsets = write_structure(backend, f"{path}/{OPTIMIZER_PT}", optimizer)
        files.append(file)
        places = {key: (file, offsets[tensor]) for key, tensor in placeholders.items()}
    with _synced(files), _array_files(backend, stream, path, [MASTER]) as masters:
        names = peft_names((tensor.name, tensor.aliases) for tensor in stream.layout.model)
        if names is None:
            _copy_model(backend, stream, f"{path}/{MODEL_NAME}")
        else:
            _export_peft(backend, stream, path, names)
        _write_state(stream, {**places, **masters})


def _export_peft(backend: Backend, stream: CheckpointStream, path: str, names: PeftNames) -> None:
    """Write a model with an adapter of peft: the model, and the adapter in a folder of its own.

    The adapter's config may not lie beside the model: ``from_pretrained`` would look at it.
    """
    backend.make_dir(f"{path}/{ADAPTER_FOLDER}")
    places: dict[str, tuple[File, int]] = {}
    files: list[File] = []
    with _synced(files):
        for file_name, renamed in (
            (MODEL_NAME, names.base),
            (f"{ADAPTER_FOLDER}/{ADAPTER_MODEL_NAME}", names.adapter),
        ):
            entries = [stream.layout.model_header.entries[name] for name in renamed]
            header = build_header(
                [(renamed[e.name], e.dtype, e.shape) for e in entries], {"format": "pt"}
            )
            files.append(_create(backend, f"{path}/{file_name}", header))
            for name, new in renamed.items():
                places[name] = (files[-1], header.data_start + header.entries[new].start)
        _write_model(stream, places)
    backend.sync_dir(f"{path}/{ADAPTER_FOLDER}")


def _export_safetensors(backend: Backend, stream: CheckpointStream, path: str) -> None:
    arrays = dict.fromkeys(
        name for i in range(len(stream.layout.parameters)) for name in stream.exported_arrays(i)
    )
    names = {p.name: stream.scalars(i) for i, p in enumerate(stream.layout.parameters)}
    document = {
        "optimizer": stream.manifest.optimizer,
        "step": stream.manifest.step,
        "param_groups": [
            {**encode_group(i, group), "params": group["param_names"]}
            for i, group in enumerate(stream.groups())
        ],
        "state": {
            name: {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            for index, (name, values) in enumerate(names.items())
            if stream.stored_scalars[index] is not None
        },
    }
    text = json.dumps(document, indent=1).encode()
    file = backend.create(f"{path}/{OPTIMIZER_JSON}", len(text))
    with _synced([file]):
        file.write_bytes(text, 0)
    with _array_files(backend, stream, path, list(arrays)) as places:
        _copy_model(backend, stream, f"{path}/{MODEL_NAME}")
        _write_state(stream, places)


def _state_dict(
    stream: CheckpointStream, make: Callable[[int, str], Any], *, by_name: bool
) -> dict[str, Any]:
    """Return torch's state dict, whose tensors are the results of `make`."""
    _require_stepped(stream)
    groups = stream.groups()
    numbers: dict[str, Any] = {
        name: name if by_name else number
        for group in groups
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    state = {}
    for index, spec in enumerate(stream.layout.parameters):
        if spec.name not in numbers:
            continue  # a parameter in no group cannot be in torch's state dict
        entry = stream.scalars(index)
        entry.update({n: make(index, n) for n in stream.exported_arrays(index) if n != MASTER})
        if entry:
            state[numbers[spec.name]] = entry
    counted = {} if by_name else {NUM_STEPS: stream.manifest.step}
    if by_name:
        for group in groups:
            group["params"] = group.pop("param_names")
    order = {number: position for position, number in enumerate(numbers.values())}
    state = {key: state[key] for key in sorted(state, key=order.__getitem__)}
    return {"state": state, "param_groups": groups, **counted}


def _require_stepped(stream: CheckpointStream) -> None:
    """Refuse an Adagrad with parameters that were never stepped.

    torch's Adagrad makes all state in its constructor, so it cannot load a dict that lacks some.
    """
    if not stream.manifest.optimizer.endswith(".Adagrad"):
        return
    for spec, scalars in zip(stream.layout.parameters, stream.stored_scalars, strict=True):
        if scalars is None:
            raise MismatchError(
                f"{spec.name!r} has never been stepped, and torch's Adagrad cannot load a state "
                "dict without its state: use full_state_dict() of the optimizer instead"
            )


def _placeholder_maker(
    stream: CheckpointStream, placeholders: dict[_Key, Placeholder]
) -> Callable[[int, str], Placeholder]:
    def make(index: int, name: str) -> Placeholder:
        """Return the placeholder of a parameter's state array, made at the first call."""
        placeholder = Placeholder(stream.layout.parameters[index].shape, torch.float32)
        return placeholders.setdefault((index, name), placeholder)

    return make


def _masters(
    stream: CheckpointStream, placeholders: dict[_Key, Placeholder]
) -> dict[int, Placeholder]:
    make = _placeholder_maker(stream, placeholders)
    indices = {p.name: i for i, p in enumerate(stream.layout.parameters)}
    return {
        number: make(indices[name], MASTER)
        for group in stream.groups()
        for number, name in zip(group["params"], group["param_names"], strict=True)
        if name in indices and MASTER in stream.exported_arrays(indices[name])
    }


@contextmanager
def _synced(files: Sequence[File]) -> Iterator[None]:
    """Sync files at the end of the block, and close them; more may be added within the block."""
    try:
        yield
        for file in files:
            file.sync()
    finally:
        for file in files:
            file.close()


@contextmanager
def _array_files(
    backend: Backend, stream: CheckpointStream, path: str, names: list[str]
) -> Iterator[dict[_Key, tuple[File, int]]]:
    """Make a safetensors file for each state array.

    Files are synced and closed at the end of the block.
    """
    parameters = stream.layout.parameters
    places: dict[_Key, tuple[File, int]] = {}
    files: list[File] = []
    with _synced(files):
        for array in names:
            have = [i for i in range(len(parameters)) if array in stream.exported_arrays(i)]
            if not have:
                continue
            header = build_header(
                [(parameters[i].name, "F32", parameters[i].shape) for i in have], {"format": "pt"}
            )
            files.append(_create(backend, f"{path}/{array_file_name(array)}", header))
            for i in have:
                start = header.data_start + header.entries[parameters[i].name].start
                places[i, array] = (files[-1], start)
        yield places


def _create(backend: Backend, path: str, header: Header) -> File:
    file = backend.create(path, header.file_bytes)
    try:
        file.write_bytes(header.encoded, 0)
    except BaseException:
        file.close()
        raise
    return file


def _copy_model(backend: Backend, stream: CheckpointStream, path: str) -> None:
    header = stream.layout.model_header
    file = _create(backend, path, header)
    with _synced([file]):
        for start, data in stream.model_blocks():
            file.write_bytes(data, header.data_start + start)


def _write_model(stream: CheckpointStream, places: Mapping[str, tuple[File, int]]) -> None:
    """Write each tensor of the model to its file, at its offset in bytes."""
    entries = [e for e in stream.layout.model_header.entries.values() if e.nbytes]
    for start, data in stream.model_blocks():
        stop = start + len(data)
        for entry in entries:
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first < last:
                file, at = places[entry.name]
                file.write_bytes(data[first - start : last - start], at + first - entry.start)


def _write_state(stream: CheckpointStream, places: Mapping[_Key, tuple[File, int]]) -> None:
    if not stream.has_optimizer:
        return
    for index, start, values in stream.blocks():
        for name, block in values.items():
            if (index, name) in places:
                file, at = places[index, name]
                write_tensor(file, at + 4 * start, block)
