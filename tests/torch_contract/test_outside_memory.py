"""`outside_memory` builds models whose parameters take no memory; nothing trains without values."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations

import offload
from offload.errors import UnsupportedParameterError


class Net(torch.nn.Module):
    """Tied weights, a frozen parameter, buffers and parameters in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8, padding_idx=1)
        self.body = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.scales = torch.nn.ParameterList([torch.ones(4), torch.ones(())])
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.frozen.kind = "frozen"
        shared = torch.nn.Parameter(torch.ones(6))
        self.first = self.second = shared
        self.register_buffer("table", torch.arange(9.0))
        self.body.apply(self._init)

    def _init(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.trunc_normal_(module.weight, std=0.02)
            module.weight.data.mul_(2)
            with torch.no_grad():
                module.bias += 1


def outside(make: Any = Net, **how: Any) -> Any:
    with offload.outside_memory(**how):
        return make()


def storage_bytes(model: torch.nn.Module) -> int:
    found = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    return sum(found.values())


def test_parameters_have_all_but_memory_and_buffers_are_real():
    plain, model = Net(), outside()
    theirs, mine = dict(plain.named_parameters()), dict(model.named_parameters())
    assert list(mine) == list(theirs)
    assert plain.state_dict().keys() == model.state_dict().keys()
    for name, parameter in mine.items():
        assert type(parameter) is torch.nn.Parameter
        assert parameter.shape == theirs[name].shape
        assert parameter.dtype == theirs[name].dtype
        assert parameter.device == theirs[name].device
        assert parameter.requires_grad == theirs[name].requires_grad
        assert parameter.is_leaf
        assert parameter.isnan().all()
    assert storage_bytes(model) == 4 * len(mine)
    assert model.head.weight is model.embed.weight
    assert model.first is model.second
    assert model.frozen.kind == "frozen"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(plain.named_buffers())[name])
    assert model.head(torch.ones(8)).isnan().all()


def test_values_can_be_given_and_then_it_trains_like_any_other():
    model = outside(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    for one in (plain, model):
        one(torch.ones(2, 8)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    torch.optim.AdamW(plain.parameters()).step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_default_dtype_default_device_and_conversions_count():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = outside()
    finally:
        torch.set_default_dtype(before)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in outside(lambda: Net().half()).parameters()} == {torch.float16}
    assert outside(device="meta").embed.weight.is_meta


def test_modules_from_before_stay_as_they_are():
    old = Net()
    values = dict(old.named_parameters())
    with offload.outside_memory():
        model = torch.nn.ModuleDict({"old": old, "new": torch.nn.Linear(3, 3)})
        old.extra = torch.nn.Linear(2, 2)
    assert {n: p for n, p in old.named_parameters() if "extra" not in n} == values
    assert all(not p.isnan().any() for p in values.values())
    assert old.extra.weight.isnan().all()
    assert model["new"].weight.isnan().all()
    assert not torch.nn.Linear(3, 3).weight.isnan().any()


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "weight_norm": (lambda: parametrizations.weight_norm(torch.nn.Linear(6, 5)), (4, 6)),
    "old_weight_norm": (lambda: torch.nn.utils.weight_norm(torch.nn.Linear(6, 5)), (4, 6)),
    "lstm": (lambda: torch.nn.LSTM(6, 5, 2), (4, 3, 6)),
    "encoder": (
        lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(6, 2, 8), 2),
        (4, 3, 6),
    ),
    "conv": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.GroupNorm(2, 4)),
        (2, 3, 8, 8),
    ),
}


@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*weight_norm. is deprecated")
def test_modules_of_torch_are_built_and_compute_as_usual_once_they_have_values(make, shape):
    model, plain = outside(make).eval(), make().eval()
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    for name, parameter in model.named_parameters():
        assert parameter.isnan().all(), name
        assert not any(parameter.stride()), name
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    x = torch.randn(shape)
    mine, theirs = model(x), plain(x)
    if isinstance(mine, tuple):
        mine, theirs = mine[0], theirs[0]
    assert torch.equal(mine, theirs)


class Lazy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(4)


class Subclass(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()

        class Packed(torch.nn.Parameter):
            """A parameter that is more than its values."""

        self.weight = Packed(torch.ones(3))


class Integers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)


class Hooked(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.register_hook(lambda grad: grad)


class Spectral(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(torch.nn.Linear(2, 2))


class Orthogonal(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.orthogonal(torch.nn.Linear(2, 2))


class Computed(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("norm", self.weight.detach().norm())


REFUSED = {
    Lazy: r"'weight' of LazyLinear has no shape yet",
    Subclass: r"'weight' of Subclass is a Packed",
    Integers: r"'weight' of Integers is a .*int8",
    Hooked: r"'weight' of Hooked has hooks",
    Spectral: r"buffer '_u' of _SpectralNorm is on meta",
    Orthogonal: r"a module reads values of its parameters while it is built",
    Computed: r"buffer 'norm' of Computed is on meta",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_outside_is_named_and_the_block_ends(kind):
    with pytest.raises(UnsupportedParameterError, match=REFUSED[kind]):
        outside(kind)
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_an_error_in_the_block_is_raised_and_ends_it():
    with pytest.raises(ZeroDivisionError):
        outside(lambda: torch.nn.Linear(2, 1 // 0))
    assert not torch.nn.Linear(2, 2).weight.is_meta
    assert outside().embed.weight.isnan().all()


def test_a_block_within_another_one():
    with offload.outside_memory():
        with offload.outside_memory("cpu"):
            inner = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(inner.weight)  # by the model around it
        assert inner.weight.is_meta
        with pytest.raises(ValueError, match="within a block for cpu"):
            outside(device="meta")
    model = outside(lambda: torch.nn.Sequential(outside(), torch.nn.Linear(2, 2)))
    assert all(p.isnan().all() for p in model.parameters())


def test_other_threads_build_real_models():
    made: dict[str, Any] = {}

    def build(name: str, inside: bool) -> None:
        """Build a model on another thread."""
        made[name] = outside() if inside else Net()

    with offload.outside_memory():
        threads = [threading.Thread(target=build, args=(str(k), k)) for k in (True, False)]
        for thread in threads:
            thread.start()
        mine = Net()
        for thread in threads:
            thread.join()
    assert not made["False"].embed.weight.isnan().any()
    assert made["True"].embed.weight.isnan().all()
    assert mine.embed.weight.isnan().all()


@pytest.mark.parametrize("how", ["plain", "fresh", "frozen", "server"])
def test_training_without_values_is_refused(tmp_path, how):
    model = outside()
    parameters = list(model.parameters())
    if how == "frozen":
        model.requires_grad_(False)
        model.adapter = torch.nn.Linear(2, 2)
        parameters = list(model.adapter.parameters())
    directory = f"offload+unix://{tmp_path}/socket/run" if how == "server" else tmp_path / "run"
    with pytest.raises(
        UnsupportedParameterError,
        match=r"'\S+' and \d+ more: no values.*Options\(parameters=\"drive\"\) and restore\(\)",
    ):
        offload.AdamW(parameters, directory=directory, model=model, fresh=how == "fresh")
    assert not (tmp_path / "run").exists()


def test_parameters_are_not_loaded_where_there_is_no_memory(tmp_path):
    plain = torch.nn.Linear(8, 8)
    with offload.AdamW(plain.parameters(), model=plain, directory=tmp_path / "run") as optimizer:
        optimizer.checkpoint().result()
    model = outside(lambda: torch.nn.Linear(8, 8))
    with pytest.raises(UnsupportedParameterError, match=r"model.to_empty\(device=\"cpu\"\)"):
        offload.load_parameters(model, tmp_path / "run")
    model.to_empty(device="cpu")
    offload.load_parameters(model, tmp_path / "run")
    assert torch.equal(model.weight, plain.weight)


PROGRAM = """
import sys, torch, offload

def peak(key="VmHWM"):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) << 10

def build(layers):
    return torch.nn.ModuleList([torch.nn.Linear(2048, 2048) for _ in range(layers)])

with offload.outside_memory():
    build(1)
before = peak()
with offload.outside_memory():
    model = build(int(sys.argv[1]))
assert sum(p.numel() for p in model.parameters()) > int(sys.argv[1]) << 22
print(peak() - before)
"""


def test_building_takes_the_memory_of_one_parameter():
    grown = []
    for layers in (8, 32):  # 128 MiB and 512 MiB
        command = [sys.executable, "-c", PROGRAM, str(layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        grown.append(int(done.stdout))
    assert max(grown) < 24 << 20, grown


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    make = transformers.AutoModelForCausalLM.from_config
    plain, model = (
        make(config, dtype=torch.bfloat16),
        outside(lambda: make(config, dtype=torch.bfloat16)),
    )
    for (name, p), (theirs, q) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert (name, p.shape, p.dtype) == (theirs, q.shape, torch.bfloat16)
        assert p.isnan().all()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (_, mine), (_, buffer) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(mine, buffer)
    assert storage_bytes(model) == 2 * len(list(model.parameters()))
