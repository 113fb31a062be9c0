"""Optimizers that others have published: each is trained to its own bits, or refused by name.

The table of ``docs/works-with.md`` says so for each class; `tests.torch_contract.published` writes
it.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import offload
from gds import MemoryBackend
from tests.stores.small import STORE, options
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


@pytest.mark.parametrize(("package", "name"), every_class())
def test_its_bits_or_a_refusal(package: str, name: str) -> None:
    it = found(classes(package)[name])
    assert it.kind in {ITS_BITS, REFUSED}, it
    said = on_the_page()[package_and_version(package), name]
    if "its place" in said and it.kind == ITS_BITS:
        return  # a few processors compute `pow` and the like in the same way at every place
    assert said == in_few_words(it), it


def test_the_page_has_every_class() -> None:
    assert set(on_the_page()) == {(package_and_version(p), name) for p, name in every_class()}


def test_there_are_many_classes() -> None:
    numbers = {package: len(classes(package)) for package in PACKAGES}
    assert all(numbers.values()), numbers
    assert sum(numbers.values()) > 100


def test_a_class_that_is_not_torchs_is_named_as_untested_once() -> None:
    class Mine(torch.optim.AdamW):
        pass

    def construct(one: type[torch.optim.Optimizer]) -> None:
        parameters = [torch.nn.Parameter(torch.ones(3))]
        settings = options(MemoryBackend())
        offload.OffloadedOptimizer(one, parameters, directory=STORE, options=settings).close()

    with pytest.warns(UserWarning, match=r"Mine is not torch's own.* are untested"):
        construct(Mine)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        construct(Mine)
        construct(torch.optim.AdamW)
    assert not said
