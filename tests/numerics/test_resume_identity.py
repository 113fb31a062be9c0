"""A run that is closed and resumed, anywhere, ends with the bits of one that never stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.numerics.models import Mixed, give_gradients, split_groups
from tests.numerics.pairs import CASES, CUTS, FOREACH, Case, Pair, memory_pair
from tests.numerics.reference import (
    Reference,
    assert_same_parameters,
    assert_same_state,
    read_state,
)

NUM_STEPS = 17


def checkpoints(pair: Pair) -> list[int]:
    """Return the steps of the store's checkpoints."""
    return [
        info.step
        for info in offload.list_checkpoints(pair.directory, backend=pair.backend)
        if info.valid
    ]


AGAIN_AND_AGAIN = "4 s r 2 s r 1 s r 5 s 1 s r 4"
"""Before and after state of late parameters begins, and around a step without gradients."""

STORIES = {
    "adamw-amsgrad-in-one-group": AGAIN_AND_AGAIN,
    "sgd-momentum-in-some-groups": AGAIN_AND_AGAIN,
    "radam": AGAIN_AND_AGAIN,
    "rmsprop-centered-momentum": AGAIN_AND_AGAIN,
    "rprop": AGAIN_AND_AGAIN,
    "asgd": AGAIN_AND_AGAIN,
    "adamw": "s r 8 s r 4",
    "adamw-maximize": "6 s x b x b x b 8",
}


@pytest.mark.parametrize(("name", "story"), STORIES.items(), ids=STORIES)
def test_resuming_again_and_again(name, story):
    """Numbers are steps; ``s`` seals, ``r`` resumes in another process, ``b`` goes back in this.

    ``x`` takes steps that are never sealed.
    """
    pair, step = memory_pair(CASES[name], CUTS[1]), 0
    grid = None
    for event in story.split():
        if event == "s":
            pair.optimizer.checkpoint({"step": step})
        elif event == "x":
            for other in range(100, 104):
                pair.step_live(other)
        elif event in ("r", "b"):
            if event == "r":
                pair.reopen(cut=CUTS[0])  # the store keeps its own chunks
            found = pair.optimizer.restore()
            assert (found.step, found.train_state) == (step, {"step": step})
            assert grid in (None, found.manifest.layout.chunk_elements)
            grid = found.manifest.layout.chunk_elements
            pair.assert_same_parameters()
        else:
            pair.steps(step, step + int(event))
            step += int(event)
    pair.assert_same_state()


def test_resuming_from_files_on_a_drive(tmp_path):
    pair = Pair(FOREACH["adamw-foreach"], CUTS[1], directory=str(tmp_path / "run"))
    for step in range(NUM_STEPS):
        pair.steps(step, step + 1)
        if step % 4 == 3:
            pair.optimizer.checkpoint({"step": step})
            pair.reopen()
            assert pair.optimizer.restore().train_state == {"step": step}
    pair.assert_same_state()


@pytest.mark.parametrize(
    ("to", "reopen"),
    [(3, False), (9, True)],
    ids=["3", "9-in-the-next-process"],
)
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


def test_a_learning_rate_changed_after_the_checkpoint_is_in_the_next_of_the_same_step():
    pair = memory_pair(CASES["adamw"], CUTS[0])
    pair.steps(5)
    pair.optimizer.checkpoint({"epoch": 1}).result()
    for optimizer in (pair.optimizer, pair.reference.inner):
        optimizer.param_groups[0]["lr"] = 0.25  # as a scheduler does between two epochs
    pair.optimizer.checkpoint({"epoch": 2}).result()
    pair.reopen()
    assert pair.optimizer.restore().train_state == {"epoch": 2}
    assert pair.optimizer.param_groups[0]["lr"] == 0.25
    pair.steps(5, 8)
    pair.assert_same_state()


def test_the_hyper_parameters_of_the_checkpoint_win():
    pair = memory_pair(CASES["sgd-momentum-in-some-groups"], CUTS[0])
    for optimizer in (pair.optimizer, pair.reference.inner):
        optimizer.param_groups[1].update(lr=0.125, custom="kept")
    pair.steps(5)
    pair.optimizer.checkpoint()
    expected = [{k: v for k, v in g.items() if k != "params"} for g in pair.optimizer.param_groups]
    case = pair.case
    pair.case = Case(case.optimizer, {"lr": 0.5}, ({"momentum": 0.1}, {"nesterov": False}, {}))
    pair.reopen()
    pair.optimizer.restore()
    found = [{k: v for k, v in g.items() if k != "params"} for g in pair.optimizer.param_groups]
    assert found == expected
    pair.steps(5, NUM_STEPS)
    pair.assert_same_state()


def test_starting_afresh_over_a_store_with_the_same_steps():
    keep = 2
    old = memory_pair(CASES["adamw"], CUTS[0], keep=keep)
    for step in range(100, 106):
        old.step(step)
        old.optimizer.checkpoint({"old": step})
    old.optimizer.close()
    assert checkpoints(old) == list(range(7 - keep, 7))

    pair = Pair(CASES["adamw"], CUTS[1], old.backend.reopened(), keep=keep, fresh=True)
    sealed = []
    for step in range(NUM_STEPS):
        pair.steps(step, step + 1)
        if step in (2, 3, 4, 5, 6, 12):
            pair.optimizer.checkpoint({"new": step}).result()
            sealed.append(step + 1)
            assert checkpoints(pair) == sealed[-keep:]
    pair.assert_same_state()
    pair.reopen(keep=keep)
    assert checkpoints(pair) == [*sealed, NUM_STEPS][-keep:]
    assert pair.optimizer.restore().step == NUM_STEPS
    pair.steps(NUM_STEPS, NUM_STEPS + 4)
    pair.assert_same_state()


def test_parameters_are_matched_by_name_whatever_their_order():
    pair = memory_pair(CASES["adamw"], CUTS[0])
    pair.steps(5)
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
    pair.steps(5, NUM_STEPS)
    pair.assert_same_state()


@pytest.mark.parametrize("naming", ["positions", "names-in-groups"])
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
