"""A process that opens, restores and verifies hostile stores, and notes what runs meanwhile.

``python -m tests.attacks.audited DIRECTORY``. Python itself reports (`sys.addaudithook`) whatever
compiles, executes, imports, unpickles, loads a library or starts a process. The first attack of
each group is carried out before that, so that modules which are imported when first needed are
there.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from tests.attacks.attacked import make_store, run
from tests.attacks.make import all_attacks

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


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    templates = {}
    for number in (1, 2):
        templates[number] = directory / f"template-{number}"
        make_store([templates[number] / f"drive-{index}" for index in range(number)])
    noted: list[tuple[str, str]] = []
    current = ""

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if current and event in EVENTS:
            noted.append((current, f"{event} {arguments!r:.200}"))

    every = all_attacks()
    attacks = [a for a in every if a.content is not None and NAMES_CODE.search(a.content)]
    for attack in {(a.target, a.stage): a for a in every if a.content is not None}.values():
        run(attack, templates[attack.num_directories], directory / "run", thorough=True)
    sys.addaudithook(note)
    current = "this one"
    exec("pass")  # shows that the hook notes what it should
    seen, noted[:] = [what for _, what in noted], []
    for attack in attacks:
        current = attack.name
        run(attack, templates[attack.num_directories], directory / "run", thorough=True)
    current = ""
    marks = [str(path) for path in directory.rglob("PWNED")]
    print(json.dumps({"noted": noted, "seen": seen, "num": len(attacks), "marks": marks}))


if __name__ == "__main__":
    main()
