"""What a training loop puts around `step()` works as it does with plain torch, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import offload
from gds import Backend, Buffer, File, IOFuture, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from tests.eventually import TIMEOUT_S
from tests.numerics.models import Mixed, give_gradients
from tests.numerics.pairs import CASES, CUTS, Case, changing_rate, memory_pair
from tests.numerics.reference import (
    assert_same_bits,
    assert_same_parameters,
    read_state,
)

NUM_STEPS = 20


class Full(torch.nn.Module):
    """FP32 all through, with BatchNorm: what plain torch trains without masters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(19, 67),
            torch.nn.BatchNorm1d(67),
            torch.nn.ReLU(),
            torch.nn.Linear(67, 21),
        )

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return (self.layers(torch.randn(8, 19, generator=generator)) - 1).square().mean()


def offloaded(
    model: torch.nn.Module, backend: Backend, name: str = "AdamW", **hyper
) -> offload.OffloadedOptimizer:
    return getattr(offload, name)(
        model.parameters(),
        model=model,
        directory="/store",
        options=CUTS[0].options(backend),
        **hyper,
    )


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_an_fp32_model_trains_as_with_plain_torch(name):
    live, expected, backend = Full(), Full(), MemoryBackend()
    optimizer = offloaded(live, backend, name, lr=0.01)
    plain = getattr(torch.optim, name)(expected.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        for model, stepped in ((live, optimizer), (expected, plain)):
            stepped.zero_grad()
            model.loss(step).backward()
            stepped.step()
        assert_same_parameters(live.state_dict().items(), expected.state_dict().items())
    stored = read_state(optimizer.checkpoint().result().path, backend)
    assert set(stored.arrays) == (set() if name == "SGD" else {"exp_avg", "exp_avg_sq"})
    for array, tensors in stored.arrays.items():
        for parameter, tensor in tensors.items():
            state = plain.state[expected.get_parameter(parameter)]
            assert_same_bits(tensor, state[array], f"{array} of {parameter}")


def test_buffers_are_restored_as_they_were_when_the_checkpoint_was_asked_for():
    live, expected, backend = Full(), Full(), MemoryBackend()
    optimizer = offloaded(live, backend, lr=0.01)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        for model, stepped in ((live, optimizer), (expected, plain)):
            stepped.zero_grad()
            model.loss(step).backward()
            stepped.step()
        if step in (4, 11):
            optimizer.checkpoint()
            live.loss(100)  # a forward pass, which changes the running statistics
            optimizer.close()
            live, backend = Full(seed=99), backend.reopened()
            optimizer = offloaded(live, backend, lr=0.01)
            optimizer.restore()
        assert_same_parameters(live.state_dict().items(), expected.state_dict().items())
    assert live.layers[1].num_batches_tracked.item() == NUM_STEPS


def test_a_grad_scaler_that_skips_steps():
    live, expected, backend = Full(), Full(), MemoryBackend()
    optimizer = offloaded(live, backend, lr=0.01)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.01)

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    scalers = [scaler(), scaler()]
    scales = set()
    for step in range(NUM_STEPS):
        for model, stepped, scale in zip(
            (live, expected), (optimizer, plain), scalers, strict=True
        ):
            stepped.zero_grad()
            loss = model.loss(step) * (float("inf") if step % 6 == 2 else 1.0)
            scale.scale(loss).backward()
            scale.unscale_(stepped)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scale.step(stepped)
            scale.update()
        scales.add(scalers[0].get_scale())
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same_parameters(live.state_dict().items(), expected.state_dict().items())
        if step == 9:
            optimizer.checkpoint({"scaler": scalers[0].state_dict()})
            optimizer.close()
            live, backend, scalers[0] = Full(seed=99), backend.reopened(), scaler()
            optimizer = offloaded(live, backend, lr=0.01)
            checkpoint = optimizer.restore()
            assert checkpoint.step == 8  # two of ten were skipped
            scalers[0].load_state_dict(checkpoint.train_state["scaler"])
    assert len(scales) > 1


def test_a_closure_is_called_once_with_gradients_enabled():
    live, expected = Full(), Full()
    optimizer = offloaded(live, MemoryBackend(), lr=0.01)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.01)
    calls = []

    def evaluate(model: Full, stepped: torch.optim.Optimizer, step: int) -> torch.Tensor:
        calls.append(step)
        stepped.zero_grad()
        loss = model.loss(step)
        loss.backward()
        return loss

    for step in range(NUM_STEPS):
        found = optimizer.step(partial(evaluate, live, optimizer, step))
        expected_loss = plain.step(partial(evaluate, expected, plain, step))
        assert_same_bits(found, expected_loss, "loss")
        assert_same_parameters(live.named_parameters(), expected.named_parameters())
    assert calls == [step for step in range(NUM_STEPS) for _ in range(2)]


@pytest.fixture
def fired() -> Iterator[dict[str, list[torch.optim.Optimizer]]]:
    seen: dict[str, list[torch.optim.Optimizer]] = {"global pre": [], "global post": []}
    hooks = [
        register_optimizer_step_pre_hook(lambda o, *_: seen["global pre"].append(o)),
        register_optimizer_step_post_hook(lambda o, *_: seen["global post"].append(o)),
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups", "adagrad", "rprop"])
def test_step_hooks_fire_once_per_step_and_only_for_the_optimizer_itself(name, fired):
    case = CASES[name]
    model = Mixed()
    optimizer = offload.OffloadedOptimizer(
        case.optimizer,
        model.parameters(),
        directory="/store",
        options=CUTS[0].options(MemoryBackend()),
        **case.hyper,
    )
    fired.update({"pre": [], "post": []})
    optimizer.register_step_pre_hook(lambda o, *_: fired["pre"].append(o))
    optimizer.register_step_post_hook(lambda o, *_: fired["post"].append(o))
    assert not any(fired.values())  # probing the class fires none
    for step in range(3):
        give_gradients(step, model)
        optimizer.step()
        for seen in fired.values():
            assert seen == [optimizer] * (step + 1)


def test_a_pre_hook_that_changes_gradients_is_heeded():
    pair = memory_pair(CASES["adamw"], CUTS[0])

    def halve(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5

    pair.optimizer.register_step_pre_hook(lambda *_: halve(pair.live))
    for step in range(4):
        give_gradients(step, pair.live, pair.expected)
        pair.optimizer.step()
        halve(pair.expected)
        pair.reference.step()
        pair.assert_same_parameters()


class Gate(WrapperBackend):
    """Holds back seals, before they write their first parameter, until `opened` is set."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.opened = threading.Event()
        self.reached = threading.Event()

    def wrap_file(self, file: File) -> File:
        return GatedFile(file, self)


class GatedFile(WrapperFile):
    def __init__(self, inner: File, gate: Gate) -> None:
        super().__init__(inner)
        self.gate = gate

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self.path.endswith("model.safetensors"):
            self.gate.reached.set()
            assert self.gate.opened.wait(TIMEOUT_S)
        return super().write(source, offset)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(tensor):
    memory = MemoryBackend()
    gate = Gate(memory)
    live = Full()
    optimizer = offloaded(live, gate, lr=torch.tensor(0.01) if tensor else 0.01)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    live.loss(0).backward()
    optimizer.step()
    running_mean = live.layers[1].running_mean.clone()
    train_state = {"list": [1, 2], "tensor": torch.zeros(3)}
    handle = optimizer.checkpoint(train_state)
    assert gate.reached.wait(TIMEOUT_S)
    train_state["list"].append(3)
    train_state["tensor"].fill_(5)
    scheduler.step()  # changes a tensor in place
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    live.loss(1)  # changes the running statistics
    assert not torch.equal(live.layers[1].running_mean, running_mean)
    gate.opened.set()
    handle.result()
    optimizer.close()

    live = Full(seed=99)
    optimizer = offloaded(live, memory.reopened(), lr=0.5)
    checkpoint = optimizer.restore()
    assert_same_bits(live.layers[1].running_mean, running_mean, "running mean")
    assert checkpoint.train_state["list"] == [1, 2]
    assert torch.equal(checkpoint.train_state["tensor"], torch.zeros(3))
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.9, 0.999)
    assert isinstance(group["lr"], torch.Tensor) == tensor
    assert float(group["lr"]) == float(torch.tensor(0.01) if tensor else 0.01)


def test_restoring_twice_restores_a_learning_rate_tensor_twice():
    optimizer = offloaded(Full(), MemoryBackend(), lr=torch.tensor(0.01))
    optimizer.checkpoint().result()
    for _ in range(2):
        optimizer.param_groups[0]["lr"].fill_(0.5)
        assert optimizer.restore().step == 0
        assert_same_bits(optimizer.param_groups[0]["lr"], torch.tensor(0.01), "learning rate")


def test_a_resumed_learning_rate_tensor_goes_on_as_if_there_had_been_no_resume():
    case = Case(torch.optim.AdamW, {}, ({"lr": torch.tensor(0.01)},))
    pair = memory_pair(case, CUTS[0])
    pair.reference.inner.param_groups[0]["lr"] = torch.tensor(0.01)
    scheduler = LambdaLR(pair.optimizer, changing_rate)
    expected = LambdaLR(pair.reference.inner, changing_rate)
    for step in range(NUM_STEPS):
        pair.step(step)
        pair.assert_same_parameters()
        scheduler.step()
        expected.step()
        if step in (5, 11):
            pair.optimizer.checkpoint({"scheduler": scheduler.state_dict()})
            pair.reopen()
            scheduler = LambdaLR(pair.optimizer, changing_rate)
            state = pair.optimizer.restore().train_state
            scheduler.load_state_dict(state["scheduler"])
    assert isinstance(pair.optimizer.param_groups[0]["lr"], torch.Tensor)
    pair.assert_same_state()


@pytest.mark.parametrize("by", ["checkpoint", "store"])
def test_load_parameters_needs_no_optimizer(by):
    pair = memory_pair(CASES["adamw"], CUTS[0])
    for step in range(5):
        pair.step(step)
    path = pair.optimizer.checkpoint().result().path
    model = Mixed(seed=99)
    pointers = [p.data_ptr() for p in model.parameters()]
    at = path if by == "checkpoint" else "/store"
    assert offload.load_parameters(model, at, backend=pair.backend) == 5
    assert_same_parameters(model.named_parameters(), pair.expected.named_parameters())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert model.tied.weight is model.tied_again.weight


def test_load_parameters_loads_buffers_too():
    live, backend = Full(), MemoryBackend()
    optimizer = offloaded(live, backend)
    for step in range(3):
        live.loss(step).backward()
        optimizer.step()
    optimizer.checkpoint().result()
    model = Full(seed=99)
    assert offload.load_parameters(model, "/store", backend=backend) == 3
    assert_same_parameters(model.state_dict().items(), live.state_dict().items())


class Tied(torch.nn.Module):
    """An embedding and a head that share their weight, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(41, 24, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(24)
        self.head = torch.nn.Linear(24, 41, bias=False)
        self.head.weight = self.embedding.weight


def test_the_model_file_loads_with_safetensors_ties_included(tmp_path):
    live = Tied()
    optimizer = offload.AdamW(live.parameters(), model=live, directory=tmp_path)
    for step in range(3):
        give_gradients(step, live)
        optimizer.step()
    path = optimizer.checkpoint().result().path
    model = Tied(seed=99)
    missing, unexpected = safetensors.torch.load_model(model, f"{path}/model.safetensors")
    assert (list(missing), list(unexpected)) == ([], [])
    assert_same_parameters(model.state_dict().items(), live.state_dict().items())
    assert model.head.weight is model.embedding.weight
    optimizer.close()


def test_from_pretrained_opens_a_checkpoint_with_a_config_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    live = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = offload.AdamW(live.parameters(), lr=0.01, model=live, directory=tmp_path, keep=1)
    tokens = torch.arange(24).view(2, 12)
    for step in range(4):
        optimizer.zero_grad()
        live(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        # a file of the user's own in a checkpoint does not keep it from being recycled
        path = optimizer.checkpoint().result().path
        config.save_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        assert_same_parameters(model.named_parameters(), live.named_parameters())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert [p.name for p in Path(tmp_path).glob("step-*")] == [f"step-{step + 1:08d}"]
    optimizer.close()
