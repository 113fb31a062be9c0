"""Runner of fio as a child process: choice of the engine, buffers on huge pages, and the report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gds.errors import RefusedError

_POLL_S: Final = 0.02


class FioError(RefusedError):
    """fio failed, or cannot run a job."""


class FioMissingError(FioError):
    """fio is not installed."""


class FioRunner:
    """Runs fio in a directory, with the same kind of memory as `gds`.

    fio's memory comes from malloc, and glibc (2.35 and newer) asks the kernel to put it on huge
    pages. `gds` does the same for its buffers; no reserved pages are needed. The kernel may refuse
    huge pages, so their amount is read from ``/proc`` while fio runs.
    """

    def __init__(self, directory: str) -> None:
        """Find fio, and an asynchronous engine that works in `directory`."""
        path = shutil.which("fio")
        if path is None:
            raise FioMissingError("fio is not installed (apt-get install fio)")
        self._path = path
        self._directory = directory
        self.engine = self._choose_engine()

    def run(self, arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
        """Run fio on files of the directory.

        Args:
            arguments: Jobs and their options.

        Returns:
            Report of fio, and the largest number of bytes of its memory on huge pages.

        Raises:
            FioError: fio failed.
        """
        process = subprocess.Popen(
            [
                self._path,
                "--output-format=json",
                "--name=global",
                "--thread",
                "--mem=malloc",
                *arguments,
            ],
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        )
        watch = _HugePages(process.pid)
        try:
            out, error = process.communicate()
        except BaseException:  # after an interrupt, fio must not keep writing to a removed file
            process.kill()
            process.wait()
            raise
        finally:
            huge_bytes = watch.stop()
        begin = out.find("{")
        if process.returncode != 0 or begin < 0:
            raise FioError(f"fio failed ({process.returncode}): {(error or out).strip()[-300:]}")
        report: dict[str, Any] = json.loads(out[begin:])
        return report, huge_bytes

    def _choose_engine(self) -> str:
        """Return the first asynchronous engine that works, tried with a small file."""
        said = ""
        name = f".gds-bench-fio-{os.getpid()}"
        for engine in ("io_uring", "libaio"):
            try:
                self.run(
                    [
                        "--direct=1",
                        f"--ioengine={engine}",
                        f"--filename={name}",
                        "--size=64k",
                        "--name=probe",
                        "--rw=write",
                    ]
                )
            except FioError as error:
                said = str(error)
                continue
            finally:
                Path(self._directory, name).unlink(missing_ok=True)
            return engine
        raise FioError(f"fio runs here with neither io_uring nor libaio: {said}")


class _HugePages:
    """Watches how much memory of a process is on huge pages, and keeps the largest value."""

    def __init__(self, pid: int) -> None:
        """Start a thread that watches a process."""
        self._path = Path(f"/proc/{pid}/smaps_rollup")
        self._largest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop watching, and return the largest number of bytes."""
        self._ended.set()
        self._thread.join()
        return self._largest

    def _watch(self) -> None:
        """Read the value repeatedly until `stop` is called."""
        while not self._ended.wait(_POLL_S):
            try:
                text = self._path.read_text()
            except OSError:
                continue
            found = re.search(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE)
            if found:
                self._largest = max(self._largest, int(found[1]) << 10)
