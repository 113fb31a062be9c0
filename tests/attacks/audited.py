"""A process that opens, restores and verifies hostile stores, and notes what runs meanwhile.

``python -m tests.attacks.audited DIRECTORY 1``, or ``4`` for every fourth of them. Python itself
reports (`sys.addaudithook`) whatever compiles, executes, imports, unpickles, loads a library or
starts a process. The first attack of each group is carried out before that, so that modules which
are imported when first needed are there.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import torch

import offload
from gds.calibration.calibration import load_calibration
from tests.attacks.attack import Attack
from tests.attacks.attacked import Attacked, make_store, open_store
from tests.attacks.good import WIDTHS
from tests.attacks.make import all_attacks
from tests.stores.small import make_model

NAMES_CODE = re.compile(rb"system|eval|__\w+__|_dynamo|module|import|load|object|PWNED|PK\x03")
"""Attacks whose content has this are those to be looked at."""

# With these, code that a store holds or names could come to run.
EVENTS = (
    "exec",
    "compile",
    "import",
    "code.__new__",
    "marshal.loads",
    "marshal.load",
    "pickle.find_class",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pty.spawn",
)


def read_everything(attack: Attack, template: Path, scratch: Path) -> None:
    """Do with an attacked store whatever reads it; errors are another test's affair."""
    global current
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(template, scratch)
    directories = [scratch / f"drive-{index}" for index in range(attack.num_directories)]
    attacked = Attacked(attack, directories, scratch / "outside", thorough=False)
    attacked.inflict()
    checkpoint, parts, model = attacked.checkpoint, attacked.parts, make_model(*WIDTHS)

    def open_it() -> None:
        with offload.open_checkpoint(checkpoint, parts=parts) as opened:
            for use in (
                lambda: opened.train_state,
                opened.verify,
                lambda: offload.read_state(opened, "0.bias"),
            ):
                with contextlib.suppress(offload.OffloadError, OSError):
                    use()

    def restore() -> None:
        with open_store(model, directories) as optimizer:
            try:
                optimizer.restore()
            except offload.OffloadError:
                optimizer.restore(1, discard_newer=True)

    current = attack.name
    for use in (
        lambda: offload.list_checkpoints(attacked.store, parts=parts),
        open_it,
        lambda: offload.load_parameters(model, checkpoint),
        restore,
        lambda: load_calibration(str(attacked.store / "calibration.json")),
    ):
        with warnings.catch_warnings(), contextlib.suppress(offload.OffloadError, OSError):
            warnings.simplefilter("ignore")
            use()
    current = ""


current = ""
"""The attack that is being carried out; what happens between them is not looked at."""


def main() -> None:
    global current
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    templates = {}
    for number in (1, 2):
        templates[number] = directory / f"template-{number}"
        make_store([templates[number] / f"drive-{index}" for index in range(number)])
    noted: list[tuple[str, str]] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if current and event in EVENTS:
            noted.append((current, f"{event} {arguments!r:.200}"))

    every = all_attacks()
    attacks = [a for a in every if a.content is not None and NAMES_CODE.search(a.content)]
    attacks = attacks[:: int(sys.argv[2])]
    for attack in {(a.target, a.stage): a for a in attacks}.values():
        read_everything(attack, templates[attack.num_directories], directory / "run")
    sys.addaudithook(note)
    current = "this one"
    exec("pass")  # shows that the hook notes what it should
    current = ""
    seen, noted[:] = [what for _, what in noted], []
    for attack in attacks:
        read_everything(attack, templates[attack.num_directories], directory / "run")
    marks = [str(path) for path in directory.rglob("PWNED")]
    print(json.dumps({"noted": noted, "seen": seen, "num": len(attacks), "marks": marks}))


if __name__ == "__main__":
    main()
