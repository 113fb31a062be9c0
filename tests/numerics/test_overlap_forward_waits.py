"""Who waits for a step beside the forward, for how much of it, and who hears of its errors."""

from __future__ import annotations

import copy
import io
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import offload
from gds import StorageError
from offload.errors import BrokenOptimizerError, SealError
from offload.overlap.forward import BesideForward
from offload.overlap.forward_hooks import _Inert
from offload.store.sealing import Sealing
from tests.eventually import TIMEOUT_S, eventually, is_freed
from tests.numerics.delays import Held
from tests.numerics.reference import assert_same_parameters

NUM_LAYERS = 6
LAST = NUM_LAYERS - 1


class Layers(torch.nn.Module):
    """Layers of one chunk each."""

    def __init__(self, order: range = range(NUM_LAYERS)) -> None:
        super().__init__()
        self.order = order
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(32, 32, bias=False) for _ in range(NUM_LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return x


class Run:
    """A model that has taken some steps, and the same one as plain torch trains it."""

    def __init__(self, model: Callable[[], torch.nn.Module] = Layers, num_steps: int = 2) -> None:
        self.backend = Held()
        self.live, self.expected = model(), model()
        self.optimizer = self.offloaded(self.live)
        self.plain = torch.optim.AdamW(self.expected.parameters(), lr=0.01)
        for step in range(num_steps):
            self.step(step)

    def offloaded(self, model: torch.nn.Module) -> offload.AdamW:
        options = offload.Options(
            backend=self.backend,
            overlap="forward",
            chunk_bytes=4096,
            ring_chunks=2,
            allow_volatile=True,
        )
        return offload.AdamW(
            model.parameters(), lr=0.01, model=model, directory="/store", options=options
        )

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        return model(x).square().mean()

    def backward(self, step: int) -> None:
        for model in (self.live, self.expected):
            model.zero_grad()
            self.loss(model, step).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.plain.step()

    def step_held(self, step: int, *chunks: int) -> None:
        """Take a step that cannot end before these chunks' reads are released."""
        self.backward(step)
        self.backend.hold(*chunks)
        self.optimizer.step()
        self.plain.step()

    def assert_same(self) -> None:
        self.optimizer.synchronize()
        assert_same_parameters(self.live.named_parameters(), self.expected.named_parameters())


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.backend.release()
    run.optimizer.close()


def when_waiting(run: Run, action: Callable[[], object]) -> None:
    """Have something done on another thread as soon as one waits for the step that is running."""
    running = run.optimizer._engine.strategy._running
    assert running is not None
    changed, wait = running._changed, running._changed.wait_until
    threads = [threading.Thread(target=action)]

    def waiting(reached: Callable[[], bool]) -> bool:
        def looked() -> bool:
            found = reached()  # chunks that are not held may just have been updated
            if not found and threads:
                threads.pop().start()
            return found

        return wait(looked)

    changed.wait_until = waiting


def test_a_module_waits_for_its_own_parameters_and_no_others(run):
    events = []
    run.step_held(2, LAST)
    waited_s = run.optimizer.stats().wait_update_s

    def first_ran(*_: object) -> None:
        assert LAST not in run.backend.ended
        events.append("first ran")
        when_waiting(run, run.backend.release)

    def last_runs(*_: object) -> None:
        assert LAST in run.backend.ended
        events.append("last runs")

    run.live.layers[0].register_forward_hook(first_ran)
    run.live.layers[LAST].register_forward_pre_hook(last_runs)
    losses = [run.loss(model, 3) for model in (run.live, run.expected)]
    assert losses[0].item() == losses[1].item()
    assert events == ["first ran", "last runs"]
    assert run.optimizer.stats().wait_update_s > waited_s
    run.assert_same()


def test_everything_is_waited_for_at_the_end_of_a_forward(run):
    """Also what this one has not used: the caller may read any parameter now."""
    run.step_held(2, LAST)
    run.live.order = range(LAST)
    run.live.layers[0].register_forward_hook(lambda *_: when_waiting(run, run.backend.release))
    run.loss(run.live, 3)
    assert LAST in run.backend.ended
    assert_same_parameters(run.live.named_parameters(), run.expected.named_parameters())


@pytest.mark.parametrize(
    "order", [range(NUM_LAYERS), range(LAST, -1, -1)], ids=["forwards", "backwards"]
)
def test_chunks_are_updated_in_the_order_in_which_the_forward_uses_them(order):
    run = Run(lambda: Layers(order))
    run.loss(run.live, 0)
    run.optimizer.synchronize()
    num_ahead = 2 * 2  # two chunks of two arrays were read ahead
    run.backend.reads = run.backend.reads[-num_ahead:]
    run.step(2)
    run.optimizer.synchronize()
    found = list(dict.fromkeys(run.backend.reads))
    assert found == list(order)
    run.optimizer.close()


class Attention(torch.nn.Module):
    """Attention that follows a layer; the projection inside it is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(32, 32, bias=False)
        self.attention = torch.nn.MultiheadAttention(32, 2, bias=False, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)[None]
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("chunk", [3, 4], ids=["in-proj", "out-proj"])
def test_a_module_waits_for_what_it_reads_of_others_and_finds_ordinary_parameters(chunk):
    """Nobody calls the module that ``out_proj`` is, and torch looks at the class of its weight."""
    run = Run(Attention)
    run.step_held(2, chunk)
    events = []

    def first_ran(*_: object) -> None:
        assert chunk not in run.backend.ended
        when_waiting(run, run.backend.release)
        events.append("first ran")

    def attention_runs(module: torch.nn.Module, _: object) -> None:
        assert chunk in run.backend.ended
        events.append({type(parameter) for parameter in module.parameters()})

    run.live.first.register_forward_hook(first_ran)
    run.live.attention.register_forward_pre_hook(attention_runs)
    losses = [run.loss(model, 3) for model in (run.live, run.expected)]
    assert losses[0].item() == losses[1].item()
    assert events == ["first ran", {torch.nn.Parameter}]
    run.assert_same()
    run.optimizer.close()


POINTS: dict[str, Callable[[Run], object]] = {
    "forward": lambda run: run.loss(run.live, 9),
    "part of a forward": lambda run: run.live.layers[LAST](torch.ones(32)),
    "evaluation": torch.no_grad()(lambda run: run.loss(run.live, 9)),
    "model.state_dict": lambda run: run.live.state_dict(),
    "state_dict of a part": lambda run: run.live.layers[LAST].state_dict(),
    "model.load_state_dict": lambda run: run.live.load_state_dict(run.expected.state_dict()),
    "synchronize": lambda run: run.optimizer.synchronize(),
    "step": lambda run: run.optimizer.step(),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "optimizer.load_state_dict": lambda run: run.optimizer.load_state_dict({}),
    "add_param_group": lambda run: run.optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(3))]}
    ),
    "restore": lambda run: run.optimizer.restore(),
    "close": lambda run: run.optimizer.close(),
}


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_waits(run, point):
    run.optimizer.checkpoint()
    run.step_held(2, LAST)
    ended = threading.Event()

    def call() -> None:
        try:
            point(run)
        except ValueError:
            pass  # load_state_dict of something else
        finally:
            ended.set()

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert not ended.wait(0.1)
    run.backend.release()
    assert ended.wait(TIMEOUT_S)
    caller.join()


def test_statistics_and_checkpoints_do_not_wait(run):
    run.step_held(2, LAST)
    stats = run.optimizer.stats()
    assert stats.steps == 3
    assert stats.moved_gradient_bytes == 4096 * NUM_LAYERS
    handle = run.optimizer.checkpoint({"x": 1})
    assert handle.step == 3
    assert not handle.done()
    assert LAST not in run.backend.ended
    run.backend.release()
    found = handle.result(TIMEOUT_S)
    assert (found.step, found.train_state) == (3, {"x": 1})
    assert run.optimizer.checkpoint({"x": 1}).result().path == found.path


class WithFrozen(Layers):
    """What is not trained is part of checkpoints, too."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(5000), requires_grad=False)


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("frozen", "amid the step"),
        ("layers.0.weight", "amid the step"),
        ("frozen", "after it"),
        (f"layers.{LAST}.weight", "after it"),
    ],
)
def test_an_edit_after_checkpoint_is_not_sealed(name, when, monkeypatch):
    """The seal begins at the end of the step, and is of the moment at which it was asked for."""
    run = Run(WithFrozen)
    step_ended, edited = threading.Event(), threading.Event()
    begin = BesideForward._seal_after

    def begin_late(*arguments: object) -> None:
        step_ended.set()
        assert edited.wait(TIMEOUT_S)
        begin(*arguments)

    monkeypatch.setattr(BesideForward, "_seal_after", begin_late)
    run.step_held(2, LAST)
    handle = run.optimizer.checkpoint()
    parameter = run.live.get_parameter(name)
    if when == "after it":
        run.backend.release()
        assert step_ended.wait(TIMEOUT_S)
    with torch.no_grad():
        parameter.mul_(2)
        run.expected.get_parameter(name).mul_(2)
    edited.set()
    run.backend.release()
    with pytest.raises(SealError, match=rf"'{name}' was changed in place.*call \.result\(\)"):
        handle.result(TIMEOUT_S)
    with pytest.raises(SealError, match="sealing step 3 failed"):
        run.optimizer.step()
    run.step(3)
    run.assert_same()
    run.optimizer.close()


def test_gradients_are_freed_as_they_are_applied(run):
    run.backward(2)
    # A weak reference of Python's to the tensor would have it copied: somebody could write into it.
    memory = [StorageWeakRef(layer.weight.grad.untyped_storage()) for layer in run.live.layers]
    run.backend.hold(LAST)
    run.optimizer.step()
    run.optimizer._engine.strategy._running.wait_for([LAST - 1])
    assert [m.expired() for m in memory] == [True] * LAST + [False]
    run.backend.release()


@contextmanager
def failing(run: Run, chunk: int = LAST) -> Iterator[StorageError]:
    run.optimizer.checkpoint().result()
    run.step(2)
    error = StorageError(5, "the drive is gone", "/store/x")
    run.step_held(3, chunk)
    yield error
    run.backend.hold()


@pytest.mark.parametrize("name", [name for name in POINTS if name not in ("restore", "close")])
def test_an_error_is_raised_at_the_next_point(run, name):
    point = POINTS[name]
    with failing(run) as error:
        when_waiting(run, lambda: run.backend.release(error))
        with pytest.raises(StorageError, match="the drive is gone") as found:
            point(run)
        assert found.value is error
        for _ in range(2):
            with pytest.raises(BrokenOptimizerError, match=r"step 4 failed.*call restore\(\)"):
                run.optimizer.step()
    with pytest.raises(BrokenOptimizerError):
        run.optimizer.checkpoint()
    assert run.optimizer.restore().step == 2
    assert run.optimizer.num_steps == 2


def test_restore_gives_up_a_step_that_failed_and_goes_on(run):
    saved = copy.deepcopy((run.expected.state_dict(), run.plain.state_dict()))
    with failing(run) as error:
        run.backend.release(error)
        with pytest.warns(RuntimeWarning, match="the drive is gone"):
            assert run.optimizer.restore().step == 2
    run.expected.load_state_dict(saved[0])
    run.plain.load_state_dict(saved[1])
    for step in range(2, 6):
        run.step(step)
    run.assert_same()


def test_a_checkpoint_of_a_step_that_failed(run):
    with failing(run) as error:
        handle = run.optimizer.checkpoint()
        run.backend.release(error)
        with pytest.raises(SealError, match=r"step 4 could not be sealed.*the drive is gone"):
            handle.result(TIMEOUT_S)
    with pytest.raises(StorageError, match="the drive is gone"):
        run.optimizer.checkpoint()
    assert run.optimizer.restore().step == 2


def test_closing_after_a_step_that_failed(run):
    with failing(run) as error:
        run.backend.release(error)
        with pytest.raises(StorageError, match="the drive is gone"):
            run.optimizer.close()
    run.optimizer.close()
    run.optimizer = run.offloaded(run.live)
    assert run.optimizer.restore().step == 2


def test_an_error_is_not_lost_in_a_forward_that_fails_itself(run):
    with failing(run) as error:

        def fail(*_: object) -> None:
            run.backend.release(error)
            raise ZeroDivisionError

        hook = run.live.layers[1].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            run.loss(run.live, 4)
        hook.remove()
        with pytest.raises(StorageError, match="the drive is gone"):
            run.optimizer.step()
    run.optimizer.restore()


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Return what sends a signal until it is heard, to be called on another thread.

    A signal that comes just before the main thread blocks is not heard: so it is in Python.
    """
    heard, ended = threading.Event(), threading.Event()

    def hear(_number: int, _frame: object) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def send() -> None:
        while not heard.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)
        ended.set()

    before = signal.signal(signal.SIGINT, hear)
    yield send
    assert ended.wait(TIMEOUT_S)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("point", ["forward", "synchronize", "step", "close"])
def test_an_interrupted_wait_can_be_repeated(run, point, ctrl_c):
    run.step_held(2, LAST)
    when_waiting(run, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        POINTS[point](run)
    assert LAST not in run.backend.ended
    run.backend.release()
    for step in range(3, 6):
        run.step(step)
    run.assert_same()


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_start(run, begun, monkeypatch):
    run.optimizer.checkpoint().result()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if begun or thread.name != "offload-step":
            start(thread)
        if thread.name == "offload-step":
            # A thread that has been started may not have come to the pass yet: it is given up then.
            assert not begun or eventually(lambda: run.optimizer._engine.strategy._running._claimed)
            raise KeyboardInterrupt

    run.backward(2)
    run.backend.hold()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step()
    if begun:
        run.plain.step()
        run.assert_same()
    else:
        with pytest.raises(BrokenOptimizerError):
            run.optimizer.step()
        assert run.optimizer.restore().step == 2


def test_copies_of_the_model_have_hooks_that_do_nothing(run):
    """They have what the step arrives at."""
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    copied = copy.deepcopy(run.live)
    assert LAST in run.backend.ended
    file = io.BytesIO()
    torch.save(run.live.layers[LAST], file)
    file.seek(0)
    assert_same_parameters(copied.named_parameters(), run.expected.named_parameters())
    run.step_held(3, LAST)
    for module in (copied, torch.load(file, weights_only=False)):
        hooks = [h for m in module.modules() for h in m._forward_pre_hooks.values()]
        assert hooks
        assert {type(hook) for hook in hooks} == {_Inert}
        assert {type(parameter) for parameter in module.parameters()} == {torch.nn.Parameter}
        module(torch.ones(32))  # does not wait
    run.backend.release()
    run.assert_same()


def num_hooks(model: torch.nn.Module) -> int:
    names = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
    )
    return sum(len(getattr(m, name)) for m in model.modules() for name in names)


def is_stepping(threads: set[threading.Thread]) -> bool:
    return any(thread.name == "offload-step" for thread in threads)


@pytest.mark.parametrize("running", [False, True])
def test_a_dropped_optimizer_takes_its_hooks_away(running):
    others = set(threading.enumerate())
    run = Run()
    assert num_hooks(run.live) == 4 * len(list(run.live.modules()))
    if running:
        run.step_held(2, LAST)
        when_waiting(run, run.backend.release)
    optimizer = weakref.ref(run.optimizer)
    del run.optimizer
    assert is_freed(optimizer)
    assert eventually(lambda: num_hooks(run.live) == 0)
    assert eventually(lambda: not is_stepping(set(threading.enumerate()) - others))
    run.offloaded(run.live).close()
    assert num_hooks(run.live) == 0


def test_a_failed_seal_does_not_keep_the_next_one_from_being_made(run, monkeypatch):
    first = run.optimizer.checkpoint()
    first.result()
    run.step(2)
    prepare = Sealing.prepare
    released = threading.Event()

    def failing_prepare(sealing, slot, composition, model_digests):
        assert released.wait(TIMEOUT_S)
        if composition.manifest.step == 3:
            raise RuntimeError("no")
        return prepare(sealing, slot, composition, model_digests)

    monkeypatch.setattr(Sealing, "prepare", failing_prepare)
    third = run.optimizer.checkpoint()
    run.step_held(3, LAST)
    fourth = run.optimizer.checkpoint()  # of a step that is running, else it would wait for `third`
    run.backend.release()
    released.set()
    with pytest.raises(SealError, match="sealing step 3 failed"):
        third.result(TIMEOUT_S)
    assert fourth.result(TIMEOUT_S).step == 4
    with pytest.raises(SealError, match="sealing step 3 failed"):
        run.optimizer.step()
    run.step(4)
    run.assert_same()
    assert run.optimizer.checkpoint().result().verify().ok
