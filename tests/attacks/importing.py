"""Processes that import one hostile file each.

python -m tests.attacks.importing      # serves them, as tests.forking says
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from offload.cli import main
from tests.attacks.imports import CASES, distributed, saved
from tests.forking import serve
from tests.process_memory import reset_peak, resident_bytes

ADDRESS_SPACE_BYTES = 3 << 30
"""More than a process may map: one that asks for terabytes dies of it, and no one else."""


def attempt(directory: str) -> None:
    """Import the file whose name is in ``case``, with limited memory; say how it went."""
    work = Path(directory)
    case = next(case for case in CASES if case.name == (work / "case").read_text())
    warnings.simplefilter("ignore")
    source = case.make(work)
    limit = resident_bytes("VmSize") + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.chdir(work)  # where a pickle would leave its mark
    reset_peak()
    before = resident_bytes("VmRSS")
    code, err = run_import(source, work / "store", *case.arguments)
    grown = resident_bytes("VmHWM") - before
    print(json.dumps({"code": code, "err": err[:2000], "grown_bytes": grown}), flush=True)
    os._exit(0)  # how Python ends takes longer than the import


def run_import(source: Path, store: Path, *arguments: str) -> tuple[object, str]:
    """Run the command; returns its status, and what it says."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["offload", "import", str(source), str(store), "--quiet", *arguments]
    code: object = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
    except BaseException as error:  # noqa: BLE001  (would be a traceback)
        err.write(f"TRACEBACK {type(error).__name__}: {error}")
    return code, err.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as first:
        # What an import needs is imported once, and not by each of the processes.
        for kind in (saved(), distributed(lambda _: None)):
            made = kind(Path(first))
            run_import(made, Path(first) / f"store-{made.name}")
    serve(globals())
