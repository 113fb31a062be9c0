"""How the state is spread over directories changes no bit of it, nor of the parameters."""

from __future__ import annotations

from typing import Any

import pytest

from gds import MemoryBackend
from offload import DriveTuning
from tests.numerics.pairs import CASES, Case, Cut, Pair
from tests.numerics.reference import assert_same_bits, read_state
from tests.numerics.test_added_parameters import Growing

DRIVES = ["/one", "/two", "/three"]
SHARES = [(1, 1, 1), (1, 4, 2), (7, 1, 1)]
NUM_STEPS = 14

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "resident": {"host_memory": 90_000},
    "split": {"master": "split"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
}


def spread(case: Case, shares: tuple[int, ...], **settings: Any) -> Pair:
    cut = Cut(4096, 3, 777, {"drives": DriveTuning(shares=shares), **settings})
    return Pair(case, cut, MemoryBackend(), DRIVES[: len(shares)])


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups", "rprop"])
def test_three_directories_against_memory(name: str, shares: tuple[int, ...]) -> None:
    pair = spread(CASES[name], shares)
    for step in range(NUM_STEPS):
        pair.step(step)
        pair.assert_same_parameters()
        if step % 4 == 3:
            stored = pair.assert_same_state()
            assert len(stored.manifest["parts"]) == 2
            assert stored.manifest["shares"] == list(shares)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
def test_two_directories_against_one(settings: dict[str, Any]) -> None:
    pairs = [spread(CASES["adamw"], shares, **settings) for shares in ((2, 3), (1,))]
    found = []
    for pair in pairs:
        for step in range(NUM_STEPS):
            pair.step_live(step)
            if step == 5:
                pair.optimizer.checkpoint()
        found.append(read_state(pair.optimizer.checkpoint().result().path, pair.backend))
    assert [len(stored.manifest["parts"]) for stored in found] == [1, 0]
    two, one = found
    assert two.model.keys() == one.model.keys()
    for name, tensor in one.model.items():
        assert_same_bits(two.model[name], tensor, name)
    assert two.arrays.keys() == one.arrays.keys()
    for array, tensors in one.arrays.items():
        assert two.arrays[array].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert_same_bits(two.arrays[array][name], tensor, f"{array} of {name}")


def test_a_resume_keeps_the_shares_and_goes_on_to_the_bit() -> None:
    pair = spread(CASES["adamw"], (1, 3, 2))
    for step in range(4):
        pair.step(step)
    pair.optimizer.checkpoint().result()
    other = Cut(
        8192, 2, settings={"drives": DriveTuning(shares=(5, 1, 1))}
    )  # both fixed when the store was made
    pair.reopen(cut=other)
    assert pair.optimizer.restore().step == 4
    for step in range(4, NUM_STEPS):
        pair.step(step)
    pair.assert_same_parameters()
    assert pair.assert_same_state().manifest["shares"] == [1, 3, 2]


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
def test_parameters_that_join_in_the_middle(name: str) -> None:
    run = Growing(name, directory=DRIVES)
    run.train(*range(3))
    run.join()
    run.train(*range(3, 6))
    checkpoint = run.optimizer.checkpoint().result()
    run.join()
    run.train(*range(6, 9))
    run.assert_same_state()
    assert len(checkpoint.parts) == 2
