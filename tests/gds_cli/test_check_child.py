"""The program that touches CUDA: with compiled stand-ins for its two libraries, and without any."""

import dataclasses
import json
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
    assert not list(drive.glob("cufile.log")), "it has run in a directory of its own"
    last = child.output.splitlines()[-1]
    assert json.loads(last) == {"stage": "cuFileHandleRegister"}
