"""The program that touches CUDA: with compiled stand-ins for its two libraries, and without any."""

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gds.check import System, cuda_child, gpu
from gds.check.storage import examine_storage

STUB = Path(__file__).parent / "cuda_stub.c"
TIMEOUT_S = 60.0
LONGER_S = (1.0, 4.0, 16.0, 60.0)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with libcuda.so.1 and libcufile.so.0."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("libcuda.so.1", "libcufile.so.0"):
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", folder / name, STUB], check=True)
    return folder


class Stubbed(System):
    """This machine, as if it had a GPU: children find the stand-ins."""

    def __init__(self, libraries: Path, fault: str) -> None:
        super().__init__()
        self._added = {"LD_LIBRARY_PATH": str(libraries), "STUB": fault}

    def library_error(self, name: str) -> str:
        return ""

    def child(self, script, arguments, *, timeout_s, environment=None):
        added = {**(environment or {}), **self._added}
        return super().child(script, arguments, timeout_s=timeout_s, environment=added)


def examined(libraries: Path, directory: Path, fault: str, timeout_s: float) -> gpu.Gpu:
    system = Stubbed(libraries, fault)
    storage = examine_storage(system, str(directory))
    # Whatever disk this is: what the child does is the question.
    storage = dataclasses.replace(storage, drives=(), mapped=False)
    if storage.gds_refusal:
        pytest.skip(f"cuFile would not be tried here: {storage.gds_refusal}")
    found = gpu.examine_gpu(system, storage, timeout_s=timeout_s)
    assert list(directory.iterdir()) == [], "the file that was tried is left"
    return found


def test_devices_and_transfers_through_the_libraries(libraries, drive):
    found = examined(libraries, drive, "", TIMEOUT_S)
    assert found.no_driver == ""
    assert found.cuda == "13.2"
    assert found.devices == ("Stub 40 (40 GiB)", "Stub 41 (41 GiB)")
    assert found.cufile == gpu.CuFile(True, True, "")


@pytest.mark.parametrize(
    ("fault", "reads", "writes", "words"),
    [
        ("refuse", False, False, "cuFileHandleRegister: cuFile error 5027, CUDA error 7"),
        ("short", False, True, "wrong data"),
        ("lost", True, False, "wrong data"),
        ("crash", False, False, "was killed by signal 6 in cuFileDriverOpen"),
    ],
)
def test_a_cufile_that_does_wrong_is_found_out(libraries, drive, fault, reads, writes, words):
    found = examined(libraries, drive, fault, TIMEOUT_S).cufile
    assert (found.reads, found.writes) == (reads, writes)
    assert words in found.reason


def test_a_cufile_that_spins_is_killed(libraries, drive):
    system = Stubbed(libraries, "spin")
    arguments = ["cufile", str(drive / "file")]
    environment = {"CUFILE_ALLOW_COMPAT_MODE": "false"}
    for timeout_s in LONGER_S:  # until a busy machine has come to where it spins
        child = system.child(
            cuda_child.__file__, arguments, timeout_s=timeout_s, environment=environment
        )
        assert child.status is None
        if '"cuFileHandleRegister"' in child.output:
            break
    last = child.output.splitlines()[-1]
    assert json.loads(last) == {"stage": "cuFileHandleRegister"}


def test_without_libraries_the_child_says_so(tmp_path):
    empty = {"LD_LIBRARY_PATH": str(tmp_path)}
    if not System().library_error("libcuda.so.1"):
        pytest.skip("there is a CUDA driver")
    child = System().child(cuda_child.__file__, ["devices"], timeout_s=TIMEOUT_S, environment=empty)
    first, last = (json.loads(line) for line in child.output.splitlines())
    assert child.status == 1
    assert first == {"stage": "libcuda.so.1"}
    assert "libcuda.so.1" in last["error"]


def test_a_child_that_never_ends_is_gone_afterwards(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        "while True: pass\n"
    )
    for timeout_s in LONGER_S:
        child = System().child(str(script), [], timeout_s=timeout_s)
        assert child.status is None
        if child.output:
            break
    assert not os.path.exists(f"/proc/{int(child.output)}")


def test_a_child_runs_in_a_directory_of_its_own_that_goes_away(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "open('cufile.log', 'w').close()\n"
        "print(os.getcwd())\n"
        "print(os.environ['A'], sys.argv[1], file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    child = System().child(str(script), ["c"], timeout_s=TIMEOUT_S, environment={"A": "b"})
    assert (child.status, child.error) == (7, "b c\n")
    assert not os.path.exists(child.output.strip())
    assert os.getcwd() != child.output.strip()
