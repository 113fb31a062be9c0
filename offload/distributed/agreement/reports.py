"""Reports: what each rank says of its part of a checkpoint, and whether all say the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from offload.distributed.agreement.leaving import in_words
from offload.distributed.agreement.messages import Json, decode, encode
from offload.distributed.agreement.peers import Peers, names

_FIELDS = {
    "step": int,
    "generation": int,
    "hyper_digest": str,
    "model_digest": str,
    "part": str,
    "table_digest": str,
    "replicas": list,
    "extra": object,
    "error": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank says when its part of a checkpoint is durable, or cannot be made durable."""

    step: int
    """Number of optimizer steps taken; the same on all ranks."""

    generation: int
    """Generation of the state; the same on all ranks."""

    hyper_digest: str = ""
    """Digest of the hyper-parameters of all groups; the same on all ranks."""

    model_digest: str = ""
    """Digest of the header of the whole model: its tensors with their names, dtypes and shapes; the
    same on all ranks."""

    part: str = ""
    """Name of the part that the rank has written; empty if it has none."""

    table_digest: str = ""
    """Digest of the part's table, which the manifest will hold."""

    replicas: Json = field(default_factory=list)
    """Digests of the values that other ranks hold as well; see `differing`."""

    extra: Json = None
    """Whatever else the writer needs for the manifest."""

    error: str = ""
    """Why the part is not durable, in words; empty if it is."""

    def encode(self) -> str:
        """Return the report as a message."""
        return encode("report", asdict(self))

    @classmethod
    def decode(cls, text: str, sender: str) -> Report:
        """Return the report of a message.

        Args:
            text: The message.
            sender: Rank that wrote it, in words.

        Raises:
            MessageError: It is not such a message.
        """
        return cls(**decode(text, "report", _FIELDS, sender))


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

    Args:
        said: For each rank, a list of parameters. Each has the name, the first of the ranks that
            hold the same part, and a digest of the values.

    Returns:
        An empty text if there is no difference.
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
