"""One process goes on from what two ranks have stored, or from a copy in a tier."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gds import Backend, MemoryBackend, PosixBackend, WrapperBackend
from offload import AdamW, DriveTuning, MismatchError, StoreFullError
from offload.engine.working_slot import StateSlots
from offload.errors import DamagedError
from offload.format.arrays import StateDtype, StateFormat
from offload.format.layout import Layout
from offload.options import Tier
from offload.store.slots.free import try_lock
from offload.store.store import Store
from offload.tiers import push
from tests.numerics.reference import bits
from tests.ranks_store.job import LAYOUTS, MODEL, ONE, SHAPES, Job, model_bytes, part_paths, values
from tests.ranks_store.job import rows as rows_of
from tests.stores.files import everything, flip
from tests.stores.small import make_model, make_optimizer, options, train
from tests.stores.training import read_array

OTHER = "/another/run"
NEWEST = f"{ONE}/step-00000001"
MOMENTS = ("exp_avg", "exp_avg_sq")
DIVIDING, NOT_DIVIDING = 50, 48
"""Rows of 20 elements that rank 0 steps: the second number is a multiple of 32 elements."""


class Net(torch.nn.Module):
    """The model of `tests.ranks_store.job`."""

    def __init__(self, **other_shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in {**SHAPES, **other_shapes}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape).bfloat16()))


def layouts(state_dtype: StateDtype, rows: int) -> list[Layout]:
    """Return what each of two ranks steps that train with AdamW."""
    arrays = StateFormat(state_dtype=state_dtype).stored_arrays("BF16", MOMENTS)
    divided = (rows_of("embed", 0, rows), rows_of("embed", rows, SHAPES["embed"][0]))
    return [
        replace(
            layout,
            parameters=tuple(
                replace(spec, arrays=arrays) for spec in (first, *layout.parameters[1:])
            ),
            state_dtype=state_dtype,
        )
        for layout, first in zip(LAYOUTS, divided, strict=True)
    ]


def made(
    backend: Backend,
    directory: str = ONE,
    state_dtype: StateDtype = "float32",
    rows: int = DIVIDING,
) -> list[Layout]:
    """Let two ranks of one host make a checkpoint of step 1; return their layouts."""
    with Job([backend, backend], directories=(directory, directory)) as job:
        job.layouts = layouts(state_dtype, rows)
        job.seal(1)
        return [*job.layouts]


def opened(
    backend: Backend | None, model: torch.nn.Module, directory: Any = ONE, **settings: Any
) -> AdamW:
    return AdamW(
        model.parameters(),
        directory=directory,
        model=model,
        options=options(backend, drives=DriveTuning(calibrate=False), **settings),
    )


def assert_same_model(model: torch.nn.Module) -> None:
    """Check that the parameters are those of step 1."""
    data, header = model_bytes(1), Layout((), MODEL, 1024).model_header
    for name, parameter in model.named_parameters():
        entry = header.entries[name]
        assert bits(parameter.detach()).numpy().tobytes() == data[entry.start : entry.stop], name


def stored_by(owner: int, layout: Layout, array: str) -> bytes:
    """Return all that a rank has stored of an array in step 1."""
    sizes = [layout.byte_range(array, chunk)[1] for chunk in range(layout.num_chunks)]
    return b"".join(values(1, owner, array, chunk, size) for chunk, size in enumerate(sizes))


def test_state_and_parameters_are_those_of_all_ranks() -> None:
    backend = MemoryBackend()
    first, second = made(backend)
    model = Net()
    with opened(backend, model) as optimizer:
        found = optimizer.restore()
        assert found is not None
        assert (found.step, found.train_state) == (1, {"step": 1})
        assert_same_model(model)
        assert optimizer.stats().restore_bytes == len(model_bytes(1))
        sealed = optimizer.checkpoint({"step": 1}).result()
        assert sealed.verify().ok
        like = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for array in ("master", *MOMENTS):
            tensors = read_array(backend, sealed, array, like)
            found_bytes = {name: bits(t).numpy().tobytes() for name, t in tensors.items()}
            one, two = stored_by(0, first, array), stored_by(1, second, array)
            cut, start = 4 * DIVIDING * 20, 4 * (90 - DIVIDING) * 20
            assert found_bytes == {
                "embed": one[:cut] + two[:start],
                "norm": one[cut:],
                "head": two[start:],
            }


class Filling(WrapperBackend):
    """Has no free space once it is full."""

    is_full = False

    def free_bytes(self, path: str) -> int:
        return 0 if self.is_full else super().free_bytes(path)


def test_a_full_drive_is_noticed_before_anything_is_changed() -> None:
    backend = Filling(MemoryBackend())
    made(backend)
    model = Net()
    with opened(backend, model) as optimizer:
        backend.is_full = True
        before = everything(backend)
        with pytest.raises(StoreFullError, match="new slot"):
            optimizer.restore()
        assert everything(backend) == before
        assert not any(parameter.any() for parameter in model.parameters())
        backend.is_full = False
        assert optimizer.restore() is not None


def test_all_drives_of_one_process_get_their_share_of_the_state() -> None:
    backend = MemoryBackend(directories=[OTHER])
    made(backend)
    with opened(backend, Net(), [ONE, OTHER]) as optimizer:
        optimizer.restore()
        sealed = optimizer.checkpoint().result()
        (part,) = sealed.parts
        assert part.startswith(f"{OTHER}/part-")
        assert sealed.verify().ok


@contextmanager
def locked_by_nobody(backend: Backend) -> Iterator[list[BaseException]]:
    """Check that a call that fails lets go of the ranks' parts; its errors are kept meanwhile."""
    kept: list[BaseException] = []
    yield kept
    assert kept
    parts = [*part_paths(backend, ONE)]
    assert parts
    for path in parts:
        lock = try_lock(backend, path)
        assert lock is not None, f"{path} could never be written again"
        lock.release()


@pytest.mark.parametrize("what", ["another model", "damaged"])
def test_a_restore_that_fails_lets_go_of_what_it_has_opened(what: str) -> None:
    backend = MemoryBackend()
    made(backend)
    model = Net() if what == "damaged" else Net(norm=(301,))
    if what == "damaged":
        flip(backend, f"{NEWEST}/model.safetensors", -100)
    with opened(backend, model) as optimizer, locked_by_nobody(backend) as kept:
        with pytest.raises((DamagedError, MismatchError)) as failed:
            optimizer.restore(1)
        assert isinstance(failed.value, DamagedError) == (what == "damaged")
        kept.append(failed.value)


@pytest.mark.parametrize(
    "step", [(Store, "reader_of"), (StateSlots, "forget")], ids=["before", "after the checks"]
)
def test_a_restore_that_is_interrupted_lets_go_of_what_it_has_opened(
    monkeypatch: pytest.MonkeyPatch, step: tuple[type, str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    backend = MemoryBackend()
    made(backend)
    with opened(backend, Net()) as optimizer, locked_by_nobody(backend) as kept:
        monkeypatch.setattr(*step, interrupted)
        with pytest.raises(KeyboardInterrupt) as failed:
            optimizer.restore()
        monkeypatch.undo()
        kept.append(failed.value)


def test_the_parts_of_ranks_are_held_as_long_as_their_state_is_the_present_one() -> None:
    """Else the rank that has a part might write into it while it is still read."""
    backend = MemoryBackend()
    made(backend)
    with opened(backend, Net()) as optimizer:
        optimizer.restore()
        paths = [*part_paths(backend, ONE)]
        assert paths
        assert [try_lock(backend, path) for path in paths] == [None] * len(paths)
    for path in paths:
        lock = try_lock(backend, path)
        assert lock is not None
        lock.release()


@contextmanager
def warned(*parts: str) -> Iterator[None]:
    """Expect one warning with all these words, which points at this file; or none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(one.message) for one in caught]
    assert len(said) == bool(parts), said
    assert all(part in message for message in said for part in parts), said
    assert all(one.filename == __file__ for one in caught), [one.filename for one in caught]


ANEW = (NEWEST, "the 8-bit state of 1 parameter is encoded anew", "not bit-identical")


@pytest.mark.parametrize("rows", [DIVIDING, NOT_DIVIDING], ids=["divided", "whole-blocks"])
def test_8_bit_state_is_encoded_anew_only_if_that_is_asked_for(rows: int) -> None:
    backend = MemoryBackend()
    made(backend, state_dtype="int8", rows=rows)
    model = Net()
    with opened(backend, model, state_dtype="int8") as optimizer:
        if rows == DIVIDING:
            with pytest.raises(MismatchError, match=r"'embed'.*restore\(reencode=True\)"):
                optimizer.restore(reencode=False)
            assert not any(parameter.any() for parameter in model.parameters())
        with warned(*(ANEW if rows == DIVIDING else ())):
            assert optimizer.restore(reencode=True) is not None
        assert_same_model(model)
        assert optimizer.checkpoint().result().verify().ok
    with opened(backend, model, state_dtype="int8") as optimizer, warned():
        assert optimizer.restore(reencode=True) is not None, "this is its cut now"


@pytest.mark.parametrize("allowed", [True, False])
def test_the_setting_says_whether_8_bit_state_may_be_encoded_anew_if_no_argument_does(
    allowed: bool,
) -> None:
    backend = MemoryBackend()
    made(backend, state_dtype="int8")
    with opened(backend, Net(), state_dtype="int8", reencode=allowed) as optimizer:
        if allowed:
            with pytest.raises(MismatchError, match=r"restore\(reencode=True\)"):
                optimizer.restore(reencode=False)
            with warned(*ANEW):
                optimizer.restore()
        else:
            with pytest.raises(MismatchError, match=r"restore\(reencode=True\)"):
                optimizer.restore()


def test_a_reference_that_has_state_encoded_anew_warns_its_caller() -> None:
    backend = MemoryBackend()
    made(backend, state_dtype="int8")
    with opened(backend, Net(), state_dtype="int8", reencode=True) as optimizer:
        with warned(*ANEW):
            optimizer.restore()
        reference = optimizer.state_dict()
    with opened(backend, Net(), state_dtype="int8", reencode=True) as optimizer:
        with warned(*ANEW):
            optimizer.load_state_dict(reference)
        assert optimizer.num_steps == 1


@pytest.mark.parametrize("made_by", ["two ranks", "one process"])
def test_an_empty_directory_takes_the_newest_copy_of_the_tier(made_by: str, tmp_path: Path) -> None:
    tier = f"file://{tmp_path}/tier"
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    model: torch.nn.Module = Net()
    if made_by == "two ranks":
        with PosixBackend() as backend:
            made(backend, old)
    else:
        model = make_model()
        with make_optimizer(model, directory=old) as optimizer:
            train(optimizer, 1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    push(old, tier)
    with opened(None, model, new, tier=Tier(tier, finish_s=0)) as optimizer:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        found = optimizer.restore()
        assert found is not None
        assert (found.step, found.train_state) == (1, {"step": 1})
        assert found.path == f"{new}/step-00000001"
        if made_by == "two ranks":
            assert_same_model(model)
        else:
            assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)
        optimizer.synchronize()
        assert found.verify().ok
