"""The manifest: everything about a checkpoint that its tensor files do not say themselves.

It is padded to a size that is reserved when the slot is made, so that writing it never needs disk
space. Even with a valid digest it is not trusted: every field is validated before anything is
allocated from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gds import ALIGNMENT
from offload.errors import ManifestError, OffloadError
from offload.format import _manifest_fields as fields
from offload.format import document
from offload.format._layout_fields import (
    Digests,
    Scalars,
    decode_dropped,
    decode_state,
    encode_state,
)
from offload.format._manifest_fields import decode_group as decode_group
from offload.format._manifest_fields import encode_group as encode_group
from offload.format.boxes import Box
from offload.format.digests import MODEL_BLOCK_BYTES
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.metrics import check_metrics
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME
from offload.format.part_file import PartReference, SealedPart, content_digest
from offload.format.shares.owners import (
    ModelBox,
    OwnerReference,
    decode_model_boxes,
    decode_references,
    encode_model_boxes,
    encode_references,
    model_box_bytes,
    parameter_boxes,
    reference_bytes,
)
from offload.format.strict_json import MAX_VALUES, short

MAX_MANIFEST_BYTES = 128 << 20
"""Largest size of a manifest in bytes, padding included. A larger file is refused unread, and none
is written."""

_MAX_SHARES = 1 << 16
"""Largest sum of the drives' shares. A larger sum would only take more time to deal out chunks."""

MAX_DIRECTORIES = 64
"""Largest number of directories of a store. A reader builds a header of 4096 bytes or more for each
directory and each state array."""

_GROUP_RESERVE_BYTES = 16 << 10
"""Bytes reserved for each parameter group, and once more for the fields that occur only once."""

_SCALAR_RESERVE_BYTES = 40
"""Bytes reserved for one scalar of a parameter's state."""

_PART_RESERVE_BYTES = 25 << 10
"""Bytes reserved for the reference to a part. Its path may have 4096 bytes, and JSON may need six
characters for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of one checkpoint. It is written last, so a checkpoint with one is complete."""

    store_id: str
    """32 hexadecimal digits that name the store, the same in all its checkpoints."""

    generation: int
    """Counter of the store; the checkpoint with the highest generation is the newest."""

    step: int

    created: str
    """ISO 8601 time at which the seal began. Only `EverySeconds` bases decisions on it."""

    torch_version: str

    optimizer: str
    """Qualified name of the wrapped optimizer class; empty if no optimizer has seen the weights."""

    groups: tuple[Mapping[str, Any], ...]
    """Hyper-parameters of each parameter group, by name; none in weights that were imported alone.
    Every optimizer has a group."""

    layout: Layout

    scalars: Scalars
    digests: Digests

    model_digests: tuple[str, ...]
    """Digest of each `MODEL_BLOCK_BYTES` of ``model.safetensors`` data; empty if there are
    `owners`."""

    parts: tuple[PartReference, ...] = ()
    """References to the state on each drive but the first, in the order of the drives."""

    owners: tuple[OwnerReference, ...] = ()
    """References to the state of each owner but the first, by rising number of the owner. `layout`,
    `scalars` and `digests` describe the state of owner 0 only, if there are others."""

    model_boxes: tuple[ModelBox, ...] = ()
    """Boxes of the model's tensors that owner 0 has written; empty if there are no `owners`."""

    order: tuple[tuple[int, ...], ...] | None = None
    """Parameters of each parameter group, as positions in `Layout.model`, in the order in which the
    optimizer got them. torch's state dicts number parameters in this order. None if the order is
    not known."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics from the caller, by name; finite."""

    update_code: str = ""
    """Code that updated the state last, for people; empty if it is not known."""

    dropped_arrays: tuple[str, ...] = ()
    """Names of the state arrays that the checkpoint was sealed with and has given up. If there are
    any, it has parameters only: `layout` has no state array, and no parameter has scalar state."""

    @property
    def has_state(self) -> bool:
        """Whether the checkpoint has the optimizer's state, so that a run can go on from it."""
        return not self.dropped_arrays

    @property
    def is_untrained(self) -> bool:
        """Whether no optimizer has seen the weights, so that any may begin with them."""
        return not self.groups

    @property
    def can_drop_state(self) -> bool:
        """Whether there are state arrays to give up, which need not stay for the model."""
        # If several ranks made the checkpoint, the tables of its owners have digests of the model.
        return bool(self.layout.array_names) and not self.owners

    def without_state(self) -> Manifest:
        """Return the manifest of the same checkpoint without its state, for `can_drop_state`.

        Digests of the model and the train state stay valid, because step and generation stay.
        """
        bare = tuple(replace(spec, arrays=()) for spec in self.layout.parameters)
        return replace(
            self,
            layout=replace(self.layout, parameters=bare, shares=(1,)),
            scalars=(None,) * len(bare),
            digests={},
            parts=(),
            dropped_arrays=self.layout.array_names,
        )

    @property
    def digest(self) -> str:
        """Digest of all fields. Two manifests with the same digest have the same content."""
        return document.digest_of(self._body())

    def encode(self, reserved_bytes: int) -> bytes:
        """Return the file's content, padded to exactly `reserved_bytes`.

        Raises:
            OffloadError: The content is larger than `reserved_bytes` or than readers accept, or
                `generation` or `step` is out of range.
            TypeError: A hyper-parameter cannot be stored as JSON. The message names it.
        """
        numbers = (self.generation, self.step)
        if min(numbers) < 0 or max(numbers) > fields.MAX_COUNT:
            raise OffloadError(
                f"generation {self.generation}, step {self.step}: both must be from 0 to "
                f"{fields.MAX_COUNT}, and no training reaches that. An older checkpoint of this "
                "store has such a number, so it is damaged or forged: remove it, and continue "
                "from another one."
            )
        return document.encode(
            self._body(),
            reserved_bytes,
            "the manifest",
            or_do="train fewer and larger parameters",
            why=" when the store was laid out; parameter groups have gained large "
            "hyper-parameters. Keep such values in train_state instead.",
        )

    def _body(self) -> dict[str, Any]:
        layout = self.layout
        state = encode_state(layout, self.scalars, self.digests)
        body: dict[str, Any] = {
            "store_id": self.store_id,
            "generation": self.generation,
            "step": self.step,
            "created": self.created,
            "torch_version": self.torch_version,
            "optimizer": self.optimizer,
            "groups": [encode_group(i, group) for i, group in enumerate(self.groups)],
            "chunk_elements": state["chunk_elements"],
            "state_dtype": state["state_dtype"],
            "shares": list(layout.shares),
            "arrays": state["arrays"],
            "parameters": state["parameters"],
            "model": [[t.name, t.dtype, list(t.shape), list(t.aliases)] for t in layout.model],
            "scalars": state["scalars"],
            "model_block_bytes": MODEL_BLOCK_BYTES,
            "digests": state["digests"],
            "model_digests": list(self.model_digests),
            "parts": [asdict(part) for part in self.parts],
        }
        if self.owners:
            body["owners"] = encode_references(self.owners)
            body["model_boxes"] = encode_model_boxes(self.model_boxes)
            del body["model_digests"]
            if layout.shard is not None:
                body["model_file"] = layout.model_name
        if self.order is not None:
            body["order"] = [list(group) for group in self.order]
        if self.metrics:
            body["metrics"] = dict(self.metrics)
        if self.update_code:
            body["update_code"] = self.update_code
        if self.dropped_arrays:
            body["dropped_arrays"] = list(self.dropped_arrays)
        return body


def _parameter_bytes(parameter: ParameterSpec) -> int:
    """Return the number of bytes to reserve for what the manifest says of a parameter."""
    arrays = sum(len(json.dumps(array)) + 2 for array in parameter.arrays)
    # 160 bytes are enough for names of arrays that are as long as those of torch's own optimizers.
    return 3 * len(json.dumps(parameter.name)) + max(160, 40 + arrays)


def reserved_bytes(layout: Layout, num_groups: int, owners: Sequence[str] = ()) -> int:
    """Return the size to reserve for the manifest of a layout, in bytes; a multiple of 4096."""
    names = sum(_parameter_bytes(p) for p in layout.parameters)
    names += sum(
        2 * len(json.dumps(t.name)) + 100 + sum(len(json.dumps(a)) for a in t.aliases)
        for t in layout.model
    )
    # An update rule keeps at most a handful of scalars per parameter (three in torch 2.13's ASGD).
    scalars = 4 * _SCALAR_RESERVE_BYTES * len(layout.parameters)
    digests = 20 * layout.num_chunks * max(1, len(layout.array_names))
    digests += 20 * num_model_blocks(layout)
    parts = _PART_RESERVE_BYTES * (len(layout.shares) - 1)
    if owners:
        parts += reference_bytes(owners) + _model_box_bytes(layout)
        parts += sum(70 * (len(p.shape) + 1) for p in layout.parameters if p.cut is not None)
    total = names + scalars + digests + parts + _GROUP_RESERVE_BYTES * (num_groups + 1)
    values = _least_values(layout)
    if values > MAX_VALUES:
        raise OffloadError(
            f"the manifest of {len(layout.parameters)} parameters in {layout.num_chunks} chunks "
            f"would have {values} values, at most {MAX_VALUES} are read: raise "
            "Options(chunk_bytes=)"
        )
    if total > MAX_MANIFEST_BYTES:
        raise OffloadError(
            f"the manifest of {len(layout.parameters)} parameters in {layout.num_chunks} chunks "
            f"could take {total} bytes, at most {MAX_MANIFEST_BYTES} are read: raise "
            "Options(chunk_bytes=)"
        )
    return -(-total // ALIGNMENT) * ALIGNMENT


def _least_values(layout: Layout) -> int:
    """Return a lower bound of the values in a layout's manifest, as `num_marks` counts them."""
    parameters = sum(10 + len(p.shape) + len(p.arrays) for p in layout.parameters)
    model = sum(7 + len(t.shape) + len(t.aliases) for t in layout.model)
    return parameters + model + layout.num_chunks * len(layout.array_names)


def _model_box_bytes(layout: Layout) -> int:
    """Return the bytes to reserve for boxes of any tensors that owner 0 may write."""
    boxes = [(t.name, Box.whole(t.shape), DTYPE_BYTES[t.dtype]) for t in layout.model]
    dtypes = {p.name: DTYPE_BYTES[p.dtype] for p in layout.parameters}
    boxes += [(name, box, dtypes[name]) for name, box in parameter_boxes(layout)]
    return model_box_bytes(boxes)


def num_model_blocks(layout: Layout) -> int:
    """Return the number of digests that cover the data of ``model.safetensors``."""
    header = layout.model_header
    return -(-(header.file_bytes - header.data_start) // MODEL_BLOCK_BYTES)


def invalid_manifest(size_bytes: int) -> bytes:
    """Return the content of the file while its slot is being rewritten; readers refuse it."""
    return document.invalid("this slot is being rewritten", size_bytes)


def decode(data: bytes, path: str) -> Manifest:
    """Decode the content of a manifest. The data is not trusted.

    Args:
        data: Content of the file; its padding is optional.
        path: Path of the file, for messages.

    Raises:
        ManifestError: The data is not a manifest, is damaged, of another version, or contradictory.
    """
    with document.decoding(path, ManifestError, "withdrawn"):
        return _decode_body(document.read_long(data, "a manifest"))


def _decode_body(body: Mapping[str, Any]) -> Manifest:
    store_id, generation = fields.store_id(body["store_id"]), fields.count(body["generation"])
    groups = fields.each(lambda group: decode_group(fields.mapping(group)), body["groups"])
    shares = fields.shape(body["shares"])
    if not 1 <= len(shares) <= MAX_DIRECTORIES or 0 in shares or sum(shares) > _MAX_SHARES:
        raise ValueError(f"shares are {short(body['shares'])}")
    layout, scalars, digests = decode_state(body, _decode_model(body), shares, len(groups))
    if layout.model_header.file_bytes > fields.MAX_COUNT:
        raise ValueError("the model's tensors take more bytes than any file has")
    owners: tuple[OwnerReference, ...] = ()
    model_boxes: tuple[ModelBox, ...] = ()
    model_digests: tuple[str, ...] = ()
    if "owners" in body:
        if shares != (1,):
            raise ValueError(f"shares are {shares}, and an owner has one directory")
        owners = decode_references(body["owners"], generation)
        layout, model_boxes = decode_model_boxes(body, layout, 0)
    elif "model_file" in body or any(p.cut is not None for p in layout.parameters):
        raise ValueError("it has boxes of parameters or a shard file, and 'owners' is missing")
    else:
        model_digests = fields.each(fields.digest, body["model_digests"])
        if len(model_digests) != num_model_blocks(layout):
            raise ValueError("there is not one digest for each block of the model file")
    parts = fields.each(lambda part: fields.part(part, generation), body["parts"])
    if len(parts) != len(layout.shares) - 1:
        raise ValueError(f"{len(parts)} parts for {len(layout.shares)} directories")
    expected = [
        SealedPart(store_id, generation, drive, content_digest(layout, digests, drive)).digest
        for drive in range(1, len(layout.shares))
    ]
    if [part.digest for part in parts] != expected:
        raise ValueError("the parts on other drives are not those of its digests")
    dropped = decode_dropped(body.get("dropped_arrays", []))
    if dropped and (owners or layout.array_names or any(s is not None for s in scalars)):
        raise ValueError(f"it has given up {short(dropped)}, and has state or owners")
    order = body.get("order")
    if order is not None:
        order = fields.each(fields.shape, order)
        if len(order) != len(groups) or any(
            position >= len(layout.model) for group in order for position in group
        ):
            raise ValueError("the order of parameters is not that of its groups")
    return Manifest(
        store_id=store_id,
        generation=generation,
        step=fields.count(body["step"]),
        created=fields.time(body["created"]),
        torch_version=fields.label(body["torch_version"]),
        optimizer=fields.label(body["optimizer"]),
        groups=groups,
        layout=layout,
        scalars=scalars,
        digests=digests,
        model_digests=model_digests,
        parts=parts,
        owners=owners,
        model_boxes=model_boxes,
        metrics=check_metrics(body.get("metrics", {})),
        order=order,
        update_code=fields.label(body.get("update_code", "")),
        dropped_arrays=dropped,
    )


def _decode_model(body: Mapping[str, Any]) -> tuple[ModelTensor, ...]:
    model = tuple(
        ModelTensor(
            fields.text(name), fields.dtype(dtype), fields.shape(shape), fields.names(aliases)
        )
        for name, dtype, shape, aliases in map(fields.items, fields.items(body["model"]))
    )
    if body["model_block_bytes"] != MODEL_BLOCK_BYTES:
        raise ValueError(f"model_block_bytes is {short(body['model_block_bytes'])}")
    return model


def slot_sizes(
    layout: Layout, num_groups: int, *, train_state_bytes: int, owners: Sequence[str] = ()
) -> dict[str, int]:
    """Return the size in bytes of every file of a slot, by name.

    Args:
        layout: Layout of the slot.
        num_groups: Number of parameter groups, which the manifest holds.
        train_state_bytes: Bytes reserved for the train state.
        owners: For each owner but the first, the store's directory on its node; see
            `offload.format.manifest.reserved_bytes`.
    """
    return {
        **layout.file_sizes(),
        TRAIN_STATE_NAME: train_state_bytes,
        MANIFEST_NAME: reserved_bytes(layout, num_groups, owners),
    }
