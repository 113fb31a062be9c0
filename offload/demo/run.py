"""Parent process of the demo: train, kill in the middle of a step, resume, compare, measure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from offload.demo import SCENARIOS, DemoError, Scenario, require_modules
from offload.demo.plain_save import measure_torch_save
from offload.demo.report import Event, Progress, show
from offload.units import size

if TYPE_CHECKING:
    from rich.console import Console

_MARKER = ".offload-demo"
"""Name of the file that marks a directory made by the demo, which the demo may empty."""

_WHOLE = "uninterrupted"
"""Name of the store of a run that is not killed, and has only its state on the drive."""

_STORE = "store"
"""Name of the store in the demo's directory, and of the run if a server has it."""

_CLOSING_S = 60.0
"""Seconds that the server has to close its store."""

_SLOTS = 3
"""Number of slots: two checkpoints that are kept, and the working slot."""

_BYTES_PER_PARAMETER = 14
"""Bytes per parameter: 16 bits of the parameter, its FP32 master and two FP32 moments."""


def run_demo(
    console: Console,
    *,
    model: str,
    directory: str,
    steps: int | None = None,
    near: bool = False,
    beyond: bool = False,
    allow_volatile: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run the whole demo and return its results, as `_report` lists them.

    Args:
        console: Console for the progress.
        model: A name in `SCENARIOS`.
        directory: Directory for the store. If an earlier demo made it, it is emptied first.
            Otherwise it must be empty or absent.
        steps: Number of optimizer steps in the whole run; None for the scenario's own number.
        near: Whether a server of its own updates the state, to which the training process connects.
        beyond: Whether gradients and the parameters of blocks are on the drive as well. All losses
            and the last parameters are then compared with those of a run in memory that is not
            killed.
        allow_volatile: Whether to accept a file system that loses its content at power-off.
        quiet: Whether to print nothing.

    Raises:
        DemoError: The demo cannot run here, or its run did not show what it should.
    """
    began = time.perf_counter()
    if near and beyond:
        raise DemoError(
            "--near and --beyond exclude each other: parameters on the drive need the drive here; "
            "leave one of them out"
        )
    scenario = SCENARIOS[model]
    total = scenario.steps if steps is None else steps
    every = min(scenario.every, total // 2)
    require_modules(scenario)
    store = _prepare(directory, scenario, beyond=beyond)
    log = os.path.join(directory, "train.log")
    # Half-way between two checkpoints, near the middle of the run.
    kill_step = every * (total // (2 * every)) + (every + 1) // 2
    with _server(directory, log) if near else nullcontext(directory) as place:
        settings = [f"--model={model}", f"--steps={total}"]
        settings += ["--allow-volatile"] * allow_volatile + ["--bf16"] * beyond
        arguments = [*settings, f"--directory={place}/{_STORE}", f"--every={every}"]
        arguments += ["--beyond"] * beyond
        with Progress(console, scenario.title, steps=total, quiet=quiet) as progress:
            if near:
                progress.say(f"A server updates the state: gradients in, parameters out of {place}")
            if beyond:
                progress.say("State, gradients and the parameters of blocks are on the drive")
            progress.say(f"Training {scenario.title} for {total} steps, a checkpoint every {every}")
            first = _train([*arguments, f"--kill={kill_step}"], log, progress)
            killed = _killed(store, first[-1], kill_step)
            progress.say(
                f"[bold red]Killed[/] by SIGKILL in the middle of step {killed['step']}; "
                f"the newest checkpoint is of step {killed['checkpoint']}"
            )
        with Progress(console, scenario.title, steps=total, quiet=quiet) as progress:
            second = _train(arguments, log, progress)
    whole = None
    if beyond:
        other = os.path.join(directory, _WHOLE)
        with Progress(console, scenario.title, steps=total, quiet=quiet) as progress:
            progress.say("The same in one go, with parameters and gradients in memory")
            one_go = [*settings, f"--directory={other}", f"--every={total}"]
            whole = _train(one_go, log, progress)
        shutil.rmtree(other)
    report = _report(
        scenario, first, second, killed, store, total, every, began, near=near, whole=whole
    )
    if report["uninterrupted"] not in (None, {"losses": True, "parameters": True}):
        raise DemoError(
            "the run with all on the drive differs from the uninterrupted one in memory: this is a "
            f"bug of offload; the output of the processes is in {log}"
        )
    if not report["equal"]:
        different = [row["step"] for row in report["repeated"] if not row["equal"]]
        show(report, console)
        raise DemoError(
            f"the losses of steps {different} differ after the resume: this is a bug of offload; "
            f"the store is kept at {store}, and the output of the processes is in {log}"
        )
    return report


def _prepare(directory: str, scenario: Scenario, *, beyond: bool) -> str:
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
    # A server has the parameters in a file as well, which leaves before torch.save is measured.
    # The run that is not killed leaves before that, too.
    more = _SLOTS if beyond else 1
    needed = scenario.num_parameters * _BYTES_PER_PARAMETER * (_SLOTS + more)
    needed += needed // 50 + (16 << 20)  # headers, manifests, train_state, directories
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DemoError(
            f"{directory} has {size(free)} free, but the demo with {scenario.title} needs "
            f"{size(needed)}, {_SLOTS + more} times the training state. "
            "Name a --directory on another disk, or pass --model tiny"
        )
    return os.path.join(directory, _STORE)


def _environment() -> dict[str, str]:
    """Return the environment of the processes that the demo starts."""
    return {
        # OpenMP threads that spin while they wait for each other make a step twenty times as
        # long beside other programs. Sleeping costs next to nothing on an idle machine.
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        # The model comes from a package. A hub is never asked, not even for a newer version.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


@contextmanager
def _server(directory: str, log: str) -> Iterator[str]:
    """Run a server for the runs in a directory, and yield the beginning of their addresses.

    Raises:
        DemoError: The server cannot be started.
    """
    # Not in the directory: the path of a socket file has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="offload-") as folder, open(log, "ab") as file:
        path = os.path.join(folder, "demo.sock")
        command = [sys.executable, "-m", "offload", "serve", directory, "--listen", f"unix:{path}"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, env=_environment(), text=True
        ) as process:
            try:
                if process.stdout is None or not process.stdout.readline():
                    raise DemoError(f"the server has ended at once; its last output is in {log}")
                yield f"offload+unix://{path}"
                process.terminate()  # it closes the store
                process.wait(_CLOSING_S)
            finally:
                process.kill()


def _train(arguments: list[str], log: str, progress: Progress) -> list[Event]:
    """Run a training process until it ends or kills itself, and return its events.

    Its standard error is appended to the file `log`. No process is left behind, whatever happens.

    Raises:
        DemoError: The process ended with another status, or by another signal.
    """
    events: list[Event] = []
    with (
        open(log, "ab") as file,
        subprocess.Popen(
            [sys.executable, "-m", "offload.demo.train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            env=_environment(),
            text=True,
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                events.append(json.loads(line))
                progress.update(events[-1])
            status = process.wait()
        finally:
            process.kill()
    kills_itself = bool(events) and events[-1]["event"] == "killing"
    if status != (-signal.SIGKILL if kills_itself else 0):
        with open(log, encoding="utf-8", errors="replace") as output:
            last_words = "".join(output.readlines()[-12:]).rstrip()
        raise DemoError(
            f"the training process ended with status {status}; its last output:\n{last_words}"
        )
    return events


def _killed(store: str, last: Event, kill_step: int) -> dict[str, int]:
    """Return how the first process ended, given its last event."""
    from offload import list_checkpoints

    if last["event"] != "killing":
        raise DemoError(
            "the training process finished before it could be killed in the middle of step "
            f"{kill_step} or later; pass a larger --steps"
        )
    step = last["step"]
    steps = [info.step for info in list_checkpoints(store) if info.valid]
    if not steps or max(steps) >= step:
        raise DemoError(
            f"killed in step {step}, the training process should have left a checkpoint of an "
            f"earlier step; it left {steps or 'none'}"
        )
    return {"signal": int(signal.SIGKILL), "step": step, "checkpoint": max(steps)}


def _report(
    scenario: Scenario,
    first: list[Event],
    second: list[Event],
    killed: dict[str, int],
    store: str,
    steps: int,
    every: int,
    began: float,
    *,
    near: bool,
    whole: list[Event] | None,
) -> dict[str, Any]:
    """Measure `torch.save` on the same state, and return the complete report, as JSON values.

    Sizes are in bytes, durations in seconds, rates in GB/s. Losses of repeated steps are texts by
    `float.hex`, and so exact to the last bit.
    """
    from offload import open_checkpoint

    resumed = next((event for event in second if event["event"] == "resumed"), None)
    if resumed is None:
        raise DemoError("the second training process did not resume from the checkpoint")
    if resumed["step"] != killed["checkpoint"]:
        raise DemoError(
            f"resumed from step {resumed['step']}, and the newest checkpoint is of step "
            f"{killed['checkpoint']}"
        )
    with open_checkpoint(store) as checkpoint:
        arrays = ["model", *checkpoint.state_arrays]
        scratch = os.path.join(os.path.dirname(store), "torch_save.pt")
        torch_save = measure_torch_save(checkpoint.path, arrays, scratch)
    before, after = (
        {event["step"]: event["loss"] for event in events if event["event"] == "update"}
        for events in (first, second)
    )
    evaluations = [event["loss"] for event in first + second if event["event"] == "evaluated"]
    done = [event for event in first + second if event["event"] == "step"]
    calls = [event["checkpoint_call_s"] for event in second if event.get("checkpoint_call_s")]
    end = second[-1]
    repeated = [
        {"step": step, "before": loss, "after": again, "equal": loss == again}
        for step, loss in before.items()
        if step > resumed["step"]
        for again in [after.get(step, "not reached")]
    ]
    return {
        "model": scenario.name,
        "near": near,
        "uninterrupted": None if whole is None else _compared(first + second, whole),
        "title": scenario.title,
        "num_parameters": end["num_parameters"],
        "steps": steps,
        "every": every,
        "killed": killed,
        "resumed": {
            "step": resumed["step"],
            "bytes": resumed["restore_bytes"],  # as the optimizer counts them
            "kernel_bytes": resumed["kernel_read_bytes"],
            "seconds": resumed["wall_s"],
        },
        "repeated": repeated,
        "equal": bool(repeated) and all(row["equal"] for row in repeated),
        "first_loss": evaluations[0],  # on held-out text, as the last one
        "last_loss": evaluations[-1],
        "step_s": statistics.median(event["step_s"] for event in done),
        "update_s": statistics.median(event["update_s"] for event in done),
        "read_gbps": end["bytes_read"] / end["read_s"] / 1e9 if end["read_s"] else 0.0,
        "write_gbps": end["bytes_written"] / end["write_s"] / 1e9 if end["write_s"] else 0.0,
        "crossing_bytes_per_parameter": _crossing(second) / end["num_parameters"],
        "state_bytes": end["state_bytes"],
        "ring_bytes": end["ring_bytes"],
        "resident_bytes": end["resident_bytes"],
        "checkpoint_bytes": end["seal_bytes"],
        # Training stands still in the call, and in steps that wait for the seal.
        "checkpoint_stall_s": (sum(calls) + end["wait_seal_s"]) / max(end["seals"], 1),
        "checkpoint_durable_s": end["seal_s"],
        **torch_save,
        "store": store,
        "elapsed_s": time.perf_counter() - began,
    }


def _compared(killed: list[Event], whole: list[Event]) -> dict[str, bool]:
    """Return whether a run that was killed had the losses and parameters of one that was not."""
    losses = {event["step"]: event["loss"] for event in whole if event["event"] == "update"}
    updates = [event for event in killed if event["event"] == "update"]
    same = all(losses[event["step"]] == event["loss"] for event in updates)
    return {
        "losses": same and {event["step"] for event in updates} == {*losses},
        "parameters": killed[-1]["digest"] == whole[-1]["digest"],
    }


def _crossing(events: list[Event]) -> float:
    """Return the bytes that a step without a checkpoint sends to a server and receives from it."""
    steps = [event for event in events if event["event"] == "step"]
    totals = [event["to_server_bytes"] + event["from_server_bytes"] for event in steps]
    found = [
        now - before
        for (before, now), event in zip(pairwise(totals), steps[1:], strict=True)
        if event["checkpoint_call_s"] is None
    ]
    return statistics.median(found) if found else 0.0
