"""A process that attacks stores: ``python -m tests.attacks.attacked 0/3 DIRECTORY``.

It makes a store, and for every third attack from the first a copy with the attack in it; with
``some`` for a few attacks of each kind. Prints the name of each before it begins, so that a hang
or a death has one, and at the end JSON: for each attack what was wrong with how it was refused,
by how many bytes the process grew at most, and what Python's audit events say was run.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import unittest.mock
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.cells
import torch
import typer.main

import offload
from gds import StorageError
from gds.calibration.calibration import load_calibration
from offload import OffloadError
from offload.cli import main as run_command
from tests.attacks.attack import Attack
from tests.attacks.good import STORE_ID, WIDTHS
from tests.attacks.make import all_attacks, some_attacks
from tests.command_line import built_once
from tests.stores.small import make_model, make_optimizer, step, train

TIMEOUT_S = 200
"""Seconds for one attack; a handful of steps on a tiny model takes a fraction of one."""

ADDRESS_SPACE_BYTES = 2 << 30
"""More than this process may map: one that asks for terabytes dies of it, and no one else."""

EVENTS = {
    *("exec", "compile", "import", "code.__new__", "marshal.loads", "marshal.load"),
    *("pickle.find_class", "ctypes.dlopen", "ctypes.dlsym", "os.system", "os.exec", "os.fork"),
    *("os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"),
}
"""Of Python's audit: with these, code that a store holds or names could come to run."""


def open_store(model: torch.nn.Module, directories: list[Path]) -> offload.OffloadedOptimizer:
    """Construct the optimizer of the store, which no drive has to be measured for."""
    settings = {"drives": offload.DriveTuning(shares=(1,) * len(directories))}
    return make_optimizer(model, directory=directories, keep=2, settings=settings)


def make_store(directories: list[Path]) -> None:
    """Leave checkpoints of steps 1 and 2, and a slot that was being written.

    The store has the id that the attacks name: they are to be refused for what is wrong with
    them, not because they belong elsewhere.
    """
    with (
        unittest.mock.patch("uuid.uuid4", return_value=uuid.UUID(STORE_ID)),
        open_store(make_model(*WIDTHS), directories) as optimizer,
    ):
        train(optimizer, 2)
        step(optimizer)


@dataclass
class Attacked:
    """A copy of the store with one attack in it, and what was wrong with how it was met."""

    attack: Attack
    directories: list[Path]
    outside: Path
    thorough: bool
    """Whether everything is tried: for the first of a kind, and in a long run for what no file can
    hold."""

    complaints: list[str] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.directories[0]

    @property
    def checkpoint(self) -> Path:
        return self.store / "step-00000002"

    @property
    def target(self) -> Path:
        target = self.attack.target.replace("{step}", self.checkpoint.name)
        if "{slot}" in target:
            (slot,) = self.store.glob(".slot-*")
            target = target.replace("{slot}", slot.name)
        if "{part}" in target:
            target = target.replace("{part}", str(self._part()))
        return self.store / target  # which may be absolute

    def _part(self) -> Path:
        body = json.loads((self.checkpoint / "manifest.json").read_bytes())["body"]
        return self.directories[1] / body["parts"][0]["name"]

    def inflict(self) -> None:
        attack, target = self.attack, self.target
        if attack.start_only:
            with target.open("r+b") as file:
                file.write(attack.content or b"")
            return
        self.outside.mkdir()
        if target.exists():
            target.rename(self.outside / target.name)
        if attack.make is None:
            target.write_bytes(attack.content or b"")
        else:
            attack.make(target, self.outside)

    def complain(self, what: str) -> None:
        self.complaints.append(what[:600])

    def expect(self, what: str, holds: bool, found: object = "") -> None:
        if not holds:
            self.complain(f"{what}: {found}")

    def refused(self, what: str, call: Callable[[], Any]) -> None:
        """Check that a call is refused by name, with the path and the reason."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = call()
        except (OffloadError, StorageError) as error:
            self.good_message(what, str(error))
        except BaseException as error:  # noqa: BLE001  (whatever it is, it should not have been)
            self.complain(f"{what}: {type(error).__name__} (not a named error): {error}")
        else:
            self.complain(f"{what}: not refused: {found!r}")

    def good_message(self, what: str, message: str) -> None:
        self.expect(f"{what}: names no path", str(self.store.parent) in message, message)
        found = re.search(self.attack.reason, message, re.DOTALL)
        self.expect(f"{what}: another reason", found is not None, message)
        self.expect(f"{what}: too long", len(message) < 2000, len(message))

    @property
    def parts(self) -> list[Path] | None:
        return self.directories[1:] or None

    def run_cli(self, *arguments: object) -> tuple[int, str, str]:
        """Run the command line, and check what holds of every run."""
        parts = [text for part in self.directories[1:] for text in ("--part", str(part))]
        argv, sys.argv = sys.argv, ["offload", *map(str, arguments), *parts]
        out, err = io.StringIO(), io.StringIO()
        code: object = "did not exit"
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                run_command()
        except SystemExit as exited:
            code = 0 if exited.code is None else exited.code
        except BaseException as error:  # noqa: BLE001  (would be a traceback)
            self.complain(f"offload {arguments[0]}: {type(error).__name__}: {error}")
        finally:
            sys.argv = argv
        for text in (out.getvalue(), err.getvalue()):
            harmless = all(c.isprintable() or c == "\n" for c in re.sub(r"\x1b\[\d*m", "", text))
            self.expect(f"offload {arguments[0]}: control characters", harmless, repr(text))
            self.expect(f"offload {arguments[0]}: traceback", "Traceback" not in text, text)
        return (code if isinstance(code, int) else -1), out.getvalue(), err.getvalue()


def read_only(attacked: Attacked) -> None:
    """Open, list and verify, from Python and from the command line."""
    stage, step_path, store = attacked.attack.stage, attacked.checkpoint, attacked.store
    refused_at_open = stage in ("open", "store")
    infos = {info.path: info for info in offload.list_checkpoints(store, parts=attacked.parts)}
    newest, oldest = infos[str(step_path)], infos[str(store / "step-00000001")]
    attacked.expect("the good one is listed as bad", oldest.valid, oldest.reason)
    attacked.expect("listed", newest.valid is not refused_at_open, newest)
    if refused_at_open:
        attacked.good_message("list_checkpoints", newest.reason)
        attacked.refused("open", lambda: offload.open_checkpoint(step_path, parts=attacked.parts))
    with contextlib.suppress(OffloadError, OSError):  # which of them is not the question here
        offload.load_parameters(make_model(*WIDTHS), step_path)
    with offload.open_checkpoint(store, parts=attacked.parts) as opened:
        attacked.expect("the store's newest", opened.step == (1 if refused_at_open else 2), opened)
    if stage == "read":
        with offload.open_checkpoint(step_path) as opened:
            attacked.refused("train_state", lambda: opened.train_state)
            problems = opened.verify().problems
            attacked.good_message("verify", problems[0] if problems else "(found nothing)")
    if attacked.thorough:
        code, out, _ = attacked.run_cli("ls", store)
        attacked.expect("offload ls: status", code == 0, code)
        if refused_at_open:
            attacked.good_message("offload ls", out)
    code, _, err = attacked.run_cli("show", step_path)
    attacked.expect("offload show: status", code == (1 if refused_at_open else 0), code)
    if refused_at_open:
        attacked.expect("offload show", err.startswith("error: ") and err.count("\n") == 1, err)
        attacked.good_message("offload show", err)
    code, _, err = attacked.run_cli("verify", store if attacked.thorough else step_path)
    damaged = stage not in ("left", "writer", "ignored")
    attacked.expect("offload verify: status", code == (1 if damaged else 0), err)
    if damaged and stage != "restore":
        attacked.good_message("offload verify", err)


def take_over(attacked: Attacked) -> None:
    """Restore, and train on: the older checkpoint is of use, and nothing else is touched."""
    attack, stage = attacked.attack, attacked.attack.stage
    model = make_model(*WIDTHS)
    if stage in ("store", "writer"):
        attacked.refused("construction", lambda: open_store(model, attacked.directories))
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = open_store(model, attacked.directories)
    with optimizer:
        expected = 2 if stage in ("left", "ignored") else 1
        with warnings.catch_warnings(record=True) as later:
            warnings.simplefilter("always")
            try:
                found = optimizer.restore()
            except (OffloadError, StorageError) as error:
                attacked.expect("restore() is refused", stage in ("read", "restore"), error)
                attacked.good_message("restore", str(error))
                found = optimizer.restore(1, discard_newer=True)
            else:
                told = " ".join(str(w.message) for w in (*caught, *later))
                if stage != "ignored" and attack.name != "slot-with-a-directory":
                    attacked.good_message("restore", told)
            attacked.expect("restored", found is not None and found.step == expected, found)
            if attacked.thorough:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what cannot be a slot is left alone
                    train_on(attacked, optimizer)


def train_on(attacked: Attacked, optimizer: offload.OffloadedOptimizer) -> None:
    """Take steps with checkpoints, so that every free slot is used."""
    for _ in range(3):
        step(optimizer)
        checkpoint = optimizer.checkpoint({"more": 1}).result()
        attacked.expect("sealed one is damaged", checkpoint.verify().ok)


def snapshot(directory: Path) -> dict[str, bytes]:
    """Return every regular file below a directory, with its content."""
    return {
        str(path): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def run(attack: Attack, template: Path, scratch: Path, *, thorough: bool) -> list[str]:
    """Carry out one attack; return what was wrong."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(template, scratch)
    directories = [scratch / f"drive-{index}" for index in range(attack.num_directories)]
    attacked = Attacked(attack, directories, scratch / "outside", thorough)
    attacked.inflict()
    before = snapshot(attacked.outside)
    if attack.target == "calibration.json":
        found = load_calibration(str(attacked.target))
        attacked.expect("the calibration is believed", found is None, found)
    read_only(attacked)
    take_over(attacked)
    attacked.expect("what is outside was touched", snapshot(attacked.outside) == before)
    return attacked.complaints


def chosen(share: str) -> list[Attack]:
    """Return the attacks that a process carries out: a share as ``0/3``, or ``some``."""
    if share == "some":
        return some_attacks()
    first, every = map(int, share.split("/"))
    return all_attacks()[first::every]


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def mapped_bytes() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])


def main() -> None:
    attacks, is_short = chosen(sys.argv[1]), sys.argv[1] == "some"
    directory = Path(sys.argv[2])
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be searched when this ends, which takes a second
    typer.main.get_command = built_once
    templates = {}
    for number in {attack.num_directories for attack in attacks}:
        templates[number] = directory / f"template-{number}"
        make_store([templates[number] / f"drive-{index}" for index in range(number)])
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + ADDRESS_SPACE_BYTES,) * 2)
    os.chdir(directory)  # where a pickle would leave its mark
    complaints: dict[str, list[str]] = {}
    first = peak_bytes()
    kinds: set[tuple[str, str]] = set()
    for attack in {attack.stage: attack for attack in attacks}.values():
        # Modules that are imported when they are first needed are there after this.
        run(attack, templates[attack.num_directories], directory / "run", thorough=True)
    rich.cells.cell_len("\u4e2d")  # and rich's table of widths
    noted: list[str] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS:
            noted.append(f"{event} {arguments!r:.200}")

    sys.addaudithook(note)
    exec("pass")  # shows that the hook notes what it should
    for attack in attacks:
        print(f"attack: {attack.id}", flush=True)
        kind = (attack.group if is_short else attack.target, attack.stage)
        thorough = kind not in kinds or (attack.content is None and not is_short)
        kinds.add(kind)
        template = templates[attack.num_directories]
        signal.alarm(TIMEOUT_S)  # a hang is the death of this process
        try:
            complaints[attack.id] = run(attack, template, directory / "run", thorough=thorough)
        except Exception as error:  # noqa: BLE001  (one more thing that was wrong)
            complaints[attack.id] = [f"{type(error).__name__}: {error}"]
        signal.alarm(0)
    ran = noted.copy()
    marks = [str(path) for path in directory.rglob("PWNED")]
    grown = peak_bytes() - first
    print(json.dumps({"complaints": complaints, "grown_bytes": grown, "marks": marks, "ran": ran}))


if __name__ == "__main__":
    main()
