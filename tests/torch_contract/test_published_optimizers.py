"""Optimizers that others have published: each is trained to its own bits, or refused by name.

The table of ``published.md`` says so for each class; `tests.torch_contract.published` writes
it. Every run of the tests looks at a class of each row, and a full run at all of them.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import offload
from gds import MemoryBackend
from tests.stores.small import make_model, make_optimizer
from tests.torch_contract.itself import ITS_BITS, REFUSED
from tests.torch_contract.published import (
    PACKAGES,
    classes,
    every_class,
    found,
    in_few_words,
    on_the_page,
    package_and_version,
)

SAMPLE = {
    "pytorch_optimizer": (
        *("AdEMAMix", "SGDW"),  # trained
        *("ROSE", "SPlus", "AggMo", "EmoNavi", "Lamb", "DiffGrad", "SAM", "DeMo", "SophiaH"),
        *("LoRARite", "Lookahead", "Muon"),
    ),
    "lion-pytorch": ("Lion",),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFreeClosure"),
}
"""Some classes of each package."""


def looked_at(package: str, name: str) -> None:
    """Check that what the page says comes of a class does."""
    it = found(classes(package)[name])
    assert it.kind in {ITS_BITS, REFUSED}, it
    said = on_the_page()[package_and_version(package), name]
    if "its place" in said and it.kind == ITS_BITS:
        return  # a few processors compute `pow` and the like in the same way at every place
    assert said == in_few_words(it), it


@pytest.mark.parametrize(("package", "name"), every_class())
def test_its_bits_or_a_refusal(package: str, name: str) -> None:
    looked_at(package, name)


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in SAMPLE for name in SAMPLE[package]]
)
def test_some_classes_of_each_kind(package: str, name: str) -> None:
    looked_at(package, name)


def test_the_page_has_every_class_and_the_sample_every_row() -> None:
    page = on_the_page()
    assert set(page) == {(package_and_version(p), name) for p, name in every_class()}
    numbers = {package: len(classes(package)) for package in PACKAGES}
    assert all(numbers.values()), numbers
    assert len(page) == sum(numbers.values()) > 100
    sampled = {(package_and_version(p), name) for p, names in SAMPLE.items() for name in names}
    rows = {(package, what) for (package, _), what in page.items()}
    assert {(entry[0], page[entry]) for entry in sampled} == rows


def test_a_class_that_is_not_torchs_is_named_as_untested_once() -> None:
    class Mine(torch.optim.AdamW):
        pass

    def construct(one: type[torch.optim.Optimizer]) -> None:
        def made(params: object, **arguments: object) -> offload.OffloadedOptimizer:
            return offload.OffloadedOptimizer(one, params, **arguments)

        make_optimizer(make_model(3, 1), MemoryBackend(), made).close()

    with pytest.warns(UserWarning, match=r"Mine is not torch's own.* are untested"):
        construct(Mine)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        construct(Mine)
        construct(torch.optim.AdamW)
    assert not said
