"""Measurement of the drive itself by fio, which moves a step's bytes in requests of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench._harness import BenchError
from gds.bench.compare import FioError, FioRunner
from gds.bench.compare import FioMissingError as _NoFio


class FioMissingError(BenchError):
    """fio is not installed on this machine."""


@dataclass(frozen=True, slots=True)
class FioRun:
    """Result of one run of fio."""

    seconds: float
    """Seconds from the start of the first transfer to the end of the last."""

    read_bytes: int
    written_bytes: int

    huge_bytes: int
    """Bytes of fio's memory on huge pages during the run; 0 if the kernel does not tell."""


class Fio:
    """fio as the measure of a drive: O_DIRECT, asynchronous, buffers on huge pages."""

    def __init__(self, directory: str) -> None:
        """Find fio, and an engine of fio that works in `directory`.

        Raises:
            FioMissingError: fio is not installed.
            BenchError: fio runs with neither io_uring nor libaio.
        """
        try:
            self._runner = FioRunner(directory)
        except _NoFio as error:
            raise FioMissingError(f"{error}: its rows are left out") from error
        except FioError as error:
            raise BenchError(str(error)) from error

    @property
    def engine(self) -> str:
        """fio's name of its engine, the way in which it submits requests."""
        return self._runner.engine

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

        One job reads and one job writes, each through the files in turn, as a step does. So the
        bytes are exactly those of a step; fio's own mixed mode would choose the direction of each
        request at random.

        Args:
            files: Names of existing files in the directory, all written before.
            file_bytes: Bytes to move of each file, from its start; a multiple of `request_bytes`.
            request_bytes: Bytes of one transfer.
            depth: Number of transfers in flight, in each direction.
            loops: Number of times that all bytes are moved.

        Raises:
            ValueError: The bytes of a file are not whole requests.
            BenchError: fio failed, or moved another number of bytes.
        """
        if file_bytes % request_bytes:
            raise ValueError(f"{file_bytes} bytes are not whole requests of {request_bytes}")
        total = file_bytes * len(files)
        common = [
            "--direct=1",
            f"--ioengine={self.engine}",
            f"--filename={':'.join(files)}",
            f"--filesize={file_bytes}",
            f"--size={total}",
            f"--bs={request_bytes}",
            "--iomem_align=2m",  # otherwise huge pages would begin within fio's buffers
            f"--iodepth={depth}",
            f"--loops={loops}",
            "--overwrite=1",
            "--fallocate=none",
            "--allow_file_create=0",
            "--file_service_type=roundrobin",
        ]
        try:
            report, huge_bytes = self._runner.run(
                [*common, "--name=reader", "--rw=read", "--name=writer", "--rw=write"]
            )
        except FioError as error:
            raise BenchError(str(error)) from error
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
