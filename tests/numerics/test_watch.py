"""A watched tensor announces each use of it, and is what it always was afterwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.model.watch import Watch, announce_use, is_watched
from tests.limits import HANG_S


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


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.arange(4.0).view(2, 2))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@torch.library.custom_op("offload_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def edited(p: nn.Parameter, edit: Callable[[nn.Parameter], object]) -> nn.Parameter:
    with torch.no_grad():
        edit(p)
    return p


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "operator": lambda p: p + 1,
    "operand on the right": lambda p: torch.ones(2, 2) @ p,
    "function": lambda p: nn.functional.linear(torch.ones(2), p),
    "function in Python": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "method": lambda p: p.sum(),
    "property": lambda p: p.T,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "item": lambda p: p[1, 1].item(),
    "numpy": lambda p: p.numpy(force=True).tolist(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "address": lambda p: isinstance(p.data_ptr(), int),
    "storage": lambda p: p.untyped_storage().nbytes(),
    "list": lambda p: torch.stack([p, p]),
    "keyword": lambda p: torch.add(input=torch.ones(2, 2), other=p),
    "assignment": lambda p: torch.zeros(2, 2).index_put_((torch.tensor([0]),), p[0]),
    "item assignment": lambda p: torch.zeros(2, 2).__setitem__(slice(None), p),
    "foreach": lambda p: torch._foreach_add([p], 1.0)[0],
    "foreach, second list": lambda p: torch._foreach_add([torch.ones(2, 2)], [p])[0],
    "autograd function": lambda p: Squared.apply(p),
    "overload": lambda p: torch.ops.aten.mul.Tensor(p, p),
    "custom operation": lambda p: double(p),
    "vmap": lambda p: torch.vmap(torch.sum)(p),
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(torch.sin, p, use_reentrant=False),
    "iteration": lambda p: list(p),
    "comparison": lambda p: torch.equal(p, torch.ones(2, 2)),
    "text": repr,
    "format": lambda p: f"{p}",
    "list of numbers": lambda p: p.tolist(),
    "vector of parameters": lambda p: nn.utils.parameters_to_vector([p]),
    "edit in place": lambda p: edited(p, lambda p: p.mul_(2)),
    "edit of the data": lambda p: edited(p, lambda p: p.data.mul_(2)),
    "new data": lambda p: edited(p, lambda p: setattr(p, "data", torch.ones(2, 2))),
    "other memory": lambda p: edited(p, lambda p: p.set_(torch.ones(2, 2))),
    "new real part": lambda p: edited(p, lambda p: setattr(p, "real", torch.ones(2, 2))),
    "real part": lambda p: p.real,
    "out": lambda p: edited(p, lambda p: torch.add(torch.ones(2, 2), 1, out=p)),
    "version": lambda p: p._version,
    "parameter of a parameter": lambda p: nn.Parameter(p),
    "another class": lambda p: p.as_subclass(torch.Tensor),
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": lambda p: save_and_load(p),
    "swap": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.ones(2, 2))),
}


def save_and_load(p: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def same(found: object, expected: object) -> bool:
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(found, torch.Tensor):
        return found == expected
    return type(found) is type(expected) and torch.equal(found, expected)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_use_is_announced_and_finds_the_ordinary_class(uses, read):
    p, plain = parameter(), parameter()
    uses.watch.add([p])
    found, expected = read(p), read(plain)
    assert len(uses.found) == 1
    assert uses.found[0] is p
    assert same(found, expected)
    assert type(p) is type(plain)
    assert len(uses.watch) == 0


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
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.clone], ids=["parameter", "tensor"])
def test_no_method_of_a_tensor_reads_or_changes_it_without_a_word(uses, kind):
    """Neither does the assignment of an attribute. It is tried with two tensors of other values."""

    def trial(use: Callable[[torch.Tensor], object], first: float) -> tuple[object, object] | None:
        """Return what is told, and the values after it, if nothing was announced."""
        p = kind(first + torch.arange(4.0).view(2, 2))
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
            one, other = trial(use, 0.0), trial(use, 10.0)
            if one is not None and (one != other or one[1] != [0.0, 1.0, 2.0, 3.0]):
                found.add(text)
    assert found == set()


LOOKS: dict[str, Callable[[nn.Parameter], object]] = {
    "shape": lambda p: p.shape,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "size": lambda p: p.size(0),
    "numel": lambda p: p.numel(),
    "torch.numel": lambda p: torch.numel(p),
    "stride": lambda p: p.stride(),
    "requires_grad": lambda p: p.requires_grad,
    "requires_grad_": lambda p: p.requires_grad_(False) is p,
    "requires_grad assigned": lambda p: setattr(p, "requires_grad", False),
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad,
    "grad assigned": lambda p: setattr(p, "grad", torch.ones(2, 2)),
    "grad deleted": lambda p: delattr(p, "grad"),
    "zeros_like": lambda p: torch.zeros_like(p).tolist(),
    "new_ones": lambda p: p.new_ones(2).tolist(),
    "zero_grad": lambda p: torch.optim.SGD([p]).zero_grad(),
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "hash": lambda p: isinstance(hash(p), int),
    "member": lambda p: p in {p: 1},
    "class": lambda p: p.__class__,
    "instance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, nn.Linear)),
    "in a module": lambda p: nn.ParameterList([p])[0] is p,
    "hook": lambda p: p.register_hook(lambda g: g).remove(),
    "accumulation hook": lambda p: p.register_post_accumulate_grad_hook(lambda _: None).remove(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_does_not_read_is_not_announced(uses, look):
    p, plain = parameter(), parameter()
    uses.watch.add([p])
    assert look(p) == look(plain)
    assert uses.found == []
    assert is_watched(p)


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


@pytest.mark.parametrize("kind", [Tagged, Loud])
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_an_operand_of_another_class(uses, kind, first):
    Loud.seen = []
    p, x = parameter(), torch.ones(2, 2).as_subclass(kind)
    expected = [x @ p, p @ x][first]
    uses.watch.add([p])
    found = [x @ p, p @ x][first]
    assert len(uses.found) == 1
    assert type(found) is type(expected) is kind


class Stubborn(type(nn.Parameter)):
    """A class of classes that are made by name only."""

    def __new__(cls, name, bases, namespace):
        if name == "Reluctant" and "_offload_original" in namespace:
            raise TypeError("no more of them")
        return super().__new__(cls, name, bases, namespace)


class Reluctant(nn.Parameter, metaclass=Stubborn):
    pass


def test_a_tensor_whose_class_cannot_be_changed_is_returned(uses):
    stuck, p = Reluctant(torch.ones(2)), parameter()
    for _ in range(2):
        assert uses.watch.add([p, stuck]) == [stuck]
        assert len(uses.watch) == 1
        assert type(stuck) is Reluctant
        uses.watch.release_all()


def test_a_use_that_is_not_allowed_for_leaves_it_watched(uses):
    uses.may = False
    p = parameter()
    uses.watch.add([p])
    for _ in range(2):
        assert (p + 1).sum().item() == 10.0
        assert is_watched(p)
    assert uses.found == [p, p]


def test_an_error_of_who_is_asked_is_the_error_of_the_use(uses):
    def fail(_: object) -> bool:
        raise ZeroDivisionError

    p = parameter()
    watch = Watch(fail)
    watch.add([p])
    with pytest.raises(ZeroDivisionError):
        p.sum()
    assert is_watched(p)
    watch.release_all()
    assert p.sum().item() == 6.0


def test_what_is_made_of_its_class_is_ordinary(uses):
    p = parameter()
    uses.watch.add([p])
    assert type(type(p)(torch.ones(2))) is nn.Parameter
    assert type(p.__class__(torch.ones(2), requires_grad=False)) is nn.Parameter
    assert uses.found == []


def test_a_copy_that_nobody_knows_behaves_like_its_class(uses):
    p = parameter()
    uses.watch.add([p])
    copied = torch.Tensor._make_subclass(type(p), torch.ones(2, 2), True)
    assert is_watched(copied)
    assert torch.equal(copied * 2, torch.full((2, 2), 2.0))
    assert type(copied) is nn.Parameter
    assert uses.found == []


def test_a_watch_that_is_gone_is_not_asked():
    uses = Uses()
    p = parameter()
    uses.watch.add([p])
    gone = weakref.ref(uses.watch)
    del uses
    gc.collect()
    assert gone() is None
    assert (p + 1).sum().item() == 10.0
    assert type(p) is nn.Parameter


def test_what_is_in_something_that_is_not_looked_into(uses):
    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def total(holder: Holder) -> torch.Tensor:
        if torch.overrides.has_torch_function_unary(holder.tensor):
            return torch.overrides.handle_torch_function(total, (holder.tensor,), holder)
        return holder.tensor.sum()

    p, other = parameter(), parameter()
    uses.watch.add([p, other])
    assert total(Holder(p)).item() == 6.0
    assert uses.found == [None]
    assert not is_watched(other)


def test_two_watches_of_one_tensor(uses):
    other = Uses()
    p = parameter()
    other.watch.add([p])
    uses.watch.add([p])
    assert other.found == [p]
    p.sum()
    assert uses.found == [p]
    assert other.found == [p]


def test_several_watches_in_one_call(uses):
    other = Uses()
    p, q = parameter(), parameter()
    uses.watch.add([p])
    other.watch.add([q])
    torch.stack([p, q])
    assert (uses.found, other.found) == ([p], [q])


def test_a_pause(uses):
    p, q = parameter(), parameter()
    uses.watch.add([p, q])
    uses.watch.pause()
    assert type(p) is nn.Parameter
    p.sum()
    uses.watch.release([q])
    uses.watch.resume()
    assert uses.found == []
    assert (is_watched(p), is_watched(q)) == (True, False)
    announce_use(p)
    assert uses.found == [p]
    assert len(uses.watch) == 0


def test_modes_and_disabled_threads(uses):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    p = parameter()
    uses.watch.add([p])
    with torch._C.DisableTorchFunctionSubclass():
        p.sum()
    assert uses.found == []
    with Mode():
        p.sum()
    assert seen == ["sum"]
    assert uses.found == [p]


def test_readers_on_several_threads_all_ask():
    together, free = threading.Barrier(5), threading.Event()
    results = []

    def wait(_: object) -> bool:
        together.wait(HANG_S)
        return free.wait(HANG_S)

    p = parameter()
    watch = Watch(wait)
    watch.add([p])
    readers = [threading.Thread(target=lambda: results.append(p.sum().item())) for _ in range(4)]
    for reader in readers:
        reader.start()
    together.wait(HANG_S)  # none of them has read it before
    assert results == []
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        p.mul_(2)
    free.set()
    for reader in readers:
        reader.join(HANG_S)
    assert results == [12.0] * 4
