"""What a run of the tests has tried, in one line each at its end.

Only tests that have passed count: what is said to have been found was found by all of them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.campaigns import TIERS, of_another_tier, sampled
from tests.dying import die_with_parent, let_forks_die

# The same examples in every run, however slow the machine: chance is not to refuse a release.
# `--hypothesis-profile=default` draws others, and says what takes long.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# torch asks for the name of the other end of each connection that ranks make. If a question to the
# name server is lost, the C library asks again after 5 s; a test makes hundreds of connections.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# In the background of a script, and under nohup, SIGINT is ignored by whatever is started. What a
# process handles is not ignored by the programs that it starts in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No process is left behind, even if the tests are killed; see tests/dying.py.
let_forks_die()
if "PYTEST_XDIST_WORKER" in os.environ:
    die_with_parent()

SYSTEM_CALL_FAULTS = "faults of "
"""Begins the names under which `tests/kernel` records how many calls it let fail."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a tier be chosen."""
    parser.addoption("--tier", choices=TIERS, help="which tests to run: see tests/campaigns.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of another tier, and of a campaign all but a sample."""
    names = [item.nodeid for item in items]
    left = sampled(names, config.args)
    left |= of_another_tier(names, config.args, config.getoption("tier"))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add up what tests have recorded with `record_property`, on all workers."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    recorded = list(_recorded(reports))
    cuts, states = _total(recorded, "crash_cuts"), _total(recorded, "crash_states")
    if cuts:
        seeds = ", ".join(sorted({str(v) for name, v in recorded if name == "crash_seed"}))
        terminalreporter.write_line(
            f"power cuts: {cuts} tried; {states} different states were opened, resumed from and "
            f"compared (CRASH_SEED={seeds})"
        )
    if kills := _total(recorded, "kills"):
        terminalreporter.write_line(f"SIGKILL: {kills} processes killed, and the run went on")
    if faults := _total(recorded, "faults"):
        terminalreporter.write_line(f"I/O faults: {faults} injected, each in a run of its own")
    calls: Counter[str] = Counter()
    for name, value in recorded:
        if name.startswith(SYSTEM_CALL_FAULTS):
            calls[name.removeprefix(SYSTEM_CALL_FAULTS)] += value
    if calls:
        listed = ", ".join(f"{name} {number}" for name, number in sorted(calls.items()))
        terminalreporter.write_line(f"faults of system calls: {listed}; {calls.total()} in all")
    if flips := _total(recorded, "flips"):
        files = _total(recorded, "flipped_files")
        terminalreporter.write_line(
            f"bits flipped: {flips}, each in another byte of {files} files; detected: {flips}"
        )
    if pages := _total(recorded, "lost_writes"):
        terminalreporter.write_line(
            f"pages stale, torn, misdirected or zeroed: {pages}; detected: {pages}"
        )
    if attacks := _total(recorded, "attacks"):
        terminalreporter.write_line(f"attacks: {attacks}; refused by name: {attacks}")
    machine: Counter[str] = Counter()
    for name, value in recorded:
        if name == "state_machine":
            machine.update(value)
    if machine:
        listed = ", ".join(f"{number} {name}" for name, number in machine.items())
        terminalreporter.write_line(f"state machine: {listed}")


def _recorded(reports: Iterable[object]) -> Iterable[tuple[str, Any]]:
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when == "call" and report.passed:
            yield from report.user_properties


def _total(recorded: Iterable[tuple[str, Any]], name: str) -> int:
    return sum(value for key, value in recorded if key == name)
