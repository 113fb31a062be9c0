"""Train states of several ranks in one file: each rank's own value, in the order of the ranks.

Random states and samplers differ between the ranks of one run, so a checkpoint of several ranks
keeps the train state of each. The JSON of such a file is the tag ``ranks`` with one item per rank.
The tensors of rank r are stored as ``rank.<r>.<name>``, where the rank's own item calls them
``<name>``. `offload.format.train_state` describes everything else about the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.format._train_state_encode import dump_json
from offload.format._train_state_leaves import TAG_KEY, StoredTensor, short
from offload.format.errors import TrainStateFormatError
from offload.format.strict_json import parse_json
from offload.format.train_state import EncodedState

MAX_RANKS = 4096
"""Largest number of ranks whose train states one file may have."""

_TAG = "ranks"
_OPENING = dump_json({TAG_KEY: _TAG, "items": []})[:-2]


def join_ranks(states: Sequence[EncodedState]) -> EncodedState:
    """Return one encoded state that holds the states of all ranks.

    Args:
        states: State of each rank, in the order of the ranks; at least one, at most `MAX_RANKS`.

    Raises:
        ValueError: The number of states is out of range.
    """
    if not 1 <= len(states) <= MAX_RANKS:
        raise ValueError(f"{len(states)} train states, expected 1 to {MAX_RANKS}, one per rank")
    tensors = {
        f"rank.{rank}.{name}": tensor
        for rank, state in enumerate(states)
        for name, tensor in state.tensors.items()
    }
    return EncodedState(f"{_OPENING}{','.join(state.json for state in states)}]}}", tensors)


def split_ranks(encoded: EncodedState) -> tuple[EncodedState, ...]:
    """Return the state of each rank; a state that `join_ranks` has not made is that of one rank.

    Raises:
        TrainStateFormatError: `join_ranks` does not return such a state.
    """
    if not encoded.json.startswith(_OPENING):
        return (encoded,)
    try:
        tree = parse_json(encoded.json.encode(), max_values=None)
    except ValueError as error:
        raise TrainStateFormatError(f"train_state: not JSON: {error}") from error
    items = tree["items"]
    if tree.keys() != {TAG_KEY, "items"} or not isinstance(items, list) or not items:
        raise TrainStateFormatError("train_state: not the states of several ranks")
    if len(items) > MAX_RANKS:
        raise TrainStateFormatError(
            f"train_state: {len(items)} ranks, expected {MAX_RANKS} at most"
        )
    tensors: list[dict[str, StoredTensor]] = [{} for _ in items]
    for stored_name, tensor in encoded.tensors.items():
        prefix, _, rest = stored_name.partition(".")
        number, _, name = rest.partition(".")
        rank = int(number) if number.isdecimal() and len(number) <= len(str(MAX_RANKS)) else -1
        if prefix != "rank" or not 0 <= rank < len(items) or str(rank) != number or not name:
            raise TrainStateFormatError(
                f"train_state: the stored tensor {short(stored_name)} belongs to no rank"
            )
        tensors[rank][name] = tensor
    return tuple(
        EncodedState(dump_json(item), own) for item, own in zip(items, tensors, strict=True)
    )
