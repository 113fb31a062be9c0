"""Where the time of a run went, and what would make it faster, said from its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from offload.report.phases import Totals, title_of
from offload.report.run import Run
from offload.units import duration

_SHOWN = 0.01
"""Smallest fraction of the time that is worth a word."""

_MATTERS = 0.05
"""Smallest fraction of the time of which the half is worth a change of the settings."""

_MOST_OF_IT = 0.4
"""Smallest fraction of a step that makes a phase the one to change first."""

_NO_HISTORY = (
    "Where the time went is not known: the store has no history of steps. The training process "
    "writes one, history.jsonl, while it runs."
)


def where_the_time_went(run: Run) -> str:
    """Say in one sentence how the time of the run was spent."""
    totals = run.totals
    if not totals.step_s:
        return _NO_HISTORY
    shares = sorted(totals.shares.items(), key=lambda item: -item[1])
    parts = [f"{share:.0%} {title_of(name)}" for name, share in shares if share >= _SHOWN]
    where = f"A step took {duration(totals.step_s / totals.num_steps)} on average"
    where += " beside the model" if totals.is_beside else ""
    where += f": {_listed(parts)}"
    of_run = _training_share(totals)
    if not of_run:
        return f"{where}."
    what = "waiting for steps" if totals.is_beside else "steps"
    stall = _stall_share(run)
    and_checkpoints = f" and waiting for checkpoints {stall:.1%}" if stall >= 0.001 else ""
    return f"{where}; of the whole time of the run, {what} took {of_run:.0%}{and_checkpoints}."


def what_would_help(run: Run) -> list[str]:
    """Say what would make the run faster, the largest gain first; something, if steps are known."""
    totals = run.totals
    if not totals.step_s:
        return []
    of_run = _training_share(totals)
    if of_run and of_run < _MATTERS:
        text = (
            f"Steps cost {of_run:.1%} of the time, so faster drives would hardly be noticed: the "
            "rest passes in forward, backward and your own code."
        )
        advice = [(0.0, text)]
    else:
        # Of a run whose length is not known, only what a step gains can be said.
        advice = [(gain * (of_run or 1.0), text) for gain, text in _about_steps(totals)]
    stall, seals = _stall_share(run), totals.shares.get("wait_seal", 0.0)
    if max(stall, seals) >= _MATTERS:
        advice.append((max(stall, seals * (of_run or 1.0)), _about_seals(run, stall, seals)))
    advice.sort(key=lambda item: -item[0])
    return [text for _, text in advice] or [
        "No wait stands out. The command offload size computes what other drives would give."
    ]


def _about_steps(totals: Totals) -> Iterator[tuple[float, str]]:
    """Yield advice about steps, each with the fraction of their time that it may save."""
    shares, step_s = totals.shares, totals.step_s / totals.num_steps
    drive = shares.get("wait_read", 0.0) + shares.get("wait_write", 0.0)
    compute, device = shares.get("compute", 0.0), shares.get("wait_device", 0.0)
    if drive >= _MATTERS:
        text = (
            f"Steps waited for the drive for {drive:.0%} of their time. A second drive of the "
            "same speed, directory=[a, b], about halves such waits: a step would take "
            f"{duration(step_s * (1 - drive / 2))} instead of {duration(step_s)}."
        )
        yield drive / 2, text
    if drive >= _MOST_OF_IT:
        text = (
            "Smaller state is as good as a faster drive: Options(host_memory=...) keeps part of "
            'it in memory with the same results; master="split" or state_dtype="int8" store 10 '
            "or 6.1 bytes per parameter instead of 12."
        )
        yield drive / 2.1, text
    if drive + compute >= _MOST_OF_IT and not totals.is_beside:
        text = (
            'Options(overlap="forward") takes the step beside the next forward, so that up to the '
            "time of a forward is no longer waited for. The results stay the same."
        )
        yield drive / 2.2, text
    if compute >= _MOST_OF_IT:
        text = (
            f"Updating took {compute:.0%} of the time of steps. On a CPU, more threads help "
            "(OMP_NUM_THREADS), and so does the compiled kernel: stats().update_code says whether "
            "it is in use."
        )
        yield compute / 2, text
    if device >= _MOST_OF_IT:
        text = (
            f"Steps waited for the device for {device:.0%} of their time. Most of that is the "
            "backward pass, which was only queued before: no drive shortens it."
        )
        yield 0.0, text


def _about_seals(run: Run, stall: float, seals: float) -> str:
    steps = [entry.step for entry in run.entries if entry.seal]
    every = f", every {_steps(steps)} so far" if len(steps) > 1 else ""
    waited = f"{stall:.0%} of the run" if stall >= seals else f"{seals:.0%} of the time of steps"
    return (
        f"Training waited for seals for {waited}. Make fewer checkpoints{every}: half as many "
        "halve it."
    )


def _steps(steps: list[int]) -> str:
    every = median(after - before for before, after in pairwise(steps))
    return "step" if every <= 1 else f"{every:,.0f} steps"


def _training_share(totals: Totals) -> float:
    """Return the fraction of the run that training waited for steps; 0 if it is not known."""
    clocks = totals.seconds
    spent = totals.step_s
    if totals.is_beside:
        spent = clocks.get("step", 0.0) + clocks.get("wait_update", 0.0)
    return spent / totals.elapsed_s if totals.elapsed_s >= spent > 0 else 0.0


def _stall_share(run: Run) -> float:
    """Return the fraction of the run that training waited for checkpoints; 0 if not known."""
    stalls = sum(seal.stall_s for seal in run.history.seals)
    return stalls / run.totals.elapsed_s if run.totals.elapsed_s >= stalls > 0 else 0.0


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
