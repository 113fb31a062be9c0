"""Update threads: how many there are, under torchrun too, and where the first root is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.update.pool import default_num_threads
from tests.dying import dying

ROOT = Path(__file__).parents[2]

AT_ONCE = 1 << 15
"""Elements from which on torch divides an operation among its threads."""

# Each rank writes what it finds, and tries the pool on a machine of eight cores.
RANK = """
import json, os, sys, threading
import torch
from offload.update.pool import UpdatePool, default_num_threads
from offload.update.rules import UpdateRule

found = {"own": default_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}
for cores in (1, 7, 8):
    os.sched_getaffinity = lambda pid: set(range(cores))
    found[f"of {cores}"] = default_num_threads()
pool = UpdatePool(UpdateRule(torch.optim.SGD, {"lr": 0.1}))
met = threading.Barrier(int(sys.argv[2]))
pool.run(lambda context, item: met.wait(60), range(met.parties))
pool.close()
torch.set_num_threads(3)
found["chosen"] = default_num_threads()
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
"""


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a user who has set no number of threads, with changes."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE")
    ours = {name: value for name, value in os.environ.items() if name not in names}
    return {**ours, "PYTHONPATH": str(ROOT), **changes}


@pytest.mark.parametrize("given", ["", "2"], ids=["not-set", "set-by-the-user"])
def test_each_rank_of_torchrun_takes_its_share_of_the_cores(given: str, tmp_path: Path) -> None:
    script, found = tmp_path / "rank.py", tmp_path / "found"
    script.write_text(RANK)
    found.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    rank = [sys.executable, "-u", str(script), str(found), given or "4"]
    done = subprocess.run(
        dying([*command, "--no-python", *dying(rank, parent=0)]),
        env=environment(**({"OMP_NUM_THREADS": given} if given else {})),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nproc = subprocess.run(["nproc"], env=environment(), capture_output=True, check=True).stdout
    for rank in ("0", "1"):
        told = json.loads((found / rank).read_text())
        assert told["chosen"] == 3
        if given:
            assert told["own"] == told["of 1"] == told["of 8"] == 2
        else:
            assert told["omp"] == "1", "torchrun has set it"
            assert told["own"] == max(1, int(nproc) // 2)
            assert (told["of 1"], told["of 7"], told["of 8"]) == (1, 3, 4)


def test_only_with_the_number_that_torchrun_sets_for_several_ranks_are_cores_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch uses one thread in these tests; here it has eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    shared = {("1", "2"): 4, ("1", "16"): 1}
    alone = [("1", ranks) for ranks in (None, "1", "0", "", "two")]
    for given in (*shared, *alone, (None, "2"), ("8", "2")):
        for name, value in zip(("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"), given, strict=True):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        assert default_num_threads() == shared.get(given, 1), given


# Every square root of a process that has just begun, in order, until two steps have been taken.
ROOTS = """
import json, sys, threading
import torch

found, root = [], torch.Tensor.sqrt

def watched(values):
    begun = any(t.name.startswith("offload-update") for t in threading.enumerate())
    found.append((threading.current_thread().name, values.numel(), begun))
    return root(values)

torch.Tensor.sqrt = watched
torch.set_num_threads(2)
import offload
from gds import MemoryBackend
options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
parameters = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(2)]
with offload.AdamW(parameters, directory="/s", options=options) as optimizer:
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(1 << 20)
        optimizer.step()
    optimizer.checkpoint().result()
print(json.dumps(found))
"""


@pytest.mark.parametrize("code", ["", "torch"])
def test_the_first_square_root_of_a_process_runs_on_one_thread(code: str) -> None:
    """If several threads run it at once, MKL may be less exact (pytorch issue 188792)."""
    done = subprocess.run(
        [sys.executable, "-c", ROOTS],
        env=environment(OFFLOAD_UPDATE=code),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    roots = json.loads(done.stdout)
    thread, num_elements, had_begun = roots[0]
    assert (thread, had_begun) == ("MainThread", False)
    assert num_elements < AT_ONCE, "torch would divide it among its own threads"
    assert any(name.startswith("offload-update") for name, _, _ in roots), "later ones run on these"
