"""Scalar state of parameters, such as step counts, as ranks report it and compare it in a seal.

Ranks that hold shards of a parameter keep its scalar state each. With replicas, all ranks agree
before each step on the parameters that they step. With shards alone nothing is sent in a step, so a
gradient that is missing on one rank is found here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.distributed.agreement.messages import Json, MessageError
from offload.errors import SealError
from offload.format._layout_fields import encode_scalars
from offload.format._manifest_fields import TENSOR_KINDS
from offload.format.manifest import Manifest


def scalar_runs(manifest: Manifest) -> Json:
    """Return the scalar state of a rank's parameters: first and last of some with equal state.

    Parameters are counted as in the model, which all ranks count alike. The length of the result
    does not grow with the number of parameters if all of them have been stepped equally often.
    """
    places = {tensor.name: place for place, tensor in enumerate(manifest.layout.model)}
    encoded = encode_scalars(manifest.scalars)
    held = sorted(
        (places[spec.name], number)
        for number, spec in enumerate(manifest.layout.parameters)
        if spec.name in places
    )
    runs: list[list[Json]] = []
    for place, number in held:
        value = encoded[number]
        if runs and runs[-1][1] == place - 1 and runs[-1][2] == value:
            runs[-1][1] = place
        else:
            runs.append([place, place, value])
    return runs


def require_same_scalars(said: Mapping[int, Json], names: Sequence[str]) -> None:
    """Check that ranks which hold parts of the same parameter have the same scalar state of it.

    Values count, and not whether a 0-d tensor has FP32 or FP64: torch makes a step count in FP64
    where FP64 is the default dtype, and a default dtype is a rank's own.
    """
    distinct: dict[tuple[int, int, str], tuple[int, Json]] = {}
    for rank, runs in sorted(said.items()):
        try:
            for first, last, value in runs:
                distinct.setdefault((int(first), int(last), _values(value)), (rank, value))
        except (TypeError, ValueError) as error:
            raise MessageError(f"rank {rank}: the report has no scalar state: {error}") from error
    active: list[tuple[int, str, int, Json]] = []
    for (first, last, text), (rank, value) in sorted(distinct.items(), key=lambda one: one[0]):
        active = [one for one in active if one[0] >= first]
        for _, other_text, other, other_value in active:
            if other_text != text:
                raise SealError(
                    f"rank {other} and rank {rank} have stepped {names[first]!r} differently: its "
                    f"scalar state is {other_value} and {value}. Let the same parameters have "
                    "gradients on all ranks, and call restore() on every rank"
                )
        active.append((last, text, rank, value))


def _values(encoded: Json) -> str:
    """Return the scalar state of a parameter as text, in which tensors have no dtype."""
    if encoded is None:
        return ""
    return repr(
        [(name, "tensor" if kind in TENSOR_KINDS else kind, v) for name, kind, v in encoded]
    )
