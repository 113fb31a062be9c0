"""Calls of a rank whose model has buffers of its own, for `Calls.do`."""

from __future__ import annotations

import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.ranks_training.calls import Calls

NAME = "own"


def make(calls: Calls, differ: bool, broadcast: bool = True, persistent: bool = True) -> None:
    """Give the model two buffers of which one may differ between the ranks."""
    model = getattr(calls.model, "module", calls.model)
    model.register_buffer("common", torch.ones(3))
    value = torch.full((2, 3), float(calls.rank if differ else 7)).t()  # not contiguous
    model.register_buffer(NAME, value, persistent=persistent)
    if isinstance(calls.model, DistributedDataParallel):
        calls.model = DistributedDataParallel(model, broadcast_buffers=broadcast)


class Counting(torch.nn.Module):
    """A module with an extra state that is no tensor, and a number that a load derives."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = {"count": count}
        self.loads = 0
        self.register_load_state_dict_post_hook(lambda module, _: module.loaded())

    def loaded(self) -> None:
        """Count the loads of a state dict."""
        self.loads += 1

    def get_extra_state(self) -> dict[str, int]:
        """Return the count."""
        return self.count

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Set the count."""
        self.count = state


def count(calls: Calls, start: int) -> None:
    """Give the model a module that is nothing but its extra state."""
    getattr(calls.model, "module", calls.model).counting = Counting(start + calls.rank)


def counted(calls: Calls) -> list[int]:
    """Return the extra state, and the number of loads."""
    counting = getattr(calls.model, "module", calls.model).counting
    return [counting.count["count"], counting.loads]


def change(calls: Calls) -> None:
    """Let the buffer differ from now on."""
    model = getattr(calls.model, "module", calls.model)
    getattr(model, NAME).fill_(calls.rank)


def value(calls: Calls) -> float:
    """Return the buffer's value."""
    return float(getattr(getattr(calls.model, "module", calls.model), NAME).flatten()[0])


def step_warning(calls: Calls) -> list[list[str]]:
    """Take a step; the value is what it warns of, and the file that each warning names."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        calls.backward()
        calls.optimizer.step()
        calls.num_steps += 1
    return [[str(one.message), one.filename] for one in seen]
