"""Whole state that a client asks for, or replaces; see `offload.near.state`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.engine.state_dict import read_blocks
from offload.engine.training_state import TrainingState
from offload.exchange.torch_dicts import MASTERS, NUM_STEPS
from offload.format._layout_fields import decode_scalars
from offload.format._manifest_fields import dtype, items, mapping
from offload.format.arrays import MASTER
from offload.near.chunks import ChunkParts
from offload.near.state import held_arrays
from offload.near.terms import decode_groups
from offload.near.wire import Kind, Wire
from offload.update.dtypes import DTYPES
from offload.update.kept_state import write_scalars


def state_blocks(
    state: TrainingState, parts: ChunkParts
) -> Iterator[tuple[Kind, int, list[memoryview]]]:
    """Yield the frames that have all state, block by block; each is valid until the next."""
    for index, _, values in read_blocks(state):
        names = held_arrays(parts.layout, index, state.table.scalars[index])
        blocks = [values[name].contiguous().view(torch.uint8).numpy().data for name in names]
        if blocks:
            yield Kind.TENSOR, parts.numbers[index], blocks


class ArrivingTensor:
    """A tensor of state that a client has; implements `TensorSource`."""

    def __init__(
        self, wire: Wire, call: int, place: tuple[int, str], code: str, shape: Sequence[int]
    ) -> None:
        self._wire, self._call = wire, call
        self._number, self._array = place
        self.dtype = DTYPES[code]
        self.shape = tuple(shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Ask for elements `start` to `stop`, and return them.

        Raises:
            NearError: The client is lost, or sends something else.
        """
        wanted = {"tensor": self._number, "array": self._array, "range": [start, stop]}
        self._wire.send_document(Kind.PASS, self._call, wanted)
        found = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        frame = self._wire.receive((Kind.TENSOR,), self._call)
        self._wire.read_into(frame, [found.view(torch.uint8).numpy().data])
        return found


def arriving_dict(
    document: Mapping[str, Any],
    groups: Sequence[Sequence[int]],
    source: Callable[[tuple[int, str], str], ArrivingTensor],
) -> dict[str, Any]:
    """Return the state dict that a client has announced. Reading a tensor of it asks the client.

    Args:
        document: Call of the client.
        groups: Numbers of the tensors of each parameter group.
        source: Function that returns a tensor, given its number and array, and its dtype.

    Raises:
        ValueError, TypeError, KeyError: The document is none of a client.
    """
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, ArrivingTensor] = {}
    for number, scalars, arrays in map(items, items(document["state"])):
        found = {
            name: source((number, name), dtype(code)) for name, code in mapping(arrays).items()
        }
        if MASTER in found:
            masters[number] = found.pop(MASTER)
        (known,) = decode_scalars([scalars], 1)
        if known is not None:
            state[number] = {**write_scalars(known), **found}
    hyper = decode_groups(document["groups"], len(groups))
    return {
        "state": state,
        "param_groups": [
            {**one, "params": list(members)} for one, members in zip(hyper, groups, strict=True)
        ],
        MASTERS: masters,
        NUM_STEPS: document["steps"],
    }
