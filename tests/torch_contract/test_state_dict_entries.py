"""Entries of a state dict that are not the model's memory come back as torch brings them back."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError, UnsupportedParameterError

BACKENDS = pytest.mark.parametrize("overlap", [None, "forward", "backward"])


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


class File(Extra):
    """As TransformerEngine had it."""

    def get_extra_state(self) -> Any:
        file = io.BytesIO()
        torch.save(self.calls, file)
        return file

    def set_extra_state(self, state: Any) -> None:
        state.seek(0)
        self.calls = torch.load(state)


class Packed(Base):
    """Keeps a number, and stores it as a tensor, as quantised modules do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count.packed"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.calls = int(state_dict.pop(f"{prefix}count.packed"))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Cast(Extra):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.cast)

    @staticmethod
    def cast(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}table"] = state[f"{prefix}table"].half()


class Turned(Extra):
    """A buffer that is stored transposed, under another name, and turned back by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.turn)
        self.register_load_state_dict_pre_hook(self.turn_back)

    @staticmethod
    def turn(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}table").t()

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


class Detached(Extra):
    """Its hook returns what ``keep_vars`` should not: detached tensors of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.detach)

    @staticmethod
    def detach(_module: Any, state: dict[str, Any], *_: Any) -> None:
        state.update({k: v.detach() for k, v in state.items() if isinstance(v, torch.Tensor)})
        state["again"] = state["l.weight"]  # tied, by memory only

    def _load_from_state_dict(self, state_dict: Any, *args: Any) -> None:
        state_dict.pop("again", None)
        super()._load_from_state_dict(state_dict, *args)


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


class OtherKeyword(Extra):
    def load_state_dict(self, state_dict: Any, *, verbose: bool = True) -> None:
        assert verbose
        super().load_state_dict(state_dict)


class PassesOn(Extra):
    def load_state_dict(self, state_dict: Any, *args: Any) -> Any:
        return super().load_state_dict(state_dict, *args)


class Wrapped(Extra):
    """An instance with methods of its own, which use other names."""

    def __init__(self) -> None:
        super().__init__()
        save, load = self.state_dict, self.load_state_dict
        self.state_dict = lambda *a, **k: {f"model.{n}": v for n, v in save(*a, **k).items()}
        self.load_state_dict = lambda state, *a, **k: load(
            {n.removeprefix("model."): v for n, v in state.items()}, *a, **k
        )


class Resizing(Extra):
    """A buffer that grows in the forward, and gets the size of the state dict in a load."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.cat([self.table.flatten(), torch.ones(1)])
        return super().forward(x)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.table = torch.empty_like(state_dict[f"{prefix}table"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Observed(Extra):
    """The first forward gives the observer's buffers their size."""

    def __init__(self) -> None:
        super().__init__()
        self.observer = torch.ao.quantization.PerChannelMinMaxObserver(ch_axis=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.observer(x * (self.calls + 1)))

    def seen(self) -> dict[str, Any]:
        return super().seen() | {"low": self.observer.min_val, "high": self.observer.max_val}


KINDS = [
    Base,
    Extra,
    Growing,
    Plain,
    File,
    Packed,
    Cast,
    Turned,
    Derived,
    Detached,
    Nested,
    NoStrict,
    OtherKeyword,
    PassesOn,
    Wrapped,
    Resizing,
    Observed,
]


def made(kind: type[torch.nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def opened(model: Any, backend: MemoryBackend, **options: Any) -> offload.AdamW:
    settings = offload.Options(backend=backend, allow_volatile=True, **options)
    params = model.l.parameters()
    return offload.AdamW(params, lr=0.1, directory="/run", model=model, options=settings)


def train(model: Any, optimizer: offload.AdamW, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def restore(model: Any, backend: MemoryBackend) -> None:
    with opened(model, backend) as optimizer:
        optimizer.restore()


def load(model: Any, backend: MemoryBackend) -> None:
    offload.load_parameters(model, "/run", backend=backend)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(torch.as_tensor(v), torch.as_tensor(other[k])) for k, v in one.items())


@BACKENDS
@pytest.mark.parametrize("kind", KINDS)
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

    backend, model = MemoryBackend(), made(Looking)
    with opened(model, backend) as optimizer:
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
        optimizer.restore()
    offload.load_parameters(made(Looking), "/run", backend=backend)
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


class Copied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(
            lambda _module, state, prefix, _: state.update(
                {f"{prefix}l.bias": state[f"{prefix}l.bias"].clone()}
            )
        )


class Unstorable(Extra):
    def get_extra_state(self) -> Any:
        return {"rule": self.get_extra_state}


class InOneEntry(Base):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"model": super().state_dict(*args, **kwargs)}


class Renamed(Base):
    """A number that its loading code does not know."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}number"] = self.calls


class OnlySaved(Extra):
    set_extra_state = torch.nn.Module.set_extra_state


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Copied, r"'l\.bias' in the model's state dict is not the parameter of this name"),
        (Unstorable, r"'_extra_state' .*get_extra_state.*the entry\['rule'\]: cannot store a val"),
        (InOneEntry, r"'model' in the .*save dense .* names of their own"),
        (OnlySaved, r"'_extra_state' in .* has changed.*define set_extra_state\(\), or"),
        (Renamed, r"'number' in .* has changed.*define _load_from_state_dict\(\), or"),
    ],
)
def test_what_cannot_be_given_back_is_refused_by_name(kind: type[Any], words: str) -> None:
    model = made(kind)

    def seal() -> None:
        with opened(model, MemoryBackend()) as optimizer:
            train(model, optimizer, 1)
            optimizer.checkpoint()

    with pytest.raises(UnsupportedParameterError, match=words):
        seal()


class Deaf(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *_: None)


@pytest.mark.parametrize(("kind", "name"), [(Packed, "count.packed"), (Plain, "_extra_state")])
def test_what_only_a_checkpoint_has_is_named(kind: type[Any], name: str) -> None:
    backend, model = MemoryBackend(), made(kind)
    with opened(model, backend) as optimizer:
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
    with pytest.raises(MismatchError, match=f"'{name}' is only in the checkpoint"):
        load(made(Base), backend)


def test_a_model_that_takes_less_than_a_checkpoint_has_is_refused_by_name() -> None:
    backend, model = MemoryBackend(), made(Packed)
    with opened(model, backend) as optimizer:
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
    for call in (restore, load):
        with pytest.raises(MismatchError, match=r"not take 'count\.packed': it is an unexpected"):
            call(made(Deaf), backend)


class Smaller(Extra):
    """Has loading code, which does not resize the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class SmallerLayer(Smaller):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2, 3)
        self.l = torch.nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Smaller, r"(?s)not take 'table.*size mismatch for table"),
        (SmallerLayer, r"'l\.weight' is F32 \[4, 4\] in the checkpoint and F32 \[3, 4\] in"),
    ],
)
def test_a_size_that_loading_code_does_not_change_is_refused(kind: type[Any], words: str) -> None:
    backend, model = MemoryBackend(), made(Extra)
    with opened(model, backend) as optimizer:
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
    for call in (restore, load):
        with pytest.raises(MismatchError, match=words):
            call(made(kind), backend)


def test_a_store_without_entries_that_are_no_tensors_is_read() -> None:
    """Earlier versions left them out, with a warning."""
    backend, model = MemoryBackend(), made(Base)
    with opened(model, backend) as optimizer:
        train(model, optimizer, 1)
        optimizer.checkpoint().result()
    restored = made(Plain, 1)
    with opened(restored, backend) as optimizer:
        with pytest.warns(RuntimeWarning, match="has no '_extra_state'"):
            optimizer.restore()
        assert torch.equal(restored.l.weight, model.l.weight)
        assert restored.calls == 0
        train(restored, optimizer, 1)
        assert optimizer.checkpoint().result().verify().ok
