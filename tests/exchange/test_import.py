"""Imports of other programs' checkpoints: `restore` goes on with the bits of plain torch."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import offload
from offload import import_checkpoint
from offload.errors import CheckpointError, MismatchError, StoreError
from offload.exchange import importing
from tests.exchange.test_export import SETTINGS, export, sealed
from tests.numerics.pairs import CASES
from tests.numerics.reference import assert_same_bits, assert_same_parameters
from tests.stores.small import give_gradients

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIONS = offload.Options(chunk_bytes=8192, ring_chunks=2)
KINDS = ("pt", "hf", "dcp")


class Net(torch.nn.Module):
    """Two groups, a buffer, a tied weight and a frozen parameter."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 24)
        self.body = torch.nn.Sequential(*[torch.nn.Linear(24, 24) for _ in range(11)])
        self.norm = torch.nn.LayerNorm(24)
        self.head = torch.nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(24))
        self.to(dtype)


def groups(model: torch.nn.Module, *, named: bool) -> list[dict[str, Any]]:
    pairs = list(model.named_parameters())
    decay = [(n, p) for n, p in pairs if p.dim() > 1]
    rest = [(n, p) for n, p in pairs if p.dim() <= 1]
    out = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return out if named else [{**g, "params": [p for _, p in g["params"]]} for g in out]


def trained(
    dtype: torch.dtype = torch.float32, *, named: bool = True, steps: int = 3, **hyper: Any
) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(dtype)
    optimizer = torch.optim.AdamW(groups(model, named=named), lr=0.01, **hyper)
    for step in range(steps):
        give_gradients(model.parameters(), step)
        optimizer.step()
    return model, optimizer


def save(model: Net, optimizer: torch.optim.Optimizer, path: Path, kind: str) -> Path:
    if kind == "pt":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    elif kind == "hf":
        path.mkdir()
        safetensors.torch.save_model(model, path / "model.safetensors")
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        (path / "trainer_state.json").write_text('{"global_step": 3}')
    else:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=path, no_dist=True)
    return path


def resumed(store: Path, dtype: torch.dtype, **settings: Any) -> tuple[Net, Any]:
    model = Net(dtype, seed=77)
    optimizer = offload.AdamW(
        groups(model, named=True),
        lr=9.0,
        model=model,
        directory=settings.pop("directory", store),
        options=settings.pop("options", OPTIONS),
    )
    found = optimizer.restore()
    assert found.step == 3
    assert found.verify().ok
    return model, optimizer


def assert_goes_on(
    plain: torch.nn.Module, theirs: torch.optim.Optimizer, mine: torch.nn.Module, own: Any
) -> None:
    for step in range(3, 7):
        for model, optimizer in ((plain, theirs), (mine, own)):
            give_gradients(model.parameters(), step)
            optimizer.step()
    assert_same_parameters(mine.named_parameters(), plain.named_parameters())
    assert_same_bits(mine.table, plain.table, "buffer")


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_training_goes_on_with_the_same_bits(tmp_path, kind):
    model, optimizer = trained()
    path = save(model, optimizer, tmp_path / "theirs", kind)
    told: list[tuple[int, int]] = []
    import_checkpoint(
        path,
        tmp_path / "store",
        options=OPTIONS,
        progress=lambda a, b: told.append((a, b)),
        tied={"head.weight": "embed.weight"} if kind == "dcp" else None,
    )
    assert told[-1][0] == told[-1][1]
    mine, own = resumed(tmp_path / "store", torch.float32)
    assert own.param_groups[0]["lr"] == 0.01
    assert_goes_on(model, optimizer, mine, own)
    own.close()


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("pt", "fused"),
        ("hf", "capturable"),
        ("dcp", "differentiable"),
        ("load_state_dict", "fused"),
        ("load_state_dict", "capturable"),
    ],
)
def test_flags_of_a_run_on_a_gpu_are_left_out(tmp_path, flag, kind, caplog):
    caplog.set_level(logging.INFO, "offload")
    model, optimizer = trained()
    of_torch = [group[flag] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group[flag] = True
    if kind == "load_state_dict":
        mine = copy.deepcopy(model)
        own = offload.AdamW(
            groups(mine, named=True), model=mine, directory=tmp_path / "store", options=OPTIONS
        )
        own.load_state_dict(optimizer.state_dict())
    else:
        path = save(model, optimizer, tmp_path / "theirs", kind)
        tied = {"head.weight": "embed.weight"} if kind == "dcp" else None
        import_checkpoint(path, tmp_path / "store", options=OPTIONS, tied=tied)
        mine, own = resumed(tmp_path / "store", torch.float32)
    with own:
        assert [group[flag] for group in own.param_groups] == of_torch
        assert [flag in record.message for record in caplog.records].count(True) == 1
        for group, value in zip(optimizer.param_groups, of_torch, strict=True):
            group[flag] = value
        assert_goes_on(model, optimizer, mine, own)


@pytest.mark.parametrize("master", ["float32", "split"])
def test_fp32_parameters_become_the_masters_of_16_bit_ones(tmp_path, master):
    model, optimizer = trained()
    path = save(model, optimizer, tmp_path / "theirs.pt", "pt")
    options = offload.Options(chunk_bytes=8192, ring_chunks=2, master=master)
    import_checkpoint(path, tmp_path / "store", dtype=torch.bfloat16, options=options)
    model.table.data = model.table.bfloat16()
    mine = Net(torch.bfloat16, seed=9)
    mine.table = mine.table.float()  # --dtype is for what the optimizer has
    own = offload.AdamW(
        groups(mine, named=True), model=mine, directory=tmp_path / "store", options=options
    )
    own.restore()
    full = own.full_state_dict()
    numbers = [p for g in optimizer.param_groups for p in g["params"]]
    for number, parameter in enumerate(numbers):
        assert_same_bits(full["master"][number], parameter.detach(), "master")
    for step in range(3, 6):
        give_gradients(mine.parameters(), step)
        for p, q in zip(model.parameters(), mine.parameters(), strict=True):
            p.grad = q.grad.float()
        optimizer.step()
        own.step()
    full = own.full_state_dict()
    for number, parameter in enumerate(numbers):
        assert_same_bits(full["master"][number], parameter.detach(), "master")
    own.close()


def test_16_bit_parameters_without_masters_begin_as_they_are(tmp_path):
    model, optimizer = trained(torch.bfloat16)
    path = save(model, optimizer, tmp_path / "theirs.pt", "pt")
    import_checkpoint(path, tmp_path / "store", options=OPTIONS)
    mine, own = resumed(tmp_path / "store", torch.bfloat16)
    full, plain = own.full_state_dict(), optimizer.state_dict()
    assert_same_parameters(mine.named_parameters(), model.named_parameters())
    for number, state in plain["state"].items():
        assert_same_bits(full["state"][number]["exp_avg"], state["exp_avg"].float(), "exp_avg")
    own.close()


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        ("exact", "pt"),
        ("exact", "hf"),
        ("resident", "dcp"),
        ("split", "hf"),
        ("split", "dcp"),
        ("bfloat16", "pt"),
        ("int8", "dcp"),
    ],
)
def test_round_trip_of_our_own_exports(tmp_path, stored, kind):
    """Every stored format, mixed dtypes, all kinds of parameters; blocks of 8 bits aside, exact."""
    settings = SETTINGS[stored]
    pair, path = sealed(tmp_path, CASES["adamw"], settings)
    full = pair.optimizer.full_state_dict()
    export(path, tmp_path / "export", kind)
    import_checkpoint(
        tmp_path / "export",
        [tmp_path / "a", tmp_path / "b"],
        options=offload.Options(
            chunk_bytes=8192,
            ring_chunks=2,
            drives=offload.DriveTuning(shares=(1, 1)),
            **{k: v for k, v in settings.items() if k != "host_memory"},
        ),
        step=3,
        frozen=["frozen"],
        tied={"tied_again.weight": "tied.weight"} if kind == "dcp" else None,
    )
    pair.directory = [str(tmp_path / "a"), str(tmp_path / "b")]
    before, parameters = pair.optimizer, pair.live
    pair.reopen()
    assert pair.optimizer is not before
    found = pair.optimizer.restore()
    assert found.step == 3
    assert found.verify().ok
    assert_same_parameters(pair.live.named_parameters(), parameters.named_parameters())
    if "int8" not in settings.values():
        again = pair.optimizer.full_state_dict()
        assert again["param_groups"] == full["param_groups"]
        for number, state in full["state"].items():
            for name, value in state.items():
                assert_same_bits(again["state"][number][name], value, f"{name} of {number}")
        for number, master in full["master"].items():
            assert_same_bits(again["master"][number], master, f"master of {number}")
    if settings.keys() <= {"host_memory"}:
        for step in range(4, 8):
            pair.step(step)
        pair.assert_same_parameters()
    pair.optimizer.close()


def test_numbers_alone_with_a_list_of_names(tmp_path):
    model, optimizer = trained(named=False)
    path = save(model, optimizer, tmp_path / "theirs", "hf")
    with pytest.raises(MismatchError, match="Give their names"):
        import_checkpoint(path, tmp_path / "store", options=OPTIONS)
    assert not (tmp_path / "store").exists()
    names = [n for g in groups(model, named=True) for n, _ in g["params"]]
    import_checkpoint(path, tmp_path / "store", names=names, options=OPTIONS)
    mine, own = resumed(tmp_path / "store", torch.float32)
    assert_goes_on(model, optimizer, mine, own)
    own.close()


def test_a_plain_checkpoint_of_one_group_needs_no_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    optimizer = torch.optim.Adam(model.parameters())
    give_gradients(model.parameters(), 1)
    optimizer.step()
    state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save(state, tmp_path / "theirs.pt")
    import_checkpoint(tmp_path / "theirs.pt", tmp_path / "s", torch.optim.Adam, options=OPTIONS)
    other = copy.deepcopy(model)
    own = offload.Adam(other.parameters(), model=other, directory=tmp_path / "s", options=OPTIONS)
    own.restore()
    give_gradients(model.parameters(), 2)
    give_gradients(other.parameters(), 2)
    optimizer.step()
    own.step()
    assert_same_parameters(other.named_parameters(), model.named_parameters())
    own.close()


NO_TORCH = r"cannot be read as a file of torch.save|holds a"
ELSE = {
    "empty": (b"", "is empty"),
    "text": ("step: 7\nMoments: \u00e9\n".encode() * 99, r"looks like text .*'step: 7'"),
    "json": (b'{"step": 7}', "looks like text"),
    "gguf": (b"GGUF\x03\x00\x00\x00", "looks like GGUF"),
    "safetensors": (b"\x0a\x00\x00\x00\x00\x00\x00\x00{}        ", "looks like safetensors"),
    "a-dict": (b"\x80\x02}q\x00.", NO_TORCH),
    "a-list": (b"\x80\x02]q\x00.", NO_TORCH),
    "torn-zip": (b"PK\x03\x04nonsense", NO_TORCH),
    "noise": (b"\xff" * 600, NO_TORCH),
}


@pytest.mark.parametrize(("content", "words"), ELSE.values(), ids=ELSE)
def test_a_file_of_something_else_is_named(tmp_path, content, words):
    path = tmp_path / "theirs"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"theirs.*({words})"):
        import_checkpoint(path, tmp_path / "store", options=OPTIONS)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        import_checkpoint(tmp_path / "gone.pt", tmp_path / "store", options=OPTIONS)
    if words == NO_TORCH:
        return
    with pytest.raises(CheckpointError, match=r"expected a file of torch\.save, a"):
        import_checkpoint(path, tmp_path / "store", options=OPTIONS)
    good = save(*trained(steps=1), tmp_path / "theirs.pt", "pt")
    with pytest.raises(CheckpointError, match=rf"{words}.*; expected a .safetensors file"):
        import_checkpoint(good, tmp_path / "store", model=path, options=OPTIONS)


def test_a_store_that_has_checkpoints_is_refused(tmp_path):
    path = save(*trained(), tmp_path / "theirs.pt", "pt")
    import_checkpoint(path, tmp_path / "store", options=OPTIONS)
    with pytest.raises(StoreError, match=r"has checkpoints already.*pass --fresh"):
        import_checkpoint(path, tmp_path / "store", options=OPTIONS, step=8)
    import_checkpoint(path, tmp_path / "store", options=OPTIONS, step=8, fresh=True)
    assert [c.step for c in offload.list_checkpoints(tmp_path / "store")] == [8]


def test_another_class_or_other_names_and_shapes_are_refused(tmp_path):
    path = save(*trained(), tmp_path / "theirs.pt", "pt")
    for cls, message in (
        (torch.optim.SGD, "another class"),
        (torch.optim.Adam, "decoupled_weight_decay"),
    ):
        with pytest.raises(MismatchError, match=message):
            import_checkpoint(path, tmp_path / "store", cls, options=OPTIONS)
    model, optimizer = trained(named=False)
    path = save(model, optimizer, tmp_path / "unnamed.pt", "pt")
    names = [n for g in groups(model, named=True) for n, _ in g["params"]]
    for wrong, message in (
        (names[:-1], "26 parameters|parameters, but"),
        ([*names[:-1], "nose"], "'nose'"),
        ([names[1], names[0], *names[2:]], "expected float32 of shape"),
        ([names[0], names[0], *names[2:]], "in two groups"),
    ):
        with pytest.raises(MismatchError, match=message):
            import_checkpoint(path, tmp_path / "store", names=wrong, options=OPTIONS)
    assert not (tmp_path / "store").exists()


def test_a_file_that_is_cut_short_after_it_was_opened_is_refused(tmp_path, monkeypatch):
    path = save(*trained(), tmp_path / "theirs.pt", "pt")
    opened = importing.open_foreign

    def cut_short(*arguments):
        found = opened(*arguments)
        os.truncate(path, 4000)
        return found

    monkeypatch.setattr(importing, "open_foreign", cut_short)
    with pytest.raises(CheckpointError, match="ends before byte"):
        import_checkpoint(path, tmp_path / "store", options=OPTIONS)
    assert not (tmp_path / "store").exists()
