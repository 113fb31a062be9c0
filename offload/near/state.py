"""Whole state that crosses on request, for torch's state dicts: tensor by tensor, in blocks.

To read it, a client asks once, and the blocks of all tensors follow. To replace it, a client says
what it has, and the server asks for one block after another. Neither end holds more than a block
besides what the user holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.engine.training_state import Groups
from offload.exchange.torch_dicts import (
    HeldParameter,
    MaterializedState,
    load_groups,
    read_state_dict,
    stated_steps,
)
from offload.format._layout_fields import decode_scalars, encode_scalars
from offload.format._manifest_fields import count, each, items, text
from offload.format.arrays import MASTER
from offload.format.layout import Layout
from offload.model.parameters import Trainable
from offload.near.link import Link
from offload.near.terms import encode_groups
from offload.near.wire import Kind
from offload.update.coding.decoder import STATE_BLOCK_ELEMENTS, has_master, kept_arrays
from offload.update.coding.filler import TensorSource
from offload.update.dtypes import DTYPE_CODES
from offload.update.kept_state import Scalars
from offload.update.rules import UpdateRule


def held_arrays(layout: Layout, index: int, scalars: Scalars | None) -> tuple[str, ...]:
    """Return the arrays of a parameter's state, in the order in which they cross."""
    spec = layout.parameters[index]
    kept = () if scalars is None else kept_arrays(spec, layout)
    return (MASTER, *kept) if has_master(spec) else kept


def receive_state(
    link: Link, groups: Groups, rule: UpdateRule, tensors: Sequence[torch.Tensor]
) -> MaterializedState:
    """Receive the present state into memory; see `OffloadedOptimizer.materialized`.

    Raises:
        NearError: The server is lost.
        OffloadError: The error of the server.
    """
    link.push()
    with link.calling("state") as (wire, number):
        result = link.result(wire, number)
        with link.understood():
            parts = link.learn(result)
            layout, numbers = parts.layout, parts.numbers
            scalars = decode_scalars(result["scalars"], len(numbers))
            group_of = {id(p): n for n, group in enumerate(groups) for p in group["params"]}
            held = [
                HeldParameter(
                    spec.name,
                    tensors[n],
                    group_of[id(tensors[n])],
                    known,
                    kept_arrays(spec, layout),
                )
                for spec, n, known in zip(layout.parameters, numbers, scalars, strict=True)
            ]
        found = MaterializedState(held, [rule.initial_state(group) for group in groups])
        arrays = [held_arrays(layout, index, known) for index, known in enumerate(scalars)]
        index_of = {n: index for index, n in enumerate(numbers)}
        starts = [0] * len(numbers)
        left = sum(p.num_elements for p, a in zip(layout.parameters, arrays, strict=True) if a)
        most = max(map(len, arrays), default=0)
        memory = torch.empty(most, STATE_BLOCK_ELEMENTS, dtype=torch.float32, device="cpu")
        while left:
            frame = link.frame(wire, number, Kind.TENSOR)
            with link.understood():
                index = index_of[frame.index]
                names, spec, start = arrays[index], layout.parameters[index], starts[index]
                size = frame.nbytes // 4 // max(len(names), 1)
                if not names or size > min(spec.num_elements - start, STATE_BLOCK_ELEMENTS):
                    raise ValueError(f"{frame.nbytes} bytes of tensor {frame.index}")
            blocks = [row[:size] for row in memory[: len(names)]]
            wire.read_into(frame, [block.view(torch.uint8).numpy().data for block in blocks])
            values = dict(zip(names, blocks, strict=True))
            found.copy(Trainable(spec, tensors[frame.index]), start, values)
            starts[index] += size
            left -= size
    return found


def send_state(
    link: Link,
    groups: Groups,
    rule: UpdateRule,
    tensors: Sequence[torch.Tensor],
    state_dict: Mapping[str, Any],
) -> None:
    """Replace the present state; see `OffloadedOptimizer.load_state_dict`.

    Raises:
        MismatchError, ValueError: The dict is of another optimizer. Nothing has been changed.
        NearError: The server is lost.
        OffloadError: The error of the server.
    """
    steps = stated_steps(state_dict)
    merged, states = read_state_dict(state_dict, groups, rule)
    sources: dict[int, Mapping[str, TensorSource]] = {}
    described = []
    for number, tensor in enumerate(tensors):
        given = states.get(tensor)
        if given is not None:
            master = {} if given.master is None else {MASTER: given.master}
            sources[number] = {**given.arrays, **master}
            dtypes = {name: DTYPE_CODES[one.dtype] for name, one in sources[number].items()}
            described.append([number, *encode_scalars([given.scalars]), dtypes])
    link.push()
    arguments = {"groups": encode_groups(merged), "state": described, "steps": steps}
    with link.calling("load_state", **arguments) as (wire, number), link.changing():
        while (frame := link.frame(wire, number, Kind.PASS, Kind.RESULT)).kind == Kind.PASS:
            wanted = wire.read_document(frame)
            with link.understood():
                source = sources[count(wanted["tensor"])][text(wanted["array"])]
                start, stop = each(count, items(wanted["range"]))
            block = source.read(start, stop).contiguous().view(torch.uint8)
            wire.send(Kind.TENSOR, number, [block.numpy().data], index=wanted["tensor"])
        link.receive_values(wire, number, link.result(wire, number, frame))
    load_groups(groups, merged, rule)
