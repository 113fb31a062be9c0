"""Command ``offload size``: disk, time, intervals and drive life of a run that is planned.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any

import typer

from offload.cli.options import Json, print_json
from offload.cli.sizing_lines import lines, link_lines

_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_OPTIONS = {
    "optimizer": "--optimizer",
    "dtype": "--dtype",
    "master": "--master",
    "state_dtype": "--state-dtype",
    "read_gbps": "--read",
    "write_gbps": "--write",
    "gpu_memory": "--card",
    "drive_tbw": "--tbw",
    "gpus": "--gpus",
    "keep": "--keep",
    "interval_s": "--every",
    "mttf_s": "--mttf",
}
"""Option for each field of `offload.sizing` that has one; ``--set`` gives the others."""

_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)


def _seconds(text: str) -> float:
    """Return a time given as ``30``, ``30s``, ``5min``, ``4h`` or ``2d`` in seconds."""
    match = _TIME.fullmatch(text.lower())
    if match is None or match[2] not in _TIMES:
        raise typer.BadParameter(f"{text!r} is not a time such as 30s, 5min, 4h or 2d")
    return float(match[1]) * _TIMES[match[2]]


def _bytes(text: str) -> float:
    """Return a number of bytes given as ``80GB`` or ``256 GiB``."""
    from offload.options import parse_bytes

    if text.strip().replace(".", "", 1).isdecimal():
        number = text.strip()
        raise typer.BadParameter(f"{text!r} has no unit: write {number}GB, or {number}B for bytes")
    try:
        return parse_bytes(text, "the size")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _settings(given: Iterable[str], types: dict[str, str]) -> dict[str, Any]:
    """Return the values of ``--set name=value``, given the type of each field as it is written."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if name not in types or not equals:
            raise typer.BadParameter(
                f"{one!r} is not name=value with one of: {', '.join(sorted(types))}",
                param_hint="--set",
            )
        found[name] = _value(name, text, types[name])
    return found


def _value(name: str, text: str, kind: str) -> Any:
    """Return the value of one field."""
    if name.endswith("_s"):
        return _seconds(text)
    if name.endswith("_memory"):
        return _bytes(text)
    try:
        if kind.startswith("tuple"):
            return tuple(int(part) for part in text.split(","))
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        return int(text) if kind == "int" else float(text)
    except (ValueError, KeyError) as error:
        expected = {"bool": "true or false", "int": "a whole number"}.get(kind, "a number")
        expected = "whole numbers such as 1,1" if kind.startswith("tuple") else expected
        raise typer.BadParameter(
            f"{name} is {text!r}, expected {expected}", param_hint="--set"
        ) from error


def _option(help_text: str, *, parser: Any = None) -> Any:
    """Return an option without a default, whose text `parser` reads."""
    kinds = {_seconds: "<time>", _bytes: "<size>"}
    return typer.Option(help=help_text, parser=parser, metavar=kinds.get(parser))


def _cards(incomplete: str) -> list[str]:
    """Return the names of GPUs that a shell offers, without spaces, which shells would divide."""
    from offload.sizing.hardware import CARDS

    names = [name.replace(" ", "-") for name in CARDS]
    names = [name.lower() for name in names] if incomplete.islower() else names
    return [name for name in names if name.startswith(incomplete)]


def size_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Number of parameters (7B, 6.7e9), config.json, safetensors file, a directory "
            "with either, or a store.",
        ),
    ],
    optimizer: Annotated[
        str,
        typer.Option(help="Class of torch: AdamW, 'SGD momentum'. A store has its own."),
    ] = "AdamW",
    dtype: Annotated[str, typer.Option(help="Dtype of parameters and gradients.")] = "bfloat16",
    master: Annotated[str, typer.Option(help="Options(master=).")] = "float32",
    state_dtype: Annotated[str, typer.Option(help="Options(state_dtype=).")] = "float32",
    card: Annotated[
        str | None,
        typer.Option(
            help="GPU: its name, as 'RTX 4090', or its memory, as 24GB.", autocompletion=_cards
        ),
    ] = None,
    drives_from: Annotated[
        list[str] | None,
        _option("Output of gds bench --json: rates of the drives. May be repeated."),
    ] = None,
    read: Annotated[float | None, _option("GB/s of reads from the drives of a rank.")] = None,
    write: Annotated[float | None, _option("GB/s of writes to the drives of a rank.")] = None,
    tbw: Annotated[
        Any, _option("Bytes that all drives of a rank are rated for, as 7PB.", parser=_bytes)
    ] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs (ranks).")] = 1,
    keep: Annotated[int, typer.Option(help="Number of checkpoints that are kept.")] = 2,
    every: Annotated[
        Any, _option("Time between checkpoints, as 30min or 4h.", parser=_seconds)
    ] = None,
    mttf: Annotated[Any, _option("Mean time to failure, as 8h.", parser=_seconds)] = None,
    link: Annotated[
        str | None,
        _option("Address of a run on a server: measure the link to it, for a few seconds."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another field of offload.sizing, as tp=8. May be repeated.",
            metavar="<name=value>",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute whether a model fits, and what a run needs: disk, seconds, intervals, drive life.

    Nothing is written, and nothing is measured but a --link. Rates of drives can be measured with
    gds bench DIRECTORY --sweep rw=read,write,mixed --json.
    """
    from offload.near.rate import measure_link
    from offload.sizing import Cluster, Machine, Precision, Run, measured_drives, size
    from offload.sizing.checks import FieldError
    from offload.sizing.hardware import card as card_of

    gpu = None if card is None else card_of(card)
    named = {
        "optimizer": optimizer,
        "dtype": dtype,
        "master": master,
        "state_dtype": state_dtype,
        "read_gbps": read,
        "write_gbps": write,
        "gpu_memory": gpu and gpu.memory,
        "drive_tbw": tbw,
        "gpus": gpus,
        "keep": keep,
        "interval_s": every,
        "mttf_s": mttf,
    }
    options: dict[str, Any] = {name: one for name, one in named.items() if one is not None}
    parts = (Precision, Machine, Cluster, Run)
    of_part: dict[str, Any] = {field.name: part for part in parts for field in fields(part)}
    types = {field.name: str(field.type) for part in parts for field in fields(part)}
    types |= {"shares": "tuple", "checkpoint_bytes_per_parameter": "float"}
    given = _settings(settings or (), {n: kind for n, kind in types.items() if n not in _OPTIONS})
    measured = [measured_drives(path) for path in drives_from or ()]
    rates: dict[str, Any] = {}
    for one in measured:
        rates |= {name: max(rate, rates.get(name, 0)) for name, rate in one.rates.items()}
    doubts = [doubt for one in measured for doubt in one.doubts]
    link_rates = {} if link is None else measure_link(link)
    if link_rates:
        options["network_gbps"] = link_rates["both"]
    values = rates | options | given

    def made(part: Any) -> Any:
        """Return a part of the plan with the values that are given for it."""
        return part(**{name: v for name, v in values.items() if of_part.get(name) is part})

    try:
        plan = size(
            model,
            precision=made(Precision),
            machine=made(Machine),
            cluster=made(Cluster),
            run=made(Run),
            **{name: value for name, value in given.items() if name not in of_part},
        )
    except FieldError as error:
        unset = rates.keys() - options.keys() - given.keys()
        raise error.naming(
            {name: f"--set {name}" for name in types}
            | _OPTIONS
            | {name: f"{name} of --drives-from" for name in unset}
        ) from None
    if as_json:
        more = {"card": gpu and gpu.name, "doubts": doubts, "link": link_rates or None}
        print_json(plan.to_json() | more)
    else:
        typer.echo("\n".join([*lines(plan, gpu and gpu.name, doubts), *link_lines(link_rates)]))
