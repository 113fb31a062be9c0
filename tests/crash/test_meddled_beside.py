"""Somebody replaces, removes or marks checkpoints, or files of them, beside a process that trains.

What training acknowledges after that is there, and what was not meddled with is not spent for it.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gds import MemoryBackend, PosixBackend
from offload import AdamW, list_checkpoints, open_checkpoint
from offload.errors import CheckpointNotFoundError, DamagedError
from tests.crash.damaging import OTHER, STORE
from tests.crash.damaging import mark as mark_wrongly
from tests.crash.meanwhile import Looking
from tests.crash.runs import (
    AWAY,
    LOSE,
    REPLACE,
    Meddle,
    assert_at_step,
    assert_goes_on,
    cut,
    ids,
    mark,
    move_away,
    remove_part,
    replace_directory,
    replace_files,
    slots_in,
    start,
    step_path,
    warned_of,
)
from tests.stores.files import contents, remove_tree, write
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    train,
)


@pytest.mark.parametrize(("how", "drives"), REPLACE, ids=ids(REPLACE))
@pytest.mark.parametrize(
    ("keep", "age"), [(1, 0), (2, 1), (5, 0)], ids=["only", "one before", "newest of five"]
)
def test_what_is_acknowledged_after_files_were_replaced_is_there(
    how: Meddle, drives: int, keep: int, age: int
) -> None:
    """The process has the old files open: it must not write its steps into those."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives, keep)
    train(model, optimizer, *range(1, keep + 2))
    how(backend, step_path(keep + 1 - age))
    for step in range(keep + 2, keep + 6):
        train(model, optimizer, step)
        assert_at_step(backend, step)
    optimizer.close()
    assert len(slots_in(backend)) <= keep + 1, "the space of what was replaced is used again"
    if keep == 2:
        assert_goes_on(backend, drives, keep + 5)


@pytest.mark.parametrize("how", [cut, replace_files])
def test_of_many_an_old_one_that_was_meddled_with_is_noticed_before_one_expires(
    how: Meddle, tmp_path: Path
) -> None:
    """Only the newest eight are examined each time; of the others, the times of their folders."""
    with PosixBackend(direct=False) as backend:
        model = Model()
        with optimizer_for(model, tmp_path / "run", options(backend), keep=10) as optimizer:
            train(model, optimizer, *range(1, 12))
            how(backend, f"{tmp_path}/run/step-00000003")
            with nullcontext() if how == replace_files else warned_of("step-00000003"):
                train(model, optimizer, 12)
                found = {c.step for c in list_checkpoints(tmp_path / "run") if c.valid}
                train(model, optimizer, 13)
    if how == replace_files:  # it is the same checkpoint
        assert found == {*range(3, 13)}
    else:
        assert found == {2, *range(4, 13)}, "ten are kept, without the one that is lost"


@pytest.mark.parametrize("moment", ["between steps", "as it is withdrawn"])
def test_a_copy_that_was_moved_away_beside_training_is_not_written_to(moment: str) -> None:
    class Meddles(Looking):
        at = ""

        def look(self, moment: str, path: str) -> None:
            if (moment, path) == ("before lock", self.at):
                self.at = ""
                replace_directory(self.inner, path)

    backend = Meddles(MemoryBackend())
    model, optimizer = start(backend)
    train(model, optimizer, 1, 2, 3)
    if moment == "between steps":
        replace_directory(backend, step_path(2))
    else:
        backend.at = step_path(2)
    train(model, optimizer, *range(4, 9))
    optimizer.close()
    assert backend.at == ""
    assert_at_step(backend, 8)
    with open_checkpoint(AWAY, backend=backend) as moved:
        assert moved.step == 2
        assert moved.verify().problems == ()


class _LooksBeforeTheCommit(Looking):
    """Notes what a process that starts just before a seal's rename would go on from."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.looks = False
        self.found: list[int] = []

    def look(self, moment: str, path: str) -> None:
        if self.looks and moment in ("before rename", "before exchange") and "/.slot-" in path:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with open_checkpoint(STORE, backend=self.inner) as newest:
                    assert newest.verify().problems == ()
                    self.found.append(newest.step)


@pytest.mark.parametrize(("how", "drives"), LOSE, ids=ids(LOSE))
@pytest.mark.parametrize("keep", [2, 3])
def test_the_last_one_that_is_usable_is_not_withdrawn(how: Meddle, drives: int, keep: int) -> None:
    """What was marked or removed beside training does not count as the newest durable one."""
    inner = MemoryBackend()
    backend = _LooksBeforeTheCommit(inner)
    model, optimizer = start(backend, drives, keep)
    train(model, optimizer, 1, 2, 3, 4)
    how(inner, step_path(4))
    if keep == 3:
        remove_tree(inner, step_path(3))
    backend.looks = True
    train(model, optimizer, 5, seal=False)
    optimizer.checkpoint({"step": 5}).result()
    with warned_of(step_path(4)):
        optimizer.checkpoint({"step": 5}).result()
    assert backend.found == [3 if keep == 2 else 2]
    optimizer.close()


SEALED_ANEW = [
    *REPLACE, (remove_tree, 1), (move_away, 2), (cut, 1), (remove_part, 2), (mark_wrongly, 2),
]  # fmt: skip


@pytest.mark.parametrize(("how", "drives"), SEALED_ANEW, ids=ids(SEALED_ANEW))
def test_a_step_is_sealed_anew_if_its_checkpoint_is_not_what_it_was(
    how: Meddle, drives: int
) -> None:
    """`.result()` of a second checkpoint() of one step means that it is there."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    how(backend, step_path(3))
    state = {"step": 3} if how is not replace_files else {"another": "state"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sealed = optimizer.checkpoint(state, metrics={"loss": 1.0}).result()
    assert (sealed.step, sealed.train_state) == (3, state)
    assert_at_step(backend, 3)
    with open_checkpoint(STORE, backend=backend) as newest:
        assert (newest.train_state, newest.metrics) == (state, {"loss": 1.0})
    optimizer.close()
    assert_goes_on(backend, drives, 3)


def test_state_that_was_marked_and_is_damaged_is_not_sealed_anew() -> None:
    """Sealed again, it would have new digests, and nobody would find the damage any more."""
    backend = MemoryBackend()
    model = torch.nn.Linear(64, 100).bfloat16()  # of more chunks than are read ahead
    optimizer = AdamW(model.parameters(), directory=STORE, options=options(backend))
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.checkpoint({"step": step}).result()
    mark(backend, step_path(2))
    with warned_of(step_path(2)), pytest.raises(DamagedError, match=r"exp_avg\.safetensors"):
        optimizer.checkpoint({"final": True}).result()
    with warned_of(step_path(2)):
        restored = optimizer.restore()
    assert restored is not None
    assert restored.step == 1
    assert optimizer.checkpoint({"step": 1}).result().verify().problems == ()
    optimizer.close()


@pytest.mark.parametrize(("how", "drives"), LOSE, ids=ids(LOSE))
def test_what_was_lost_can_neither_be_pinned_nor_gone_back_to(how: Meddle, drives: int) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2)
    how(backend, step_path(2))
    with warned_of(step_path(2)), pytest.raises(CheckpointNotFoundError, match="step-00000001"):
        optimizer.pin("mine", 2)
    optimizer.pin("mine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointNotFoundError, match="step-00000001"):
            optimizer.restore(2)
        restored = optimizer.restore()
    assert restored is not None
    assert restored.step == 1
    train(model, optimizer, 2, 3, 4)
    optimizer.close()
    assert_at_step(backend, 4)
    with open_checkpoint(step_path(1), backend=backend) as pinned:
        assert differences(pinned, backend, Reference().after(1)) == []


@pytest.mark.parametrize("drives", [1, 2])
def test_another_checkpoint_in_its_place_is_left_alone(drives: int) -> None:
    """One of another run, say: this process knows nothing of it, and counts it as none of its."""
    backend, foreign, stranger = MemoryBackend(), MemoryBackend(), Model(history=1)
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    with optimizer_for(stranger, STORE, options(foreign)) as other:
        train(stranger, other, 1, 2, seal=False)
        other.checkpoint({"foreign": True}).result()
    remove_tree(backend, step_path(2))
    backend.make_dir(step_path(2))
    for name, data in contents(foreign, step_path(2)).items():
        write(backend, f"{step_path(2)}/{name}", data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, 4, 5, 6, 7)
    optimizer.close()
    assert_at_step(backend, 7)
    with open_checkpoint(step_path(2), backend=backend) as found:
        assert found.train_state == {"foreign": True}


@pytest.mark.parametrize("drives", [1, 2])
def test_state_is_read_from_the_parts_of_a_checkpoint_that_was_removed(drives: int) -> None:
    """The next step reads them while it writes others, of a slot that has to be made."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    used = {step_path(2), step_path(3)}
    for step in (2, 3):
        with open_checkpoint(step_path(step), backend=backend) as checkpoint:
            used.update(checkpoint.parts)
    parts = [f"{OTHER}/{n}" for n in backend.list_dir(OTHER)] if drives == 2 else []
    for path in [f"{STORE}/{n}" for n in slots_in(backend)] + [p for p in parts if "part-" in p]:
        if path not in used:
            remove_tree(backend, path)
    remove_tree(backend, step_path(3))
    with warned_of(step_path(3)):
        optimizer.checkpoint({"step": 3}).result()
    assert_at_step(backend, 3)
    train(model, optimizer, 4, 5, 6)
    optimizer.close()
    if drives == 2:
        assert len([n for n in backend.list_dir(OTHER) if n.startswith("part-")]) == 3
    assert_goes_on(backend, drives, 6)
