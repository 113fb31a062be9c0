"""Reports: what each rank says of its part of a checkpoint, and whether all say the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from offload.distributed.agreement.peers import (
    Json,
    Peers,
    decode,
    encode,
    in_words,
    names,
)
from offload.errors import SealError
from offload.format._layout_fields import encode_scalars
from offload.format._manifest_fields import TENSOR_KINDS
from offload.format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank says when its part of a checkpoint is durable, or cannot be made durable."""

    step: int
    generation: int
    hyper_digest: str = ""
    """Digest of the hyper-parameters of all groups."""

    model_digest: str = ""
    """Digest of the header of the whole model: its tensors with their names, dtypes and shapes."""

    part: str = ""
    """Name of the part that the rank has written; empty if it has none."""

    table_digest: str = ""
    """Digest of the part's table, which the manifest will hold."""

    replicas: Json = field(default_factory=list)
    """Digests of the values that other ranks hold as well; see `differing`."""

    extra: Json = None
    """What else the writer needs of a part: its reference, the train state, the scalar state."""

    error: str = ""
    """Why the part is not durable, in words; empty if it is."""

    def encode(self) -> str:
        """Return the report as a message."""
        return encode("report", asdict(self))

    @classmethod
    def decode(cls, text: str, sender: str) -> Report:
        """Return the report in the message of a rank, which is named in words."""
        return cls(**decode(text, "report", sender))


_SAME = (
    ("step", "the number of optimizer steps", "call step() equally often on all ranks"),
    ("generation", "the generation of the state", "restart the job"),
    (
        "hyper_digest",
        "the hyper-parameters",
        "set learning rates and other values of param_groups alike on all ranks",
    ),
    (
        "model_digest",
        "the names, dtypes or shapes of the model's tensors",
        "build the same model on all ranks, with the same buffers",
    ),
)
"""Fields that are the same on all ranks, each in words, and what to do if they are not."""


def disagreement(
    peers: Peers,
    reports: Mapping[int, Report],
    refused: Mapping[int, str],
    begun: Collection[int],
    lost: Collection[int] = (),
    left: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return why a checkpoint must not be made of some reports, in words; empty if it may."""
    missing = {*range(peers.size)} - reports.keys() - refused.keys()
    missing = missing & {*lost} or missing
    problems = [refused[rank] for rank in sorted(refused)]
    problems += [
        f"{peers.name(rank)}: {report.error}"
        for rank, report in sorted(reports.items())
        if report.error
    ]
    if left:
        problems.append(in_words(left))
        missing -= left.keys()
    if absent := missing - {*begun}:
        problems.append(
            f"{names(absent)} did not call checkpoint() within {peers.timeout_s:g} s: call it on "
            "every rank"
        )
    if silent := missing & {*begun}:
        problems.append(
            f"{names(silent)} called checkpoint(), but gave no sign of progress for "
            f"{peers.timeout_s:g} s before reporting a durable part"
        )
    own = reports[peers.rank]
    well = {rank: report for rank, report in reports.items() if not report.error}
    if peers.rank in well:
        for name, what, remedy in _SAME:
            value = getattr(own, name)
            other = {rank for rank, one in well.items() if getattr(one, name) != value}
            if other:
                shown = f" ({_values(well, name, other, value)})" if type(value) is int else ""
                differ = "differs" if len(other) == 1 else "differ"
                problems.append(
                    f"{names(other)} {differ} from rank {peers.rank} in {what}{shown}: {remedy}"
                )
    if words := differing({rank: report.replicas for rank, report in well.items()}):
        problems.append(words)
    return "; ".join(problems)


def differing(said: Mapping[int, Json]) -> str:
    """Return which parameters differ between ranks that hold the same part of them, in words.

    Each rank says the name, the first rank that holds the same part, and a digest of the values.
    """
    first: dict[tuple[str, int], tuple[int, str]] = {}
    found: dict[str, tuple[int, set[int]]] = {}
    for rank, values in sorted(said.items()):
        for name, holder, digest in values:
            other, expected = first.setdefault((name, holder), (rank, digest))
            if digest != expected:
                found.setdefault(name, (other, set()))[1].add(rank)
    if not found:
        return ""
    name, (other, ranks) = next(iter(found.items()))
    more = f" (one of {len(found)} parameters)" if len(found) > 1 else ""
    return (
        f"parameter {name!r}{more} has other values on {names(ranks)} than on rank {other}: "
        "broadcast those of one rank, or call restore() on every rank. Parameters that all ranks "
        "hold are stepped and stored once, so they must be the same. Those that are meant to "
        "differ need an optimizer of each rank (process_group=offload.SEPARATE). Without model=, "
        "ranks must give their parameters in the same order"
    )


def _values(reports: Mapping[int, Report], name: str, other: Collection[int], value: object) -> str:
    found = sorted({getattr(reports[rank], name) for rank in other})
    shown = ", ".join(map(str, found[:3])) + (", ..." if len(found) > 3 else "")
    return f"{shown} instead of {value}"


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

    With replicas, all ranks agree before each step on the parameters that they step. With shards
    alone nothing is sent in a step, so a gradient that is missing on one rank is found here. Values
    count, and not whether a 0-d tensor has FP32 or FP64: torch makes a step count in FP64
    where FP64 is the default dtype, and a default dtype is a rank's own.
    """
    distinct: dict[tuple[int, int, str], tuple[int, Json]] = {}
    for rank, runs in sorted(said.items()):
        for first, last, value in runs:
            distinct.setdefault((first, last, _untyped(value)), (rank, value))
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


def _untyped(encoded: Json) -> str:
    """Return the scalar state of a parameter as text, in which tensors have no dtype."""
    if encoded is None:
        return ""
    return repr(
        [(name, "tensor" if kind in TENSOR_KINDS else kind, v) for name, kind, v in encoded]
    )
