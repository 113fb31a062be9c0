"""Reports: what each rank says of its part of a checkpoint, and whether all say the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
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
    """Return why a checkpoint must not be made of some reports, in words; empty if it may.

    Args:
        peers: All ranks.
        reports: Report of each rank from which one came.
        refused: Reason for each rank whose report cannot be read.
        begun: Ranks that have called ``checkpoint()``, as far as it is known.
        lost: Ranks that were waited for in vain. Further ranks may have no report yet.
        left: Those of them that have said that they leave, each with the reason.
    """
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
        for field, what, remedy in _SAME:
            value = getattr(own, field)
            other = {rank for rank, one in well.items() if getattr(one, field) != value}
            if other:
                shown = f" ({_values(well, field, other, value)})" if type(value) is int else ""
                differ = "differs" if len(other) == 1 else "differ"
                problems.append(
                    f"{names(other)} {differ} from rank {peers.rank} in {what}{shown}: {remedy}"
                )
    return "; ".join(problems)


def _values(
    reports: Mapping[int, Report], field: str, other: Collection[int], value: object
) -> str:
    found = sorted({getattr(reports[rank], field) for rank in other})
    shown = ", ".join(map(str, found[:3])) + (", ..." if len(found) > 3 else "")
    return f"{shown} instead of {value}"
