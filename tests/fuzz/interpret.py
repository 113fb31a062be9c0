"""Runs a program on both sides and compares them all the way."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.compare import FindingError, require_same
from tests.fuzz.loops import LOOPS
from tests.fuzz.program import Operation, Program
from tests.fuzz.sides import Ours, Plain
from tests.fuzz.stores import Pair
from tests.fuzz.troubles import STORES

EXPECTED = (
    "no direct I/O",  # promised on tmpfs
    "Detected call of `lr_scheduler.step()` before",  # torch's, if the first step was interrupted
    "could not be made ready (KeyboardInterrupt)",  # after which no slot is reused
    "the reference that state_dict() has returned cannot be resumed from",  # of an unsealed state
)
MEMORY = Path("/dev/shm")


@dataclass
class Outcome:
    """What came of a program: how many operations of each kind ran, and what was found."""

    name: str
    ran: dict[str, int] = field(default_factory=dict)
    finding: str | None = None
    at: int | None = None
    trace: str | None = None


def _attempt(call: Callable[[], Any]) -> tuple[Any, list[str], str | None]:
    """Return what a call returns, or its error's type; its warnings; and the error's traceback."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = None
        try:
            result = call()
        except Exception as error:  # what one side raises is compared with the other
            if isinstance(error, FindingError):
                raise
            result = ("raised", type(error).__name__)
            trace = traceback.format_exc()
    messages = {str(w.message)[:200] for w in caught}
    unexpected = {m for m in messages if not any(words in m for words in EXPECTED)}
    return result, sorted(unexpected), trace


def _both(pair: Pair, op: Operation) -> None:
    """Run an operation of a training loop on both sides, and compare."""
    function = LOOPS[op.kind]
    torch.manual_seed(op.seed)
    plain, expected, plain_trace = _attempt(lambda: function(pair.plain, op))
    torch.manual_seed(op.seed)
    ours, warned, ours_trace = _attempt(lambda: function(pair.ours, op))
    if ours_trace and not plain_trace:
        raise FindingError(f"{op.kind}: ours raises\n{ours_trace}")
    if plain_trace and not ours_trace:
        raise FindingError(f"{op.kind}: plain torch raises, ours does not\n{plain_trace}")
    require_same(op.kind, plain, ours)
    _require_warnings(op, expected, warned)
    if ours_trace and "planned" not in str(ours) and "No inf checks" not in ours_trace:
        # Both raise the same: nothing that a user goes on from without clearing gradients.
        for side in (pair.plain, pair.ours):
            side.model.zero_grad()


def _require_warnings(op: Operation, expected: list[str], warned: list[str]) -> None:
    new = [message for message in warned if message not in expected]
    if new:
        raise FindingError(f"{op.kind}: ours warns: {new}")


def _stores(pair: Pair, op: Operation) -> None:
    torch.manual_seed(op.seed)
    _, warned, trace = _attempt(lambda: STORES[op.kind](pair, op))
    if trace:
        raise FindingError(f"{op.kind}: raises\n{trace}")
    _require_warnings(op, [], warned)


def _compare(pair: Pair, op: Operation, *, all_of_it: bool) -> None:
    """Compare what can be seen now; in ``overlap="forward"`` looking would hide a wait left out."""
    if op.kind != "threads":  # whose hooks come in any order
        require_same(f"after {op.kind}: what hooks saw", pair.plain.log, pair.ours.log)
    pair.plain.log.clear()
    pair.ours.log.clear()
    if all_of_it or pair.ours.overlap != "forward":
        require_same(f"after {op.kind}: parameters", pair.plain.look(), pair.ours.look())
        require_same(f"after {op.kind}: hyper-parameters", pair.plain.hyper(), pair.ours.hyper())


def _require_none_lost(op: Operation, lost: list[str]) -> None:
    """Raise if a destructor has failed; an interrupt that came within one is lost in Python."""
    failed = [text for text in lost if not text.startswith("KeyboardInterrupt")]
    if failed:
        raise FindingError(f"{op.kind}: raised where nobody can catch it: {failed}")


def run(program: Program) -> Outcome:
    """Run a program in this process, and clean up after it."""
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    torch.set_num_threads(program.config["threads"])
    torch.set_flush_denormal(program.config["denormal"])
    torch.backends.mha.set_fastpath_enabled(False)  # hooks on modules switch it off as well
    disk = program.config["disk"] or not MEMORY.is_dir()
    root = Path(tempfile.mkdtemp(prefix="offload-fuzz-", dir=None if disk else MEMORY))
    ran: Counter[str] = Counter()
    outcome = Outcome(program.name)
    pair: Pair | None = None
    lost: list[str] = []
    sys.unraisablehook = lambda raised: lost.append(f"{raised.exc_value!r} in {raised.object!r}")
    try:
        pair = Pair(Plain(program, root), Ours(program, root))
        for n, op in enumerate(program.operations):
            outcome.at = n
            (_both if op.kind in LOOPS else _stores)(pair, op)
            _compare(pair, op, all_of_it=op.seed % 11 == 0)
            ran[op.kind] += 1
            _require_none_lost(op, lost)
        outcome.at = len(program.operations)
        last = Operation("the end", 0, {})
        _compare(pair, last, all_of_it=True)
        STORES["state"](pair, last)
        STORES["reopen"](pair, Operation("reopen", 0, {"options": pair.ours.options}))
        _compare(pair, last, all_of_it=True)
        STORES["state"](pair, last)
        pair.ours.close()
        _require_none_lost(last, lost)
    except FindingError as finding:
        outcome.finding = str(finding)
        outcome.trace = traceback.format_exc()
    except BaseException as error:  # noqa: BLE001 - anything that escapes is a finding
        outcome.finding = f"{type(error).__name__}: {error}"
        outcome.trace = traceback.format_exc()
    finally:
        sys.unraisablehook = sys.__unraisablehook__
        outcome.ran = dict(ran)
        shutil.rmtree(root, ignore_errors=True)
    return outcome
