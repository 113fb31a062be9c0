"""Whoever reads or edits a parameter while a step runs beside the forward gets the step's result.

The oracle is the same model with torch's own optimizer. A step cannot end before somebody waits for
it: it is released at that moment, so that who does not wait computes with old values.
"""

from __future__ import annotations

import copy
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload
from offload.model.watch import is_watched
from tests.eventually import TIMEOUT_S
from tests.numerics.reference import assert_same_bits, assert_same_parameters, read_state
from tests.numerics.test_overlap_forward_waits import (
    LAST,
    Layers,
    Run,
    ctrl_c,
    run,
    when_waiting,
)

__all__ = ["ctrl_c", "run"]  # fixtures

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))


def last(model: Layers) -> nn.Parameter:
    return model.layers[LAST].weight


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def average(model: Layers) -> list[torch.Tensor]:
    averaged = AveragedModel(Layers(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)  # the first takes a copy
    averaged.update_parameters(model)
    return list(averaged.parameters())


def forward_without_the_module(model: Layers) -> torch.Tensor:
    for layer in model.layers[:LAST]:
        layer(X)
    return nn.functional.linear(X, last(model))


def edit(model: Layers, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    with torch.no_grad():
        change(last(model))
    return last(model).detach().clone()


READERS: dict[str, Callable[[Layers], object]] = {
    "function": lambda model: nn.functional.linear(X, last(model)),
    "function beside modules that are called": forward_without_the_module,
    "operator": lambda model: X @ last(model),
    "data": lambda model: last(model).data.clone(),
    "detach": lambda model: last(model).detach().clone(),
    "numpy": lambda model: torch.from_numpy(last(model).numpy(force=True).copy()),
    "item": lambda model: last(model)[0, 0].item(),
    "sums": lambda model: [p.sum() for p in model.parameters()],
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "state_dict": lambda model: [t.clone() for t in model.state_dict().values()],
    "torch.save": lambda model: saved(last(model)),
    "deepcopy": lambda model: copy.deepcopy(last(model)),
    "deepcopy of the model": lambda model: list(copy.deepcopy(model).parameters()),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), (X,)
    ),
    "averaged model": average,
    "gradient": lambda model: torch.autograd.grad((X @ last(model)).sum(), last(model)),
    "text": lambda model: repr(last(model)),
    "edit": lambda model: edit(model, lambda p: p.mul_(0.5)),
    "edit of the data": lambda model: edit(model, lambda p: p.data.clamp_(-0.1, 0.1)),
    "edit of a row": lambda model: edit(model, lambda p: p[3].zero_()),
    "copy into": lambda model: edit(model, lambda p: p.copy_(torch.ones(32, 32))),
    "other memory": lambda model: edit(model, lambda p: p.set_(torch.full((32, 32), 0.25))),
    "new real part": lambda model: edit(model, lambda p: setattr(p, "real", torch.ones(32, 32))),
    "weight decay by hand": lambda model: edit(model, lambda p: torch._foreach_mul_([p], 0.9)),
}


def assert_same(found: object, expected: object) -> None:
    if isinstance(found, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(found, torch.Tensor):
        assert_same_bits(found, expected, "what was read")
    else:
        assert found == expected


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("thread", ["same", "another"])
def test_a_reader_waits(run, read, thread):
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    found = []
    reader = threading.Thread(target=lambda: found.append(read(run.live)))
    if thread == "another":
        reader.start()
        reader.join(TIMEOUT_S)
    else:
        reader.run()
    assert_same(found[0], read(run.expected))
    assert type(last(run.live)) is nn.Parameter
    for step in range(3, 6):  # edits count, and the step's masters follow them
        run.step(step)
    run.assert_same()
    assert all(type(p) is nn.Parameter for p in run.live.parameters())


def test_a_reader_waits_for_its_own_parameter_and_no_other(run):
    run.step_held(2, LAST)
    assert_same_bits(X @ run.live.layers[0].weight, X @ run.expected.layers[0].weight, "read")
    assert LAST not in run.backend.ended
    assert type(run.live.layers[0].weight) is nn.Parameter
    assert is_watched(last(run.live))
    run.backend.release()
    run.assert_same()


def test_who_only_looks_does_not_wait(run):
    run.step_held(2, LAST)
    p = last(run.live)
    assert (p.shape, p.dtype, p.device.type) == ((32, 32), torch.float32, "cpu")
    assert p.requires_grad
    assert p.grad is None
    p.grad = torch.ones_like(run.expected.layers[LAST].weight)
    run.optimizer.zero_grad()
    run.live.zero_grad()
    nn.utils.clip_grad_norm_(run.live.parameters(), 1.0)
    assert sum(p.numel() for p in run.live.parameters()) == 32 * 32 * len(run.live.layers)
    assert p.__class__ is nn.Parameter
    run.live.train()
    assert LAST not in run.backend.ended
    assert is_watched(p)
    run.backend.release()
    run.assert_same()


class Calls(nn.Module):
    """Is used in other ways than by a call, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32, bias=False)
        self.position = nn.Parameter(torch.ones(40, 32))
        self.head = nn.Linear(32, 64, bias=False)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x + self.position.sum(0))

    def forward(self, x: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
        hidden = self.encode(x)
        return nn.functional.linear(hidden[-1:], self.head.weight) if fused else self.head(hidden)


PATHS: dict[str, Callable[[Calls], torch.Tensor]] = {
    "forward": lambda model: model(X),
    "fused loss": lambda model: model(X, fused=True),
    "a method": lambda model: model.encode(X),
    "a part": lambda model: model.head(X),
    "parameters": lambda model: X @ model.first.weight @ model.head.weight.T,
}
MODES: dict[str, Callable[[], object]] = {
    "training": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_was_not_recorded(path, mode):
    run = Run(Calls)
    for step in range(2, 5):
        run.step_held(step, *range(6))
        when_waiting(run, run.backend.release)
        found = []
        for model in (run.live, run.expected):
            model.train(mode == "training")
            with MODES[mode]():
                found.append(PATHS[path](model).detach().clone())
            model.train()
        assert_same_bits(found[0], found[1], path)
        run.backend.release()
    run.assert_same()
    run.optimizer.close()


def evaluate(model: Layers) -> torch.Tensor:
    with torch.no_grad():
        return model(X)


def infer(model: Layers) -> torch.Tensor:
    with torch.inference_mode():
        return model(X)


def in_eval_mode(model: Layers) -> torch.Tensor:
    model.eval()
    try:
        return model(X)
    finally:
        model.train()


def on_a_thread(model: Layers) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(X)))
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0]


OTHER_CALLS = {
    "no_grad": evaluate,
    "inference_mode": infer,
    "eval": in_eval_mode,
    "another thread": on_a_thread,
    "another module": lambda model: model.layers[0](X),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_a_call_that_is_not_like_those_recorded_waits_for_everything_at_its_entry(run, call):
    run.step_held(2, LAST)
    ended, classes = [], set()

    def first_runs(*_: object) -> None:
        ended.append(LAST in run.backend.ended)
        classes.update(type(p) for p in run.live.parameters())

    hook = run.live.layers[0].register_forward_pre_hook(first_runs)
    when_waiting(run, run.backend.release)
    found = call(run.live)
    hook.remove()
    assert ended == [True]
    assert classes == {nn.Parameter}
    assert_same_bits(found.detach(), call(run.expected).detach(), "output")
    run.assert_same()


class Encoder(nn.Module):
    """torch's own layers, which take a fast path, with other bits, where no gradient is needed.

    `tested` is where it is asked for: as a call of its own, or within a call that trains.
    """

    within = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(32, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        return x + self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)[None].expand(2, -1, -1)
        out = self.encode(x)
        if self.within:
            self.encoder.eval(), self.attention.eval()
            with torch.no_grad():
                out = out + self.encode(x)
            self.train()
        return out


def fast_and_slow(model: Encoder, call: Callable[[Encoder], torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        found.append(call(model).detach().clone())
    torch.backends.mha.set_fastpath_enabled(True)
    return found


def evaluated(model: Encoder) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        out = model(X)
    model.train()
    return out


def evaluated_by_a_method(model: Encoder) -> torch.Tensor:
    model.eval()
    with torch.inference_mode():
        out = model.encode(model.first(X)[None])
    model.train()
    return out


def evaluated_nested(model: Encoder) -> torch.Tensor:
    """With sequences of different lengths, in nested tensors within."""
    model.eval()
    mask = torch.tensor([[False, False, False], [False, True, True]])
    with torch.no_grad():
        out = model.encoder(X[None].expand(2, -1, -1), src_key_padding_mask=mask)
    model.train()
    return out


def evaluated_within(model: Encoder) -> torch.Tensor:
    model.within = True
    out = model(X)
    model.within = False
    return out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("recorded", [True, False], ids=["", "within-the-recorded-forward"])
@pytest.mark.parametrize(
    "call", [evaluated, evaluated_by_a_method, evaluated_nested, evaluated_within]
)
def test_evaluation_takes_the_fast_paths_that_it_takes_without_overlap(call, recorded):
    run = Run(Encoder, num_steps=3 if recorded else 0)
    if recorded:
        run.step_held(3, *range(8))
        when_waiting(run, run.backend.release)
    found = call(run.live).detach().clone()
    fast, slow = fast_and_slow(run.expected, call)
    assert not torch.equal(fast, slow), "the paths do not differ: this shows nothing"
    assert_same_bits(found, fast, "evaluation")
    run.backend.release()
    run.assert_same()
    run.optimizer.close()


def test_two_threads_that_evaluate(run):
    for step in range(2, 6):
        run.step_held(step, LAST)
        when_waiting(run, run.backend.release)
        found: list[torch.Tensor] = []
        threads = [
            threading.Thread(target=lambda into=found: into.append(evaluate(run.live)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        for output in found:
            assert_same_bits(output, evaluate(run.expected), "evaluation")
        assert len(found) == 3


def test_a_checkpoint_on_one_thread_does_not_let_another_one_pass(run):
    """The optimizer looks at the model's state dict meanwhile, without waiting."""
    run.step_held(2, LAST)
    found: list[torch.Tensor] = []
    evaluating = threading.Thread(target=lambda: found.append(evaluate(run.live)))

    def looked_at(*_: object) -> None:
        if not evaluating.ident:
            evaluating.start()
            evaluating.join(0.2)  # in which it would pass

    run.live.register_state_dict_post_hook(looked_at)
    handle = run.optimizer.checkpoint()
    assert found == []
    run.backend.release()
    evaluating.join(TIMEOUT_S)
    assert_same_bits(found[0], evaluate(run.expected), "evaluation")
    assert handle.result(TIMEOUT_S).step == 3


class EntryReader(nn.Module):
    """Reads a later layer's weight at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.second.weight.sum(0)
        return self.second(self.first(x)) + bias


INTERRUPTED: dict[str, tuple[type[nn.Module], int, Callable[[nn.Module], object]]] = {
    "entry of a forward": (EntryReader, 1, lambda model: model(X)),
    "entry of an evaluation": (EntryReader, 1, evaluate),
    "module": (Layers, LAST, lambda model: model(X)),
    "end of a forward": (Layers, LAST, lambda model: first_layers(model)),
    "reader": (EntryReader, 1, lambda model: model.second.weight.sum()),
    "state_dict": (EntryReader, 1, lambda model: model.state_dict()),
    "edit": (EntryReader, 1, lambda model: model.second.weight.data.mul_(2)),
}
THEN: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "forward": lambda model: model(X),
    "evaluation": evaluate,
    "reader": lambda model: torch.cat([p.flatten() for p in model.parameters()]),
}


def first_layers(model: Layers) -> torch.Tensor:
    model.order = range(LAST)
    try:
        return model(X)
    finally:
        model.order = range(LAST + 1)


def step_held(run: Run, step: int, chunk: int) -> None:
    """Take two steps, of which the second is held, also if it has read this chunk ahead."""
    run.optimizer.synchronize()
    run.backend.hold(chunk)
    run.step(step)
    run.step_held(step + 1, chunk)


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("where", INTERRUPTED)
def test_after_an_interrupted_wait_everything_still_waits(where, then, ctrl_c):
    kind, chunk, call = INTERRUPTED[where]
    run = Run(kind)
    if kind is Layers:
        run.step_held(3, chunk)
    else:
        step_held(run, 2, chunk)
    when_waiting(run, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        call(run.live)
    assert chunk not in run.backend.ended
    when_waiting(run, run.backend.release)
    found = THEN[then](run.live)
    assert_same_bits(found.detach(), THEN[then](run.expected).detach(), then)
    for step in range(4, 6):
        run.step(step)
    run.assert_same()
    run.optimizer.close()


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return what has something done by a handler of signals, once, on the main thread."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle(action: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: action())

    yield handle
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_of_signals_amid_a_step_that_has_not_begun_reads_the_values_before_it(
    run, alarm, monkeypatch
):
    """Who would begin the step is the thread that the handler runs on: it must not wait."""
    run.backward(2)
    before, found = last(run.live).detach().clone(), []
    alarm(lambda: found.append(last(run.live).detach().clone()))
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "offload-step":
            os.kill(os.getpid(), signal.SIGUSR1)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    run.optimizer.step()
    assert len(found) == 1
    assert_same_bits(found[0], before, "amid the step")
    run.plain.step()
    run.assert_same()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_that_reads_amid_a_step_is_told_so(run):
    run.step_held(2, LAST)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message = "nothing was said"
            for read in (lambda: last(run.live).sum(), lambda: run.live(X)):
                try:
                    read()
                except offload.OffloadError as error:
                    message = str(error)
                else:
                    message = "nothing was said"
                    break
            os.write(writer, message.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(child, 0)
    assert "call synchronize() before forking" in message
    run.backend.release()
    run.assert_same()


class Fixed(type(nn.Parameter)):
    """A class of which there are no subclasses."""

    def __new__(cls, name, bases, namespace):
        if any(type(base) is Fixed for base in bases):
            raise TypeError("there are no subclasses of it")
        return super().__new__(cls, name, bases, namespace)


class FixedParameter(nn.Parameter, metaclass=Fixed):
    pass


class WithFixed(Layers):
    """Layers, of which one has a parameter whose class cannot be changed."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layers[LAST]
        layer.weight = FixedParameter(layer.weight.detach())


def test_the_step_waits_for_a_parameter_whose_class_cannot_be_changed():
    run = Run(WithFixed)
    run.backward(2)
    run.backend.hold(LAST)
    ended = threading.Event()
    releasing = threading.Thread(target=lambda: (ended.wait(0.2), run.backend.release()))
    releasing.start()
    run.optimizer.step()
    assert LAST in run.backend.ended  # it could not have returned before
    ended.set()
    releasing.join()
    run.plain.step()
    assert_same_bits(X @ last(run.live), X @ last(run.expected), "read")
    run.assert_same()
    run.optimizer.close()


class FusedLoss(nn.Module):
    """Its head is never called: the loss takes the weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_a_loss_that_reads_a_weight_outside_of_the_model_keeps_the_overlap():
    run = Run(FusedLoss, num_steps=0)
    run.loss = lambda model, _: nn.functional.linear(model(X), model.head.weight).square().mean()
    for step in range(3):
        run.step(step)
    step_held(run, 3, 1)
    assert 1 not in run.backend.ended  # and yet the step has returned
    when_waiting(run, run.backend.release)
    run.step(5)
    run.assert_same()
    run.optimizer.close()


class Stated(Layers):
    """Its state dict has a value that is computed of parameters when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.add)
        self.register_load_state_dict_pre_hook(self.drop)

    @staticmethod
    def add(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        state[prefix + "total"] = last(module).detach().sum(0)

    @staticmethod
    def drop(_: nn.Module, state: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
        del state[prefix + "total"]


def test_a_state_dict_that_computes_with_parameters_is_sealed_with_their_new_values():
    run = Run(Stated)
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    found = run.optimizer.checkpoint().result(TIMEOUT_S)
    assert found.step == 3
    stored = read_state(found.path, run.backend)
    assert_same_bits(stored.model["total"], last(run.expected).detach().sum(0), "what is sealed")
    run.optimizer.close()


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_a_second_optimizer_for_the_same_parameters_waits(run, overlap):
    """Of whatever kind: torch's own reads them as anybody does."""
    options = offload.Options(
        backend=Run().backend, chunk_bytes=1 << 16, allow_volatile=True, overlap=overlap
    )
    both = [run.live.layers[number].weight for number in (1, LAST)]
    expected = [run.expected.layers[number].weight for number in (1, LAST)]
    second = offload.SGD(both, lr=0.1, directory="/second", options=options, model=run.live)
    other = torch.optim.SGD(expected, lr=0.1)
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    for parameters, optimizer in ((both, second), (expected, other)):
        for parameter in parameters:
            parameter.grad = torch.ones(32, 32)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(run.live.named_parameters(), run.expected.named_parameters())
    run.assert_same()
    second.close()


def grad_of_sum(p: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda w: w.square().sum())(p)


def jagged_times(p: torch.Tensor) -> torch.Tensor:
    """Nested tensors handle every function themselves."""
    parts = [X[:1], X[1:]]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return torch.cat(list((nested @ p).unbind()))


def without_torch_functions(p: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return X @ p


def given_to_another(p: torch.Tensor) -> torch.Tensor:
    other = torch.zeros(32, 32)
    other.data = p
    return other.clone()


def set_into_another(p: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.zeros(32, 32).set_(p).clone()


def real_part_of_another(p: torch.Tensor) -> torch.Tensor:
    other = torch.zeros(32, 32)
    with torch.no_grad():
        other.real = p
    return other


def value_of_grad_and_value(p: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = torch.func.grad_and_value(lambda w: w.square().sum())(p)[1]
    return value


def value_of_vjp(p: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = torch.func.vjp(torch.sin, p)[0]
    return value


def sparse_csr(p: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(torch.arange(33), torch.arange(32), p).values().clone()


def scripted() -> Callable[[torch.Tensor], torch.Tensor]:
    script: Callable[[torch.Tensor], torch.Tensor] = torch.jit.script(doubled)
    return script


def doubled(p: torch.Tensor) -> torch.Tensor:
    return p * 2


def shared_state(model: Layers) -> torch.Tensor:
    tensor: torch.Tensor = model.state_dict()[f"layers.{LAST}.weight"]
    return tensor


SHARED: dict[str, Callable[[Layers], torch.Tensor]] = {
    "NumPy": lambda model: torch.from_numpy(last(model).detach().numpy()),
    "DLPack": lambda model: torch.from_dlpack(last(model).detach()),
    "detach": lambda model: last(model).detach(),
    "a view": lambda model: last(model)[0],
    "a state dict": shared_state,
}
"""What shares memory with a parameter since before the step."""

UNANNOUNCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.requires_grad_(False))),
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "asarray": lambda p: torch.asarray(p, dtype=torch.float64, requires_grad=False),
    "constructor": lambda p: torch.Tensor(p).clone(),
    "constructor of a type": lambda p: torch.FloatTensor(p).clone(),
    "new": lambda p: torch.ones(1).new(p).clone(),
    "q.data = p": given_to_another,
    "q.set_(p)": set_into_another,
    "q.real = p": real_part_of_another,
    "Tensor.set_": lambda p: torch.Tensor.set_(torch.empty(0), p).clone(),
    "sparse_coo_tensor": lambda p: torch.sparse_coo_tensor(
        torch.arange(32)[None], p, (32, 32)
    ).to_dense(),
    "sparse_csr_tensor": sparse_csr,
    "torch.func.grad": grad_of_sum,
    "torch.func.grad_and_value": value_of_grad_and_value,
    "torch.func.vjp": value_of_vjp,
    "torch.func.functionalize": lambda p: torch.func.functionalize(torch.clone)(p),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p]).to_padded_tensor(0.0),
    "jagged operand": jagged_times,
    "no torch functions": without_torch_functions,
}
"""Functions that read a parameter without a word."""


def test_what_the_guarantees_say_about_readers_that_are_not_seen():
    """So that the list there is complete."""
    page = (Path(__file__).parents[2] / "docs/guarantees.md").read_text()
    names = ("NumPy", "DLPack", "torch.func.grad(f)(p)", "torch.tensor(p)", "jagged", "q.set_(p)")
    names += ("torch.func.vjp(f, p)", "torch.sparse_csr_tensor(c, i, p)", "q.data = p", "x.new(p)")
    for name in names:
        assert name in page


def check_unseen(run: Run, read: Callable[[], torch.Tensor], stale: torch.Tensor) -> None:
    """Show that what is read amid a step is old, and that `synchronize` helps."""
    assert_same_bits(read().detach(), stale, "it waits: the guarantees need not speak of it")
    assert LAST not in run.backend.ended
    run.backend.release()
    run.optimizer.synchronize()


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_memory_that_was_shared_before_is_not_seen_but_synchronize_helps(run, share):
    shared, expected = share(run.live), share(run.expected)
    stale = shared.detach().clone()
    run.step_held(2, LAST)
    check_unseen(run, lambda: shared, stale)
    assert_same_bits(shared.detach(), expected.detach(), "after synchronize()")
    assert not torch.equal(shared, stale)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("read", UNANNOUNCED.values(), ids=UNANNOUNCED)
def test_functions_that_ask_nobody_are_not_seen_but_synchronize_helps(run, read):
    run.optimizer.synchronize()
    stale = read(last(run.live)).detach().clone()
    last(run.live).requires_grad_()
    run.step_held(2, LAST)
    check_unseen(run, lambda: read(last(run.live)), stale)
    found, expected = read(last(run.live)), read(last(run.expected))
    assert_same_bits(found.detach(), expected.detach(), "after synchronize()")
    assert not torch.equal(found, stale)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is not supported:DeprecationWarning")
def test_scripted_functions_are_not_seen_but_synchronize_helps(run):
    read = scripted()
    run.optimizer.synchronize()
    stale = read(last(run.live)).detach().clone()
    run.step_held(2, LAST)
    check_unseen(run, lambda: read(last(run.live)), stale)
    assert_same_bits(
        read(last(run.live)).detach(), doubled(last(run.expected)).detach(), "after synchronize()"
    )


def test_parameters_are_ordinary_when_the_optimizer_is_gone(run):
    run.step_held(2, LAST)
    run.backend.release()
    run.optimizer.close()
    assert all(type(p) is nn.Parameter for p in run.live.parameters())
    assert_same_parameters(run.live.named_parameters(), run.expected.named_parameters())
