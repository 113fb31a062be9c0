"""What the demo shows: its progress, and its results as tables.

In a line of the progress, r and w are the rates at which the SSD was read and written. SSD and RAM
are the sizes of the state on the SSD and in memory.
"""

from __future__ import annotations

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
                f"{size(event['restore_bytes'])} in {event['restore_s']:.2f} s, 16-bit "
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


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table of the steps that both processes took, and a table of the costs."""
    from rich.table import Table

    steps = Table(title="Steps taken twice", title_justify="left")
    for title in ("step", "loss before the kill", "loss after the resume", "bit for bit"):
        steps.add_column(title, justify="right")
    for row in report["repeated"]:
        same = "[green]equal[/]" if row["equal"] else "[bold red]DIFFERENT[/]"
        steps.add_row(str(row["step"]), row["before"], row["after"], same)
    console.print(steps)

    costs = Table(title=f"{report['title']}, {report['num_parameters']:,} parameters")
    costs.title_justify = "left"
    costs.add_column("")
    costs.add_column("offload", justify="right")
    costs.add_column("plain torch", justify="right")
    in_memory = f"{size(report['ring_bytes'])} + {size(report['resident_bytes'])}"
    saved = size(report["torch_save_bytes"])
    stalled = f"{report['torch_save_s'] * 1000:,.0f} ms"
    crossed = f"{report['crossing_bytes_per_parameter']:.2f} bytes"
    rows = (
        *([("a step sends and receives, per parameter", crossed, "-")] if report["near"] else []),
        ("optimizer state on SSD", size(report["state_bytes"]), "-"),
        ("... in memory (ring + resident)", in_memory, size(report["state_bytes"])),
        ("one checkpoint writes", size(report["checkpoint_bytes"]), saved),
        ("... and stops training for", f"{report['checkpoint_stall_s'] * 1000:,.0f} ms", stalled),
        ("... and is durable after", f"{report['checkpoint_durable_s'] * 1000:,.0f} ms", stalled),
        ("resuming reads", size(report["resumed"]["bytes"]), saved),
        (
            "... and takes",
            f"{report['resumed']['seconds']:.2f} s",
            f"{report['torch_load_s']:.2f} s",
        ),
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
    if report["uninterrupted"]:
        console.print(
            "All losses, and the last parameters, are those of the run that was not killed and had "
            "parameters and gradients in memory, bit for bit."
        )
