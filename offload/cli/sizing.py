"""Command ``offload size``: disk, time, intervals and drive life of a run that is planned.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from offload.cli.options import Json, print_json
from offload.cli.sizing_lines import lines

_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_OPTIONS = {
    "read_gbps": "--read",
    "write_gbps": "--write",
    "mixed_gbps": "--mixed",
    "update_gbps": "--update",
    "copy_gbps": "--copy",
    "staged_read_gbps": "--staged-read",
    "staged_write_gbps": "--staged-write",
    "new_memory_gbps": "--new-memory",
    "sync_s": "--sync",
    "flush_gbps": "--flush",
    "link_gbps": "--link",
    "network_gbps": "--network",
    "drive_tbw": "--tbw",
    "storage_gbps": "--storage",
    "storage_read_gbps": "--storage-read",
    "writer_gbps": "--writer",
    "interval_s": "--every",
    "mttf_s": "--mttf",
    "stall_s": "--stall",
    "iteration_s": "--iteration",
    "forward_s": "--forward",
    "backward_s": "--backward",
    "upload_s": "--upload",
    "checkpoint_bytes_per_parameter": "--checkpoint-bytes",
} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("optimizer", "dtype", "master", "state_dtype", "gradient_bytes", "shares"),
        *("gpu_memory", "host_memory", "gpus", "tp", "pp", "efficiency"),
        *("keep", "budget", "tokens", "tflops"),
    )
}
"""Option for each field of `offload.sizing`, for messages."""

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
        optimizer: Annotated[
            str,
            typer.Option(help="Class of torch: AdamW, 'SGD momentum'. A store has its own."),
        ] = "AdamW",
        dtype: Annotated[str, typer.Option(help="Dtype of parameters and gradients.")] = "bfloat16",
        master: Annotated[str, typer.Option(help="Options(master=).")] = "float32",
        state_dtype: Annotated[str, typer.Option(help="Options(state_dtype=).")] = "float32",
        gradient_bytes: Annotated[
            int, typer.Option(help="Bytes of a gradient in memory; 0: those of the dtype.")
        ] = 0,
        drives_from: Annotated[
            list[str] | None,
            _option("Output of gds bench --json: rates of the drives. May be repeated."),
        ] = None,
        read: Annotated[float | None, _option("GB/s of reads from the drives of a rank.")] = None,
        write: Annotated[float | None, _option("GB/s of writes to the drives of a rank.")] = None,
        mixed: Annotated[
            float | None, _option("GB/s of reads and writes at once, both added up.")
        ] = None,
        shares: Annotated[
            Any, _option("Shares of a rank's drives, such as 1,1.", parser=_shares)
        ] = None,
        update: Annotated[
            float | None, _option("GB/s of the update on the CPU: bytes read and written.")
        ] = None,
        copy: Annotated[
            float | None, _option("GB/s at which one core copies and digests parameters.")
        ] = None,
        staged_read: Annotated[
            float | None,
            _option("GB/s of reads while a core digests and copies: gds bench --staged."),
        ] = None,
        staged_write: Annotated[
            float | None,
            _option("GB/s of writes while a core copies and digests: gds bench --staged."),
        ] = None,
        new_memory: Annotated[
            float | None, _option("GB/s at which the kernel makes new memory.")
        ] = None,
        sync: Annotated[
            Any, _option("Time of one sync of a file, as 0.2ms.", parser=_seconds)
        ] = None,
        flush: Annotated[
            float | None, _option("GB/s at which a sync flushes what a drive has in its cache.")
        ] = None,
        link: Annotated[float | None, _option("GB/s between GPU and host, each way.")] = None,
        network: Annotated[
            float | None, _option("GB/s to a server next to the storage, each way.")
        ] = None,
        gpu_memory: Annotated[Any, _option("Memory of a GPU, as 80GB.", parser=_bytes)] = None,
        host_memory: Annotated[
            Any, _option("Memory of a rank for copies that wait for storage.", parser=_bytes)
        ] = None,
        tbw: Annotated[
            Any, _option("Bytes that all drives of a rank are rated for, as 7PB.", parser=_bytes)
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
        storage_read: Annotated[float | None, _option("GB/s of reads from shared storage.")] = None,
        writer: Annotated[float | None, _option("Most GB/s of one writer.")] = None,
        efficiency: Annotated[
            float, typer.Option(help="Share of the storage's peak that is reached.")
        ] = 1.0,
        keep: Annotated[int, typer.Option(help="Number of checkpoints that are kept.")] = 2,
        every: Annotated[
            Any, _option("Time between checkpoints, as 30min or 4h.", parser=_seconds)
        ] = None,
        budget: Annotated[
            float | None, _option("Share of time that checkpoints may add, as 0.05.")
        ] = None,
        mttf: Annotated[Any, _option("Mean time to failure, as 8h.", parser=_seconds)] = None,
        stall: Annotated[
            Any,
            _option("Time for which a seal stops training; 0.02 s if not given.", parser=_seconds),
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
        from offload.sizing.checks import FieldError

        measured = [measured_drives(path) for path in drives_from or ()]
        rates: dict[str, Any] = {}
        for one in measured:
            rates |= {name: max(rate, rates.get(name, 0)) for name, rate in one.rates.items()}
        doubts = [doubt for one in measured for doubt in one.doubts]
        given = {
            "read_gbps": read,
            "write_gbps": write,
            "mixed_gbps": mixed,
            "staged_read_gbps": staged_read,
            "staged_write_gbps": staged_write,
            "flush_gbps": flush,
        }
        rates |= {name: rate for name, rate in given.items() if rate is not None}
        try:
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
                    copy_gbps=copy,
                    new_memory_gbps=new_memory,
                    sync_s=sync,
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
        except FieldError as error:
            unset = {name: f"{name} of --drives-from" for name in rates if given[name] is None}
            raise error.naming(_OPTIONS | unset) from None
        if as_json:
            print_json(plan.to_json() | {"doubts": doubts})
        else:
            typer.echo("\n".join(lines(plan, doubts)))
