"""A process that imports hostile files: ``python -m tests.attacks.importing DIRECTORY 0/3``.

It makes every third of them from the first, or with ``some`` a few of different kinds, and tries
each in a process of its own.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import signal
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from offload.cli import main
from tests.attacks.imports import CASES, Hostile, distributed, saved
from tests.dying import let_forks_die

ADDRESS_SPACE_BYTES = 3 << 30
TIMEOUT_S = 300

SOME = {
    *("good-folder", "evil", "evil-distributed", "many-lists", "state-is-large"),
    *("index-escapes", "weights-are-a-device", "lr-nan", "expanded", "state-step=nan"),
}


def chosen(share: str) -> list[Hostile]:
    """Return the files that a process tries: a share as ``0/3``, or ``some``."""
    if share == "some":
        return [case for case in CASES if case.name in SOME]
    first, every = map(int, share.split("/"))
    return CASES[first::every]


def attempt(case: Hostile, directory: Path) -> dict[str, Any]:
    """Import in a forked process, whose memory and time are limited; say how it went."""
    work = directory / case.name.replace("=", "-")
    work.mkdir()
    source = case.make(work)
    gc.collect()
    reading, writing = os.pipe()
    before = _resident_bytes()
    started = time.monotonic()
    let_forks_die()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.chdir(work)
        signal.alarm(TIMEOUT_S)
        limit = _mapped_bytes() + ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with os.fdopen(writing, "w") as pipe:
            json.dump(_run(["import", str(source), str(work / "store"), *case.arguments]), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status, used = os.wait4(pid, 0)
    found = json.loads(text) if text else {"code": None, "err": f"died with status {status}"}
    found |= {
        "name": case.name,
        "seconds": time.monotonic() - started,
        "grown_bytes": max(used.ru_maxrss * 1024 - before, 0),
        "pwned": (work / "PWNED").exists(),
    }
    sealed = [p.name for p in work.glob("store/step-*")]
    found["sealed"] = sealed
    if sealed:
        listed = _run(["ls", str(work / "store"), "--json"])
        found["listed"] = [Path(i["path"]).name for i in json.loads(listed["out"]) if i["valid"]]
    return found


def _run(arguments: list[str]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["offload", *arguments, *(["--quiet"] if arguments[0] == "import" else [])]
    code: object = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
    except BaseException as error:  # noqa: BLE001  (would be a traceback)
        err.write(f"TRACEBACK {type(error).__name__}: {error}")
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()[:2000]}


def _resident_bytes() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])


def _mapped_bytes() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, cases = Path(sys.argv[1]), chosen(sys.argv[2])
    warnings.simplefilter("ignore")
    # What an import needs is imported once, and not by each of the processes.
    (directory / "first").mkdir()
    for make in (saved(), distributed(lambda _: None)):
        source = make(directory / "first")
        _run(["import", str(source), str(directory / "first" / f"store-{source.name}")])
    for case in cases:
        print(json.dumps(attempt(case, directory)), flush=True)
