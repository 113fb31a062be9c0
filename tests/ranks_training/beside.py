"""Scenes of ranks whose steps run beside the forward: see `play`.

Each of them trains twice in the same process: in memory, and with an optimizer of this package.
Nothing reads a parameter between a step and the forward after it, because whoever reads one waits
for the step. Which chunk a step updates last, and that somebody waits for it, is known to inner
modules alone.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gds import File, PosixBackend, StorageError, WrapperBackend
from offload import SealError
from tests.eventually import eventually
from tests.numerics.delays import Held, HeldFile
from tests.numerics.reference import bits
from tests.ranks_training.calls import Calls
from tests.ranks_training.ddp_trainings import Ddp
from tests.ranks_training.fsdp2_trainings import Fsdp2
from tests.ranks_training.models import inner, local
from tests.ranks_training.trainings import Model, Training, values


class Gate(Held):
    """Holds back reads of state in real files until they are released; may fail model files."""

    fails = False
    """Whether writes to model files fail."""
    fails_opening = False
    """Whether model files cannot be opened."""

    def __init__(self) -> None:
        super().__init__()
        WrapperBackend.__init__(self, PosixBackend())

    def wrap_file(self, file: File) -> File:
        return GateFile(file, self)

    def open(self, path: str, *, writable: bool = False) -> File:
        if self.fails_opening and path.endswith("model.safetensors"):
            raise StorageError(errno.EIO, "injected", path)
        return super().open(path, writable=writable)


class GateFile(HeldFile):
    def write_bytes(self, data: bytes, offset: int) -> None:
        assert isinstance(self.backend, Gate)
        if self.backend.fails and self.path.endswith("model.safetensors"):
            raise StorageError(errno.EIO, "injected", self.path)
        super().write_bytes(data, offset)


class Beside(Training):
    """A training that notes its losses."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.losses: list[float] = []
        self.gate = Gate()
        self.options = {"overlap": "forward", "ring_chunks": 2, "backend": self.gate}

    def build(self) -> torch.nn.Module:
        return Model((12, 192, 12, 192, 12, 5)).to(self.dtype)

    def loss(self, output: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        loss = super().loss(output, scale)
        self.losses.append(loss.item())
        return loss


class DdpBeside(Beside, Ddp):
    pass


class Fsdp2Beside(Beside, Fsdp2):
    pass


KINDS: dict[str, type[Beside]] = {"ddp": DdpBeside, "fsdp2": Fsdp2Beside}


class Run:
    """A training in memory and an offloaded one, whose last chunk can be held back in a step."""

    def __init__(self, calls: Calls, kind: str, num_steps: int) -> None:
        self.rank, self.kind, self.folder = calls.rank, kind, calls.directory.parent
        self.trainings = [KINDS[kind](calls.rank, calls.size) for _ in range(2)]
        self.gate = self.trainings[1].gate
        models, optimizers = [], []
        for training, make in zip(self.trainings, ("in_memory", "make_optimizer"), strict=True):
            training.begin()
            models.append(training.wrap(training.build()))
            optimizers.append(getattr(training, make)(models[-1], self.folder / "run"))
        self.models: list[Any] = models
        self.memory, self.optimizer = optimizers
        for step in range(1, num_steps + 1):
            self.both(step)

    def backward(self, step: int) -> None:
        """Compute the gradients of a step."""
        for training, model in zip(self.trainings, self.models, strict=True):
            training.backward(model, step, 1.0)

    def update(self) -> None:
        """Step with these gradients."""
        self.memory.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a seal that failed
            self.optimizer.step()
        self.zero()

    def zero(self) -> None:
        """Forget the gradients."""
        for model in self.models:
            model.zero_grad()

    def both(self, step: int) -> None:
        """Take a step."""
        self.backward(step)
        self.update()

    def checkpoint(self, step: int) -> Any:
        """Ask for a checkpoint."""
        return self.optimizer.checkpoint({"step": step, "rank": self.rank})

    @property
    def running(self) -> Any:
        """The step that is running."""
        return self.optimizer._engine.strategy._running

    def hold_last(self) -> None:
        """Hold back the chunk that the next step updates last."""
        self.gate.hold(self.optimizer._engine.strategy._hooks.order[-1])

    def step_held(self, step: int, *, held: bool = True) -> None:
        """Take a step that cannot end before its last chunk is released."""
        self.optimizer.synchronize()
        self.backward(step)
        if held:
            self.hold_last()
        self.update()
        assert not (held and self.running.ended)

    def release_when_waited_for(self) -> None:
        """Release the chunk on another thread as soon as one waits for the step that is running."""
        changed, wait = self.running._changed, self.running._changed.wait_until
        threads = [threading.Thread(target=self.gate.release)]

        def waiting(reached: Callable[[], bool]) -> bool:
            def looked() -> bool:
                found = reached()  # chunks that are not held may just have been updated
                if not found and threads:
                    threads.pop().start()
                return found

            return wait(looked)

        changed.wait_until = waiting

    def different(self) -> list[str]:
        """Return what differs from the training in memory."""
        plain, live = (values(model) for model in self.models)
        found = [name for name, value in plain.items() if not torch.equal(live[name], value)]
        same = self.trainings[0].losses == self.trainings[1].losses
        return found if same else [*found, "losses"]

    def end(self, step: int = 0) -> dict[str, Any]:
        """Take a last step and seal it, if there is one; return the seal, and what differs."""
        found: dict[str, Any] = {}
        if step:
            self.both(step)
            found["sealed"] = self.checkpoint(step).result().step
        found["different"] = self.different()
        self.optimizer.close()
        return found


def hidden(calls: Calls, kind: str) -> dict[str, Any]:
    """Hold back the chunk that is needed last, until the first layer has run."""
    run = Run(calls, kind, 3)
    # In DDP, the first ranks step the first layers, which the forward needs first.
    run.step_held(4, held=kind != "ddp" or calls.rank == calls.size - 1)
    seen: dict[str, bool] = {}

    def ran(*_: Any) -> None:
        if "hidden" not in seen:
            seen["hidden"] = not run.running.ended
            calls.touch(f"ran-{kind}-{calls.rank}")
            if calls.rank == calls.size - 1:  # on a busy machine another rank may come later
                for rank in range(calls.size):
                    calls.await_file(f"ran-{kind}-{rank}")
        run.gate.release()

    inner(run.models[1]).layers[0].register_forward_hook(ran)
    run.both(5)
    return run.end() | seen


READERS: dict[str, Callable[[torch.nn.Parameter], torch.Tensor]] = {
    "local part": lambda p: local(p).detach().clone(),
    "whole": lambda p: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone(),
    "data": lambda p: local(p.data).clone(),
}


def _note(seen: list[torch.Tensor], read: Callable[..., Any], parameter: Any) -> None:
    seen.append(read(parameter))


def readers(calls: Calls, kind: str) -> dict[str, Any]:
    """Read the parameter that is stepped last in many ways, with some on another thread."""
    run, wrong = Run(calls, kind, 3), []
    for number, (name, read) in enumerate(READERS.items()):
        run.step_held(4 + number)
        last = run.optimizer._engine.state.table.trainables[-1].spec.name
        run.release_when_waited_for()
        seen: list[torch.Tensor] = []
        for model in reversed(run.models):
            parameter = dict(inner(model).named_parameters())[last]
            reading = threading.Thread(target=_note, args=(seen, read, parameter))
            if number % 2:
                reading.start()
                reading.join()
            else:
                reading.run()
        if not torch.equal(bits(seen[0]), bits(seen[1])):
            wrong.append(name)
        run.gate.release()
    run.both(4 + len(READERS))
    return {"wrong": wrong} | run.end()


def sealed_apart(calls: Calls, kind: str, *, fails: bool) -> dict[str, Any]:
    """Seal a step that has ended on all ranks but the first; maybe after a seal that failed."""
    run, errors = Run(calls, kind, 3), []
    if fails:
        run.gate.fails = run.rank == 1
        run.checkpoint(3).wait()
        run.gate.fails = False
    run.backward(4)
    if run.rank == 0:
        run.hold_last()
    run.update()
    assert run.rank == 0 or eventually(lambda: run.running.ended)
    if run.rank == 0 and fails:
        run.release_when_waited_for()
    for _ in range(1 + fails):
        try:
            handle = run.checkpoint(4)
        except SealError as error:
            errors.append(str(error))
    held = run.rank == 0 and not fails and not run.running.ended
    run.gate.release()
    sealed = handle.result().step
    run.both(5)
    return {"errors": errors, "held": held, "sealed": sealed} | run.end()


def torn(calls: Calls, kind: str, *, failing: int, then: str = "synchronize") -> dict[str, Any]:
    """Let a step fail on one rank; all ranks restore the checkpoint before it and go on.

    Then: the call after the step: ``synchronize``, or ``checkpoint`` while the step still runs on
    that rank.
    """
    run = Run(calls, kind, 2)
    run.checkpoint(2).result()
    live, model = run.trainings[1], run.models[1]
    live.backward(model, 3, 1.0)
    if run.rank == failing:
        run.hold_last()
    run.optimizer.step()
    model.zero_grad()
    live.losses.pop()
    injected = StorageError(errno.EIO, "injected", "state")

    def call() -> None:
        if then == "checkpoint":
            handle = run.checkpoint(3)
            run.gate.release(injected)
            handle.result()
            return
        run.gate.release(injected)
        assert eventually(lambda: run.running.ended)
        run.optimizer.synchronize()

    found: dict[str, Any] = {"error": error_of(call)}
    run.gate.hold()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a seal that failed
        found["restored"] = run.optimizer.restore().step
    run.both(3)
    return found | run.end(4)


def error_of(call: Callable[[], object]) -> str:
    """Return the class and the message of the error that a call raises; empty if it raises none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        return f"{type(error).__name__}: {error}"
    return ""


def refused_seal(calls: Calls, kind: str, *, victim: int) -> dict[str, Any]:
    """Let a seal that was asked for amid a step not begin on one rank when the step has ended."""
    run = Run(calls, kind, 2)
    run.step_held(3)
    handle = run.checkpoint(3)
    run.gate.fails_opening = run.rank == victim
    run.gate.release()
    found: dict[str, Any] = {"error": error_of(handle.result)}
    run.gate.fails_opening = False
    found["then"] = [error_of(run.optimizer.synchronize) for _ in range(2)]
    return found | run.end(4)


def play(calls: Calls, name: str, kind: str, **how: Any) -> dict[str, Any]:
    """Call one of the functions above; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found: dict[str, Any] = globals()[name](calls, kind, **how)
        return found
