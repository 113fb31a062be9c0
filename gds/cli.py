"""Command line ``gds``: ``check`` says what a directory can do, and ``bench`` how fast it is.

Large libraries are imported only when a command runs. torch is never imported for a path of host
memory.

Exit status of ``gds check``: 0 for GPUDirect Storage in both directions, or if the requirement of
``--require`` is met; 3 for device memory that is copied through the host; 4 for POSIX with direct
I/O; 5 for POSIX through the page cache; 1 for an error, or if no path is usable. Exit status of
``gds bench``: 0 for success; 1 for an error, a refusal, or wrong data. Exit status of both: 2 for
wrong usage; 128 + N after signal N.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gds.errors import RefusedError, message_of

if TYPE_CHECKING:
    from gds.check import Examination
    from gds.check.examine import Directions, Requirement

app = typer.Typer(
    name="gds",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich keeps the line breaks of docstrings
)

_COLOURS: Final = {"ok": "green", "limits": "yellow", "missing": "red"}
_TITLES: Final = {"machine": "Machine", "storage": "Storage", "gpu": "GPU"}

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if that is wanted."""
    if wanted:
        import importlib.metadata

        try:
            version = importlib.metadata.version("ssd-offload")
        except importlib.metadata.PackageNotFoundError:  # the package runs from its sources
            version = "(not installed)"
        typer.echo(f"gds {version}")
        raise typer.Exit


@app.callback()
def gds(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Find out what a drive, a file system and a GPU can do together, and how fast."""


class Required(StrEnum):
    """Values of ``gds check --require``."""

    gds = "gds"
    bounce = "bounce"
    direct = "direct"
    any = "any"


class Wanted(StrEnum):
    """Directions that `gds check --for` can judge by."""

    both = "both"
    read = "read"
    write = "write"


@app.command()
def check(
    directory: Annotated[
        str, typer.Argument(help="Directory that will hold the data.", show_default=False)
    ],
    require: Annotated[
        Required | None,
        typer.Option(
            help="Exit with 0 if the path that would be used is at least this one; direct means "
            "past the page cache.",
            show_default=False,
        ),
    ] = None,
    wanted: Annotated[
        Wanted, typer.Option("--for", help="Direction of the transfers that must meet --require.")
    ] = Wanted.both,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds that cuFile may take to answer, in its own process."),
    ] = 10.0,
    as_json: Json = False,
) -> None:
    """Say which path transfers in a directory would take.

    For each better path, the reason why it is not taken is named.
    """
    from gds.check.examine import examine

    found = examine(directory, cufile_timeout_s=timeout)
    requirement: Requirement | None = require.value if require else None
    directions: Directions = wanted.value
    if as_json:
        _print_json(found.to_json(requirement, directions))
    else:
        _show_examination(found)
    raise typer.Exit(found.exit_status(requirement, directions))


class Pattern(StrEnum):
    """Values of ``gds bench --rw``."""

    read = "read"
    write = "write"
    mixed = "mixed"
    randread = "randread"
    randwrite = "randwrite"
    randmixed = "randmixed"


class PathOption(StrEnum):
    """Names of the paths. The paths of a GPU are refused on a machine without one."""

    gds = "gds"
    compat = "compat"
    bounce = "bounce"
    direct = "direct"
    buffered = "buffered"


class Cache(StrEnum):
    """States of the page cache that `gds bench` can prepare before each pass."""

    cold = "cold"
    warm = "warm"
    as_is = "as-is"


@app.command()
def bench(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="DIRECTORY|FILE",
            help="A directory: a scratch file is made in it and removed. Or a file: it is only "
            "read. Several are measured at once.",
            show_default=False,
        ),
    ],
    rw: Annotated[
        Pattern, typer.Option(help="Transfers to measure; mixed runs both at once.")
    ] = Pattern.read,
    path: Annotated[PathOption, typer.Option(help="Path of the transfers.")] = PathOption.direct,
    size: Annotated[str, typer.Option(help="Size of a request.")] = "1M",
    threads: Annotated[int, typer.Option(help="Threads that run requests.")] = 2,
    depth: Annotated[
        int | None, typer.Option(help="Requests in flight; default: one per thread.")
    ] = None,
    mix: Annotated[int, typer.Option(help="Percentage of reads in a mixed run.")] = 50,
    file_size: Annotated[str, typer.Option(help="Size of each scratch file.")] = "1G",
    files: Annotated[int, typer.Option(help="Number of scratch files in each directory.")] = 1,
    reopen: Annotated[
        bool, typer.Option("--reopen", help="Open and close a file in every request.")
    ] = False,
    staged: Annotated[
        bool,
        typer.Option(
            "--staged", help="Copy and digest each block on one thread beside the transfers."
        ),
    ] = False,
    passes: Annotated[int, typer.Option(help="Number of times that every block is moved.")] = 1,
    seconds: Annotated[
        float, typer.Option(help="Least duration of a run in seconds; whole passes are run.")
    ] = 2.5,
    ramp: Annotated[float, typer.Option(help="Seconds before each run that do not count.")] = 0.5,
    cache: Annotated[
        Cache,
        typer.Option(
            help="State of the page cache before each pass: emptied, filled, or left as it is."
        ),
    ] = Cache.cold,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="size=64K..16M doubles; rw=read,write lists. May be repeated."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Number of runs of each row.")] = 3,
    steady: Annotated[
        bool,
        typer.Option(
            "--steady",
            help="Repeat runs until five in a row are steady by SNIA's rule, 25 at most.",
        ),
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds of an interval of the time series.")
    ] = 1.0,
    series: Annotated[
        str | None, typer.Option(help="Write the time series of all runs into this CSV file.")
    ] = None,
    histogram: Annotated[
        bool, typer.Option("--histogram", help="Print a histogram of the latencies.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every block with what was written.")
    ] = False,
    compare_fio: Annotated[
        bool, typer.Option("--compare-fio", help="Alternate with fio and print the ratio.")
    ] = False,
    pairs: Annotated[
        int, typer.Option(min=1, help="Number of pairs of runs in the comparison with fio.")
    ] = 11,
    plot: Annotated[
        str | None, typer.Option(help="Draw a sweep into this file; needs matplotlib.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the contents and of the random order.")
    ] = 0,
    allow_volatile: Annotated[
        bool, typer.Option("--allow-volatile", help="Accept a directory in memory (tmpfs).")
    ] = False,
    allow_small: Annotated[
        bool, typer.Option("--allow-small", help="Accept a file that a drive's cache holds.")
    ] = False,
    as_json: Json = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the results as CSV, for spreadsheets.")
    ] = False,
) -> None:
    """Measure rate, latency and processor time of reads and writes.

    By default a row is measured three times for 2.5 seconds, and takes about 10 seconds.
    """
    from gds.bench.report import plot as draw
    from gds.bench.result import write_csv
    from gds.bench.run import Plan, run
    from gds.bench.target import StopSignal, stopping
    from gds.bench.workload import Workload, expand, parse_size, parse_sweep

    if as_json and as_csv:
        raise RefusedError("--json and --csv cannot both be printed: choose one")
    is_file = os.path.isfile(places[0])
    base = Workload(
        rw=rw.value,
        path=path.value,
        size=parse_size(size),
        threads=threads,
        depth=depth,
        mix=mix,
        cache=cache.value,
        passes=passes,
        seconds=seconds,
        ramp_s=ramp,
        interval_s=interval,
        files=files,
        reopen=reopen,
        staged=staged,
        file_bytes=os.path.getsize(places[0]) if is_file else parse_size(file_size),
    )
    plan = Plan(
        places=places,
        workloads=expand(base, [parse_sweep(text) for text in sweep or ()]),
        repeat=repeat,
        until_steady=steady,
        verify=verify,
        compare_fio=compare_fio,
        pairs=pairs,
        seed=seed,
        allow_volatile=allow_volatile,
        allow_small=allow_small,
        plot=plot is not None,
    )
    try:
        with contextlib.ExitStack() as stack:
            # Open the file first, so that a bad path is refused before anything is measured.
            log = stack.enter_context(open(series, "a", newline="")) if series else None
            stack.enter_context(stopping())
            report = run(plan, say=lambda line: typer.secho(line, dim=True, err=True))
            if log:
                log.truncate(0)
                write_csv(log, report.series())
    except StopSignal as stop:
        typer.secho("stopped; the scratch file is removed", fg="red", err=True)
        raise typer.Exit(128 + stop.number) from None
    if as_json:
        _print_json(report.to_json())
    elif as_csv:
        report.write_csv(sys.stdout)
    else:
        from rich.console import Console

        from gds.bench.screen import show

        show(report, Console(), histograms=histogram)
    if plot is not None:
        draw(report, plot)


def _show_examination(found: Examination) -> None:
    """Print an examination for people: each finding, then the path of each direction."""
    from gds.check.examine import CONSIDERED
    from gds.paths import PATHS

    section = ""
    for finding in found.findings:
        if finding.section != section:
            section = finding.section
            typer.secho(f"\n{_TITLES[section]}", bold=True)
        typer.secho(f"  {finding.verdict:<8}", fg=_COLOURS[finding.verdict], nl=False)
        typer.echo(f"{finding.what:<20} {finding.value}")
        if finding.why:
            typer.echo(f"{'':10}why: {finding.why}")
        if finding.do:
            typer.echo(f"{'':10}do:  {finding.do}")
    typer.secho(f"\nPaths in {found.directory}", bold=True)
    for what, choice in (("reads", found.reads), ("writes", found.writes)):
        better = CONSIDERED
        if choice.path is None:
            typer.secho(f"  {what:<8}none", fg="red")
        else:
            typer.secho(f"  {what:<8}{choice.path}: {PATHS[choice.path].title}", fg="green")
            better = CONSIDERED[: CONSIDERED.index(choice.path)]
        for name in better:
            typer.echo(f"{'':10}not {name}: {choice.why_not[name]}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """Run the command line. An expected error is one line on standard error, with status 1."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has stopped. Keep the interpreter from flushing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (RefusedError, OSError) as error:
        typer.secho(f"error: {message_of(error)}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
