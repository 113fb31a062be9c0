"""Streamed blocks give the bits of the same model in memory, however the program uses them."""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.blocks.models import Model, batch, make, pair, recomputing
from tests.numerics.reference import assert_same_bits, assert_same_parameters

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # torch's tracer causes it
)
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_has_the_bits_of_torch(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    optimizer, hyper = OPTIMIZERS[name]
    both = pair(tmp_path / "run", optimizer=optimizer, hyper=hyper, dtype=dtype)
    for step in range(3):
        both.train(step, num=1 + 2 * (step % 2))
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in both]
        assert_same_bits(norms[1], norms[0], "the norm")
        both.step()
    both.optimizer.close()


RECOMPUTED = {
    "reentrant": recomputing(reentrant=True),
    "not-reentrant": recomputing(reentrant=False),
    "reentrant-forward": recomputing(reentrant=True, forward_only=True),
    "not-reentrant-forward": recomputing(reentrant=False, forward_only=True),
}


def checkpointed(how: str) -> Callable[[Model], None]:
    def prepare(model: Model) -> None:
        model.recompute = RECOMPUTED[how]

    return prepare


def frozen(model: Model) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name and "layers.1" not in name)


def partly_transposed(model: Model) -> None:
    for layer in model.layers:
        layer.up.weight.data = layer.up.weight.data.t().contiguous().t()


def reordered(model: Model) -> None:
    model.order = [4, 2, 0, 0]


def compiled(how: str) -> Callable[[Model], None]:
    def prepare(model: Model) -> None:
        torch._dynamo.reset()
        if how == "whole":
            model.compile(backend="aot_eager")
        for layer in model.layers:
            if how == "blocks":
                layer.compile(backend="aot_eager")
            elif how == "forwards":
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
            elif how != "whole":
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
                model.recompute = {
                    "checkpointed": RECOMPUTED["not-reentrant"],
                    "called-directly": lambda layer, hidden: layer.forward(hidden),
                }[how]

    return prepare


PREPARED: dict[str, Callable[[Any], Any]] = {
    **{how: checkpointed(how) for how in RECOMPUTED},
    "frozen": frozen,
    "transposed": partly_transposed,
    "reordered": reordered,
    **{
        f"compiled-{how}": compiled(how)
        for how in ("whole", "blocks", "forwards", "checkpointed", "called-directly")
    },
}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED)
def test_models_of_many_kinds(tmp_path: Path, prepare: Callable[[Any], Any]) -> None:
    both = pair(tmp_path / "run", prepare)
    for step in range(2):
        both.train(step, num=2)
        both.step()


def test_tied_weights_stay_in_memory(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", tied=True, options={"blocks": ["layers.*", "head", "embedding"]})
    for step in range(2):
        both.train(step)
        both.step()


def evaluating(model: Model) -> Any:
    model.eval()
    with torch.no_grad():
        first = model(batch(1))
    with torch.inference_mode():
        second = model(batch(2)).clone()
    model.train()
    return first, second


def penalized(model: Model) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hidden = model.embedding(batch(1)).detach().requires_grad_()
        loss = model.after(hidden).square().mean()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        (loss + gradient.float().square().sum()).backward()


def retained(model: Model) -> Any:
    loss = model.loss(batch(1))
    loss.backward(retain_graph=True)
    loss.backward()


def on_cpu(model: Model) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = model.loss(batch(1))
    loss.backward()


def autocast(model: Model) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.loss(batch(1)).backward()


def regularized(model: Model) -> Any:
    (model.loss(batch(1)) + sum(p.float().square().mean() for p in model.parameters())).backward()


def decayed(model: Model) -> Any:
    loss = model.loss(batch(1))
    (loss + sum(p.square().mean() for p in model.parameters())).backward()


def skipped(model: Model) -> Any:
    for order in ([0, 1, 1, 3, 0], [4, 2, 0], range(5)):
        model.order = order
        model.loss(batch(1)).backward()


def clamped(model: Model) -> Any:
    with torch.no_grad():
        model.layers[1].up.weight.clamp_(-0.01, 0.01)
        model.layers[0].scale[3] = 2.0
    model.layers[2].up.weight.data.mul_(0.5)
    weight = model.layers[3].up.weight
    weight.data = torch.full_like(weight.data, 0.01)
    torch.nn.init.constant_(model.layers[4].down.bias, 0.125)


def loaded(model: Model) -> Any:
    with torch.no_grad():
        state = {name: value * 0.9 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def aliased(model: Model) -> Any:
    state, data = model.state_dict(), model.layers[0].up.weight.data
    model.loss(batch(1)).backward()
    state["layers.3.up.weight"].mul_(0.5)
    data.mul_(0.25)
    model.loss(batch(2)).backward()


def interrupted(model: Model) -> Any:
    hook = model.layers[2].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.loss(batch(1))
    hook.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def hooked(model: Model) -> Any:
    seen = []

    def after(module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(module.scale.sum().item())
        return output * module.scale

    handle = model.layers[1].register_forward_hook(after)
    model.loss(batch(1)).backward()
    handle.remove()
    return torch.tensor(seen)


def edited_within(model: Model) -> Any:
    def shrink(module: Any, _args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    hook = model.layers[1].up.register_forward_pre_hook(shrink)
    for seed in range(2):
        model.loss(batch(seed)).backward()
    hook.remove()


def moved(model: Model) -> Any:
    assert model.to("cpu", torch.bfloat16) is model
    for parameter in model.parameters():
        assert parameter.is_contiguous()
        assert torch.zeros_like(parameter).stride() == parameter.stride()


def all_at_once(model: Model) -> Any:
    with pytest.raises(RuntimeError):
        torch.cat(list(model.parameters()))
    norms = torch._foreach_norm(list(model.parameters()))
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.5)
    return [norm.detach() for norm in norms], vector


def transformed(model: Model) -> Any:
    hidden = model.embedding(batch(1)).detach()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.func.grad(lambda x: model.after(x).square().mean())(hidden)


def functional(model: Model) -> Any:
    values = {name: value * 2 for name, value in model.state_dict().items()}
    return torch.func.functional_call(model, values, (batch(1),)).detach()


USES: dict[str, Callable[[Model], Any]] = {
    use.__name__: use
    for use in (
        evaluating, penalized, retained, on_cpu, autocast, regularized, decayed, skipped,
        clamped, loaded, aliased, interrupted, hooked, edited_within, moved, all_at_once,
        transformed, functional,
    )
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_uses_between_steps(tmp_path: Path, use: Callable[[Model], Any]) -> None:
    both = pair(tmp_path / "run")
    both.train(0)
    both.step()
    found = [use(model) for model in both]
    for plain, streamed in zip(*map(torch.utils._pytree.tree_leaves, found), strict=True):
        if plain is not None:
            assert_same_bits(streamed, plain, use.__name__)
    both.train(1)
    both.step()
    for model in both:
        model.order = range(5)
    both.train(2)
    both.step()


def test_one_function_may_take_more_parameters_than_there_are_buffers(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", layers=9)
    found = [all_at_once(model) for model in both]
    for plain, streamed in zip(*map(torch.utils._pytree.tree_leaves, found), strict=True):
        assert_same_bits(streamed, plain, "what was computed")
    both.train(0)
    both.step()


def test_an_edit_counts_without_a_forward_before_the_step(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    for step in range(2):
        both.train(step)
        for model in both:
            clamped(model)
        both.step()


def test_aliases_get_the_values_of_a_step(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    kept = [(model.state_dict(), model.layers[2].up.weight.detach()) for model in both]
    for step in range(2):
        both.train(step)
        both.step()
        assert_same_parameters(kept[1][0].items(), kept[0][0].items())
        assert_same_bits(kept[1][1], kept[0][1], "the alias")


def test_copies_and_files_of_the_model_hold_its_values(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    both.train(0)
    both.step()
    copied = copy.deepcopy(both.streamed)
    file = io.BytesIO()
    torch.save(both.streamed, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for model in (copied, saved):
        assert_same_parameters(model.state_dict().items(), both.plain.state_dict().items())
        loss = model.loss(batch(3))
        assert_same_bits(loss.detach(), both.plain.loss(batch(3)).detach(), "the loss")
    both.train(1)
    both.step()


def edited(tensor: Callable[[Model], torch.Tensor]) -> Callable[[Model], str]:
    def use(model: Model) -> str:
        kept: list[torch.Tensor] = []
        hook = model.layers[1].down.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        model.kept = kept
        loss = model.loss(batch(1))
        hook.remove()
        with torch.no_grad():
            tensor(model).add_(1)
        try:
            loss.backward()
        except RuntimeError as error:
            return (
                "modified by an inplace operation" if "modified by an inplace" in str(error) else ""
            )
        return "no error"

    return use


@pytest.mark.parametrize(
    "tensor",
    [lambda model: model.layers[1].up.weight, lambda model: model.kept[0].detach()],
    ids=["parameter", "activation"],
)
def test_an_edit_between_forward_and_backward_is_refused(
    tmp_path: Path, tensor: Callable[[Model], torch.Tensor]
) -> None:
    both = pair(tmp_path / "run")
    assert [edited(tensor)(model) for model in both] == ["modified by an inplace operation"] * 2


def test_a_graph_of_parameters_before_a_step_is_refused(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    both.train(0)
    loss = both.streamed.loss(batch(1))
    both.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_without_backward_leaves_no_memory(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    for seed in range(20):
        both.streamed.loss(batch(seed))
    both.train(0)
    both.step()
    del both.plain
    both.streamed.loss(batch(1)).backward()
    assert both.optimizer.stats().block_buffers <= 5  # state_dict() of the comparison held all


def test_closing_gives_the_parameters_back(tmp_path: Path) -> None:
    both = pair(tmp_path / "run")
    both.train(0)
    both.step()
    clamped(both.plain)
    clamped(both.streamed)
    both.optimizer.close()
    loads = both.optimizer.stats().block_loads
    both.compare()
    both.train(1)
    both.compare_gradients()
    assert both.optimizer.stats().block_loads == loads
    assert all(type(p) is torch.nn.Parameter for p in both.streamed.parameters())


def test_a_scaler_skips_steps_as_torchs_does(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", dtype=torch.float16)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        both.train(step)
        for model in both:
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
        if factor == 1.0:
            both.step()
        else:
            scaler = offload.GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.ones(()))
            scaler.step(both.optimizer)
            scaler.update()
            for model in both:
                model.zero_grad()
            both.compare()


def test_a_second_model_in_the_process_is_not_concerned(tmp_path: Path) -> None:
    both = pair(tmp_path / "one")
    other = pair(tmp_path / "two", seed=1)
    for step in range(2):
        for each in (both, other):
            each.train(step)
            each.step()
    make()


@pytest.mark.parametrize("where", ["host", "drive"])
@pytest.mark.parametrize("num_aliases", [0, 1, 2])
def test_memory_of_a_parameter_is_replaced_while_aliases_hold_its_block(
    num_aliases: int, where: str, tmp_path: Path
) -> None:
    both = pair(tmp_path / "run", options={"parameters": where}, layers=2)
    held = []
    for model in both:
        held.append([model.layers[1].out.weight.detach() for _ in range(num_aliases)])
        model.layers[1].scale.data = model.layers[1].scale.data * 0.5
    for step in range(3):
        both.train(step)
        both.step()
        for plain, streamed in zip(*held, strict=True):
            assert_same_bits(streamed, plain, "an alias")


@pytest.mark.parametrize("where", ["host", "drive"])
def test_another_thread_reads_parameters_while_this_one_trains(where: str, tmp_path: Path) -> None:
    both = pair(tmp_path / "run", frozen, options={"parameters": where})
    before = {n: p.detach().clone() for n, p in both.plain.named_parameters()}
    names = [n for n, p in both.streamed.named_parameters() if not p.requires_grad]
    ended, wrong = threading.Event(), []

    def read() -> None:
        for name in itertools.cycle(names):
            if ended.is_set():
                return
            try:
                found = both.streamed.get_parameter(name).detach().clone()
                assert_same_bits(found, before[name], name)
            except BaseException as error:  # noqa: BLE001
                wrong.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for step in range(15):
            both.train(step)
            both.step()
    finally:
        ended.set()
        thread.join()
    assert wrong == []
