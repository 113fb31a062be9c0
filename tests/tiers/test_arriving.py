"""Restoring from a tier into an empty directory, and training on while the state arrives."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import PosixBackend, WrapperBackend
from offload.errors import (
    BrokenOptimizerError,
    DamagedError,
    MismatchError,
    TierError,
    TierNotFoundError,
    TierUnavailableError,
)
from offload.tiers import push
from tests.eventually import eventually
from tests.limits import HANG_S
from tests.stores.small import make_model, step, train
from tests.threads import since
from tests.tiers.copies import DOCUMENTS, WIDTHS, change, files, new_in, optimizer_in
from tests.tiers.proxy import Proxy, Request

pytestmark = pytest.mark.usefixtures("impatient")


def names(store: Path) -> list[str]:
    """The checkpoints of a store, as a stranger sees them."""
    if not store.exists():
        return []
    return [os.path.basename(found.path) for found in offload.list_checkpoints(store)]


@pytest.fixture
def went_on(store: Path) -> dict[str, bytes]:
    """The checkpoint of step 6 of the training that was never interrupted."""
    with optimizer_in(store, keep=9) as optimizer:
        optimizer.restore()
        train(optimizer, 3)
    return files(store / "step-00000006", *DOCUMENTS)


def test_training_goes_on_bit_by_bit(
    store: Path, tier: str, tmp_path: Path, went_on: dict[str, bytes]
) -> None:
    push(store / "step-00000003", tier)
    new = tmp_path / "new"
    with new_in(new, tier) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert (restored.step, restored.train_state) == (3, {"step": 3})
        assert restored.path == str(new / "step-00000003")
        train(optimizer, 3)
        assert names(new) == ["step-00000004", "step-00000005", "step-00000006"]
    assert files(new / "step-00000006", *DOCUMENTS) == went_on


def test_state_arrives_on_several_drives(
    store: Path, s3: str, tmp_path: Path, went_on: dict[str, bytes]
) -> None:
    push(store / "step-00000003", s3)
    drives = [tmp_path / "first", tmp_path / "second"]
    with new_in(drives, s3) as optimizer:
        assert optimizer.restore() is not None
        train(optimizer, 3)
    found = offload.open_checkpoint(drives[0] / "step-00000006", parts=drives[1:])
    with found, offload.open_checkpoint(store / "step-00000006") as before:
        assert found.generation == before.generation
        assert found.verify().ok
        for name in before.state_arrays:
            for key in ("0.weight", "0.bias"):
                one = offload.read_state(found, key)[name]
                assert torch.equal(one, offload.read_state(before, key)[name])


def test_what_has_arrived_is_the_checkpoint_that_was_sent(
    store: Path, s3: str, tmp_path: Path
) -> None:
    push(store, s3)
    with new_in(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        assert optimizer.checkpoint({"other": 1}).result().train_state == {"other": 1}
        assert names(tmp_path / "new") == ["step-00000003"]
    with new_in(tmp_path / "newer", s3, settings={"train_state_bytes": 65536}) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.train_state == {"step": 3}
        optimizer.synchronize()
        assert names(tmp_path / "newer") == ["step-00000003"]
        assert optimizer.position.sealed
    with offload.open_checkpoint(tmp_path / "newer") as checkpoint:
        assert checkpoint.train_state == {"step": 3}
        assert checkpoint.verify().ok
    with new_in(tmp_path / "newest", s3) as optimizer:
        optimizer.restore()
        optimizer.synchronize()
    sent, arrived = (files(tmp_path / name / "step-00000003") for name in ("store", "newest"))
    assert sent == arrived


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_the_first_forward_needs_the_parameters_only(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, overlap: str | None
) -> None:
    """The server keeps the state back until the forward has run."""
    push(store, s3)
    forward_has_run, asked = threading.Event(), threading.Event()

    def rule(request: Request) -> str:
        if request.method == "GET" and "/state/" in request.path:
            asked.set()
            assert forward_has_run.wait(60)
        return ""

    proxy.requests.clear()
    proxy.rule = rule
    model = make_model(*WIDTHS, seed=5)
    with new_in(tmp_path / "new", s3, model, settings={"overlap": overlap}) as optimizer:
        optimizer.restore()
        assert asked.wait(60)
        loss = model(torch.ones(2, WIDTHS[0], dtype=torch.bfloat16)).float().sum()
        before = sum(r.bytes_down for r in proxy.requests)
        whole = sum(r.bytes_down for r in proxy.requests if "model.safetensors" in r.path)
        assert names(tmp_path / "new") == []
        forward_has_run.set()
        loss.backward()
        optimizer.step()
        optimizer.synchronize()
        assert names(tmp_path / "new") == ["step-00000003"]
    with offload.open_checkpoint(store) as checkpoint:
        header = checkpoint.manifest.layout.model_header
    assert whole == header.file_bytes - header.data_start  # 2 bytes per parameter
    documents = ("COMPLETE.json", "manifest.json", "train_state", "?")
    others = [
        r for r in proxy.requests
        if "model.safetensors" not in r.path and "/state/" not in r.path
    ]  # fmt: skip
    assert all(any(name in r.path for name in documents) for r in others)
    assert before == whole + sum(r.bytes_down for r in others)


def test_the_first_step_takes_chunks_as_they_arrive(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, went_on: dict[str, bytes]
) -> None:
    """The last chunk is kept back until the step has updated the first one."""
    push(store / "step-00000003", s3, object_bytes=1)  # one chunk in each object
    with offload.open_checkpoint(store) as checkpoint:
        last = checkpoint.manifest.layout.num_chunks - 1
    assert last >= 2
    model = make_model(*WIDTHS, seed=5)
    weight = next(model.parameters())
    restored, seen = threading.Event(), list[torch.Tensor]()

    def rule(request: Request) -> str:
        if request.method == "GET" and f".{last:06d}" in request.path:
            assert restored.wait(60)
            assert eventually(lambda: not torch.equal(weight.detach()[0], seen[0]))
        return ""

    proxy.rule = rule
    with new_in(tmp_path / "new", s3, model) as optimizer:
        optimizer.restore()
        seen.append(weight.detach()[0].clone())
        restored.set()
        train(optimizer, 3)
    assert files(tmp_path / "new" / "step-00000006", *DOCUMENTS) == went_on


def test_a_download_that_was_closed_half_way_goes_on(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    push(store, s3, object_bytes=1)
    done = arrived_objects(proxy)
    proxy.rule = lambda r: "hang" if "/state/exp_avg_sq" in r.path and r.method == "GET" else ""
    with new_in(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        assert eventually(lambda: sum("/state/" in name for name in done()) >= 3)
    assert names(tmp_path / "new") == []
    first = done()
    proxy.rule = lambda _: ""
    with new_in(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        optimizer.synchronize()
        assert names(tmp_path / "new") == ["step-00000003"]
    assert max((done() - first).values()) == 1
    twice = {name for name, times in done().items() if times > 1}
    assert not any("/state/" in name for name in twice)
    with offload.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.verify().ok


class Collecting(WrapperBackend):
    """A drive on which the thread of the arrival waits, and begins a collection.

    Any allocation there may begin one.
    """

    def __init__(self) -> None:
        super().__init__(PosixBackend())
        self.dropped, self.collected = threading.Event(), threading.Event()

    def rename(self, source: str, target: str, *arguments: Any, **more: Any) -> None:
        if threading.current_thread().name == "offload-arrival":
            assert self.dropped.wait(HANG_S)
            gc.collect()
            self.collected.set()
        super().rename(source, target, *arguments, **more)


def test_an_optimizer_that_is_collected_on_the_thread_of_its_arrival_is_closed(
    store: Path, folder: str, tmp_path: Path
) -> None:
    push(store, folder, object_bytes=1)
    drive = Collecting()
    gc.disable()
    try:
        others = threading.enumerate()
        optimizer = new_in(tmp_path / "new", folder, backend=drive)
        optimizer.restore()
        optimizer.itself = optimizer
        (thread,) = since(others, "offload-arrival")
        del optimizer
        drive.dropped.set()
        assert drive.collected.wait(HANG_S)
        thread.join(HANG_S)
        assert not thread.is_alive()
    finally:
        gc.enable()
    assert eventually(lambda: not since(others, "offload-close"))
    with new_in(tmp_path / "new", folder) as successor:  # the store is not locked
        assert successor.restore() is not None


def arrived_objects(proxy: Proxy) -> Callable[[], Counter[str]]:
    """Return a function that counts how often each range was answered since now."""
    proxy.requests.clear()

    def count() -> Counter[str]:
        return Counter(
            f"{r.path} {r.range}" for r in [*proxy.requests]
            if r.method == "GET" and r.bytes_down
            and ("safetensors" in r.path or "/state/" in r.path)
        )  # fmt: skip

    return count


def test_a_wrong_byte_is_found_and_named(store: Path, folder: str, tmp_path: Path) -> None:
    push(store, folder, object_bytes=1)
    change(folder, "model.safetensors", "last")
    with new_in(tmp_path / "new", folder) as optimizer:
        with pytest.raises(DamagedError, match=r"model\.safetensors: bytes"):
            optimizer.restore()
        assert names(tmp_path / "new") == []
        change(folder, "model.safetensors", "last")  # the same bit again
        change(folder, "state/exp_avg.000001", "last")
        optimizer.restore()
        with pytest.raises(DamagedError, match=r"state/exp_avg\.000001: bytes 0 to"):
            train(optimizer, 1)
        with pytest.raises(BrokenOptimizerError, match="to go on from the newest checkpoint in"):
            step(optimizer)
        assert names(tmp_path / "new") == []
        change(folder, "state/exp_avg.000001", "last")
        with pytest.warns(RuntimeWarning, match="are not those that were sent"):
            assert optimizer.restore() is not None
        train(optimizer, 1)
    assert names(tmp_path / "new") == ["step-00000003", "step-00000004"]


def test_a_link_that_dies_is_named_and_what_has_arrived_stays(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    push(store, s3, object_bytes=1)
    proxy.rule = lambda r: "503" if "/state/exp_avg_sq" in r.path else ""
    with new_in(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        with pytest.raises(TierUnavailableError, match="exp_avg_sq"):
            train(optimizer, 1)
        proxy.rule = lambda _: ""
        with pytest.warns(RuntimeWarning, match="exp_avg_sq"):
            optimizer.restore()
        train(optimizer, 1)
    assert names(tmp_path / "new") == ["step-00000003", "step-00000004"]


def test_a_run_begins_without_a_copy_and_a_tier_that_cannot_be_reached_is_no_empty_one(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    with new_in(tmp_path / "first", f"{s3}-of-the-first") as optimizer:
        assert optimizer.restore() is None
        train(optimizer, 1)
    assert names(tmp_path / "first") == ["step-00000001"]
    proxy.rule = lambda r: "403" if "COMPLETE" in r.path and r.method == "PUT" else ""
    with pytest.raises(TierError):
        push(store, s3, retry_s=0)
    with (
        new_in(tmp_path / "new", s3) as optimizer,
        pytest.warns(RuntimeWarning, match=r"no complete copy.*from the beginning"),
    ):
        assert optimizer.restore() is None
    for fault, error in (("503", TierUnavailableError), ("404:NoSuchBucket", TierNotFoundError)):
        proxy.rule = lambda _, fault=fault: fault
        with new_in(tmp_path / "newer", s3) as optimizer, pytest.raises(error):
            optimizer.restore()
    proxy.requests.clear()
    with new_in(store, s3) as optimizer:  # which has checkpoints, and does not need the tier
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == 3
    # The thread that uploads may ask what the tier has; restore() reads nothing there.
    assert not any(r.method == "GET" and "safetensors" in r.path for r in proxy.requests)


def test_what_is_no_checkpoint_of_this_run_is_refused_before_anything_is_fetched(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    push(store, s3)
    other = make_model(30, 20)
    before = [p.detach().clone() for p in other.parameters()]
    with new_in(tmp_path / "new", s3, other) as optimizer:
        with pytest.raises(MismatchError, match="/run/"):
            optimizer.restore()
        assert all(map(torch.equal, before, other.parameters()))
        train(optimizer, 1)
    assert names(tmp_path / "new") == ["step-00000001"]
    with optimizer_in(tmp_path / "other") as optimizer:
        train(optimizer, 1)
    for one in (store, tmp_path / "other"):
        push(one, f"{s3}-of-two")
    with (
        new_in(tmp_path / "newer", f"{s3}-of-two") as optimizer,
        pytest.raises(TierError, match="copies of 2 stores are here; name one of them"),
    ):
        optimizer.restore()
    with new_in(tmp_path / "newest", s3, fresh=True) as optimizer:  # which does not ask the tier
        assert optimizer.restore() is None
