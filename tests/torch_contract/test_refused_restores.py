"""What is refused, what the message says to do about it, and that nothing has been changed."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import re
import subprocess
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gds import Backend, MemoryBackend, StorageError, WrapperBackend
from offload import (
    SGD,
    Adam,
    AdamW,
    OffloadedOptimizer,
    OffloadError,
    Options,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
)
from offload.errors import (
    BrokenOptimizerError,
    CheckpointError,
    CheckpointNotFoundError,
    MismatchError,
    NotRestoredError,
    SealError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    UnsupportedOptimizerError,
    UnsupportedParameterError,
    VolatileStoreError,
)
from offload.format.document import digest_of
from offload.format.train_state import TrainStateTooLargeError, TrainStateTypeError
from offload.options import Overlap
from offload.units import size
from tests.eventually import eventually, is_freed

STORE = "/run"
CHUNK_BYTES = 4096
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(width: int = 40, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(30, width), torch.nn.Linear(width, 4)).to(dtype)


def make_optimizer(
    trained: torch.nn.Module,
    backend: Backend,
    optimizer_class: Callable[..., OffloadedOptimizer] = AdamW,
    *,
    train_state_bytes: int = 8192,
    overlap: Overlap | None = None,
    **changes: Any,
) -> OffloadedOptimizer:
    settings = Options(
        backend=backend,
        allow_volatile=True,
        chunk_bytes=CHUNK_BYTES,
        train_state_bytes=train_state_bytes,
        overlap=overlap,
    )
    arguments = {"directory": STORE, "model": trained, "options": settings, **changes}
    return optimizer_class(arguments.pop("params", trained.parameters()), **arguments)


def step(model: torch.nn.Module, optimizer: OffloadedOptimizer) -> None:
    generator = torch.Generator().manual_seed(optimizer.num_steps)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def store_with_steps(num_checkpoints: int = 2, **changes: Any) -> MemoryBackend:
    """Return files with checkpoints of steps 1, 2, ..., made by a process that has ended."""
    backend = MemoryBackend()
    model = make_model()
    with make_optimizer(model, backend, keep=num_checkpoints, **changes) as optimizer:
        for number in range(1, num_checkpoints + 1):
            step(model, optimizer)
            optimizer.checkpoint({"number": number}).result()
    return backend.reopened()


def everything(backend: Backend, path: str = STORE) -> dict[str, bytes]:
    """Return every file below a directory with its bytes."""
    found = {}
    for name in backend.list_dir(path):
        stat = backend.stat(f"{path}/{name}")
        assert stat is not None
        if stat.kind == "directory":
            found.update(everything(backend, f"{path}/{name}"))
        else:
            file = backend.open(f"{path}/{name}")
            found[f"{path}/{name}"] = file.read_bytes(0, file.size_bytes)
            file.close()
    return found


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {n: t.detach().numpy(force=True).tobytes() for n, t in _as_bytes(model).items()}


def _as_bytes(model: torch.nn.Module) -> Tensors:
    return {
        n: t.detach().reshape(-1).contiguous().view(torch.uint8)
        for n, t in model.state_dict().items()
        if t.numel()
    }


@contextmanager
def nothing_changes(
    backend: Backend, model: torch.nn.Module, optimizer: OffloadedOptimizer | None = None
) -> Iterator[None]:
    """Check that files, live tensors and hyper-parameters are what they were."""

    def state() -> object:
        listed = optimizer.param_groups if optimizer else []
        groups = [{k: v for k, v in group.items() if k != "params"} for group in listed]
        return everything(backend), bits(model), copy.deepcopy(groups)

    before = state()
    yield
    assert state() == before


class TestOptimizers:
    @pytest.mark.parametrize(
        ("optimizer_class", "hyper", "why"),
        [
            (torch.optim.Adafactor, {}, "factored over rows and columns"),
            (torch.optim.Muon, {}, "orthogonalises whole matrices"),
            (torch.optim.LBFGS, {}, "inner products over all parameters"),
            (torch.optim.SparseAdam, {}, "sparse gradient"),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_that_need_more_than_one_element(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        hyper: dict[str, Any],
        why: str,
        tmp_path: Path,
    ) -> None:
        model = make_model(dtype=torch.float32)
        weights = [p for p in model.parameters() if p.ndim == 2]
        with pytest.raises(UnsupportedOptimizerError, match=why) as error:
            OffloadedOptimizer(
                optimizer_class, weights, directory=tmp_path / "run", model=model, **hyper
            )
        assert optimizer_class.__name__ in str(error.value)
        assert "Use an element-wise optimizer (AdamW, Adam, SGD" in str(error.value)
        assert "keep this one in memory" in str(error.value)
        assert isinstance(error.value, TypeError)
        assert not (tmp_path / "run").exists()

    def test_a_subclass_is_refused_like_its_base(self, tmp_path: Path) -> None:
        class Tuned(torch.optim.LBFGS):
            pass

        with pytest.raises(UnsupportedOptimizerError, match="Tuned cannot be offloaded"):
            OffloadedOptimizer(Tuned, make_model().parameters(), directory=tmp_path / "run")

    @pytest.mark.parametrize(
        ("flag", "why"),
        [
            ("capturable", "captured in a CUDA graph"),
            ("differentiable", "autograd cannot follow"),
            ("fused", "round differently depending on where a tensor is cut"),
        ],
    )
    @pytest.mark.parametrize("where", ["constructor", "group"])
    def test_flags_that_cannot_be_honoured(
        self, flag: str, why: str, where: str, tmp_path: Path
    ) -> None:
        model = make_model()
        params = list(model.parameters())
        if where == "constructor":
            arguments: dict[str, Any] = {"params": params, flag: True}
        else:
            arguments = {"params": [{"params": params[:2]}, {"params": params[2:], flag: True}]}
        with pytest.raises(UnsupportedOptimizerError, match=why) as error:
            AdamW(arguments.pop("params"), directory=tmp_path / "run", model=model, **arguments)
        assert f"{flag}=True is not supported" in str(error.value)
        assert f"Leave {flag} unset" in str(error.value)
        assert {p.name for p in tmp_path.glob("run/*")} <= {"LOCK"}
        AdamW(model.parameters(), directory=tmp_path / "run", model=model).close()

    @pytest.mark.parametrize("keep", [0, -1])
    def test_keeping_no_checkpoint(self, keep: int, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=f"keep must be at least 1, got {keep}"):
            AdamW(make_model().parameters(), directory=tmp_path / "run", keep=keep)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("argument", "says"),
        [
            ({"options": None}, "got NoneType: leave it out for the defaults, or write options="),
            ({"options": {}}, "got dict: leave it out for the defaults, or write options="),
            ({"keep": None}, "got None: leave it out to keep the newest 2"),
        ],
        ids=repr,
    )
    def test_what_may_be_left_out(
        self, argument: dict[str, Any], says: str, tmp_path: Path
    ) -> None:
        with pytest.raises(TypeError, match=says):
            AdamW(make_model().parameters(), directory=tmp_path / "run", **argument)
        assert not (tmp_path / "run").exists()

    def test_state_that_is_looked_for_in_memory(self) -> None:
        model = make_model()
        with make_optimizer(model, MemoryBackend()) as optimizer:
            step(model, optimizer)
            weight = model[0].weight
            with pytest.raises(KeyError, match=r"exp_avg: .* is on storage.*materialized\(\)"):
                optimizer.state[weight]["exp_avg"]
            assert optimizer.state[weight] == {}
            assert "exp_avg" not in optimizer.state[weight]
            with optimizer.materialized():
                assert optimizer.state[weight]["exp_avg"].shape == weight.shape
                assert type(optimizer.state[weight]) is dict
            step(model, optimizer)

    @pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
    def test_copies(self, copied: Callable[[object], object]) -> None:
        optimizer = make_optimizer(make_model(), MemoryBackend())
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*call checkpoint\(\)"):
            copied(optimizer)
        optimizer.close()

    def test_use_after_close(self) -> None:
        model = make_model()
        optimizer = make_optimizer(model, MemoryBackend())
        optimizer.close()
        optimizer.close()
        for call in (optimizer.step, optimizer.checkpoint, optimizer.restore):
            with pytest.raises(OffloadError, match="is closed; construct it again"):
                call()


class TestClosing:
    """Not refused, as there are runs without checkpoints, but said."""

    STORE = "/run-that-is-closed"
    """Optimizers that other tests have dropped may be collected now, and say the same of theirs."""

    def said(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [message for message in caplog.messages if self.STORE in message]

    @pytest.mark.parametrize("overlap", [None, "forward", "backward"])
    @pytest.mark.parametrize("how", ["close", "with", "drop"])
    def test_steps_of_which_no_checkpoint_was_made(
        self, how: str, overlap: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend, overlap=overlap, directory=self.STORE)
        for _ in range(2):
            model(torch.zeros(1, 30, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        if how == "close":
            optimizer.close()
            optimizer.close()
        elif how == "with":
            with optimizer:
                pass
        else:
            gone = weakref.ref(optimizer)
            del optimizer
            assert is_freed(gone)
            eventually(lambda: self.said(caplog))  # on another thread, if that has collected it
        (said,) = self.said(caplog)
        assert said == (
            f"{self.STORE}: 2 optimizer steps are lost: no checkpoint() was made after them; the "
            "store has none"
        )

    def test_after_a_restore(self, caplog: pytest.LogCaptureFixture) -> None:
        model, backend = make_model(), store_with_steps(2, directory=self.STORE)
        with make_optimizer(model, backend, directory=self.STORE) as optimizer:
            optimizer.restore()
        assert not self.said(caplog), "there was no step"
        with make_optimizer(model, backend, directory=self.STORE) as optimizer:
            optimizer.restore()
            step(model, optimizer)
        (said,) = self.said(caplog)
        assert "1 optimizer step is lost" in said
        assert said.endswith(f"the newest checkpoint is {self.STORE}/step-00000002")

    @pytest.mark.parametrize("overlap", [None, "forward", "backward"])
    @pytest.mark.parametrize("num_later", [0, 1, 2])
    def test_after_a_checkpoint(
        self, num_later: int, overlap: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = make_model()
        with make_optimizer(
            model, MemoryBackend(), directory=self.STORE, overlap=overlap
        ) as optimizer:
            for number in range(2 + num_later):
                model(torch.zeros(1, 30, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                if number < 2:
                    optimizer.checkpoint()  # without later steps it ends within close()
        if num_later:
            (said,) = self.said(caplog)
            steps, them = ("step is", "it") if num_later == 1 else ("steps are", "them")
            assert said == (
                f"{self.STORE}: {num_later} optimizer {steps} lost: no checkpoint() was made after "
                f"{them}; the newest checkpoint is {self.STORE}/step-00000002"
            )
        else:
            assert not self.said(caplog)

    def test_steps_that_restore_has_given_up_are_not_lost(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = make_model()
        with make_optimizer(model, MemoryBackend(), directory=self.STORE) as optimizer:
            step(model, optimizer)
            optimizer.checkpoint()
            step(model, optimizer)
            optimizer.restore()
        assert not self.said(caplog)

    def test_steps_whose_checkpoint_failed_are_lost(self, caplog: pytest.LogCaptureFixture) -> None:
        class CannotName(WrapperBackend):
            def rename(self, source: str, target: str) -> None:
                if target.endswith("/step-00000002"):
                    raise StorageError(errno.EIO, "rename", target)
                super().rename(source, target)

        model = make_model()
        backend = CannotName(MemoryBackend())
        with make_optimizer(model, backend, directory=self.STORE) as optimizer:
            step(model, optimizer)
            optimizer.checkpoint().result()
            step(model, optimizer)
            optimizer.checkpoint()
            with pytest.raises(SealError):
                optimizer.synchronize()
        (said,) = self.said(caplog)
        assert "1 optimizer step is lost" in said


class TestParameters:
    @pytest.mark.parametrize(
        ("dtype", "advice"),
        [
            (torch.complex64, "view_as_real"),
            (torch.float64, "Convert it, or give it to another optimizer"),
            (torch.float8_e4m3fn, "Convert it, or give it to another optimizer"),
        ],
        ids=str,
    )
    def test_dtypes(self, dtype: torch.dtype, advice: str, tmp_path: Path) -> None:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(3, 3).to(dtype))
        with pytest.raises(UnsupportedParameterError, match="parameter 'weight'") as error:
            AdamW(model.parameters(), directory=tmp_path / "run", model=model)
        assert str(dtype) in str(error.value)
        assert advice in str(error.value)
        assert {p.name for p in tmp_path.glob("run/*")} <= {"LOCK"}
        # Frozen ones are stored, not stepped.
        model.weight.requires_grad_(False)
        model.other = torch.nn.Parameter(torch.zeros(3))
        AdamW(model.parameters(), directory=tmp_path / "run", model=model).close()

    def test_sparse_gradients(self) -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(50, 30, sparse=True), make_model())
        backend = MemoryBackend()
        optimizer = make_optimizer(model, backend)
        model[0](torch.tensor([3, 4])).sum().backward()
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(UnsupportedParameterError, match=r"gradient of '0\.weight'") as error,
        ):
            optimizer.step()
        assert "pass sparse=False" in str(error.value)
        assert optimizer.num_steps == 0
        step(model, optimizer)  # dense ones are fine
        optimizer.close()

    def test_two_of_the_same_name(self, tmp_path: Path) -> None:
        a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        with pytest.raises(MismatchError, match=r"two parameters are called 'w'.*different names"):
            AdamW([{"params": [("w", a)]}, {"params": [("w", b)]}], directory=tmp_path / "run")

    @pytest.mark.parametrize("named", [True, False], ids=["model", "no-model"])
    def test_one_that_is_given_twice(self, tmp_path: Path, named: bool) -> None:
        """torch warns within a group, and refuses it in two."""
        model = make_model()
        weight = model[0].weight
        arguments = {"directory": tmp_path / "run", "model": model if named else None}
        name = r"0\.weight" if named else r"group0\.param2"
        with (
            pytest.warns(UserWarning, match="duplicate parameters"),
            pytest.raises(
                MismatchError, match=rf"'{name}' is given twice, at position 0 of .* position 2 of"
            ) as error,
        ):
            AdamW([weight, model[0].bias, weight], **arguments)
        assert "give it once" in str(error.value)
        assert {p.name for p in tmp_path.glob("run/*")} <= {"LOCK"}
        with pytest.raises(ValueError, match="in more than one parameter group"):
            AdamW([{"params": [weight]}, {"params": [weight]}], **arguments)

    @pytest.mark.parametrize("stepped", [True, False])
    def test_one_that_is_given_twice_later(self, stepped: bool) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend, params=model[0].parameters())
        if stepped:
            step(model, optimizer)
        weight, bias = model[1].parameters()
        with (
            nothing_changes(backend, model, optimizer),
            pytest.warns(UserWarning, match="duplicate parameters"),
            pytest.raises(MismatchError, match="is given twice, at position 0 of parameter grou"),
        ):
            optimizer.add_param_group({"params": [weight, weight]})
        assert len(optimizer.param_groups) == 1
        optimizer.param_groups[0]["params"] += [weight, bias, bias]  # as libraries do
        with pytest.raises(MismatchError, match=r"'1\.bias' is given twice, at position 3 of"):
            step(model, optimizer)
        optimizer.param_groups[0]["params"].pop()
        step(model, optimizer)
        optimizer.close()


class TestDirectories:
    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot keep a store here") as error:
            AdamW(make_model().parameters(), directory=tmp_path / "file" / "run")
        assert "choose a directory that you can create files in" in str(error.value)
        assert error.value.errno == errno.ENOTDIR
        assert error.value.filename == str(tmp_path / "file" / "run")
        assert os.listdir(tmp_path) == ["file"]

    def test_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("mine")
        with pytest.raises(StoreError, match="cannot keep a store here"):
            AdamW(make_model().parameters(), directory=tmp_path / "run")
        assert (tmp_path / "run").read_text() == "mine"

    def test_where_the_kernel_makes_no_files(self) -> None:
        with pytest.raises(StoreError, match="cannot keep a store here"):
            AdamW(make_model().parameters(), directory="/proc/run")

    @pytest.mark.parametrize("exists", [True, False], ids=["a-store", "nothing-there"])
    def test_that_is_mounted_read_only(self, tmp_path: Path, exists: bool) -> None:
        (tmp_path / "disk").mkdir()
        directory = tmp_path / "disk" / "run"
        model = make_model()
        if exists:
            with AdamW(model.parameters(), directory=directory, model=model) as optimizer:
                step(model, optimizer)
                optimizer.checkpoint().result()
        with mounted(tmp_path / "disk", "--bind", tmp_path / "disk", read_only=True):
            before = bits(model)
            names = sorted(str(p) for p in tmp_path.rglob("*"))
            with pytest.raises((StoreError, StorageError)) as error:  # noqa: PT012
                optimizer = AdamW(model.parameters(), directory=directory, model=model)
                try:
                    optimizer.restore()
                    step(model, optimizer)
                finally:
                    optimizer.close()
            assert error.value.errno == errno.EROFS
            assert bits(model) == before
            assert sorted(str(p) for p in tmp_path.rglob("*")) == names
            if exists:
                assert load_parameters(make_model(), directory) == 1

    def test_in_memory(self, memory_directory: Path) -> None:
        with pytest.raises(VolatileStoreError, match="loses its content at power-off") as error:
            AdamW(make_model().parameters(), directory=memory_directory / "a" / "run")
        assert "Options(allow_volatile=True)" in str(error.value)
        assert "tmpfs" in str(error.value)
        assert list(memory_directory.iterdir()) == []
        allowed = Options(allow_volatile=True)
        AdamW(
            make_model().parameters(), directory=memory_directory / "a" / "run", options=allowed
        ).close()

    def test_that_another_optimizer_writes_to(self) -> None:
        model, backend = make_model(), MemoryBackend()
        first = make_optimizer(model, backend)
        step(model, first)
        with (
            nothing_changes(backend, model, first),
            pytest.raises(StoreLockedError, match=r"call close\(\) of that optimizer first"),
        ):
            make_optimizer(model, backend)
        step(model, first)
        first.close()

    @pytest.fixture
    def memory_directory(self) -> Iterator[Path]:
        path = Path(f"/dev/shm/offload-test-{os.getpid()}")
        try:
            path.mkdir()
        except OSError as error:
            pytest.skip(f"no writable /dev/shm: {error}")
        yield path
        for directory, names, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(f"{directory}/{name}")
            for name in names:
                os.rmdir(f"{directory}/{name}")
        path.rmdir()


@contextmanager
def mounted(where: Path, *arguments: object, read_only: bool = False) -> Iterator[None]:
    """Mount something for a while; skips the test where that is not allowed."""
    commands = [["mount", *map(str, arguments), str(where)]]
    if read_only:
        commands.append(["mount", "-o", "remount,bind,ro", str(where)])
    for number, command in enumerate(commands):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            if number:
                subprocess.run(["umount", str(where)], check=True)
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(where)], check=True)


class TestSpace:
    def slot_bytes(self) -> int:
        return sum(len(d) for p, d in everything(store_with_steps(1)).items() if "/step-" in p)

    @pytest.mark.parametrize("keep", [1, 3])
    def test_too_little_for_what_is_to_be_kept(self, keep: int) -> None:
        needed = (keep + 1) * self.slot_bytes()
        model = make_model()
        small = MemoryBackend(capacity_bytes=needed - 1)
        with pytest.raises(StoreFullError, match=f"{re.escape(size(needed))} in all") as error:
            make_optimizer(model, small, keep=keep)
        for advice in ("make room", "another directory", "smaller keep="):
            assert advice in str(error.value)
        assert error.value.errno == errno.ENOSPC
        assert set(everything(small)) <= {f"{STORE}/LOCK"}
        make_optimizer(model, MemoryBackend(capacity_bytes=needed), keep=keep).close()

    def test_a_small_disk(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        size = 2 * self.slot_bytes()
        with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
            model = make_model()
            settings = Options(allow_volatile=True, chunk_bytes=CHUNK_BYTES)
            with pytest.raises(StoreFullError, match="make room"):
                AdamW(model.parameters(), directory=tmp_path / "disk" / "run", options=settings)
            assert {p.name for p in (tmp_path / "disk").rglob("*")} <= {"run", "LOCK"}

    def test_taken_by_someone_else_before_the_first_step(self) -> None:
        backend = MemoryBackend(capacity_bytes=3 * self.slot_bytes())
        model, reference = make_model(), make_model()
        optimizer = make_optimizer(model, backend, keep=2)
        backend.create("/other", 3 * self.slot_bytes() - 10_000).close()
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(StorageError, match="the slot that the next step writes to") as error,
        ):
            step(model, optimizer)
        assert error.value.errno == errno.ENOSPC
        assert optimizer.num_steps == 0
        backend.remove("/other")
        optimizer.step()
        other = make_optimizer(reference, MemoryBackend())
        step(reference, other)
        assert bits(model) == bits(reference)
        for one in (optimizer, other):
            one.close()

    def test_too_little_for_an_added_group(self) -> None:
        backend = MemoryBackend(capacity_bytes=2 * self.slot_bytes() + 1000)
        model, twin = (
            torch.nn.ModuleDict({"body": make_model(), "head": torch.nn.Linear(90, 90)})
            for _ in range(2)
        )
        roomy = MemoryBackend()
        optimizer, other = (
            make_optimizer(m["body"], b, keep=1, model=None)
            for m, b in ((model, backend), (twin, roomy))
        )
        for one, its in ((model, optimizer), (twin, other)):
            step(one["body"], its)
            its.checkpoint().result()
        for _ in range(2):
            with (
                nothing_changes(backend, model, optimizer),
                pytest.raises(StorageError, match="the slot that the next step writes to"),
            ):
                optimizer.add_param_group({"params": list(model["head"].parameters())})
            assert len(optimizer.param_groups) == 1
        for one, its in ((model, optimizer), (twin, other)):
            for _ in range(2):
                step(one["body"], its)
            assert its.checkpoint().result().verify().ok
            its.close()
        assert bits(model["body"]) == bits(twin["body"])


class TestTrainState:
    class Sampler:
        pass

    @pytest.mark.parametrize(
        ("state", "path"),
        [
            ({"epoch": 1, "sampler": Sampler()}, r"\['sampler'\]"),
            ({"functions": [1, len]}, r"\['functions'\]\[1\]"),
        ],
        ids=["object", "function"],
    )
    def test_that_would_not_come_back_the_same(self, state: object, path: str) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        step(model, optimizer)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(TrainStateTypeError, match=path),
        ):
            optimizer.checkpoint(state)
        assert optimizer.checkpoint({"epoch": 1}).result().train_state == {"epoch": 1}
        optimizer.close()

    @pytest.mark.parametrize(
        "state",
        ["ckpt.pt", b"state", Path("out/ckpt.pt"), 1, 0.5, True],
        ids=lambda state: type(state).__name__,
    )
    def test_what_is_meant_as_a_file_name_or_a_step(self, state: object) -> None:
        model, backend = make_model(), MemoryBackend()
        with make_optimizer(model, backend) as optimizer:
            step(model, optimizer)
            with (
                nothing_changes(backend, model, optimizer),
                pytest.raises(TrainStateTypeError, match=r"train_state .*, got ") as error,
            ):
                optimizer.checkpoint(state)
            said = str(error.value)
            assert f"got {type(state).__name__} {state!r}" in said
            assert "the step number and the name of a checkpoint are the store's" in said
            assert '{"epoch": 3}' in said
            assert optimizer.checkpoint({"state": state} if state != Path("out/ckpt.pt") else None)

    @pytest.mark.parametrize(
        "state",
        [None, {}, [1, 2], ("epoch", 1), {"name"}, np.float32(2), torch.tensor(1)],
        ids=repr,
    )
    def test_other_values_are_stored_as_they_are(self, state: object) -> None:
        model = make_model()
        with make_optimizer(model, MemoryBackend()) as optimizer:
            step(model, optimizer)
            assert optimizer.checkpoint(state).result().train_state == state

    def test_that_is_larger_than_what_is_reserved(self) -> None:
        backend = store_with_steps(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        optimizer.restore()
        step(model, optimizer)
        large = {"seen": torch.arange(5000)}
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(TrainStateTooLargeError, match="the checkpoints reserve 8192") as error,
        ):
            optimizer.checkpoint(large)
        optimizer.checkpoint({"seen": None}).result()
        optimizer.close()
        # What the message says helps, and in every slot, also in those that were made before.
        needed = int(str(error.value).rpartition("train_state_bytes=")[2].rstrip(")"))
        backend = backend.reopened()
        model = make_model()
        optimizer = make_optimizer(model, backend, train_state_bytes=needed)
        optimizer.restore()
        for _ in range(4):
            step(model, optimizer)
            found = optimizer.checkpoint(large).result()
            assert torch.equal(found.train_state["seen"], large["seen"])
        optimizer.close()

    def test_a_hyperparameter_that_cannot_be_stored(self) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        step(model, optimizer)
        optimizer.param_groups[0]["note"] = self.Sampler()
        with pytest.raises(TypeError, match=r"param_groups\[0\]\['note'\] is a Sampler"):
            optimizer.checkpoint()
        del optimizer.param_groups[0]["note"]
        assert optimizer.checkpoint().result().verify().ok
        optimizer.close()


class TestResuming:
    @pytest.mark.parametrize("call", ["step", "checkpoint", "synchronize"])
    def test_using_a_store_before_deciding_about_it(self, call: str) -> None:
        backend = store_with_steps(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(NotRestoredError, match="already has checkpoints") as error,
        ):
            getattr(optimizer, call)()
        assert "step-00000001, step-00000002" in str(error.value)
        assert "call restore() to continue" in str(error.value)
        assert "fresh=True to the optimizer to start over" in str(error.value)
        assert optimizer.restore() is not None
        getattr(optimizer, call)()
        optimizer.close()

    def test_an_older_checkpoint_without_saying_so(self) -> None:
        backend = store_with_steps(3)
        model = make_model()
        optimizer = make_optimizer(model, backend, keep=3)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match="step-00000001 is not the newest") as error,
        ):
            optimizer.restore(1)
        assert "pass discard_newer=True" in str(error.value)
        assert "open_checkpoint or load_parameters" in str(error.value)
        found = optimizer.restore(1, discard_newer=True)
        assert found is not None
        assert found.step == 1
        assert [c.step for c in list_checkpoints(STORE, backend=backend)] == [1]
        optimizer.close()

    @pytest.mark.parametrize("which", [7, "step-00000007", "/elsewhere/step-00000001"])
    def test_a_checkpoint_that_is_not_there(self, which: int | str) -> None:
        backend = store_with_steps(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(CheckpointNotFoundError, match="no usable checkpoint") as error,
        ):
            optimizer.restore(which)
        assert "it has: step-00000001, step-00000002" in str(error.value)
        optimizer.close()

    def test_an_older_one_that_is_damaged_does_not_cost_the_newer_ones(self) -> None:
        backend = store_with_steps(3)
        flip(backend, f"{STORE}/step-00000001/model.safetensors", -100)
        model = make_model()
        optimizer = make_optimizer(model, backend, keep=3)
        with pytest.raises(CheckpointError, match=r"step-00000001/model\.safetensors"):
            optimizer.restore(1, discard_newer=True)
        assert [c.step for c in list_checkpoints(STORE, backend=backend)] == [1, 2, 3]
        with pytest.warns(RuntimeWarning, match="not using .*step-00000001"):
            found = optimizer.restore()
        assert found is not None
        assert found.step == 3
        optimizer.close()


def renamed(model: torch.nn.Sequential) -> torch.nn.Module:
    return torch.nn.ModuleDict({"first": model[0], "second": model[1]})


class TestAnotherModel:
    @pytest.mark.parametrize(
        ("build", "says"),
        [
            (lambda: renamed(make_model()), ["'0.weight' is only in the checkpoint"]),
            (lambda: make_model(width=41), ["'0.weight' is BF16 [40, 30]", "BF16 [41, 30]"]),
            (lambda: make_model(dtype=torch.float32), ["BF16 [40, 30]", "F32 [40, 30]"]),
            (
                lambda: torch.nn.Sequential(*make_model(), torch.nn.Linear(4, 4)),
                ["'2.weight' is only in the model"],
            ),
            (
                lambda: torch.nn.Sequential(*make_model(), torch.nn.BatchNorm1d(4, affine=False)),
                ["'2.running_mean' is only in the model"],
            ),
        ],
        ids=["names", "shapes", "dtype", "more-parameters", "more-buffers"],
    )
    def test_is_refused_by_name(
        self, build: Callable[[], torch.nn.Module], says: list[str]
    ) -> None:
        backend = store_with_steps(2)
        model = build()
        optimizer = make_optimizer(model, backend)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match="differs from the one that was saved") as error,
        ):
            optimizer.restore()
        for part in says:
            assert part in str(error.value)
        said = str(error.value)
        assert "Build the model as it was then, with the same configuration" in said
        is_dtype = any("F32" in part for part in says)
        assert ("convert it to another dtype after restore()" in said) == is_dtype
        assert "if this is another run, give it another directory=, or pass fresh=True" in said
        with nothing_changes(backend, model), pytest.raises(MismatchError) as error:
            load_parameters(model, STORE, backend=backend)
        said = str(error.value)
        assert "Build the model as it was then, with the same configuration" in said
        assert ("convert it to another dtype after load_parameters()" in said) == is_dtype
        assert "or name a checkpoint of this model" in said
        assert "fresh" not in said
        with pytest.raises(NotRestoredError):
            optimizer.step()
        optimizer.close()

    def test_names_that_are_only_numbers(self) -> None:
        backend = store_with_steps(2, model=None)
        model = make_model()
        with pytest.raises(MismatchError, match=r"'group0\.param0' is only in the ch") as error:
            load_parameters(model, STORE, backend=backend)
        said = "It was made without model=, so it does not have the model's names"
        assert said in str(error.value)
        with (
            make_optimizer(model, backend) as named,
            pytest.raises(MismatchError, match=f"{said}: an optimizer that is made without model="),
        ):
            named.restore()
        with make_optimizer(model, backend, model=None) as numbered:
            assert numbered.restore() is not None

    def test_another_class(self) -> None:
        backend = store_with_steps(2)
        model = make_model()
        optimizer = make_optimizer(model, backend, Adam)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"made with torch\.optim\.adamw\.AdamW") as error,
        ):
            optimizer.restore()
        assert "this optimizer is torch.optim.adam.Adam" in str(error.value)
        assert "construct the same class" in str(error.value)
        optimizer.close()

    def test_another_number_of_groups(self) -> None:
        backend = store_with_steps(2)
        model = make_model()
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        optimizer = make_optimizer(model, backend, params=groups)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"has 1 parameter group, .*has 2") as error,
        ):
            optimizer.restore()
        assert "construct it with the same groups" in str(error.value)
        optimizer.close()

    def test_parameters_in_other_groups(self) -> None:
        groups: Callable[[Any], Any] = lambda m: [  # noqa: E731
            {"params": list(m[0].parameters())},
            {"params": list(m[1].parameters()), "momentum": 0.9},
        ]
        model, backend = make_model(), MemoryBackend()
        with make_optimizer(model, backend, SGD, params=groups(model), lr=0.1) as optimizer:
            step(model, optimizer)
            optimizer.checkpoint().result()
        model = make_model()
        optimizer = make_optimizer(model, backend, SGD, params=groups(model)[::-1], lr=0.1)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"parameter '\d\.\w+' was in group") as error,
        ):
            optimizer.restore()
        assert "Construct the optimizer with the same groups" in str(error.value)
        optimizer.close()

    def test_a_group_that_was_added_is_added_before_restoring(self) -> None:
        """What the message advises works."""

        def build() -> tuple[torch.nn.Sequential, dict[str, Any]]:
            model = torch.nn.Sequential(*make_model(), torch.nn.Linear(4, 4))
            model[2].requires_grad_(False)
            return model, {"params": list(model[2].parameters())}

        backend = MemoryBackend()
        model, added = build()
        with make_optimizer(model, backend, params=list(model[:2].parameters())) as optimizer:
            step(model, optimizer)
            model[2].requires_grad_(True)
            optimizer.add_param_group(added)
            step(model, optimizer)
            optimizer.checkpoint().result()
        trained = bits(model)
        model, added = build()
        model[2].requires_grad_(True)
        optimizer = make_optimizer(model, backend, params=list(model[:2].parameters()))
        with pytest.raises(MismatchError, match="add those that were added during training"):
            optimizer.restore()
        optimizer.add_param_group(added)
        assert optimizer.restore() is not None
        assert bits(model) == trained
        optimizer.close()

    @pytest.mark.filterwarnings("ignore:the reference that state_dict")
    def test_a_state_dict_of_elsewhere(self) -> None:
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        step(model, optimizer)
        stale = {**optimizer.state_dict(), "step": 9}
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(MismatchError, match=r"never sealed.* at step 9, .* at step 1 now"),
        ):
            optimizer.load_state_dict(stale)
        optimizer.close()


def overwrite(backend: Backend, path: str, data: bytes) -> None:
    """Replace a file, also by one of another size."""
    if backend.stat(path) is not None:
        backend.remove(path)
    file = backend.create(path, len(data))
    if data:
        file.write_bytes(data, 0)
    file.close()


def read(backend: Backend, path: str) -> bytes:
    file = backend.open(path)
    try:
        return file.read_bytes(0, file.size_bytes)
    finally:
        file.close()


def flip(backend: Backend, path: str, at: int) -> None:
    """Change one bit of a file where it is; `at` counts from the end if it is negative."""
    file = backend.open(path, writable=True)
    at %= file.size_bytes
    file.write_bytes(bytes([file.read_bytes(at, 1)[0] ^ 1]), at)
    file.close()


def replace_in(name: str, old: bytes, new: bytes) -> Callable[[Backend, str], None]:
    def damage(backend: Backend, path: str) -> None:
        data = read(backend, f"{path}/{name}")
        assert old in data
        changed = data.replace(old, new, 1).rstrip(b" \n") if len(old) != len(new) else data
        overwrite(backend, f"{path}/{name}", changed.replace(old, new, 1).ljust(len(data)))

    return damage


def truncate(name: str, nbytes: int) -> Callable[[Backend, str], None]:
    def damage(backend: Backend, path: str) -> None:
        overwrite(backend, f"{path}/{name}", read(backend, f"{path}/{name}")[:nbytes])

    return damage


def remove(name: str) -> Callable[[Backend, str], None]:
    return lambda backend, path: backend.remove(f"{path}/{name}")


def make_a_directory(name: str) -> Callable[[Backend, str], None]:
    def damage(backend: Backend, path: str) -> None:
        backend.remove(f"{path}/{name}")
        backend.make_dir(f"{path}/{name}")

    return damage


def edit_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Backend, str], None]:
    """Change the manifest as someone would who knows how to make its digest right."""

    def damage(backend: Backend, path: str) -> None:
        data = read(backend, f"{path}/manifest.json")
        document = json.loads(data)
        change(document["body"])
        document["digest"] = digest_of(document["body"])
        overwrite(backend, f"{path}/manifest.json", json.dumps(document).encode().ljust(len(data)))

    return damage


def set_rate(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["groups"][0].update(lr=value)


def nested(depth: int) -> object:
    value: object = 1.0
    for _ in range(depth):
        value = {"tuple": [value]}
    return value


DAMAGE: dict[str, tuple[Callable[[Backend, str], None], str]] = {
    "manifest edited": (
        replace_in("manifest.json", b'"lr":0.001', b'"lr":0.005'),
        "does not match its digest",
    ),
    "manifest garbage": (
        lambda backend, path: overwrite(backend, f"{path}/manifest.json", bytes(range(256)) * 9),
        "not a JSON document",
    ),
    "manifest empty": (truncate("manifest.json", 0), "not a JSON document"),
    "manifest truncated": (truncate("manifest.json", 700), "not a JSON document"),
    "manifest missing": (remove("manifest.json"), "no manifest.json: not a complete checkpoint"),
    "manifest a directory": (make_a_directory("manifest.json"), "expected a file"),
    "manifest of another version": (
        replace_in("manifest.json", b'"format":2', b'"format":9'),
        "format version 9, expected 2 or 3; it was written by another version",
    ),
    "array truncated": (truncate("exp_avg.safetensors", 5000), "5000 bytes, expected a file of"),
    "array missing": (remove("master.safetensors"), "master.safetensors: missing"),
    "array with another header": (
        replace_in("exp_avg_sq.safetensors", b'"0.weight"', b'"9.weight"'),
        "its header lists other tensors than the manifest",
    ),
    "model with a broken header": (
        replace_in("model.safetensors", b'{"', b"{{"),
        "damaged header",
    ),
    "model missing": (remove("model.safetensors"), "model.safetensors: missing"),
    "train state missing": (remove("train_state.safetensors"), "train_state.safetensors: missing"),
    "a file in its place": (
        lambda backend, path: (
            [backend.remove(f"{path}/{name}") for name in backend.list_dir(path)],
            backend.remove_dir(path),
            overwrite(backend, path, b"gone"),
        ),
        "step-00000002",
    ),
    "hostile: a huge tensor": (
        edit_manifest(set_rate({"tensor": "0.1", "dtype": "float32", "shape": [1 << 50]})),
        "contradictory content",
    ),
    "hostile: an unknown dtype": (
        edit_manifest(set_rate({"tensor": "0.1", "dtype": "float31", "shape": []})),
        "contradictory content",
    ),
    "hostile: deep nesting": (edit_manifest(set_rate(nested(400))), "contradictory content"),
    "hostile: parameters too many": (
        edit_manifest(lambda body: body["parameters"].append(["9.w", "BF16", [1 << 60], 0, []])),
        "contradictory content",
    ),
    "hostile: metrics that are a list": (
        edit_manifest(lambda body: body.update(metrics=[["loss", 1.0]])),
        "contradictory content",
    ),
    "hostile: a metric that is text": (
        edit_manifest(lambda body: body.update(metrics={"loss": "1.0"})),
        "contradictory content",
    ),
    "hostile: a metric that is true": (
        edit_manifest(lambda body: body.update(metrics={"loss": True})),
        "contradictory content",
    ),
    "hostile: a huge metric": (
        edit_manifest(lambda body: body.update(metrics={"loss": 10**400})),
        "an integer of 401 digits",
    ),
    "hostile: a number that overflows": (
        replace_in("manifest.json", b'"lr":0.001', b'"lr":1e999'),
        "the number '1e999' is not finite",
    ),
    "hostile: too many metrics": (
        edit_manifest(lambda body: body.update(metrics={str(n): 1.0 for n in range(17)})),
        "contradictory content",
    ),
    "hostile: a group that is not there": (
        edit_manifest(lambda body: body["parameters"][0].__setitem__(3, 5)),
        "contradictory content",
    ),
}


@pytest.fixture(params=DAMAGE, ids=lambda name: name.replace(" ", "-"))
def damage(request: pytest.FixtureRequest) -> tuple[Callable[[Backend, str], None], str]:
    return DAMAGE[request.param]


class TestDamage:
    def test_is_passed_over_with_the_reason(
        self, damage: tuple[Callable[[Backend, str], None], str]
    ) -> None:
        inflict, reason = damage
        backend = store_with_steps(2)
        newest = f"{STORE}/step-00000002"
        inflict(backend, newest)
        before = everything(backend)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = optimizer.restore()
        assert found is not None
        assert found.step == 1
        (message,) = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert message.startswith(f"not using {newest}: ")
        assert reason in message
        assert everything(backend) == before, "it is left alone: somebody may want to look at it"
        info = {c.path: c for c in list_checkpoints(STORE, backend=backend)}
        assert not info[newest].valid
        assert reason in info[newest].reason
        assert info[f"{STORE}/step-00000001"].valid
        with pytest.warns(RuntimeWarning) as caught, open_checkpoint(STORE, backend=backend) as old:
            assert old.step == 1
        assert [str(w.message) for w in caught] == [message]
        # Training goes on, and takes the damaged one's name when it comes to its step.
        step(model, optimizer)
        assert optimizer.checkpoint().result().path == newest
        with open_checkpoint(newest, backend=backend) as opened:
            assert opened.verify().ok
        optimizer.close()

    def test_of_the_only_checkpoint_is_an_error(
        self, damage: tuple[Callable[[Backend, str], None], str]
    ) -> None:
        inflict, reason = damage
        backend = store_with_steps(2)
        for name in ("step-00000001", "step-00000002"):
            inflict(backend, f"{STORE}/{name}")
        model = make_model()
        optimizer = make_optimizer(model, backend)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.warns(RuntimeWarning, match="not using"),
            pytest.raises(CheckpointError, match="none of its checkpoints can be used") as error,
        ):
            optimizer.restore()
        assert reason in str(error.value)
        assert "pass fresh=True to start over" in str(error.value)
        with pytest.raises(NotRestoredError, match=r"call restore\(\).*or pass fresh=True"):
            optimizer.step()
        optimizer.close()
        with make_optimizer(model, backend, fresh=True) as optimizer:
            step(model, optimizer)
            assert optimizer.checkpoint().result().verify().ok

    @pytest.mark.parametrize("name", ["model", "master", "exp_avg", "train_state"])
    def test_of_one_bit_is_found_by_a_complete_read(self, name: str) -> None:
        backend = store_with_steps(2)
        path = f"{STORE}/step-00000002/{name}.safetensors"
        flip(backend, path, -5 if name != "train_state" else 40)
        with open_checkpoint(STORE, backend=backend) as opened:
            (problem,) = opened.verify().problems
        assert problem.startswith(path)
        if name != "train_state":
            assert "damaged: their digest" in problem
        assert problem.count(path) == 1

    @pytest.mark.parametrize("name", ["model", "master", "exp_avg", "train_state"])
    @pytest.mark.parametrize("at", [0, 7, 8, 12, -5], ids="at{}".format)
    def test_a_message_about_damage_says_the_path_once(self, name: str, at: int) -> None:
        backend = store_with_steps(2)
        path = f"{STORE}/step-00000002/{name}.safetensors"
        flip(backend, path, at)
        try:
            with open_checkpoint(f"{STORE}/step-00000002", backend=backend) as opened:
                problems = list(opened.verify().problems)
        except CheckpointError as error:  # what is seen without reading all of it
            problems = [str(error)]
        assert problems
        for problem in problems:
            assert problem.startswith(path)
            assert problem.count(path) == 1

    def test_of_the_parameters_is_found_when_they_are_restored(self) -> None:
        backend = store_with_steps(2)
        flip(backend, f"{STORE}/step-00000002/model.safetensors", -5)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        with pytest.raises(CheckpointError, match=r"step-00000002/model.*bytes \d+ to") as error:
            optimizer.restore(2)
        assert "call restore() to go on from" in str(error.value)
        with pytest.raises((NotRestoredError, BrokenOptimizerError)):
            optimizer.step()
        with pytest.warns(RuntimeWarning, match="not using .*step-00000002"):
            found = optimizer.restore()
        assert found is not None
        assert found.step == 1
        flip(backend, f"{STORE}/step-00000001/model.safetensors", -5)
        with (
            pytest.warns(RuntimeWarning, match="not using .*step-00000002"),
            pytest.raises(CheckpointError, match=r"step-00000001/model.*bytes \d+ to"),
        ):
            load_parameters(model, STORE, backend=backend)
        optimizer.close()

    def test_found_in_the_middle_of_training_is_not_trained_on(self) -> None:
        """A restore that fails half way leaves neither the old nor the new state."""
        model, backend = make_model(), MemoryBackend()
        optimizer = make_optimizer(model, backend)
        for _ in range(2):
            step(model, optimizer)
            optimizer.checkpoint().result()
        step(model, optimizer)
        flip(backend, f"{STORE}/step-00000002/model.safetensors", -5)
        with pytest.raises(CheckpointError, match="damaged"):
            optimizer.restore(2)
        for call in (optimizer.step, optimizer.checkpoint, optimizer.synchronize):
            with pytest.raises(BrokenOptimizerError, match=r"call restore\(\)"):
                call()
        with pytest.warns(RuntimeWarning, match="not using .*step-00000002"):
            found = optimizer.restore()
        assert found is not None
        assert optimizer.num_steps == found.step == 1
        step(model, optimizer)
        optimizer.close()

    def test_a_reader_that_keeps_newer_ones_from_being_withdrawn(self) -> None:
        backend = store_with_steps(2)
        model = make_model()
        optimizer = make_optimizer(model, backend)
        optimizer.restore()
        with (
            open_checkpoint(f"{STORE}/step-00000002", backend=backend),
            pytest.raises(StoreError, match="is being read and cannot be withdrawn"),
        ):
            optimizer.restore(1, discard_newer=True)
        with pytest.raises(BrokenOptimizerError, match=r"call restore\(\)"):
            step(model, optimizer)
        found = optimizer.restore()
        assert found is not None
        assert found.step == 2
        step(model, optimizer)
        assert optimizer.num_steps == 3
        optimizer.close()


def test_options_that_are_a_dict(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(
        TypeError, match=r"offload\.Options, got dict: leave it out for the defaults, or write "
    ):
        AdamW([weight], directory=tmp_path / "run", options={"overlap": "forward"})
    assert not (tmp_path / "run").exists()
