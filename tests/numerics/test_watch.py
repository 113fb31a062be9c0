"""A watched tensor announces each use of it, and is what it always was afterwards.

The watch of a wing is asked itself, since all methods of a tensor are tried. What a step does with
its answers is in ``test_overlap_readers.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.model.watch import Watch


class Uses:
    """A watch that notes what it is asked."""

    def __init__(self, may: bool = True) -> None:
        self.found: list[torch.Tensor | None] = []
        self.may = may
        self.watch = Watch(self.note, "watched in a test")

    def note(self, tensor: torch.Tensor | None) -> bool:
        self.found.append(tensor)
        return self.may


@pytest.fixture
def uses() -> Uses:
    return Uses()


OTHER = torch.full((2, 2), 7.0)
INDEX = torch.tensor([0, 1])
ARGUMENTS: list[Callable[[], tuple[object, ...]]] = [
    tuple,
    lambda: (0,),
    lambda: (0.5,),
    lambda: (0, 1),
    lambda: ((2, 2),),
    lambda: ((2, 2), (2, 1)),
    lambda: (OTHER.clone(),),
    lambda: (OTHER.clone(), OTHER.clone()),
    lambda: (OTHER > 0, 0.5),
    lambda: (OTHER > 0, OTHER.clone()),
    lambda: (INDEX.clone(),),
    lambda: (0, INDEX.clone()),
    lambda: (0, INDEX.clone(), OTHER.clone()),
    lambda: ((INDEX.clone(),), OTHER.clone()),
    lambda: (torch.float64,),
    lambda: (torch.Tensor,),
    lambda: ("cpu",),
    lambda: (lambda *_: 0.0,),
    lambda: (OTHER.clone(), lambda *_: 0.0),
    lambda: (OTHER.untyped_storage(),),
    lambda: (OTHER.untyped_storage(), 0, (2, 2), (2, 1)),
]
"""Some of which each method of a tensor takes."""


def told_by(value: object) -> object:
    """Return what can depend on the values of a tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().flatten().tolist()
    if isinstance(value, (list, tuple)):
        return [told_by(item) for item in value]
    return value if isinstance(value, float) else None


@pytest.mark.filterwarnings("ignore")  # of deprecated methods
def test_no_method_of_a_tensor_reads_or_changes_it_without_a_word(uses):
    """Neither does the assignment of an attribute. It is tried with two tensors of other values."""

    def trial(use: Callable[[torch.Tensor], object], first: float) -> tuple[object, object] | None:
        """Return what is told, and the values after it, if nothing was announced."""
        p = nn.Parameter(first + torch.arange(4.0).view(2, 2))
        uses.watch.add([p])
        uses.found.clear()
        told: object = None
        try:
            with torch.no_grad():
                told = use(p)
        except Exception:  # noqa: BLE001  (these are not its arguments)
            pass
        silent = not uses.found
        uses.watch.release_all()
        after = torch.Tensor.detach(p).flatten() - first  # its own may have been assigned to
        return (None if told is p else told_by(told), after.tolist()) if silent else None

    found = set()
    for name in set(dir(torch.Tensor)) - {"__new__", "new_empty"}:  # whose results hold anything
        ways: list[tuple[str, Callable[[torch.Tensor], object]]] = [
            (f"p.{name} = ", lambda p, name=name: setattr(p, name, OTHER.clone())),
            (f"p.{name}", lambda p, name=name: getattr(p, name)),
        ]
        ways += [
            (f"p.{name}()", lambda p, name=name, make=make: getattr(p, name)(*make()))
            for make in ARGUMENTS
        ]
        for text, use in ways:
            one = trial(use, 0.0)
            if one is not None and (one != trial(use, 10.0) or one[1] != [0.0, 1.0, 2.0, 3.0]):
                found.add(text)
    assert found == set()


class Tagged(torch.Tensor):
    """Keeps its class in results, as torch's default does."""


class Loud(torch.Tensor):
    """Has a ``__torch_function__`` of its own."""

    seen: list[tuple[str, tuple[type, ...]]]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Loud.seen.append((func.__name__, types))
        return super().__torch_function__(func, types, args, kwargs or {})


class MyParameter(nn.Parameter):
    """As libraries define them."""


@pytest.mark.parametrize("kind", [torch.Tensor, Tagged, Loud, MyParameter])
def test_classes_of_others_do_what_they_always_do(uses, kind):
    Loud.seen = []
    tensor = torch.ones(2, 2).as_subclass(kind).requires_grad_()
    expected = [tensor @ tensor, tensor.sum(), tensor.shape]
    calls, Loud.seen = Loud.seen, []
    uses.watch.add([tensor])
    assert isinstance(tensor, kind)
    assert uses.found == []
    found = [tensor @ tensor, tensor.sum(), tensor.shape]
    assert [type(f) for f in found] == [type(e) for e in expected]
    assert uses.found == [tensor]
    assert type(tensor) is kind
    assert Loud.seen == calls[-len(Loud.seen) :] if kind is Loud else Loud.seen == []
