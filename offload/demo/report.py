"""What the demo shows: its progress, and its results as JSON for a script and as tables for people.

In a line of the progress, r and w are the rates at which the SSD was read and written. SSD and RAM
are the sizes of the state on the SSD and in memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from offload.units import size

if TYPE_CHECKING:
    from rich.console import Console

Event = dict[str, Any]
"""One line that the training process printed; ``event["event"]`` is its kind."""


class Progress:
    """Display of one training process, from its first step to the last step of the run."""

    def __init__(self, console: Console, title: str, *, steps: int, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bar

        self._console = console
        self._quiet = quiet
        # On a terminal the bar stays below the lines. In a log there are only the lines.
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=steps, state="starting")
        self._last: Event = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, unless the display is quiet."""
        if not self._quiet:
            self._console.print(text, highlight=False, soft_wrap=True)

    def update(self, event: Event) -> None:
        """Show an event of the training process."""
        kind = event["event"]
        if kind == "resumed":
            self.say(
                f"[bold]Resumed from step {event['step']}[/]: read "
                f"{size(event['restore_bytes'])} in {event['restore_s']:.2f} s, the 16-bit "
                "parameters and nothing else"
            )
            self._bar.update(self._task, completed=event["step"], state="resumed")
        elif kind == "update":
            self._bar.update(self._task, state=f"step {event['step']}: updating from SSD")
        elif kind == "step":
            self.say(self._line(event))
            if event["checkpoint_call_s"] is not None:
                call_ms = event["checkpoint_call_s"] * 1000
                self.say(f"          [cyan]checkpoint of step {event['step']}: {call_ms:.0f} ms[/]")
            self._bar.update(self._task, completed=event["step"], state=self._memory(event))
            self._last = event

    def _line(self, event: Event) -> str:
        return (
            f"step {event['step']:>3}  loss {float.fromhex(event['loss']):.4f}  "
            f"{event['step_s']:.2f} s/step  r {self._rate(event, 'bytes_read', 'read_s')} "
            f"w {self._rate(event, 'bytes_written', 'write_s')} GB/s  {self._memory(event)}"
        )

    def _rate(self, event: Event, amount: str, seconds: str) -> str:
        """Return the rate since the last step in GB/s, as text.

        Only the time in which transfers were in progress counts.
        """
        moved = event[amount] - self._last.get(amount, 0)
        took = event[seconds] - self._last.get(seconds, 0.0)
        return f"{moved / took / 1e9:.2f}" if moved > 0 and took > 0 else "-.--"

    def _memory(self, event: Event) -> str:
        in_memory = event["ring_bytes"] + event["resident_bytes"]
        return f"SSD {size(event['state_bytes'])}  RAM {size(in_memory)}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """A step that both processes took, with its loss in each.

    Losses are texts by `float.hex`, and so exact to the last bit.
    """

    step: int
    before: str
    """Loss before the kill, in the first process."""

    after: str
    """Loss after the resume, in the second process."""

    equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """End of the first process."""

    signal: int
    """Number of the signal that ended the process."""

    step: int
    """The step whose update had begun and was not finished."""

    checkpoint: int
    """Step of the newest complete checkpoint that the process left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Start of the second process."""

    step: int
    """Step of the checkpoint from which the process continued."""

    bytes: int
    """Bytes that `restore` read, as the optimizer counts them."""

    kernel_bytes: int
    """Bytes that the process made the disk read during the resume, as the kernel counts them."""

    seconds: float
    """Seconds that `restore` took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of the demo. Sizes are in bytes, durations in seconds, rates in GB/s."""

    model: str
    title: str
    num_parameters: int
    steps: int
    every: int
    killed: Killed
    resumed: Resumed
    repeated: list[Repeated]
    first_loss: float
    """Loss on held-out text before the first step."""
    last_loss: float
    """Loss on held-out text after the last step."""
    step_s: float
    """Median duration of a step in both processes, forward and backward included."""
    update_s: float
    """Median duration of `optimizer.step()` alone."""
    read_gbps: float
    write_gbps: float
    state_bytes: int
    ring_bytes: int
    resident_bytes: int
    checkpoint_bytes: int
    """Bytes that the newest checkpoint wrote."""
    checkpoint_stall_s: float
    """Average time that training stands still for a checkpoint: in the call, and in steps that wait
    for the seal."""
    checkpoint_durable_s: float
    """Time until the newest checkpoint was safe from a power failure, while training continued."""
    torch_save_bytes: int
    torch_save_s: float
    torch_load_s: float
    store: str
    elapsed_s: float

    @property
    def equal(self) -> bool:
        """Whether there were repeated steps, and each had the same loss in both processes."""
        return bool(self.repeated) and all(row.equal for row in self.repeated)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self) | {"equal": self.equal}

    def show(self, console: Console) -> None:
        """Print a table of the repeated steps and a table of the costs."""
        from rich.table import Table

        steps = Table(title="Steps taken twice", title_justify="left")
        for title in ("step", "loss before the kill", "loss after the resume", "bit for bit"):
            steps.add_column(title, justify="right")
        for row in self.repeated:
            same = "[green]equal[/]" if row.equal else "[bold red]DIFFERENT[/]"
            steps.add_row(str(row.step), row.before, row.after, same)
        console.print(steps)

        costs = Table(title=f"{self.title}, {self.num_parameters:,} parameters")
        costs.title_justify = "left"
        costs.add_column("")
        costs.add_column("offload", justify="right")
        costs.add_column("plain torch", justify="right")
        in_memory = f"{size(self.ring_bytes)} + {size(self.resident_bytes)}"
        saved = size(self.torch_save_bytes)
        stalled = f"{self.torch_save_s * 1000:,.0f} ms"
        rows = (
            ("optimizer state on SSD", size(self.state_bytes), "-"),
            ("... in memory (ring + resident)", in_memory, size(self.state_bytes)),
            ("one checkpoint writes", size(self.checkpoint_bytes), saved),
            ("... and stops training for", f"{self.checkpoint_stall_s * 1000:,.0f} ms", stalled),
            ("... and is durable after", f"{self.checkpoint_durable_s * 1000:,.0f} ms", stalled),
            ("resuming reads", size(self.resumed.bytes), saved),
            ("... and takes", f"{self.resumed.seconds:.2f} s", f"{self.torch_load_s:.2f} s"),
        )
        for cells in rows:
            costs.add_row(*cells)
        console.print(costs)
        console.print(
            "Same disk, same state (16-bit parameters, FP32 masters, two moments). torch.save: "
            "with fsync, without its checksums, the faster of two. torch.load: from the disk, not "
            "from the page cache, without load_state_dict.",
            style="dim",
        )
