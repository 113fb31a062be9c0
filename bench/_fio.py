"""What the drive itself can do: fio, moving the same bytes in requests of the same size."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._harness import BenchError

_POLL_S = 0.02


class FioMissingError(BenchError):
    """There is no fio on this machine."""

    def __init__(self) -> None:
        super().__init__("fio is not installed (apt-get install fio): its rows are left out")


@dataclass(frozen=True, slots=True)
class FioRun:
    """One run of fio."""

    seconds: float
    """From the start of the first transfer to the end of the last."""

    read_bytes: int
    written_bytes: int

    huge_bytes: int
    """Memory on huge pages while it ran; 0 where the kernel does not tell."""


class Fio:
    """fio as the measure of a drive: O_DIRECT, asynchronous, buffers on huge pages.

    Its memory comes from malloc, which glibc (2.35 and newer) then asks the kernel to put on huge
    pages. That needs no reserved pages, and is what `gds` does for its own buffers; whether it
    worked is read from ``/proc`` while fio runs, and recorded.
    """

    def __init__(self, directory: str) -> None:
        """Find fio, and the engine that works in `directory`.

        Raises:
            FioMissingError: It is not installed.
            BenchError: It runs with neither io_uring nor libaio.
        """
        path = shutil.which("fio")
        if path is None:
            raise FioMissingError
        self._path = path
        self._directory = directory
        self.engine = self._choose_engine()

    def mixed(
        self,
        files: Sequence[str],
        *,
        file_bytes: int,
        request_bytes: int,
        depth: int,
        loops: int,
    ) -> FioRun:
        """Read all bytes of `files` and write all of them, both at once.

        One job reads and one writes, each through the files in turn, as a step does; so the bytes
        are exactly a step's, where fio's own mixed mode would draw lots for each request.

        Args:
            files: Names of existing files in the directory, all written before.
            file_bytes: How much of each, from its start; whole requests of it.
            request_bytes: Bytes of one transfer.
            depth: Transfers in flight, in each direction.
            loops: How many times over.
        """
        if file_bytes % request_bytes:
            raise ValueError(f"{file_bytes} bytes are not whole requests of {request_bytes}")
        total = file_bytes * len(files)
        common = [
            f"--filename={':'.join(files)}",
            f"--filesize={file_bytes}",
            f"--size={total}",
            f"--bs={request_bytes}",
            f"--iodepth={depth}",
            f"--loops={loops}",
            "--overwrite=1",
            "--fallocate=none",
            "--allow_file_create=0",
            "--file_service_type=roundrobin",
        ]
        report, huge_bytes = self._run(
            [*common, "--name=reader", "--rw=read", "--name=writer", "--rw=write"]
        )
        reader, writer = report["jobs"]
        run = FioRun(
            seconds=max(reader["read"]["runtime"], writer["write"]["runtime"], 1) / 1000,
            read_bytes=reader["read"]["io_bytes"],
            written_bytes=writer["write"]["io_bytes"],
            huge_bytes=huge_bytes,
        )
        if (run.read_bytes, run.written_bytes) != (total * loops, total * loops):
            raise BenchError(f"fio was to move {total * loops} bytes each way, and moved {run}")
        return run

    def _choose_engine(self) -> str:
        said = ""
        name = "fio-probe.bin"
        for engine in ("io_uring", "libaio"):
            self.engine = engine
            try:
                self._run([f"--filename={name}", "--size=64k", "--name=probe", "--rw=write"])
            except BenchError as error:
                said = str(error)
                continue
            finally:
                Path(self._directory, name).unlink(missing_ok=True)
            return engine
        raise BenchError(f"fio runs here with neither io_uring nor libaio: {said}")

    def _run(self, arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
        common = ["--name=global", "--thread", "--direct=1", f"--ioengine={self.engine}"]
        process = subprocess.Popen(
            [self._path, "--output-format=json", *common, "--mem=malloc", *arguments],
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        )
        watch = _HugePages(process.pid)
        out, error = process.communicate()
        huge_bytes = watch.stop()
        begin = out.find("{")
        if process.returncode != 0 or begin < 0:
            raise BenchError(f"fio failed ({process.returncode}): {(error or out).strip()[-300:]}")
        return json.loads(out[begin:]), huge_bytes


class _HugePages:
    """Watches how much of a process's memory is on huge pages; keeps the largest figure."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/smaps_rollup")
        self._largest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return the most bytes seen."""
        self._ended.set()
        self._thread.join()
        return self._largest

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                text = self._path.read_text()
            except OSError:
                continue
            found = re.search(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE)
            if found:
                self._largest = max(self._largest, int(found[1]) << 10)
