"""A run that is closed and resumed, anywhere, ends with the bits of one that never stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.numerics.models import FIRST_LATE_STEP, Mixed, give_gradients, split_groups
from tests.numerics.pairs import CASES, CUTS, FOREACH, Case, Pair, changing_rate, memory_pair
from tests.numerics.reference import (
    Reference,
    assert_same_parameters,
    assert_same_state,
    read_state,
)

NUM_STEPS = 20


def checkpoints(pair: Pair) -> list[int]:
    """Return the steps of the store's checkpoints."""
    return [
        info.step
        for info in offload.list_checkpoints(pair.directory, backend=pair.backend)
        if info.valid
    ]


def train(pair: Pair, steps: range) -> None:
    for step in steps:
        pair.step(step)
        pair.assert_same_parameters()


def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, changing_rate)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_resuming_again_and_again_with_a_scheduler(case):
    pair = memory_pair(case, CUTS[1])
    scheduler, expected = schedule(pair.optimizer), schedule(pair.reference.inner)
    for step in range(NUM_STEPS):
        pair.step(step)
        pair.assert_same_parameters()
        scheduler.step()
        expected.step()
        if step % 3 == 0:
            pair.optimizer.checkpoint({"scheduler": scheduler.state_dict()})
        if step in (3, FIRST_LATE_STEP - 1, FIRST_LATE_STEP, 15):
            # One of these is a checkpoint already, and others follow one by a step or two.
            pair.optimizer.checkpoint({"scheduler": scheduler.state_dict()})
            pair.reopen()
            scheduler = schedule(pair.optimizer)
            checkpoint = pair.optimizer.restore()
            assert checkpoint.step == step + 1
            scheduler.load_state_dict(checkpoint.train_state["scheduler"])
            pair.assert_same_parameters()
    pair.assert_same_state()


@pytest.mark.parametrize("name", ["adamw-foreach", "sgd-momentum-in-some-groups"])
def test_resuming_from_files_on_a_drive(name, tmp_path):
    pair = Pair({**CASES, **FOREACH}[name], CUTS[1], directory=str(tmp_path / "run"))
    for step in range(NUM_STEPS):
        train(pair, range(step, step + 1))
        if step % 4 == 3:
            pair.optimizer.checkpoint({"step": step})
            pair.reopen()
            assert pair.optimizer.restore().train_state == {"step": step}
    pair.assert_same_state()


@pytest.mark.parametrize("at", range(FIRST_LATE_STEP - 2, FIRST_LATE_STEP + 3))
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups", "rprop", "adagrad"])
def test_state_that_starts_around_the_resume(name, at):
    pair = memory_pair(CASES[name], CUTS[0])
    train(pair, range(at))
    pair.optimizer.checkpoint()
    pair.reopen()
    pair.optimizer.restore()
    train(pair, range(at, at + 5))
    pair.assert_same_state()


@pytest.mark.parametrize("reopen", [False, True], ids=["in-this-process", "in-the-next-process"])
@pytest.mark.parametrize("to", [3, 9, 15])
def test_going_back_to_an_older_checkpoint(to, reopen):
    pair = memory_pair(CASES["adamw"], CUTS[0], keep=6)
    for step in range(NUM_STEPS):
        pair.step_expected(step)
    for step in range(17):
        pair.step_live(step)
        if (step + 1) % 3 == 0:
            pair.optimizer.checkpoint({"after": step})
    if reopen:
        pair.reopen(keep=6)
    else:
        pair.optimizer.synchronize()
    assert checkpoints(pair) == [3, 6, 9, 12, 15]
    before = {n: p.detach().clone() for n, p in pair.live.named_parameters()}
    if to != 15:
        with pytest.raises(MismatchError, match="discard_newer=True"):
            pair.optimizer.restore(to)
        assert_same_parameters(pair.live.named_parameters(), before.items())
    checkpoint = pair.optimizer.restore(to, discard_newer=True)
    assert (checkpoint.step, checkpoint.train_state) == (to, {"after": to - 1})
    assert checkpoints(pair) == [step for step in (3, 6, 9, 12, 15) if step <= to]
    for step in range(to, NUM_STEPS):
        pair.step_live(step)
        if (step + 1) % 4 == 0:
            pair.optimizer.checkpoint({"again": step})
    pair.assert_same_parameters()
    pair.assert_same_state()


def test_rolling_back_steps_that_were_never_sealed():
    pair = memory_pair(CASES["sgd-momentum-in-some-groups"], CUTS[0])
    train(pair, range(6))
    pair.optimizer.checkpoint()
    for _ in range(3):
        for step in range(100, 104):
            pair.step_live(step)
        assert pair.optimizer.restore().step == 6
        pair.assert_same_parameters()
    train(pair, range(6, NUM_STEPS))
    pair.assert_same_state()


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("cut", [CUTS[0], CUTS[3]], ids=str)
def test_sealing_every_step_keeps_as_many_as_asked(keep, cut):
    pair = memory_pair(CASES["adamw"], cut, keep=keep)
    for step in range(9):
        train(pair, range(step, step + 1))
        pair.optimizer.checkpoint({"step": step})
    pair.reopen(keep=keep)
    assert checkpoints(pair) == list(range(10 - keep, 10))
    assert pair.optimizer.restore().train_state == {"step": 8}
    for step in range(9, 14):
        train(pair, range(step, step + 1))
        pair.optimizer.checkpoint({"step": step}).result()
        assert checkpoints(pair)[-1] == step + 1
        assert len(checkpoints(pair)) <= keep
    assert len(checkpoints(pair)) == keep
    pair.assert_same_state()


def test_a_checkpoint_before_the_first_step():
    pair = memory_pair(CASES["adamw"], CUTS[0])
    assert pair.optimizer.restore() is None
    assert pair.optimizer.checkpoint({"nothing": "yet"}).result().step == 0
    pair.reopen()
    checkpoint = pair.optimizer.restore()
    assert (checkpoint.step, checkpoint.train_state) == (0, {"nothing": "yet"})
    train(pair, range(8))
    pair.optimizer.checkpoint()
    pair.reopen()
    assert pair.optimizer.restore().step == 8
    train(pair, range(8, 12))
    pair.assert_same_state()


def test_a_checkpoint_before_the_first_step_and_no_resume():
    pair = memory_pair(CASES["rmsprop-centered-momentum"], CUTS[0])
    pair.optimizer.checkpoint()
    train(pair, range(12))
    pair.assert_same_state()


@pytest.mark.parametrize("durable", [False, True], ids=["at-once", "after-the-first"])
def test_sealing_the_same_step_again_replaces_the_train_state(durable):
    pair = memory_pair(CASES["adamw"], CUTS[0])
    train(pair, range(5))
    first = pair.optimizer.checkpoint({"epoch": 1})
    if durable:
        first.result()
    second = pair.optimizer.checkpoint({"epoch": 2, "more": torch.arange(5)})
    third = pair.optimizer.checkpoint({"epoch": 2, "more": torch.arange(5)})
    assert first.result().path == second.result().path == third.result().path
    assert checkpoints(pair) == [5]
    train(pair, range(5, 7))
    pair.reopen()
    checkpoint = pair.optimizer.restore()
    assert checkpoint.verify().ok
    assert checkpoint.step == 5
    assert checkpoint.train_state["epoch"] == 2
    assert torch.equal(checkpoint.train_state["more"], torch.arange(5))
    pair.step_live(5)
    pair.step_live(6)
    train(pair, range(7, 12))
    pair.assert_same_state()


def test_a_learning_rate_changed_after_the_checkpoint_is_in_the_next_of_the_same_step():
    pair = memory_pair(CASES["adamw"], CUTS[0])
    train(pair, range(5))
    pair.optimizer.checkpoint({"epoch": 1}).result()
    for optimizer in (pair.optimizer, pair.reference.inner):
        optimizer.param_groups[0]["lr"] = 0.25  # as a scheduler does between two epochs
    pair.optimizer.checkpoint({"epoch": 2}).result()
    pair.reopen()
    assert pair.optimizer.restore().train_state == {"epoch": 2}
    assert pair.optimizer.param_groups[0]["lr"] == 0.25
    train(pair, range(5, 8))
    pair.assert_same_state()


def test_the_hyper_parameters_of_the_checkpoint_win():
    pair = memory_pair(CASES["sgd-momentum-in-some-groups"], CUTS[0])
    for optimizer in (pair.optimizer, pair.reference.inner):
        optimizer.param_groups[1].update(lr=0.125, custom="kept")
    train(pair, range(5))
    pair.optimizer.checkpoint()
    expected = [{k: v for k, v in g.items() if k != "params"} for g in pair.optimizer.param_groups]
    case = pair.case
    pair.case = Case(case.optimizer, {"lr": 0.5}, ({"momentum": 0.1}, {"nesterov": False}, {}))
    pair.reopen()
    pair.optimizer.restore()
    found = [{k: v for k, v in g.items() if k != "params"} for g in pair.optimizer.param_groups]
    assert found == expected
    train(pair, range(5, NUM_STEPS))
    pair.assert_same_state()


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
def test_the_stores_own_chunks_win_over_the_options(cut):
    pair = memory_pair(CASES["adamw"], CUTS[0])
    train(pair, range(5))
    grid = pair.assert_same_state().manifest["chunk_elements"]
    pair.reopen(cut=cut)
    pair.optimizer.restore()
    train(pair, range(5, 12))
    assert pair.assert_same_state().manifest["chunk_elements"] == grid
    assert pair.optimizer.stats().ring_bytes <= 6 * cut.ring_chunks * (4096 + 4096)


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_starting_afresh_over_a_store_with_the_same_steps(keep):
    old = memory_pair(CASES["adamw"], CUTS[0], keep=keep)
    for step in range(100, 106):
        old.step(step)
        old.optimizer.checkpoint({"old": step})
    old.optimizer.close()
    assert checkpoints(old) == list(range(7 - keep, 7))

    pair = Pair(CASES["adamw"], CUTS[1], old.backend.reopened(), keep=keep, fresh=True)
    sealed = []
    for step in range(NUM_STEPS):
        train(pair, range(step, step + 1))
        if step in (2, 3, 4, 5, 6, 12):
            pair.optimizer.checkpoint({"new": step}).result()
            sealed.append(step + 1)
            assert checkpoints(pair) == sealed[-keep:]
    pair.assert_same_state()
    pair.reopen(keep=keep)
    assert checkpoints(pair) == [*sealed, NUM_STEPS][-keep:]
    assert pair.optimizer.restore().step == NUM_STEPS
    train(pair, range(NUM_STEPS, NUM_STEPS + 4))
    pair.assert_same_state()


def test_parameters_are_matched_by_name_whatever_their_order():
    pair = memory_pair(CASES["adamw"], CUTS[0])
    train(pair, range(5))
    pair.optimizer.checkpoint()
    pair.optimizer.close()
    pair.backend = pair.backend.reopened()
    pair.live = Mixed(seed=99)
    groups = split_groups(pair.live, pair.case.groups)
    for group in groups:
        group["params"].reverse()
    pair.optimizer = offload.OffloadedOptimizer(
        pair.case.optimizer,
        groups,
        model=pair.live,
        directory="/store",
        options=pair.cut.options(pair.backend),
    )
    pair.optimizer.restore()
    train(pair, range(5, NUM_STEPS))
    pair.assert_same_state()


@pytest.mark.parametrize("naming", ["positions", "named-parameters", "names-in-groups"])
def test_resuming_without_a_model(naming):
    def groups(model: Mixed) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        if naming == "positions":
            named = [p for _, p in named]
        if naming == "names-in-groups":
            return [{"params": named[:9]}, {"params": named[9:], "lr": 0.01}]
        return named

    def optimizer(model: Mixed) -> offload.AdamW:
        options = CUTS[0].options(backend)
        return offload.AdamW(groups(model), lr=1e-3, directory="/store", options=options)

    live, expected, backend = Mixed(), Mixed(), MemoryBackend()
    reference = Reference(torch.optim.AdamW, groups(expected), lr=1e-3)
    offloaded = optimizer(live)
    for step in range(12):
        for model in (live, expected):
            give_gradients(step, model)
        offloaded.step()
        reference.step()
        if step in (4, 9):
            offloaded.checkpoint()
            offloaded.close()
            backend, live = backend.reopened(), Mixed(seed=99)
            offloaded = optimizer(live)
            assert offloaded.restore().step == step + 1
        assert_same_parameters(live.named_parameters(), expected.named_parameters())
    stored = read_state(offloaded.checkpoint().result().path, backend)
    names = {
        name if naming != "positions" else f"group0.param{index}": p
        for index, (name, p) in enumerate(expected.named_parameters())
        if p.requires_grad
    }
    assert_same_state(stored, reference, names)
