"""Homes: memory in which parameters are kept whose tensors are filled only while they are used.

A step updates a parameter's home, a seal copies it, and a restore reads into it. The parameter of
the model gives the name, the group and the identity, as with a `Shard`, and never has to be filled
for any of this. Parameters without a home are their own memory.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Keeper(ABC):
    """Keeps the values of some parameters outside of them, from `register` to `unregister`."""

    @abstractmethod
    def home_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the home of a parameter, always the same tensor; None if it has none here."""

    @abstractmethod
    def settle(self) -> None:
        """Bring edits that the program has made to its parameters home."""

    @abstractmethod
    def refresh(self) -> None:
        """Fill parameters anew before their next use, because their homes have changed."""

    def stays_filed(self, parameter: torch.Tensor) -> bool:  # noqa: ARG002
        """Return whether a restore leaves a parameter in the model file of the slot."""
        return False

    def register(self) -> None:
        """Let `home_of` and `written` know of this keeper."""
        _keepers.add(self)

    def unregister(self) -> None:
        """Make every parameter its own memory again."""
        _keepers.discard(self)


_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()


def home_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the home of a parameter; None if its memory is its own."""
    for keeper in list(_keepers) if _keepers else ():
        home = keeper.home_of(parameter)
        if home is not None:
            return home
    return None


def stays_filed(parameter: torch.Tensor) -> bool:
    """Return whether a restore leaves a parameter in the model file of the slot."""
    return any(keeper.stays_filed(parameter) for keeper in list(_keepers) if _keepers)


@contextmanager
def written() -> Iterator[None]:
    """Run a block that overwrites parameters through their homes, after all edits before it."""
    for keeper in list(_keepers):
        keeper.settle()
    try:
        yield
    finally:
        for keeper in list(_keepers):
            keeper.refresh()
