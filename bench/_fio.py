"""What the drive itself can do: fio, moving the bytes of a step in requests of the same size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench._harness import BenchError
from gds.bench.fio import FioError, FioRunner
from gds.bench.fio import FioMissingError as _NoFio


class FioMissingError(BenchError):
    """There is no fio on this machine."""


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
    """fio as the measure of a drive: O_DIRECT, asynchronous, buffers on huge pages."""

    def __init__(self, directory: str) -> None:
        """Find fio, and the engine that works in `directory`.

        Raises:
            FioMissingError: It is not installed.
            BenchError: It runs with neither io_uring nor libaio.
        """
        try:
            self._runner = FioRunner(directory)
        except _NoFio as error:
            raise FioMissingError(f"{error}: its rows are left out") from error
        except FioError as error:
            raise BenchError(str(error)) from error

    @property
    def engine(self) -> str:
        """fio's name of the way it submits requests."""
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
            "--direct=1",
            f"--ioengine={self.engine}",
            f"--filename={':'.join(files)}",
            f"--filesize={file_bytes}",
            f"--size={total}",
            f"--bs={request_bytes}",
            "--iomem_align=2m",  # or the huge pages would begin somewhere within its buffers
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
