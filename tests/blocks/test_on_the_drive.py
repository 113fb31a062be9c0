"""Parameters of blocks in the slot's model file: plain torch's bits, without memory for them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from gds import PosixBackend, StorageError
from offload.errors import (
    DamagedError,
    NotRestoredError,
    OffloadError,
    UnsupportedParameterError,
)
from tests.blocks.models import HYPER, Model, Pair, batch, make, pair
from tests.blocks.test_bits import OPTIMIZERS, PREPARED, USES
from tests.crash.fault_backend import FaultBackend
from tests.dying import dying
from tests.numerics.reference import Reference, assert_same_bits, assert_same_parameters

DRIVE = {"parameters": "drive"}
ALL_DRIVE = {"parameters": "drive", "gradients": "drive"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_has_the_bits_of_torch(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    optimizer, hyper = OPTIMIZERS[name]
    both = pair(tmp_path / "run", optimizer=optimizer, hyper=hyper, dtype=dtype, options=ALL_DRIVE)
    for step in range(5):
        both.train(step, num=1 + step % 3)
        if step == 2:
            for model in both:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        both.step()
        if step % 2:
            both.optimizer.checkpoint()


@pytest.mark.parametrize("how", ["reentrant", "not-reentrant-forward", "frozen", "reordered"])
def test_models_of_many_kinds(tmp_path: Path, how: str) -> None:
    both = pair(tmp_path / "run", PREPARED[how], options=DRIVE)
    for step in range(3):
        both.train(step, num=2)
        both.step()
        if step == 1:
            both.optimizer.checkpoint().result()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_uses_between_steps(tmp_path: Path, use: Any) -> None:
    both = pair(tmp_path / "run", options=DRIVE)
    for step in range(3):
        both.train(step)
        found = [use(model) for model in both]
        assert (found[0] is None) == (found[1] is None)
        both.step()
        [use(model) for model in both]
        if step == 1:
            both.optimizer.checkpoint().result()
            both.optimizer.restore()


@pytest.mark.parametrize(
    "settings",
    [{"master": "split"}, {"state_dtype": "int8"}, {"state_dtype": "bfloat16"}],
    ids=["split", "int8", "bfloat16"],
)
def test_compressed_state_has_the_bits_that_it_has_in_memory(settings: Any, tmp_path: Path) -> None:
    found = []
    for where in ({}, ALL_DRIVE):
        model = make()
        options = offload.Options(chunk_bytes=32768, **settings, **where)
        with offload.AdamW(
            model.parameters(), directory=tmp_path / str(len(found)), model=model, options=options
        ) as optimizer:
            for step in range(3):
                model.loss(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    optimizer.checkpoint().result()
            found.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert_same_parameters(found[1].items(), found[0].items())


def on_the_drive(model: torch.nn.Module, directory: Path, *, keep: int = 2, **settings: Any) -> Any:
    options = offload.Options(**{**ALL_DRIVE, "chunk_bytes": 32768, **settings})
    return offload.AdamW(
        model.parameters(), directory=directory, model=model, keep=keep, options=options, **HYPER
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_without_memory_is_imported_trained_and_resumed(is_tied, tmp_path: Path) -> None:
    plain = make(tied=is_tied)
    state = {n: t for n, t in plain.state_dict().items() if not (is_tied and n == "head.weight")}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    tied = {"tied": {"head.weight": "embedding.weight"}} if is_tied else {}
    offload.import_checkpoint(
        tmp_path / "model.safetensors", tmp_path / "run", torch.optim.AdamW, **tied
    )
    reference = Reference(torch.optim.AdamW, plain.parameters(), **HYPER)
    for start in (0, 2):
        with offload.outside_memory():
            model = Model(tied=is_tied).to(torch.bfloat16)
        with on_the_drive(model, tmp_path / "run") as optimizer:
            with pytest.raises(NotRestoredError, match="call restore"):
                model.loss(batch(0))
            assert optimizer.restore().step == start
            for step in range(start, start + 2):
                for each, one in ((model, optimizer), (plain, reference)):
                    for p in each.parameters():
                        p.grad = None
                    each.loss(batch(step)).backward()
                    one.step()
                values = {n: p.detach().clone() for n, p in model.named_parameters()}
                assert_same_parameters(values.items(), plain.named_parameters())
            path = optimizer.checkpoint().result().path
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    for name, p in plain.named_parameters():
        assert_same_bits(stored[name], p.detach(), name)


def test_frozen_blocks_of_a_model_without_memory_come_back_with_a_restore(tmp_path: Path) -> None:
    plain = make()
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    offload.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", torch.optim.AdamW)
    with offload.outside_memory():
        model = Model().to(torch.bfloat16)
    for each in (plain, model):
        each.layers[1].requires_grad_(requires_grad=False)
    trained = [p for p in plain.parameters() if p.requires_grad]
    reference = Reference(torch.optim.AdamW, trained, **HYPER)
    options = offload.Options(chunk_bytes=32768, **DRIVE)
    with offload.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        directory=tmp_path / "run", model=model, options=options, **HYPER,
    ) as optimizer:  # fmt: skip
        optimizer.restore()
        for step in range(4):
            for each, one in ((model, optimizer), (plain, reference)):
                each.zero_grad()
                each.loss(batch(step)).backward()
                one.step()
            optimizer.checkpoint().result()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        assert_same_parameters(values.items(), plain.named_parameters())


def test_edits_count_with_and_without_a_gradient_and_in_a_checkpoint(tmp_path: Path) -> None:
    both = pair(tmp_path / "run", options=DRIVE)
    both.train(0)
    both.step()
    for model in both:
        with torch.no_grad():
            model.layers[0].up.weight.mul_(0.5)
            model.layers[3].scale.fill_(0.25)
    path = both.optimizer.checkpoint().result().path
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    assert_same_bits(stored["layers.3.scale"], both.plain.layers[3].scale.detach(), "sealed")
    for model in both:
        model.order = [0, 1, 2]  # the fourth block has no gradient, but its edit is to be kept
    for step in range(1, 3):
        both.train(step)
        both.step()
    both.compare()


def test_an_edit_without_a_gradient_is_kept_by_steps_in_place(tmp_path: Path) -> None:
    """Such a step does not read the chunks of the block, and yet has to write the edit."""
    both = pair(tmp_path / "run", options={**DRIVE, "chunk_bytes": 4096})
    for step in range(2):
        both.train(step)
        both.step()
    for model in both:
        with torch.no_grad():
            model.layers[3].up.weight.mul_(0.5)
        model.order = [0, 1, 2]
    for step in range(2, 4):
        both.train(step)
        both.step()
        both.compare()
    path = both.optimizer.checkpoint().result().path
    stored = safetensors.torch.load_file(f"{path}/model.safetensors")
    assert_same_bits(
        stored["layers.3.up.weight"], both.plain.layers[3].up.weight.detach(), "sealed"
    )


def test_a_checkpoint_writes_no_parameter_that_a_step_has_written(tmp_path: Path) -> None:
    model = make(width=256)
    trained = sum(p.nbytes for layer in model.layers for p in layer.parameters())
    with on_the_drive(model, tmp_path / "run") as optimizer:
        for step in range(6):
            model.loss(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.checkpoint().result()
        assert trained > 7 << 20
        written = optimizer.stats().seal_bytes
    assert written < 1.5 * (1 << 20)  # train state, manifest, and the mebibytes at both ends


@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_step_moves_as_many_bytes_as_the_page_says(tmp_path: Path, num_micro: int) -> None:
    """(14 + 2m) read and written by the step; 2 for each load of a block, at most 4m."""
    model = make(layers=12, width=256)
    num = sum(p.numel() for p in model.parameters())
    with on_the_drive(model, tmp_path / "run", chunk_bytes=1 << 20) as optimizer:
        moved = []
        for step in range(3):
            for micro in range(num_micro):
                model.loss(batch(10 * step + micro)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            moved.append(optimizer.stats())
        before, after = moved[1:]
    loaded = after.block_bytes - before.block_bytes
    assert 3 * num_micro * num < loaded <= 4 * num_micro * num
    read, written = (
        getattr(after, name) - getattr(before, name) for name in ("bytes_read", "bytes_written")
    )
    expected = (14 + 2 * num_micro) * num
    assert written == pytest.approx(expected, rel=0.01)
    # What is read ahead for the next step or forward is counted in this one or the next.
    assert read == pytest.approx(expected + loaded, rel=0.05)


def test_a_damaged_block_is_refused_before_it_is_used(tmp_path: Path) -> None:
    """The file has three ranges with a digest; a restore reads the first and the last one."""
    model = make(layers=24, width=256)
    with on_the_drive(model, tmp_path / "run", gradients=None, chunk_bytes=1 << 20) as optimizer:
        model.loss(batch(0)).backward()
        optimizer.step()
        path = Path(optimizer.checkpoint().result().path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    assert len(content) > 33 << 20
    content[24 << 20] ^= 4
    file.write_bytes(content)
    model = make(layers=24, width=256)
    with on_the_drive(model, tmp_path / "run", gradients=None, chunk_bytes=1 << 20) as optimizer:
        assert optimizer.restore().step == 1
        with pytest.raises(DamagedError, match=r"model\.safetensors"):
            model.loss(batch(1))


def test_a_block_that_cannot_be_read_is_named_and_training_goes_on(tmp_path: Path) -> None:
    backend = FaultBackend(PosixBackend())
    model, plain = make(), make()
    reference = Reference(torch.optim.AdamW, plain.parameters(), **HYPER)
    with on_the_drive(model, tmp_path / "run", backend=backend) as optimizer:
        for step in range(2):
            for each, one in ((model, optimizer), (plain, reference)):
                each.zero_grad()
                each.loss(batch(step)).backward()
                one.step()
        optimizer.checkpoint().result()
        optimizer.synchronize()
        backend.fail("read", 1, forever=True)
        with pytest.raises(StorageError, match=r"model\.safetensors"):
            model.loss(batch(9))
        backend.repair()
        optimizer.restore()
        for each, one in ((model, optimizer), (plain, reference)):
            each.zero_grad()
            each.loss(batch(2)).backward()
            one.step()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        assert_same_parameters(values.items(), plain.named_parameters())


def test_after_closing_every_use_says_where_the_values_are(tmp_path: Path) -> None:
    model = make()
    with on_the_drive(model, tmp_path / "run") as optimizer:
        model.loss(batch(0)).backward()
        optimizer.step()
        path = optimizer.checkpoint().result().path
    with pytest.raises(OffloadError, match="is closed"):
        model.loss(batch(0))
    fresh = make(seed=1)
    offload.load_parameters(fresh, path)
    assert torch.isfinite(fresh.loss(batch(0)))


def test_what_would_need_other_values_is_refused(tmp_path: Path) -> None:
    model = make()
    model.layers[0].up.weight.data = model.layers[0].up.weight.data.t().contiguous().t()
    with pytest.raises(TypeError, match="is not contiguous"):
        on_the_drive(model, tmp_path / "run")


def test_a_reference_is_loaded_beside_the_parameters_as_they_are(tmp_path: Path) -> None:
    """As a Trainer resumes: it loads the parameters itself."""
    both = pair(tmp_path / "run", options=DRIVE)
    for step in range(2):
        both.train(step)
        both.step()
    both.optimizer.checkpoint().result()
    reference, values = both.optimizer.state_dict(), both.plain.state_dict()
    both.optimizer.close()
    other = pair(tmp_path / "run", options=DRIVE, seed=5)
    other.streamed.load_state_dict(values)
    again = Pair(both.plain, other.streamed, both.reference, other.optimizer)
    for model in again:
        model.zero_grad()
        with torch.no_grad():
            model.layers[1].up.weight.mul_(0.5)
            model(batch(0))  # drops the block that was loaded for the edit
    other.optimizer.load_state_dict(reference)
    again.compare()
    for step in range(2, 4):
        again.train(step)
        again.step()
        again.optimizer.checkpoint().result()


def test_gradients_set_by_hand_after_a_restore(tmp_path: Path) -> None:
    model = make()
    with on_the_drive(model, tmp_path / "run") as optimizer:
        model.loss(batch(0)).backward()
        optimizer.step()
        optimizer.checkpoint().result()
    model = make()
    with on_the_drive(model, tmp_path / "run", gradients=None) as optimizer:
        optimizer.restore()
        for p in model.parameters():
            p.grad = torch.ones(p.shape, dtype=p.dtype)
        optimizer.step()
        assert torch.isfinite(model.loss(batch(1)))


def test_a_drive_that_fails_does_not_keep_close_from_closing(tmp_path: Path) -> None:
    backend, model = FaultBackend(PosixBackend()), make()
    optimizer = on_the_drive(model, tmp_path / "run", backend=backend)
    model.loss(batch(0)).backward()
    optimizer.step()
    optimizer.checkpoint().result()
    held = model.state_dict()
    backend.fail("read", 1, forever=True)
    optimizer.close()
    backend.repair()
    assert_same_parameters(model.state_dict().items(), held.items())
    model = make()
    with on_the_drive(model, tmp_path / "run") as optimizer:
        optimizer.restore()
    with pytest.raises(UnsupportedParameterError, match="build the model anew"):
        on_the_drive(model, tmp_path / "run")
    model = make()
    with on_the_drive(model, tmp_path / "run") as again:
        assert again.restore().step == 1


def run_program(*arguments: Any, kill_after: str | None = None) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "tests.blocks.beyond", *map(str, arguments)]
    with subprocess.Popen(
        dying(command), stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if kill_after is not None and line.startswith(f"moment {kill_after}"):
                process.send_signal(signal.SIGKILL)
    if kill_after is not None:
        assert process.returncode == -signal.SIGKILL
        return None
    assert process.returncode == 0, lines
    found: dict[str, Any] = json.loads(lines[-1])
    return found


FROZEN = "(qkv|up|down).weight"


@pytest.mark.parametrize(
    ("frozen", "moments"),
    [((), ("forward 1", "backward 2", "step 2", "seal 3")), ((FROZEN,), ("seal 0", "step 2"))],
    ids=["trained", "frozen"],
)
def test_a_process_that_is_killed_resumes_to_the_same_bits(
    frozen: Any, moments: Any, tmp_path: Path
) -> None:
    plain = run_program("plain", tmp_path / "a", 4, 6, *frozen)
    for moment in moments:
        run_program("drive", tmp_path / "b", 4, 6, *frozen, kill_after=moment)
    found = run_program("drive", tmp_path / "b", 4, 6, *frozen)
    assert plain is not None
    assert found is not None
    assert found["digest"] == plain["digest"]


def test_memory_hardly_grows_with_the_depth(tmp_path: Path) -> None:
    """Two depths, four times apart. What grows is the graph and the objects of each block."""
    small, large = (run_program("drive", tmp_path / str(n), 2, n) for n in (20, 80))
    assert small is not None
    assert large is not None
    assert large["above"] - small["above"] < (large["parameters"] - small["parameters"]) / 4
    assert large["above"] < allowed(large["parameters"])


def allowed(parameters: int) -> int:
    """The ring, three of 80 blocks, gradients that are under way, and 128 MiB."""
    return 3 * (3 << 20) + 3 * parameters // 80 + (16 << 20) + (128 << 20)


def test_frozen_parameters_take_no_memory(tmp_path: Path) -> None:
    found = run_program("drive", tmp_path / "a", 2, 80, FROZEN)
    assert found is not None
    assert found["above"] < allowed(found["parameters"]) < found["parameters"] * 2 / 3
