"""Who waits for a step beside the forward, for how much of it, and who hears of its errors."""

from __future__ import annotations

import copy
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gds import StorageError
from offload.errors import BrokenOptimizerError, SealError
from tests.eventually import TIMEOUT_S, eventually, is_freed
from tests.numerics.delays import Held
from tests.numerics.reference import assert_same_parameters
from tests.numerics.twins import LAST, NUM_LAYERS, Layers, Twins, is_stepping, when_waiting

__all__ = ["when_waiting"]


def test_a_module_waits_for_what_it_reads_and_for_nothing_else(run):
    run.step_held(2, LAST)
    waited_s = run.optimizer.stats().wait_update_s
    events = []

    def first_ran(*_: object) -> None:
        assert LAST not in run.backend.ended
        when_waiting(run, run.backend.release)
        events.append("first ran")

    def last_runs(module: nn.Module, _: object) -> None:
        assert LAST in run.backend.ended
        events.append({type(parameter) for parameter in module.parameters()})

    run.live.layers[0].register_forward_hook(first_ran)
    run.live.layers[-1].register_forward_pre_hook(last_runs)
    losses = [run.loss(model, 3) for model in run.both()]
    assert losses[0].item() == losses[1].item()
    assert events == ["first ran", {nn.Parameter}]
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


def test_chunks_are_updated_in_the_order_in_which_the_forward_uses_them():
    order = range(LAST, -1, -1)
    run = Twins(lambda: Layers(order), backend=Held(), num_steps=2)
    run.loss(run.live, 0)
    run.optimizer.synchronize()
    num_ahead = 2 * 2  # two chunks of two arrays were read ahead
    run.backend.reads = run.backend.reads[-num_ahead:]
    run.step(2)
    run.optimizer.synchronize()
    assert list(dict.fromkeys(run.backend.reads)) == list(order)
    run.optimizer.close()


POINTS: dict[str, Callable[[Twins], object]] = {
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
        {"params": [nn.Parameter(torch.ones(3))]}
    ),
    "restore": lambda run: run.optimizer.restore(),
    "close": lambda run: run.optimizer.close(),
}


@pytest.mark.parametrize("point", ["synchronize", "restore", "close"])
def test_waits(run, point):
    run.optimizer.checkpoint()
    run.step_held(2, LAST)
    ended = threading.Event()

    def call() -> None:
        POINTS[point](run)
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
        self.frozen = nn.Parameter(torch.ones(5000), requires_grad=False)


@pytest.mark.parametrize("name", ["frozen", "layers.0.weight"])
def test_an_edit_after_checkpoint_is_not_sealed(name):
    """The seal begins at the end of the step, and is of the moment at which it was asked for."""
    run = Twins(WithFrozen, backend=Held(), num_steps=2)
    run.step_held(2, LAST)
    handle = run.optimizer.checkpoint()
    with torch.no_grad():
        for model in run.both():
            model.get_parameter(name).mul_(2)
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
    assert eventually(lambda: [m.expired() for m in memory] == [True] * LAST + [False])
    run.backend.release()


@contextmanager
def failing(run: Twins, chunk: int = LAST) -> Iterator[StorageError]:
    run.optimizer.checkpoint().result()
    run.step(2)
    error = StorageError(5, "the drive is gone", "/store/x")
    run.step_held(3, chunk)
    yield error
    run.backend.hold()


@pytest.mark.parametrize("name", [name for name in POINTS if name not in ("restore", "close")])
def test_an_error_is_raised_at_the_next_point_that_waits(run, name):
    with failing(run) as error:
        when_waiting(run, lambda: run.backend.release(error))
        with pytest.raises(StorageError, match="the drive is gone") as found:
            POINTS[name](run)
        assert found.value is error
        for _ in range(2):
            with pytest.raises(BrokenOptimizerError, match=r"step 4 failed.*call restore\(\)"):
                run.optimizer.step()
    with pytest.raises(BrokenOptimizerError):
        run.optimizer.checkpoint()
    assert run.optimizer.restore().step == 2
    assert run.optimizer.num_steps == 2


def test_restore_gives_up_a_step_that_failed_and_goes_on(run):
    saved = copy.deepcopy((run.expected.state_dict(), run.plain.inner.state_dict()))
    with failing(run) as error:
        run.backend.release(error)
        with pytest.warns(RuntimeWarning, match="the drive is gone"):
            assert run.optimizer.restore().step == 2
    run.expected.load_state_dict(saved[0])
    run.plain.inner.load_state_dict(saved[1])
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


def test_copies_of_the_model_wait_for_nothing(run):
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
        assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
        module(torch.ones(32))  # does not wait
    run.backend.release()
    run.assert_same()


def num_hooks(model: nn.Module) -> int:
    kinds = ("forward_pre", "forward", "state_dict_pre", "load_state_dict_pre")
    return sum(len(getattr(m, f"_{kind}_hooks")) for m in model.modules() for kind in kinds)


@pytest.mark.parametrize("running", [False, True])
def test_a_dropped_optimizer_takes_its_hooks_away(running):
    others = set(threading.enumerate())
    run = Twins(backend=Held(), num_steps=2)
    assert num_hooks(run.live) >= len(list(run.live.modules()))
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
