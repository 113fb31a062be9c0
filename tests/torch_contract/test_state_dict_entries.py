"""Entries of a state dict that are not the model's memory come back as torch brings them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError, UnsupportedParameterError
from tests.stores.small import STORE, make_optimizer


class Base(torch.nn.Module):
    """A model that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(4, 4)
        self.calls = 0
        self.register_buffer("table", torch.zeros(2, 3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table += self.calls + 0.1
        return self.l(x)

    def seen(self) -> dict[str, Any]:
        return {"calls": self.calls, "table": self.table, "w": self.l.weight, "b": self.l.bias}


class Extra(Base):
    def get_extra_state(self) -> Any:
        return torch.tensor([self.calls])

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state)


class Growing(Extra):
    """Its first entry is no tensor, and the others are of different lengths."""

    def get_extra_state(self) -> Any:
        return torch.ones(self.calls, dtype=torch.uint8) if self.calls else None

    def set_extra_state(self, state: Any) -> None:
        self.calls = 0 if state is None else len(state)


class Plain(Extra):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "more": [(1, 2.5), {"x": torch.arange(3)}, b"\0\1"]}

    def set_extra_state(self, state: Any) -> None:
        assert state["more"][0] == (1, 2.5)
        assert state["more"][2] == b"\0\1"
        assert state["more"][1]["x"].tolist() == [0, 1, 2]
        self.calls = state["calls"]


class Packed(Base):
    """Keeps a number, and stores it as a tensor, as quantised modules do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count.packed"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.calls = int(state_dict.pop(f"{prefix}count.packed"))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Turned(Extra):
    """A buffer that is stored transposed, as FP16 and under another name, and turned back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.turn)
        self.register_load_state_dict_pre_hook(self.turn_back)

    @staticmethod
    def turn(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}table").t().half()

    @staticmethod
    def turn_back(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}table"] = state.pop(f"{prefix}turned").t()


class Derived(Base):
    """Counts nothing, but derives a number from its weights when they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: module.derive())

    def derive(self) -> None:
        self.calls = float(self.l.weight.detach().sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x)


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList([Plain(), Packed()])
        self.l = self.inner[0].l

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[1](self.inner[0](x))

    def seen(self) -> dict[str, Any]:
        return {f"{n}.{k}": v for n, m in enumerate(self.inner) for k, v in m.seen().items()}


class NoStrict(Extra):
    """Its own ``load_state_dict`` takes the dict alone."""

    def load_state_dict(self, state: Any) -> Any:
        return super().load_state_dict({k.removeprefix("module."): v for k, v in state.items()})


KINDS = [Growing, Plain, Packed, Turned, Derived, Nested, NoStrict]


def made(kind: type[torch.nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def opened(model: Any, backend: MemoryBackend, overlap: Any = None) -> offload.AdamW:
    params, settings = model.l.parameters(), {"overlap": overlap}
    return make_optimizer(model, backend, params=params, lr=0.1, settings=settings)


def sealed(model: Any) -> MemoryBackend:
    """Take a step, make a checkpoint, and return the files."""
    backend = MemoryBackend()
    with opened(model, backend) as optimizer:
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
    return backend


def train(model: Any, optimizer: offload.AdamW, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def restore(model: Any, backend: MemoryBackend) -> None:
    with opened(model, backend) as optimizer:
        optimizer.restore()


def load(model: Any, backend: MemoryBackend) -> None:
    offload.load_parameters(model, STORE, backend=backend)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(torch.as_tensor(v), torch.as_tensor(other[k])) for k, v in one.items())


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [*((kind, None) for kind in KINDS), (Growing, "forward"), (Nested, "backward")],
)
def test_they_come_back_as_torch_brings_them_back(kind: type[Any], overlap: Any) -> None:
    """Values are those of the call, and the oracle is torch's own ``load_state_dict``."""
    backend, model = MemoryBackend(), made(kind)
    with opened(model, backend, overlap=overlap) as optimizer:
        for _ in range(3):
            train(model, optimizer, 1)
            optimizer.checkpoint().result()
        train(model, optimizer, 1)
        handle = optimizer.checkpoint()
        optimizer.synchronize()
        expected = made(kind, 1)
        expected.load_state_dict(model.state_dict())
        for child in model.modules():
            child.calls = 77  # after the call of `checkpoint`
        handle.result()
    restored, loaded = made(kind, 2), made(kind, 3)
    own = [*restored.l.parameters()]
    with opened(restored, backend, overlap=overlap) as optimizer:
        assert optimizer.restore().step == 4
        assert same(restored.seen(), expected.seen())
        load(loaded, backend)
        assert same(loaded.seen(), expected.seen())
        assert [*restored.l.parameters()] == own
        train(restored, optimizer, 1)
        assert optimizer.checkpoint().result().verify().ok


def test_the_memory_of_parameters_is_read_in_place_and_never_doubled() -> None:
    """What hooks of a load are given is the parameters themselves."""
    found: list[bool] = []

    class Looking(Base):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            found.append(state_dict["l.weight"].data_ptr() == self.l.weight.data_ptr())
            super()._load_from_state_dict(state_dict, prefix, *args)

    backend = sealed(made(Looking))
    restore(made(Looking), backend)
    load(made(Looking), backend)
    assert found == [True, True]


class Constant(Base):
    """Has an entry that no load takes, as bitsandbytes does."""

    constant = 5

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}l.weight.quant_state"] = torch.tensor([self.constant])


def test_a_constant_that_no_load_takes_must_stay_the_same() -> None:
    backend, model = MemoryBackend(), made(Constant)
    with opened(model, backend) as optimizer:
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
        model.constant = 6
        train(model, optimizer, 1)
        with pytest.raises(UnsupportedParameterError, match=r"'l\.weight\.quant_state' .*changed"):
            optimizer.checkpoint()
        model.constant = 5
        optimizer.checkpoint().result()
    for constant in (5, 6):
        for call in (restore, load):
            again = made(Constant, 1)
            again.constant = constant
            if constant == 5:
                call(again, backend)
                assert same(again.seen() | {"calls": 0}, model.seen() | {"calls": 0})
            else:
                with pytest.raises(MismatchError, match=r"not take 'l\.weight\.quant_state'"):
                    call(again, backend)


class Unstorable(Extra):
    def get_extra_state(self) -> Any:
        return {"rule": len}


class OnlySaved(Extra):
    set_extra_state = torch.nn.Module.set_extra_state


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Unstorable, r"'_extra_state' .*get_extra_state.*the entry\['rule'\]: cannot store a val"),
        (OnlySaved, r"'_extra_state' in .* has changed.*define set_extra_state\(\), or"),
    ],
)
def test_what_cannot_be_given_back_is_refused_by_name(kind: type[Any], words: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=words):
        sealed(made(kind))


class Smaller(Extra):
    """Has loading code, which does not resize the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize(
    ("saved", "kind", "words"),
    [
        (Extra, Smaller, r"(?s)not take 'table.*size mismatch for table"),
        (Packed, Base, r"'count\.packed' is only in the checkpoint"),
        (Plain, Base, r"'_extra_state' is only in the checkpoint"),
    ],
)
def test_a_model_that_takes_less_than_a_checkpoint_has_is_refused_by_name(
    saved: type[Any], kind: type[Any], words: str
) -> None:
    backend = sealed(made(saved))
    for call in (restore, load):
        with pytest.raises(MismatchError, match=words):
            call(made(kind), backend)


def test_a_store_without_entries_that_are_no_tensors_is_read() -> None:
    """Earlier versions left them out, with a warning."""
    model = made(Base)
    backend = sealed(model)
    restored = made(Plain, 1)
    with opened(restored, backend) as optimizer:
        with pytest.warns(RuntimeWarning, match="has no '_extra_state'"):
            optimizer.restore()
        assert torch.equal(restored.l.weight, model.l.weight)
        assert restored.calls == 0
        train(restored, optimizer, 1)
        assert optimizer.checkpoint().result().verify().ok
