"""Parent process of the demo: train, kill in the middle of a step, resume, compare, measure."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.demo import SCENARIOS, DemoError, Scenario, require_modules
from offload.demo.child import Child, Event
from offload.demo.progress import Progress
from offload.demo.report import Killed, Repeated, Report, Resumed
from offload.units import size

if TYPE_CHECKING:
    from rich.console import Console

_MARKER = ".offload-demo"
"""Name of the file that marks a directory made by the demo, which the demo may empty."""

_SLOTS = 3
"""Number of slots: two checkpoints that are kept, and the working slot."""

_BYTES_PER_PARAMETER = 14
"""Bytes per parameter: 16 bits of the parameter, its FP32 master and two FP32 moments."""


@dataclass(slots=True)
class RunLog:
    """The events of one training process."""

    losses: dict[int, str] = field(default_factory=dict)
    """Loss before the update of a step, as text by `float.hex`, by number of the step."""

    evaluations: dict[int, float] = field(default_factory=dict)
    """Loss on held-out text, by step."""

    steps: list[Event] = field(default_factory=list)
    """Events of completed steps, in order."""

    resumed: Event | None = None
    """Event of the resume; None if the process did not resume."""

    last: Event | None = None
    """Event at the end of the run; None if the process did not reach it."""

    def add(self, event: Event) -> None:
        """Record an event."""
        kind = event["event"]
        if kind == "update":
            self.losses[event["step"]] = event["loss"]
        elif kind == "step":
            self.steps.append(event)
        elif kind == "evaluated":
            self.evaluations[event["step"]] = event["loss"]
        elif kind == "resumed":
            self.resumed = event
        elif kind == "end":
            self.last = event


def run_demo(
    console: Console,
    *,
    model: str,
    directory: str,
    steps: int | None = None,
    allow_volatile: bool = False,
    quiet: bool = False,
) -> Report:
    """Run the whole demo and return its results.

    Args:
        console: Console for the progress.
        model: A name in `SCENARIOS`.
        directory: Directory for the store. If an earlier demo made it, it is emptied first.
            Otherwise it must be empty or absent.
        steps: Number of optimizer steps in the whole run; None for the scenario's own number.
        allow_volatile: Whether to accept a file system that loses its content at power-off.
        quiet: Whether to print nothing.

    Raises:
        DemoError: The demo cannot run here, or its run did not show what it should.
    """
    began = time.perf_counter()
    scenario = SCENARIOS[model]
    total = scenario.steps if steps is None else steps
    if total < 4:
        raise DemoError(
            f"--steps {total}: the demo needs at least 4, so that the training can be killed "
            "between two checkpoints"
        )
    every = min(scenario.every, total // 2)
    require_modules(scenario)
    store = _prepare(directory, scenario)
    arguments = ["--model", model, "--directory", store, f"--steps={total}", f"--every={every}"]
    if allow_volatile:
        arguments.append("--allow-volatile")
    log = os.path.join(directory, "train.log")

    # Half-way between two checkpoints, near the middle of the run.
    kill_step = every * (total // (2 * every)) + (every + 1) // 2
    with (
        Child([*arguments, f"--hold={kill_step}"], log=log) as child,
        Progress(console, scenario.title, steps=total, quiet=quiet) as progress,
    ):
        progress.say(f"Training {scenario.title} for {total} steps, a checkpoint every {every}")
        first, killed = _train_and_kill(child, progress, store, kill_step)
        progress.say(
            f"[bold red]Killed[/] by SIGKILL in the middle of step {killed.step}; "
            f"the newest checkpoint is of step {killed.checkpoint}"
        )
    with (
        Child(arguments, log=log) as child,
        Progress(console, scenario.title, steps=total, quiet=quiet) as progress,
    ):
        second = RunLog()
        for event in child.events():
            second.add(event)
            progress.update(event)
    report = _report(scenario, first, second, killed, directory, total, every, began)
    if not report.equal:
        different = [row.step for row in report.repeated if not row.equal]
        report.show(console)
        raise DemoError(
            f"the losses of steps {different} differ after the resume: this is a bug of offload; "
            f"the store is kept at {store}, and the output of the processes is in {log}"
        )
    return report


def _prepare(directory: str, scenario: Scenario) -> str:
    """Empty or make the directory, check its free space, and return the store's path in it."""
    marker = os.path.join(directory, _MARKER)
    try:
        os.makedirs(directory, exist_ok=True)
        if os.listdir(directory) and not os.path.exists(marker):
            raise DemoError(
                f"{directory} is not empty, and no earlier demo made it; name another --directory"
            )
        with open(marker, "w", encoding="ascii") as file:
            file.write("Made by `offload demo`, which empties this directory when it runs again.\n")
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif name != _MARKER:
                os.remove(path)
    except OSError as error:
        raise DemoError(f"cannot prepare the directory {directory}: {error}") from error
    needed = scenario.num_parameters * _BYTES_PER_PARAMETER * (_SLOTS + 1)
    needed += needed // 50 + (16 << 20)  # headers, manifests, train_state, directories
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DemoError(
            f"{directory} has {size(free)} free, but the demo with {scenario.title} needs "
            f"{size(needed)}: {_SLOTS} times the training state, and once more for torch.save; "
            "name a --directory on another disk, or pass --model tiny"
        )
    return os.path.join(directory, "store")


def _train_and_kill(
    child: Child, progress: Progress, store: str, kill_step: int
) -> tuple[RunLog, Killed]:
    """Follow a training process until it stops within an update, and kill it.

    The update is that of step `kill_step` or of a later step.
    """
    record = RunLog()
    for event in child.events():
        record.add(event)
        progress.update(event)
        if event["event"] != "held":
            continue
        child.wait_stopped()
        status = child.kill()
        if status != -signal.SIGKILL:
            raise DemoError(f"the training process ended with status {status}, not by SIGKILL")
        return record, _killed(store, event["step"])
    raise DemoError(
        "the training process finished before it could be killed in the middle of step "
        f"{kill_step} or later; pass a larger --steps"
    )


def _killed(store: str, step: int) -> Killed:
    from offload import list_checkpoints

    steps = [info.step for info in list_checkpoints(store) if info.valid]
    if not steps or max(steps) >= step:
        raise DemoError(
            f"killed in step {step}, the training process should have left a checkpoint of an "
            f"earlier step; it left {steps or 'none'}"
        )
    return Killed(signal=int(signal.SIGKILL), step=step, checkpoint=max(steps))


def _report(
    scenario: Scenario,
    first: RunLog,
    second: RunLog,
    killed: Killed,
    directory: str,
    steps: int,
    every: int,
    began: float,
) -> Report:
    """Measure `torch.save` on the same state, and return the complete report."""
    from offload import open_checkpoint
    from offload.demo import baseline

    resumed, end = second.resumed, second.last
    if resumed is None or end is None:
        raise DemoError("the second training process did not resume from the checkpoint")
    if resumed["step"] != killed.checkpoint:
        raise DemoError(
            f"resumed from step {resumed['step']}, and the newest checkpoint is of step "
            f"{killed.checkpoint}"
        )
    store = os.path.join(directory, "store")
    with open_checkpoint(store) as checkpoint:
        arrays = ["model", *checkpoint.state_arrays]
        saved = baseline.measure(checkpoint.path, arrays, os.path.join(directory, "torch_save.pt"))
    both = first.steps + second.steps
    calls = [
        event["checkpoint_call_s"]
        for event in second.steps
        if event["checkpoint_call_s"] is not None
    ]
    seals = max(end["seals"], 1)
    return Report(
        model=scenario.name,
        title=scenario.title,
        num_parameters=end["num_parameters"],
        steps=steps,
        every=every,
        killed=killed,
        resumed=Resumed(
            step=resumed["step"],
            bytes=resumed["restore_bytes"],
            kernel_bytes=resumed["kernel_read_bytes"],
            seconds=resumed["wall_s"],
        ),
        repeated=[
            Repeated(step, before, second.losses.get(step, "not reached"))
            for step, before in sorted(first.losses.items())
            if step > resumed["step"]
        ],
        first_loss=first.evaluations[0],
        last_loss=second.evaluations[steps],
        step_s=statistics.median(event["step_s"] for event in both),
        update_s=statistics.median(event["update_s"] for event in both),
        read_gbps=end["bytes_read"] / end["read_s"] / 1e9 if end["read_s"] else 0.0,
        write_gbps=end["bytes_written"] / end["write_s"] / 1e9 if end["write_s"] else 0.0,
        state_bytes=end["state_bytes"],
        ring_bytes=end["ring_bytes"],
        resident_bytes=end["resident_bytes"],
        checkpoint_bytes=end["seal_bytes"],
        checkpoint_stall_s=(sum(calls) + end["wait_seal_s"]) / seals,
        checkpoint_durable_s=end["seal_s"],
        torch_save_bytes=saved.bytes,
        torch_save_s=saved.save_s,
        torch_load_s=saved.load_s,
        store=store,
        elapsed_s=time.perf_counter() - began,
    )
