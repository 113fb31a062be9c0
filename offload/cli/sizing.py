"""Command ``offload size``: disk, time, intervals and drive life of a run that is planned.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.options import Json, one_line, print_json
from offload.units import many

if TYPE_CHECKING:
    from offload.sizing import Plan

_TIMES = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_NAME_WIDTH = 30
_WIDTH = 78


def _seconds(text: str) -> float:
    """Return a time given as ``30``, ``30s``, ``5min``, ``4h`` or ``2d`` in seconds."""
    match = _TIME.fullmatch(text.lower())
    if match is None or match[2] not in _TIMES:
        raise typer.BadParameter(f"{text!r} is not a time such as 30s, 5min, 4h or 2d")
    return float(match[1]) * _TIMES[match[2]]


def _bytes(text: str) -> float:
    """Return a number of bytes given as ``80GB`` or ``256 GiB``."""
    from offload.options import parse_bytes

    try:
        return parse_bytes(text, "the size")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _shares(text: str) -> tuple[int, ...]:
    """Return the shares of the drives, given as ``1,1``."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 1,1")
    return tuple(int(part) for part in parts)


def _option(help_text: str, *, parser: Any = None) -> Any:
    """Return an option without a default, whose text `parser` reads."""
    kinds = {_seconds: "<time>", _bytes: "<size>", _shares: "<list>"}
    return typer.Option(
        help=help_text, show_default=False, parser=parser, metavar=kinds.get(parser)
    )


def register(app: typer.Typer) -> None:
    """Add the command ``size`` to the program."""

    @app.command("size")
    def size_command(
        model: Annotated[
            str,
            typer.Argument(
                help="Number of parameters (7B, 6.7e9), config.json, safetensors file, a directory "
                "with either, or a store.",
                show_default=False,
            ),
        ],
        optimizer: Annotated[str, typer.Option(help="Class of torch, such as AdamW.")] = "AdamW",
        dtype: Annotated[str, typer.Option(help="Dtype of parameters and gradients.")] = "bfloat16",
        master: Annotated[str, typer.Option(help="Options(master=).")] = "float32",
        state_dtype: Annotated[str, typer.Option(help="Options(state_dtype=).")] = "float32",
        gradient_bytes: Annotated[
            int, typer.Option(help="Bytes of a gradient in memory; 0: those of the dtype.")
        ] = 0,
        drives_from: Annotated[
            str | None, _option("Output of gds bench --json: rates of the drives.")
        ] = None,
        read: Annotated[float | None, _option("GB/s of reads from the drives of a rank.")] = None,
        write: Annotated[float | None, _option("GB/s of writes to them.")] = None,
        mixed: Annotated[
            float | None, _option("GB/s of reads and writes at once, added up.")
        ] = None,
        shares: Annotated[
            Any, _option("Shares of a rank's drives, such as 1,1.", parser=_shares)
        ] = None,
        update: Annotated[
            float | None, _option("GB/s of the update on the CPU: bytes read and written.")
        ] = None,
        link: Annotated[float | None, _option("GB/s between GPU and host, each way.")] = None,
        network: Annotated[
            float | None, _option("GB/s to a server next to the storage, each way.")
        ] = None,
        gpu_memory: Annotated[Any, _option("Memory of a GPU, as 80GB.", parser=_bytes)] = None,
        host_memory: Annotated[
            Any, _option("Memory for copies that wait for storage.", parser=_bytes)
        ] = None,
        tbw: Annotated[
            Any, _option("Bytes that the drives are rated for, as 7PB or 600TB.", parser=_bytes)
        ] = None,
        gpus: Annotated[int, typer.Option(help="Number of GPUs (ranks).")] = 1,
        tp: Annotated[int, typer.Option(help="Degree of tensor parallelism.")] = 1,
        pp: Annotated[int, typer.Option(help="Degree of pipeline parallelism.")] = 1,
        sharded: Annotated[
            bool, typer.Option("--sharded", help="The optimizer is sharded (ZeRO, FSDP).")
        ] = False,
        storage: Annotated[
            float | None, _option("GB/s of writes to shared storage, all writers.")
        ] = None,
        storage_read: Annotated[float | None, _option("GB/s of reads from it.")] = None,
        writer: Annotated[float | None, _option("Most GB/s of one writer.")] = None,
        efficiency: Annotated[
            float, typer.Option(help="Share of the storage's peak that is reached.")
        ] = 1.0,
        keep: Annotated[int, typer.Option(help="Checkpoints that are kept.")] = 2,
        every: Annotated[
            Any, _option("Time between checkpoints, as 30min or 4h.", parser=_seconds)
        ] = None,
        budget: Annotated[
            float | None, _option("Share of time that checkpoints may add, as 0.05.")
        ] = None,
        mttf: Annotated[Any, _option("Mean time to failure, as 8h.", parser=_seconds)] = None,
        stall: Annotated[
            Any, _option("Time that a seal stops training: 0.02 s.", parser=_seconds)
        ] = None,
        iteration: Annotated[
            Any, _option("Time from one optimizer step to the next.", parser=_seconds)
        ] = None,
        forward: Annotated[Any, _option("Time of a forward pass.", parser=_seconds)] = None,
        backward: Annotated[Any, _option("Time of a backward pass.", parser=_seconds)] = None,
        tokens: Annotated[float | None, _option("Tokens of the run, as 300e9.")] = None,
        tflops: Annotated[float | None, _option("TFLOPS of one GPU in training.")] = None,
        upload: Annotated[
            Any, _option("Time to copy a checkpoint to a remote tier.", parser=_seconds)
        ] = None,
        checkpoint_bytes: Annotated[
            float | None, _option("Bytes per parameter that a copying system saves.")
        ] = None,
        as_json: Json = False,
    ) -> None:
        """Compute what a run needs: disk, seconds, checkpoint intervals, drive life.

        Nothing is measured and nothing is written. Rates of drives can be measured with
        gds bench DIRECTORY --sweep rw=read,write,mixed --json.
        """
        from offload.sizing import Cluster, Machine, Precision, Run, measured_drives, size

        rates: dict[str, Any] = {} if drives_from is None else measured_drives(drives_from)
        given = {"read_gbps": read, "write_gbps": write, "mixed_gbps": mixed}
        rates |= {name: rate for name, rate in given.items() if rate is not None}
        plan = size(
            model,
            precision=Precision(
                optimizer=optimizer,
                dtype=dtype,
                master=master,  # type: ignore[arg-type]  # `Precision` checks the name
                state_dtype=state_dtype,  # type: ignore[arg-type]
                gradient_bytes=gradient_bytes,
            ),
            machine=Machine(
                **rates,
                update_gbps=update,
                link_gbps=link,
                network_gbps=network,
                gpu_memory=gpu_memory,
                host_memory=host_memory,
                drive_tbw=tbw,
            ),
            cluster=Cluster(
                gpus=gpus,
                tp=tp,
                pp=pp,
                sharded=sharded,
                storage_gbps=storage,
                storage_read_gbps=storage_read,
                writer_gbps=writer,
                efficiency=efficiency,
            ),
            run=Run(
                keep=keep,
                interval_s=every,
                budget=budget,
                mttf_s=mttf,
                **({} if stall is None else {"stall_s": stall}),
                iteration_s=iteration,
                forward_s=forward,
                backward_s=backward,
                tokens=tokens,
                tflops=tflops,
                upload_s=upload,
            ),
            shares=shares or (1,),
            checkpoint_bytes_per_parameter=checkpoint_bytes,
        )
        if as_json:
            print_json(plan.to_json())
        else:
            typer.echo("\n".join(lines(plan)))


def lines(plan: Plan) -> Iterator[str]:
    """Return the lines of a plan for people, at most 80 characters wide."""
    number = plan.num_parameters
    yield one_line(plan.source)
    yield ""
    yield _row("Bytes", "per parameter", "in all")
    memory = plan.memory
    for name, nbytes in (
        ("parameters (a seal, a resume)", plan.parameter_bytes),
        ("optimizer state (a step)", plan.state_bytes),
        ("on the GPU, all in memory", memory.in_memory * number),
        ("on the GPU, state on drives", memory.offloaded * number),
        (f"disk, {plan.disk.slots} slots", plan.disk.total_bytes),
    ):
        yield _row(name, f"{nbytes / number:.3g}", _size(nbytes))
    if len(plan.disk.on_each_drive) > 1:
        each = ", ".join(map(_size, plan.disk.on_each_drive))
        yield from _note(f"On the drives of each rank: {each}.")
    if not plan.disk.exact:
        yield from _note("Disk is data alone, without headers and manifests.")
    if memory.largest_in_memory is not None and memory.largest_offloaded is not None:
        yield from _note(
            f"The GPU's memory holds {_count(memory.largest_in_memory)} parameters with their "
            f"state, {_count(memory.largest_offloaded)} without; activations are not counted."
        )
    yield ""
    yield _row("Step, with the update on", "link B/param", "link bytes", "time", "limited by")
    for step in plan.steps:
        yield _row(
            f"the {step.place}",
            f"{step.bytes_per_parameter:.3g}",
            _size(step.link_bytes),
            _time(step.seconds),
            step.limited_by or "",
        )
    yield from _notes(plan)
    yield ""
    yield from _checkpoints(plan)
    for text in plan.remarks:
        yield ""
        yield from textwrap.wrap(text, _WIDTH)


def _notes(plan: Plan) -> Iterator[str]:
    if plan.seal_s is None and plan.resume_s is None and plan.hide_s is None:
        yield from _note("--read and --write (GB/s of the drives) give times.")
    else:
        yield from _note(
            f"A seal writes for {_time(plan.seal_s)} beside training; a resume reads for "
            f"{_time(plan.resume_s)}."
        )
    if plan.hide_s is not None:
        host = plan.steps[1].seconds
        hidden = "" if host is None else f": the step takes {_time(host)} on the host"
        yield from _note(
            f"A step can hide behind {_time(plan.hide_s)} of the model's work{hidden}."
        )
    if plan.gathered_bytes:
        gathered = _size(plan.gathered_bytes)
        yield from _note(f"With DDP, each rank receives {gathered} of parameters in a step.")
    if plan.steps_of_life is not None:
        days = "" if plan.days_of_life is None else f", {plan.days_of_life:,.0f} days"
        steps = _count(plan.steps_of_life)
        yield from _note(f"The drives last {steps} steps with a seal each{days}.")
    if plan.training_s is not None:
        yield from _note(
            f"Training computes for {plan.training_s / 86400:,.1f} days, "
            f"{plan.training_s * 4 / 3 / 86400:,.1f} with recomputation."
        )


def _checkpoints(plan: Plan) -> Iterator[str]:
    yield _row("Checkpoint", "written", "link bytes", "stall", "durable after")
    for copies in plan.copies:
        yield _row(
            copies.name,
            _size(copies.written_bytes),
            _size(copies.link_bytes),
            _time(copies.stall_s),
            _time(copies.durable_s),
        )
        if copies.fills_memory_s is not None and not math.isinf(copies.fills_memory_s):
            filled = _time(copies.fills_memory_s)
            yield from _note(f"Asynchronous copies fill the host memory after {filled}.")
    if plan.writers > 1:
        rate = "" if plan.writer_gbps is None else f" at {plan.writer_gbps:.3g} GB/s"
        yield from _note(f"{plan.writers} writers write {_size(plan.writer_bytes)} each{rate}.")
    if plan.least_gbps is not None:
        least = f"{plan.least_gbps:.4g} GB/s"
        yield from _note(f"A full copy within the budget needs {least} of storage.")
    if any(i.overhead or i.for_budget_s or i.optimal_s for i in plan.intervals):
        yield ""
        yield _row("Interval", "overhead", "for budget", "optimum", "waste at it")
        for interval in plan.intervals:
            yield _row(
                interval.name,
                _percent(interval.overhead),
                _time(interval.for_budget_s),
                _time(interval.optimal_s),
                _percent(interval.waste),
            )
    restores = plan.restores
    yield ""
    yield _row(f"Restore of {many(restores.replicas, 'replica')}", "read", "by each", "read once")
    yield _row(
        "parameters and state",
        _size(restores.each_bytes),
        _time(restores.each_s),
        _time(restores.once_s),
    )
    yield _row(
        "parameters only (here)",
        _size(restores.parameters_bytes),
        _time(restores.parameters_s),
        _time(restores.parameters_once_s),
    )


def _row(name: str, *cells: str) -> str:
    widths = (13, 11, 10, 13)
    text = "".join(
        f"{cell:>{width}}" if column < 3 else f"  {cell}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=False))
    )
    return f"{name:<{_NAME_WIDTH}}{text}".rstrip()


def _size(nbytes: float) -> str:
    for unit, factor in _BYTES:
        if nbytes >= 0.9995 * factor:
            return f"{nbytes / factor:,.1f} {unit}" if nbytes < 1e15 else f"{nbytes / 1e12:,.0f} TB"
    return f"{nbytes:.0f} B"


def _count(number: float) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number:,.0f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if math.isinf(seconds):
        return "never"
    for unit, factor in (("d", 172800.0), ("h", 7200.0), ("min", 600.0)):
        if seconds >= factor:
            return f"{seconds / _TIMES[unit]:,.1f} {unit}"
    if seconds < 1e-3:
        return "< 1 ms"
    return f"{seconds:,.1f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g} %"


def _note(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
