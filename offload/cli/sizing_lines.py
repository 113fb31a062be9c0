"""Lines that ``offload size`` prints for people."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from offload.cli.options import one_line
from offload.units import many

if TYPE_CHECKING:
    from offload.sizing import Plan
    from offload.sizing.figures import Fit

_TIMES = (("d", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 600.0))
"""Each unit, its seconds, and the least seconds that are printed in it."""

_BYTES = (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_NAME_WIDTH = 30
_WIDTH = 78


def lines(plan: Plan, card: str | None = None, doubts: Sequence[str] = ()) -> Iterator[str]:
    """Return the lines of a plan for people, at most 80 characters wide: the answer, then figures.

    Args:
        plan: Plan to print.
        card: Name of the GPU, if one was named.
        doubts: Reasons not to trust the measured rates of the drives.
    """
    number = plan.num_parameters
    yield one_line(plan.source)
    yield from textwrap.wrap(f"{_fit(plan, card)} {_step(plan)}", _WIDTH)
    yield ""
    yield from _on_the_gpu(plan)
    yield from _outside(plan)
    yield from _typical_steps(plan)
    yield ""
    yield _row("Bytes", "per parameter", "in all")
    for name, nbytes in (
        ("parameters (a seal, a resume)", plan.parameter_bytes),
        ("optimizer state (a step)", plan.state_bytes),
        (f"disk, {plan.disk.slots} slots", plan.disk.total_bytes),
    ):
        yield _row(name, _each(nbytes / number), _size(nbytes))
    if len(plan.disk.on_each_drive) > 1:
        each = ", ".join(map(_size, plan.disk.on_each_drive))
        yield from _note(f"On the drives of each rank: {each}.")
    if not plan.disk.exact:
        yield from _note("Disk is data alone, without headers and manifests.")
    yield ""
    yield _row("Step, with the update on", "link B/param", "link bytes", "time", "limited by")
    for step in plan.steps:
        yield _row(
            f"the {step.place}",
            _each(step.bytes_per_parameter),
            _size(step.link_bytes),
            _time(step.seconds),
            step.limited_by or "",
        )
    yield from _link(plan)
    yield from _drives(plan, doubts)
    yield from _notes(plan)
    yield ""
    yield from _checkpoints(plan)
    for text in plan.remarks:
        yield ""
        yield from textwrap.wrap(text, _WIDTH)


def _fit(plan: Plan, card: str | None) -> str:
    """Return a sentence that says whether the model fits on the GPU, or on which GPU it fits."""
    memory, smallest = plan.machine.gpu_memory, min(plan.fits, key=lambda fit: fit.gpu_bytes)
    each = " each" if plan.gpus > 1 else ""
    if memory is None:
        # Of two ways that need the same GPU, the one that gives up less is named.
        least = {fit.least_gpu_bytes: _how(fit) for fit in reversed(plan.fits)}
        sizes = [f"{size / 1e9:g} GB with {how}" for size, how in least.items() if size is not None]
        if sizes:
            return f"Fits on a GPU of {', '.join(sizes)}."
        with_what = f"{_size(smallest.gpu_bytes)}{each} with {_how(smallest)}"
        return f"Fits on no GPU in the list: {with_what}."
    gpu = f"a GPU of {_size(memory)}" if card is None else f"the {card} ({memory / 1e9:g} GB)"
    fit = _chosen(plan)
    needed = f"{_size(fit.gpu_bytes)}{each} with {_how(fit)}"
    if fit.host_bytes:
        needed += f" and {_size(fit.host_bytes)} of host memory"
    if fit.verdict not in ("fits", "tight"):
        return f"Does not fit on {gpu}: {needed}."
    left = f"{_size(fit.left_bytes or 0)} left for activations"
    more = "; no drive is needed for that" if fit is plan.fits[0] else ""
    return f"{fit.verdict.capitalize()} on {gpu}: {needed}, {left}{more}."


def _chosen(plan: Plan) -> Fit:
    """Return the way of training that fits and gives up least; the smallest if none fits."""
    for verdict in ("fits", "tight"):
        for fit in plan.fits:
            if fit.verdict == verdict:
                return fit
    return min(plan.fits, key=lambda fit: fit.gpu_bytes)


def _how(fit: Fit) -> str:
    return fit.name if "=" in fit.name else fit.name.replace("state", "the state")


def _step(plan: Plan) -> str:
    """Return a sentence with the seconds of a step on the host."""
    fit = plan.fits[1] if plan.machine.gpu_memory is None else _chosen(plan)
    if (seconds := plan.steps[1].seconds) is not None:
        return f"A step takes {_time(max(seconds, fit.drives_s or 0))}."
    moved = (fit.step_read_bytes + fit.step_written_bytes) / plan.gpus / 1e9
    times = [max(step.seconds, moved / step.gbps) for step in plan.typical_steps]
    return f"A step takes {_time(min(times))} to {_time(max(times))} with typical drives."


def _on_the_gpu(plan: Plan) -> Iterator[str]:
    """Return a table of the memory of a GPU, and what is left of it if it is known."""
    known = plan.machine.gpu_memory is not None
    where = "On the GPU" if plan.gpus == 1 else "On each GPU"
    yield _row(where, "per parameter", "needed", "left" if known else "fits on")
    for fit in plan.fits:
        left = "-" if fit.left_bytes is None or fit.left_bytes < 0 else _size(fit.left_bytes)
        least = "-" if fit.least_gpu_bytes is None else f"{fit.least_gpu_bytes / 1e9:g} GB"
        cells = [left, fit.verdict or ""] if known else [least]
        yield _row(fit.name, _each(fit.bytes_per_parameter), _size(fit.gpu_bytes), *cells)
    if known:
        *most, last = [_count(fit.largest) for fit in plan.fits if fit.largest is not None]
        yield from _note(
            f"The largest models that fit have {', '.join(most)} and {last} parameters."
        )
    yield from _note(
        "Activations come on top, and are not known: a model fits if a fifth of the memory is left."
    )
    if any(fit.name.startswith("overlap") for fit in plan.fits):
        yield from _note('overlap="backward" excludes clipping and gradient accumulation.')


def _outside(plan: Plan) -> Iterator[str]:
    """Return a table of host memory and drives, if gradients or parameters may be outside."""
    ways = [fit for fit in plan.fits if fit.host_bytes]
    if not ways:
        return
    yield ""
    yield _row("Outside of the GPU", "host memory", "step reads", "writes", "drives take")
    for fit in [plan.fits[1], *ways]:
        moved = _size(fit.step_read_bytes), _size(fit.step_written_bytes)
        yield _row(fit.name, _size(fit.host_bytes), *moved, _time(fit.drives_s))
    if len(ways) > 1:
        yield from _note(
            'parameters="host" is with gradients="host", and parameters="drive" with '
            'gradients="drive".'
        )
    else:
        yield from _note('A config.json or safetensors files show what parameters="drive" needs.')


def _typical_steps(plan: Plan) -> Iterator[str]:
    """Return a table of a step with typical drives, if the rates of the drives are not given."""
    if not plan.typical_steps:
        return
    yield ""
    yield _row("Step, with typical drives", "bytes", "assumed", "time")
    moved = _size(2 * plan.state_bytes / plan.gpus)
    for step in plan.typical_steps:
        yield _row(step.drives, moved, f"{step.gbps:g} GB/s", _time(step.seconds))
    yield from _note(
        "Rates are assumed, for reads and writes together: gds bench measures yours. Drives for "
        "desktops are slower once their cache is full."
    )


def _link(plan: Plan) -> Iterator[str]:
    """Return lines with what a seal and a resume move over the link."""
    host, storage = plan.steps[1], plan.steps[2]

    def moved(nbytes: float, seconds: float | None) -> str:
        """Return bytes, and the seconds that they take if the rate is known."""
        return _size(nbytes) + ("" if seconds is None else f" ({_time(seconds)})")

    sealed = moved(host.seal_link_bytes, host.seal_link_s)
    resumed = moved(host.resume_link_bytes, host.resume_link_s)
    none = f"{_size(storage.seal_link_bytes)} with the update on the storage"
    yield from _note(f"Over the link, a seal moves {sealed}, {none}, and a resume {resumed}.")


def _drives(plan: Plan, doubts: Sequence[str]) -> Iterator[str]:
    """Return a line with the rates of the drives that the times follow from."""
    machine = plan.machine
    known = [
        f"{rate:.3g} GB/s {what}"
        for rate, what in (
            (machine.read_gbps, "read"),
            (machine.write_gbps, "written"),
            (machine.mixed_gbps, "both at once"),
        )
        if rate is not None
    ]
    if known:
        yield from _note(f"Drives of a rank: {', '.join(known)}.")
    for doubt in doubts:
        yield from _note(f"The measurement is in doubt: {one_line(doubt)}.")


def _notes(plan: Plan) -> Iterator[str]:
    if plan.seal_parts_s is not None:
        yield from _note(_sum("A seal", "writes", plan.seal_parts_s, " beside training"))
    if plan.resume_parts_s is not None:
        yield from _note(_sum("A resume", "reads", plan.resume_parts_s))
    if plan.seal_s is None or plan.resume_s is None:
        which = "times" if plan.steps[1].seconds is None else "the times of a resume and a seal"
        yield from _note(f"--read and --write (GB/s of a rank's drives) give {which}.")
    if plan.hide_s is not None:
        host = plan.steps[1].seconds
        hidden = "" if host is None else f"; on the host it takes {_time(host)}"
        yield from _note(
            f"A step can hide behind {_time(plan.hide_s)} of the model's work{hidden}."
        )
    if plan.gathered_bytes:
        gathered = _size(plan.gathered_bytes)
        yield from _note(f"Each rank receives {gathered} of updated parameters in a step.")
    if plan.steps_of_life is not None:
        life = "" if plan.days_of_life is None else f", {_time(plan.days_of_life * 86400)}"
        if life and plan.iteration_s is None:
            life += " if steps follow each other at once (--set iteration_s)"
        steps = _count(plan.steps_of_life)
        yield from _note(f"The drives last {steps} steps with a seal each{life}.")
        if (least := plan.fits[-1]).steps_of_life not in (None, plan.steps_of_life):
            steps = _count(least.steps_of_life or 0)
            yield from _note(f"With {_how(least)} they last {steps} steps.")
    if plan.training_s is not None:
        yield from _note(
            f"Training computes for {plan.training_s / 86400:,.1f} days, "
            f"{plan.training_s * 4 / 3 / 86400:,.1f} with recomputation."
        )


def _sum(what: str, verb: str, parts: Mapping[str, float], more: str = "") -> str:
    """Return a sentence about the time of something, with its parts if there are several."""
    seconds = _time(sum(parts.values()))
    if len(parts) == 1:
        return f"{what} {verb} for {seconds}{more}."
    listed = ", ".join(f"{name} {_time(part)}" for name, part in parts.items())
    return f"{what} takes {seconds}{more}: {listed}."


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
        if plan.node_gbps is not None and plan.node_gbps != plan.writer_gbps:
            rate += f", {plan.node_gbps:.3g} GB/s for a node of 8 GPUs"
        yield from _note(f"{plan.writers} writers write {_size(plan.writer_bytes)} each{rate}.")
    if plan.peak_gbps is not None and plan.efficiency < 1:
        yield from _note(
            f"Storage that reaches {_percent(plan.efficiency)} of its peak needs a peak of "
            f"{plan.peak_gbps:.4g} GB/s."
        )
    if plan.least_gbps is not None:
        share = f", {plan.least_gbps / plan.writers:.3g} GB/s for each" if plan.writers > 1 else ""
        yield from _note(
            f"A full copy within the budget needs {plan.least_gbps:.4g} GB/s of storage{share}."
        )
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
        yield from _warnings(plan)
    restores = plan.restores
    yield ""
    replicas = many(restores.replicas, "replica")
    yield _row(f"Restore of {replicas}", "bytes read", "each reads", "one reads")
    for name, nbytes, each, once in (
        ("parameters and state", restores.each_bytes, restores.each_s, restores.once_s),
        (
            "parameters only (here)",
            restores.parameters_bytes,
            restores.parameters_s,
            restores.parameters_once_s,
        ),
    ):
        yield _row(name, _size(nbytes), _time(each), _time(once))
    if restores.replicas > 1 and restores.equal_time_gbps is not None:
        yield from _note(
            "A restore that takes as long as a full copy reads "
            f"{restores.equal_time_gbps:.4g} GB/s."
        )


def link_lines(rates: Mapping[str, float]) -> Iterator[str]:
    """Return lines with the measured rates of a link; none if nothing was measured."""
    if rates:
        yield ""
        yield _row("Link to the server", "there", "back", "both at once")
        yield _row(
            "GB/s, measured", *(f"{rates[n]:.3g}" for n in ("to_server", "from_server", "both"))
        )


def _warnings(plan: Plan) -> Iterator[str]:
    """Return notes on intervals that a formula gives, and that cannot be kept."""
    durable = {copies.name: copies.durable_s for copies in plan.copies}
    if any(
        shortest is not None and limit is not None and shortest < limit
        for interval in plan.intervals
        for limit in [durable[interval.name]]
        for shortest in (interval.for_budget_s, interval.optimal_s)
        if interval.stall_s != limit  # a full copy is durable when training goes on
    ):
        yield from _note(
            "Intervals shorter than the time until a checkpoint is durable cannot be kept up: "
            "checkpoints would pile up."
        )
    if any(interval.waste is not None and interval.waste >= 1 for interval in plan.intervals):
        yield from _note(
            "A waste of 100 % or more means that failures come faster than checkpoints: such a "
            "run makes no progress."
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
            value = nbytes / factor
            return f"{value:,.1f} {unit}" if value < 1e4 else f"{value:.1e} {unit}"
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
    for unit, length, least in _TIMES:
        if seconds >= least:
            value = seconds / length
            return f"{value:,.1f} {unit}" if value < 1e4 else f"{value:.1e} {unit}"
    if seconds < 1e-3:
        return "< 1 ms"
    return f"{seconds:,.1f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    percent = 100 * share
    if 1000 <= percent < 1e6:
        return f"{percent:,.0f} %"
    return f"{percent:.3g} %" if percent < 1000 else f"{percent:.1e} %"


def _each(nbytes: float) -> str:
    """Return bytes per parameter."""
    return f"{nbytes:.3g}" if nbytes < 1000 else f"{nbytes:,.0f}"


def _note(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
