"""Restoring from a tier into an empty directory, and training on while the state arrives."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import (
    BrokenOptimizerError,
    CheckpointError,
    DamagedError,
    MismatchError,
    TierError,
    TierNotFoundError,
    TierUnavailableError,
)
from offload.format.digests import DigestContext
from offload.options import Tier
from offload.tiers import arriving, push
from offload.tiers.filling import Download
from tests.dying import dying
from tests.eventually import eventually
from tests.stores.files import tree
from tests.stores.small import make_model, make_optimizer, step, train
from tests.threads import since
from tests.tiers.conftest import SETTINGS, optimizer_in
from tests.tiers.proxy import Proxy, Request

WIDTHS = (64, 40)


def optimizer_with(
    store: Path | list[Path], tier: str, model: torch.nn.Module | None = None, **changes: Any
) -> offload.OffloadedOptimizer:
    settings = {**SETTINGS, "tier": Tier(tier, finish_s=0), **changes.pop("settings", {})}
    arguments = {"directory": store, "keep": 3, **changes}
    return make_optimizer(model or make_model(*WIDTHS, seed=5), settings=settings, **arguments)


def names(store: Path) -> list[str]:
    """The checkpoints of a store, as a stranger sees them."""
    if not store.exists():
        return []
    return [os.path.basename(found.path) for found in offload.list_checkpoints(store)]


def sealed(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint without those that say when it was made."""
    return {p.name: data for p, data in tree(path).items() if p.suffix == ".safetensors"}


@pytest.fixture
def went_on(store: Path) -> dict[str, bytes]:
    """The checkpoint of step 6 of the training that was never interrupted."""
    with optimizer_in(store, keep=9) as optimizer:
        optimizer.restore()
        train(optimizer, 3)
    return sealed(store / "step-00000006")


@pytest.mark.parametrize("num_drives", [1, 2])
def test_training_goes_on_bit_by_bit(
    store: Path, tier: str, tmp_path: Path, went_on: dict[str, bytes], num_drives: int
) -> None:
    push(store / "step-00000003", tier)
    drives = [tmp_path / f"new{number}" for number in range(num_drives)]
    with optimizer_with(drives, tier) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert (restored.step, restored.train_state) == (3, {"step": 3})
        assert restored.path == str(drives[0] / "step-00000003")
        train(optimizer, 3)
        assert optimizer._uploads is not None
        assert [*names(drives[0])] == ["step-00000004", "step-00000005", "step-00000006"]
    found = sealed(drives[0] / "step-00000006")
    if num_drives == 1:
        assert {n: d for n, d in found.items() if n != "train_state.safetensors"} == {
            n: d for n, d in went_on.items() if n != "train_state.safetensors"
        }
    found_state = offload.open_checkpoint(drives[0] / "step-00000006", parts=drives[1:] or None)
    before = offload.open_checkpoint(store / "step-00000006")
    with found_state, before:
        assert found_state.generation == before.generation
        assert found_state.verify().ok
        for name in before.state_arrays:
            for key in ("0.weight", "0.bias"):
                one = offload.read_state(found_state, key)[name]
                assert torch.equal(one, offload.read_state(before, key)[name])


def test_what_has_arrived_is_the_checkpoint_that_was_sent(
    store: Path, tier: str, tmp_path: Path
) -> None:
    push(store, tier)
    with optimizer_with(tmp_path / "new", tier) as optimizer:
        optimizer.restore()
        optimizer.synchronize()
        assert names(tmp_path / "new") == ["step-00000003"]
        assert optimizer.position.sealed
    sent, arrived = (tree(p / "step-00000003") for p in (store, tmp_path / "new"))
    assert [*sent.values()] == [*arrived.values()]


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
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
    with optimizer_with(tmp_path / "new", s3, model, settings={"overlap": overlap}) as optimizer:
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
    with optimizer_with(tmp_path / "new", s3, model) as optimizer:
        optimizer.restore()
        seen.append(weight.detach()[0].clone())
        restored.set()
        train(optimizer, 3)
    found = sealed(tmp_path / "new" / "step-00000006")
    assert found.keys() == went_on.keys()
    assert {name for name in found if found[name] != went_on[name]} <= {"train_state.safetensors"}


def test_a_download_that_was_closed_half_way_goes_on(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    push(store, s3, object_bytes=1)
    done = arrived_objects(proxy)
    proxy.rule = lambda r: "hang" if "/state/exp_avg_sq" in r.path and r.method == "GET" else ""
    with optimizer_with(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        assert eventually(lambda: sum("/state/" in name for name in done()) >= 3)
    assert names(tmp_path / "new") == []
    first = done()
    proxy.rule = lambda _: ""
    with optimizer_with(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        optimizer.synchronize()
        assert names(tmp_path / "new") == ["step-00000003"]
    assert max((done() - first).values()) == 1
    twice = {name for name, times in done().items() if times > 1}
    assert not any("/state/" in name for name in twice)
    with offload.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.verify().ok


def test_an_optimizer_that_is_collected_on_the_thread_of_its_arrival_is_closed(
    store: Path, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any allocation there may begin a collection."""
    push(store, tier, object_bytes=1)
    dropped, collected = threading.Event(), threading.Event()
    publish = Download.publish

    def collect(download: Download, *arguments: Any) -> Any:
        dropped.wait(60)
        gc.collect()
        collected.set()
        return publish(download, *arguments)

    monkeypatch.setattr(Download, "publish", collect)
    gc.disable()
    try:
        others = threading.enumerate()
        optimizer = optimizer_with(tmp_path / "new", tier)
        optimizer.restore()
        optimizer.itself = optimizer
        (thread,) = since(others, "offload-arrival")
        del optimizer
        dropped.set()
        assert collected.wait(60)
        thread.join(60)
        assert not thread.is_alive()
    finally:
        gc.enable()
    assert eventually(lambda: not since(others, "offload-close"))
    with optimizer_with(tmp_path / "new", tier) as successor:  # the store is not locked
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


@pytest.mark.parametrize("place", ["parameters", "a chunk of three", "all but one piece"])
def test_a_process_that_is_killed_half_way_leaves_what_it_has(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, went_on: dict[str, bytes], place: str
) -> None:
    """SIGKILL; the next process goes on, and asks for nothing twice that was written."""
    push(store / "step-00000003", s3, object_bytes=1)
    hung = threading.Event()
    proxy.requests.clear()
    kept_back, wanted = {
        "parameters": ("/state/", 0),
        "a chunk of three": ("/state/[a-z_]*.00000[12]", 3),
        "all but one piece": ("/state/exp_avg_sq.000002", 8),
    }[place]

    def rule(request: Request) -> str:
        if request.method == "GET" and re.search(kept_back, request.path):
            hung.set()
            return "hang"
        return ""

    proxy.rule = rule
    command = [sys.executable, "-m", "tests.tiers.killed", "restore", s3, str(tmp_path / "new")]
    with subprocess.Popen(dying(command), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"restored\n"
            assert hung.wait(60)
            assert eventually(lambda: len(state_in(tmp_path / "new", store)) == wanted)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert names(tmp_path / "new") == []
    with pytest.raises(CheckpointError):
        offload.open_checkpoint(tmp_path / "new")
    written = state_in(tmp_path / "new", store)
    proxy.requests.clear()
    proxy.rule = lambda _: ""
    with optimizer_with(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        train(optimizer, 3)
    # Not what uploads of the next checkpoints read back.
    asked = [r.path for r in proxy.requests if r.method == "GET" and "/gen-00000003/" in r.path]
    assert not any("model.safetensors" in path for path in asked)
    for name in written:
        assert not any(name in path for path in asked)
    found = sealed(tmp_path / "new" / "step-00000006")
    assert {name for name in found if found[name] != went_on[name]} <= {"train_state.safetensors"}


def state_in(directory: Path, store: Path) -> set[str]:
    """Names of the objects of state, one chunk each, whose bytes are in a slot of a directory."""
    with offload.open_checkpoint(store / "step-00000003") as sent:
        manifest = sent.manifest
    found = set[str]()
    for slot in directory.glob(".slot-*"):
        for array, digests in manifest.digests.items():
            file = slot / f"{array}.safetensors"
            if not file.exists():
                continue
            whole = file.read_bytes()
            for chunk, digest in enumerate(digests):
                start, nbytes = manifest.layout.byte_range(array, chunk)
                context = DigestContext(manifest.store_id, manifest.generation)
                data = memoryview(whole[start : start + nbytes])
                if digest is not None and context.digest(array, chunk, data) == digest:
                    found.add(f"state/{array}.{chunk:06d}")
    return found


def damage(tier: str, name: str) -> None:
    """Change a byte of an object in a folder."""
    (path,) = Path(tier.removeprefix("file://")).rglob(name)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_wrong_byte_is_found_and_named(store: Path, tmp_path: Path) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier, object_bytes=1)
    damage(tier, "exp_avg.000001")
    model = make_model(*WIDTHS, seed=5)
    with optimizer_with(tmp_path / "new", tier, model) as optimizer:
        optimizer.restore()
        with pytest.raises(DamagedError, match=r"state/exp_avg\.000001: bytes 0 to"):
            train(optimizer, 1)
        with pytest.raises(BrokenOptimizerError, match="to go on from the newest checkpoint in"):
            step(optimizer)
        assert names(tmp_path / "new") == []
        damage(tier, "exp_avg.000001")  # the same bit again
        with pytest.warns(RuntimeWarning, match="are not those that were sent"):
            assert optimizer.restore() is not None
        train(optimizer, 1)
    assert names(tmp_path / "new") == ["step-00000003", "step-00000004"]


def test_a_wrong_byte_of_the_parameters_changes_nothing_on_the_drive(
    store: Path, tmp_path: Path
) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier)
    damage(tier, "model.safetensors")
    with (
        optimizer_with(tmp_path / "new", tier) as optimizer,
        pytest.raises(DamagedError, match=r"model\.safetensors: bytes"),
    ):
        optimizer.restore()
    assert names(tmp_path / "new") == []


def test_a_link_that_dies_is_named_and_what_has_arrived_stays(
    store: Path, s3: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "_RETRY_S", 0.2)
    push(store, s3, object_bytes=1)
    proxy.rule = lambda r: "503" if "/state/exp_avg_sq" in r.path else ""
    with optimizer_with(tmp_path / "new", s3) as optimizer:
        optimizer.restore()
        with pytest.raises(TierUnavailableError, match="exp_avg_sq"):
            train(optimizer, 1)
        proxy.rule = lambda _: ""
        with pytest.warns(RuntimeWarning, match="exp_avg_sq"):
            optimizer.restore()
        train(optimizer, 1)
    assert names(tmp_path / "new") == ["step-00000003", "step-00000004"]


def test_a_checkpoint_before_the_first_step_waits_for_the_state(
    store: Path, tmp_path: Path
) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier)
    with optimizer_with(tmp_path / "new", tier) as optimizer:
        optimizer.restore()
        handle = optimizer.checkpoint({"other": 1})
        assert handle.result().train_state == {"other": 1}
        assert names(tmp_path / "new") == ["step-00000003"]
        assert optimizer.restore() is not None


def test_an_empty_tier_means_the_beginning(tmp_path: Path, tier: str) -> None:
    with optimizer_with(tmp_path / "new", tier) as optimizer:
        assert optimizer.restore() is None
        train(optimizer, 1)
    assert names(tmp_path / "new") == ["step-00000001"]


def test_a_tier_with_nothing_complete_is_mentioned(store: Path, s3: str, proxy: Proxy) -> None:
    proxy.rule = lambda r: "403" if "COMPLETE" in r.path and r.method == "PUT" else ""
    with pytest.raises(TierError):
        push(store, s3, retry_s=0)
    with (
        optimizer_with(store.parent / "new", s3) as optimizer,
        pytest.warns(RuntimeWarning, match=r"no complete copy.*from the beginning"),
    ):
        assert optimizer.restore() is None


def test_a_store_with_checkpoints_does_not_need_the_tier(
    store: Path, s3: str, proxy: Proxy
) -> None:
    proxy.rule = lambda _: "503"
    with optimizer_with(store, s3) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.step == 3
    # The thread that uploads may ask what the tier has; restore() reads nothing there.
    assert not any(r.method == "GET" and "safetensors" in r.path for r in proxy.requests)


def test_starting_over_does_not_ask_the_tier(store: Path, tmp_path: Path) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier)
    with optimizer_with(tmp_path / "new", tier, fresh=True) as optimizer:
        assert optimizer.restore() is None


def test_copies_of_several_stores_are_refused_until_one_is_named(
    store: Path, tmp_path: Path
) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier)
    with optimizer_in(tmp_path / "other") as optimizer:
        train(optimizer, 1)
    push(tmp_path / "other", tier)
    with (
        optimizer_with(tmp_path / "new", tier) as optimizer,
        pytest.raises(TierError, match="copies of 2 stores are here; name one of them"),
    ):
        optimizer.restore()


def test_another_model_is_refused_before_anything_is_fetched(store: Path, tmp_path: Path) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier)
    other = make_model(30, 20)
    before = [p.detach().clone() for p in other.parameters()]
    with optimizer_with(tmp_path / "new", tier, other) as optimizer:
        with pytest.raises(MismatchError, match="/tier/"):
            optimizer.restore()
        assert all(map(torch.equal, before, other.parameters()))
        train(optimizer, 1)
    assert names(tmp_path / "new") == ["step-00000001"]


def test_another_size_of_train_states_is_taken(store: Path, tmp_path: Path) -> None:
    tier = f"file://{tmp_path}/tier"
    push(store, tier)
    settings = {"train_state_bytes": 65536}
    with optimizer_with(tmp_path / "new", tier, settings=settings) as optimizer:
        restored = optimizer.restore()
        assert restored is not None
        assert restored.train_state == {"step": 3}
        train(optimizer, 1)
    with offload.open_checkpoint(tmp_path / "new" / "step-00000003") as checkpoint:
        assert checkpoint.train_state == {"step": 3}
        assert checkpoint.verify().ok


@pytest.mark.parametrize(
    ("fault", "error"), [("503", TierUnavailableError), ("404:NoSuchBucket", TierNotFoundError)]
)
def test_a_tier_that_cannot_be_reached_is_not_an_empty_one(
    tmp_path: Path, s3: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: str, error: type
) -> None:
    monkeypatch.setattr(arriving, "_RETRY_S", 0.2)
    proxy.rule = lambda _: fault
    with optimizer_with(tmp_path / "new", s3) as optimizer, pytest.raises(error):
        optimizer.restore()
