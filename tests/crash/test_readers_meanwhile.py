"""What a reader does if a checkpoint goes away, comes back or cannot be read while it looks.

A process that trains recycles checkpoints, and renames a directory for that. Here the moment is
chosen by the operation of the reader before which something happens.
"""

from __future__ import annotations

import warnings
from itertools import count

import pytest
import torch

from gds import Backend, LockHeldError, MemoryBackend
from offload import (
    CheckpointError,
    LastK,
    ManifestError,
    ParametersOnly,
    RecycledError,
    UnreadableError,
    list_checkpoints,
    open_checkpoint,
    verify_and_mark,
)
from tests.crash.meanwhile import Looking, Meanwhile
from tests.crash.runs import copy_tree
from tests.crash.trained import Training
from tests.stores.files import overwrite, remove_tree, write
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, train
from tests.torch_contract.test_damaged_checkpoints import edit_manifest

FIRST = f"{STORE}/step-00000001"
NEWEST = f"{STORE}/step-00000002"
MANIFEST = f"{NEWEST}/manifest.json"
AWAY = f"{STORE}/.slot-9"


def take_away(backend: Backend) -> None:
    """Recycle the newest checkpoint, as far as its name goes."""
    backend.rename(NEWEST, AWAY)


def put_back(backend: Backend) -> None:
    if backend.stat(AWAY) is not None:
        backend.rename(AWAY, NEWEST)


def listed(backend: Backend) -> list[tuple[int, bool]]:
    return [(info.step, info.valid) for info in list_checkpoints(STORE, backend=backend)]


class TestOpening:
    def test_readers_share_a_checkpoint_and_keep_writers_out(self) -> None:
        backend = memory_store()
        with (
            open_checkpoint(NEWEST, backend=backend),
            open_checkpoint(NEWEST, backend=backend) as two,
        ):
            assert two.step == 2
            with pytest.raises(LockHeldError):
                backend.lock(NEWEST)
        backend.lock(NEWEST).release()

    def test_a_checkpoint_that_goes_at_any_moment_is_said_to_be_recycled(self) -> None:
        inner, counts = memory_store(), {"recycled": 0, "opened": 0}
        for nth in count(2):  # what is gone before the first look was never there
            backend = Meanwhile(inner, nth, lambda: take_away(inner))
            try:
                open_checkpoint(NEWEST, backend=backend).close()
                counts["opened"] += 1
            except RecycledError:
                counts["recycled"] += 1
            put_back(inner)
            if backend.left > 0:
                break
        inner.lock(NEWEST).release()
        assert counts["recycled"] > 10
        assert counts["opened"] > 0

    def test_the_newest_of_a_store_that_goes_at_any_moment_is_not_missed(self) -> None:
        """Nor is anybody warned of it: warnings are errors here."""
        inner, steps = memory_store(), []
        for nth in count(1):
            backend = Meanwhile(inner, nth, lambda: take_away(inner))
            with open_checkpoint(STORE, backend=backend) as opened:
                steps.append(opened.step)
            put_back(inner)
            if backend.left > 0:
                break
        assert steps.count(1) > 20
        assert steps[-1] == 2

    @pytest.mark.parametrize("reader", ["list", "open"])
    def test_one_that_gives_up_its_state_at_any_moment_is_not_missed(self, reader: str) -> None:
        """Another one is sealed meanwhile, so that the newest has its parameters only then."""
        inner = MemoryBackend()
        training = Training(inner, keep=LastK(1) | ParametersOnly(LastK(2)))
        training.steps_and_seal(3)
        for nth in count(1):
            newest = training.optimizer.num_steps
            backend = Meanwhile(inner, nth, training.steps_and_seal)
            if reader == "list":
                assert (newest, True) in listed(backend)
            else:
                with open_checkpoint(STORE, backend=backend) as opened:
                    assert opened.step >= newest
            if backend.left > 0:
                break
        assert nth > 20
        training.optimizer.close()

    def test_one_that_is_replaced_while_it_is_being_opened_is_not_what_is_locked(self) -> None:
        """The lock would be on what had the name, which is free by now: it would keep nothing."""
        inner = MemoryBackend()
        training = Training(inner, keep=2)
        path = training.steps_and_seal()

        def seal_this_step_again() -> None:
            training.model.norm.running_mean.add_(1)
            training.optimizer.checkpoint().result()

        backend = Meanwhile(inner)
        backend.before("lock", path, seal_this_step_again)
        with open_checkpoint(path, backend=backend) as reader:
            assert reader.generation == training.optimizer.state_dict()["generation"]
            for _ in range(2):  # the step after that has no slot left
                training.steps_and_seal()
            assert reader.verify().ok, "it has not been recycled: the lock is on the right one"
        training.steps_and_seal(2)  # nothing has kept its lock
        training.optimizer.close()

    def test_one_that_is_replaced_as_soon_as_it_is_locked_is_locked_anew(self) -> None:
        class Replaces(Looking):
            due = True

            def look(self, moment: str, path: str) -> None:
                if self.due and (moment, path) == ("after lock", NEWEST):
                    self.due = False
                    take_away(self.inner)
                    copy_tree(self.inner, AWAY, NEWEST)

        backend = Replaces(memory_store())
        with open_checkpoint(NEWEST, backend=backend) as opened:
            assert opened.step == 2
            with pytest.raises(LockHeldError):
                backend.inner.lock(NEWEST)
            backend.inner.lock(AWAY).release()

    def test_one_that_is_refused_is_not_kept_locked(self) -> None:
        backend = memory_store(3)
        overwrite(backend, MANIFEST, b"{{{")
        with pytest.raises(ManifestError) as caught:
            open_checkpoint(NEWEST, backend=backend)
        backend.lock(NEWEST).release()
        assert MANIFEST in str(caught.value)
        overwrite(backend, f"{STORE}/step-00000003/manifest.json", b"{{{")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="not using"):
                open_checkpoint(STORE, backend=backend)
        backend.lock(FIRST).release()
        with (
            pytest.warns(RuntimeWarning) as said,
            open_checkpoint(STORE, backend=backend) as opened,
        ):
            assert opened.step == 1
        for step, which in ((2, [True, False]), (3, [False, True])):
            assert [f"step-0000000{step}" in str(w.message) for w in said] == which


class TestWithoutALock:
    """A checkpoint as a seal or `restore` returns it: it may be recycled at any time."""

    @pytest.mark.parametrize("how", ["recycled", "sealed anew", "damaged"])
    def test_what_has_become_of_it_is_said_and_no_other_is_read_in_its_place(
        self, how: str
    ) -> None:
        model, backend = make_model(), MemoryBackend()
        with make_optimizer(model, backend, keep=1) as optimizer:
            train(optimizer, 1, seal_at=[])
            first = optimizer.checkpoint({"step": 1}).result()
            if how == "damaged":
                overwrite(backend, f"{FIRST}/manifest.json", b"[", 9)
                assert "manifest.json" in first.verify().problems[0]
                return
            if how == "recycled":
                train(optimizer, 2)
            else:
                with torch.no_grad():
                    model[0].bias.zero_()
                assert optimizer.checkpoint({"step": 1}).result().path == first.path
            for use in (first.verify, lambda: first.train_state, lambda: verify_and_mark(first)):
                with pytest.raises(RecycledError, match=f"{FIRST}: .*recycled"):
                    use()

    def test_one_that_is_locked_and_moved_by_hand_is_damaged(self) -> None:
        """No process recycles what a reader has locked, so this is somebody's mistake."""
        backend = memory_store()
        with open_checkpoint(NEWEST, backend=backend) as opened:
            take_away(backend)
            report = opened.verify()
            assert any("no manifest.json" in problem for problem in report.problems)
            with pytest.raises(CheckpointError, match="train_state"):
                _ = opened.train_state


class TestVerifying:
    """What happens to files after they were opened."""

    def test_a_manifest_that_was_replaced_since_is_said_to_be(self) -> None:
        backend = memory_store()
        with open_checkpoint(NEWEST, backend=backend) as opened:
            edit_manifest(lambda body: body.update(torch_version="2.0"))(backend, NEWEST)
            assert opened.verify().problems == (f"{MANIFEST}: replaced since it was opened",)

    def test_what_cannot_be_read_is_not_called_damaged_and_what_is_gone_is(self) -> None:
        backend = Meanwhile(memory_store())
        with open_checkpoint(NEWEST, backend=backend) as opened:
            backend.fail("open", MANIFEST)
            report = opened.verify()
            assert report.problems == ()
            assert MANIFEST in "".join(report.unreadable)
            assert opened.verify().ok
            backend.remove(f"{NEWEST}/exp_avg.safetensors")
            report = opened.verify()
            assert report.unreadable == ()
            assert all("exp_avg.safetensors" in problem for problem in report.problems)
            assert len(report.problems) > 1, "the file as a whole, and each of its chunks"


class TestListing:
    def test_one_that_takes_the_place_of_another_is_listed(self) -> None:
        backend = Meanwhile(memory_store(3))
        third, prepared = f"{STORE}/step-00000003", f"{STORE}/.slot-8"
        backend.rename(third, prepared)

        def sealed() -> None:
            take_away(backend)
            backend.rename(prepared, third)

        backend.before("open", MANIFEST, sealed)
        assert listed(backend) == [(1, True), (3, True)]

    def test_what_cannot_be_listed_is_said_to_be(self) -> None:
        backend = Meanwhile(memory_store())
        backend.make_dir(f"{STORE}/pins")
        for path in (STORE, f"{STORE}/pins"):
            backend.fail("list_dir", path)
            with pytest.raises(UnreadableError, match=r"could not be read .* try again"):
                list_checkpoints(STORE, backend=backend)
        assert listed(backend) == [(1, True), (2, True)]
        for path, words in (
            (f"{STORE}/LOCK", "a file, expected the directory of a store"),
            (NEWEST, f"this is a checkpoint; its store is {STORE}"),
        ):
            with pytest.raises(CheckpointError, match=f"^{path}: {words}"):
                list_checkpoints(path, backend=backend)

    def test_checkpoints_make_a_store_and_so_does_a_lock(self) -> None:
        backend = memory_store()
        backend.remove(f"{STORE}/LOCK")
        assert listed(backend) == [(1, True), (2, True)]
        backend.make_dir(f"{STORE}/step-2")
        assert listed(backend) == [(1, True), (2, True), (2, False)], "valid ones first"
        for path in (FIRST, NEWEST, f"{STORE}/step-2"):
            remove_tree(backend, path)
        with pytest.raises(CheckpointError, match="not a store"):
            listed(backend)
        write(backend, f"{STORE}/LOCK", b"")
        assert listed(backend) == []
