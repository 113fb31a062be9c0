"""Commands that read a store while a process trains in it: no false alarm, and no damage missed.

A checkpoint that is recycled while somebody looks is no damage. A few runs of ``offload verify``
beside a real process are made here, and 52 with ``FULL_TESTS=1``; VERIFY_RUNS=1000 makes a
thousand. Besides, training goes on before single operations of a reader; in a campaign before each.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gds
import offload
from gds import LockHeldError, MemoryBackend
from offload import (
    RecycledError,
    export_checkpoint,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
)
from offload.cli import main
from offload.store import verification
from tests.campaigns import FULL
from tests.command_line import Run, runner
from tests.crash import children as child
from tests.crash.meanwhile import Meanwhile
from tests.crash.trained import Training
from tests.eventually import eventually
from tests.forking import Children
from tests.stores.files import flip_on_disk, remove_tree, steps
from tests.stores.training import Model

IS_CAMPAIGN = FULL or "VERIFY_RUNS" in os.environ
RUNS = int(os.environ.get("VERIFY_RUNS", "52" if FULL else "8"))
"""Of ``offload verify`` beside training, in all settings together."""

EACH = (
    (*range(1, 31), *range(31, 1000, 7))
    if IS_CAMPAIGN
    else (*range(3, 30, 5), *range(31, 1000, 29))
)
"""Operations of a reader before which training goes on. The first ones take no lock yet."""

STORES = [(1, 1), (2, 2), (1, 2), (2, 1)][: 4 if IS_CAMPAIGN else 2]
"""How many checkpoints a store keeps, and on how many drives."""


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.crash.children")
    yield server
    server.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner("offload", main, monkeypatch, capsys)


@pytest.mark.parametrize(("keep", "drives"), STORES)
def test_verify_beside_a_process_that_trains(
    keep: int, drives: int, children: Children, run: Run, tmp_path: Path
) -> None:
    (tmp_path / child.PLAN).write_text(json.dumps({"keep": keep, "drives": drives}))
    pid = children.start(child.train_until_told, tmp_path)
    store = Path(child.store_of(str(tmp_path), drives)[0])
    try:
        assert eventually((tmp_path / child.STARTED).exists)
        began_at = max(steps(store))
        found: Counter[str] = Counter()
        for number in range(RUNS // len(STORES)):
            arguments = ["--all", tmp_path] if number % 3 == 2 else [store]
            status, out, err = run("verify", *arguments, "--json")
            said = json.loads(out)
            assert (status, said["ok"]) == (0, True), f"run {number}: {out} {err}"
            assert err == ""
            found["checked"] += len(said["checkpoints"])
            found["recycled"] += len(said["recycled"])
            assert len(said["checkpoints"]) >= 2, "the pinned one, and the newest"
            if number % 5 == 0:
                for command in ("ls", "show"):
                    status, _, err = run(command, store)
                    assert (status, err) == (0, ""), f"{command}, after run {number}"

        assert eventually(lambda: max(steps(store)) > began_at + 2), "training does not go on"

        # Damage of a checkpoint that stays is found every time.
        damaged = store / "step-00000001" / "exp_avg.safetensors"
        flip_on_disk(damaged, 4096 + 8)
        for _ in range(5 if IS_CAMPAIGN else 1):
            status, out, _ = run("verify", store, "--json")
            wrong = [result for result in json.loads(out)["checkpoints"] if not result["ok"]]
            assert status == 1
            assert [result["path"] for result in wrong] == [str(damaged.parent)]
            assert str(damaged) in wrong[0]["problems"][0]
    finally:
        (tmp_path / child.STOP).touch()
        ended = children.wait(pid, tmp_path)
    assert ended.status == 0, ended.output
    print(f"keep={keep}, drives={drives}: {dict(found)} beside {ended.output.splitlines()[-1]}")


def trained(inner: gds.Backend, directories: list[str], keep: int) -> Training:
    training = Training(inner, directories, keep=keep, reader_timeout_s=0.02)
    for _ in range(keep + 1):
        training.steps_and_seal()
    return training


@pytest.mark.parametrize("again", [False, True], ids=["next-steps", "same-step"])
@pytest.mark.parametrize(("keep", "drives"), STORES)
def test_training_goes_on_before_any_operation_of_verify(
    keep: int, drives: int, again: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checkpoints that were there are recycled, or replaced by others of their step."""
    directories = [f"/run{number}" for number in range(drives)]
    inner = MemoryBackend()
    training = trained(inner, directories, keep)
    newest = training.optimizer.checkpoint().result().path

    def recycle() -> None:
        if again:
            try:  # beside a reader of the same step a seal waits
                inner.lock(newest).release()
            except LockHeldError:
                return
            training.model.norm.running_mean.add_(1)
            training.optimizer.checkpoint().result()
            return
        for _ in range(keep + 1):
            training.steps_and_seal()

    counts: Counter[str] = Counter()
    for nth in EACH:
        made: list[Meanwhile] = []

        def backend(nth: int = nth, made: list[Meanwhile] = made) -> Meanwhile:
            # One command uses several backends, one after the other.
            made.append(Meanwhile(inner, made[-1].left if made else nth, recycle))
            return made[-1]

        for module in (gds, gds.opening, verification):
            monkeypatch.setattr(module, "PosixBackend", backend)
        status, out, err = run("verify", directories[0], "--json")
        said = json.loads(out)
        assert (status, said["ok"], err) == (0, True, ""), f"before operation {nth}: {out}"
        assert said["checkpoints"], f"before operation {nth}: nothing was checked"
        counts["recycled"] += len(said["recycled"])
        if made[-1].left > 0:
            break
    assert nth > 40
    assert counts["recycled"] > 0 or again
    training.optimizer.close()


def _list(backend: gds.Backend, store: str) -> None:
    for info in list_checkpoints(store, backend=backend):
        assert info.valid, info.reason


def _export(backend: Meanwhile, store: str) -> None:
    with open_checkpoint(store, backend=backend) as opened:
        export_checkpoint(opened, "/exported", "safetensors")
    remove_tree(backend.inner, "/exported")


READERS: dict[str, Callable[[Meanwhile, str], object]] = {
    "list": _list,
    "open": lambda backend, store: open_checkpoint(store, backend=backend).close(),
    "load": lambda backend, store: load_parameters(Model(), store, backend=backend),
    "export": _export,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("keep", [1, 2] if IS_CAMPAIGN else [1])
def test_training_goes_on_before_any_operation_of_a_reader(name: str, keep: int) -> None:
    """Nothing is damaged, nor warned of: warnings are errors here."""
    inner = MemoryBackend()
    training = trained(inner, ["/run", "/other"], keep)

    def recycle() -> None:
        for _ in range(keep + 1):
            training.steps_and_seal()

    for nth in EACH:
        backend = Meanwhile(inner, nth, recycle)
        READERS[name](backend, "/run")
        if backend.left > 0:
            break
    assert nth > 10
    training.optimizer.close()


def test_a_checkpoint_without_a_lock_that_was_recycled_is_said_to_be(tmp_path: Path) -> None:
    """What restore() and a seal return has none: it may be recycled at any time."""
    training = trained(MemoryBackend(), ["/run", "/other"], 1)
    before = training.optimizer.checkpoint({"step": 0}).result()
    assert before.verify().ok
    training.steps_and_seal(2)
    training.steps_and_seal()
    for use in (
        before.verify,
        lambda: before.train_state,
        lambda: offload.read_state(before, "first.weight"),
        lambda: export_checkpoint(before, tmp_path / "exported", "safetensors"),
    ):
        with pytest.raises(RecycledError, match="recycled; open a newer one"):
            use()
    training.optimizer.close()


def test_the_metrics_of_a_checkpoint_may_be_replaced_while_it_is_verified() -> None:
    training = Training(MemoryBackend(), keep=2)
    path = training.steps_and_seal()
    with open_checkpoint(path, backend=training.backend) as opened:
        training.optimizer.checkpoint({"step": 1}, metrics={"loss": 1.0}).result()
        assert opened.verify().problems == ()
    training.optimizer.close()
