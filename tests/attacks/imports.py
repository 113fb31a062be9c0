"""Hostile and odd files for `offload import`, and what each must be refused for."""

from __future__ import annotations

import copy
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Hostile:
    """One file or directory."""

    name: str
    make: Make
    """Makes it in an empty directory; returns what is to be imported."""

    reason: str = ""
    """A regular expression that the refusal must match; empty for what must be imported."""

    arguments: tuple[str, ...] = ()


class Evil:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("PWNED",))


def good() -> dict[str, Any]:
    """Return what can be imported."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def saved(change: Callable[[dict[str, Any]], object] | None = None, **settings: Any) -> Make:
    """Return what makes a file of `torch.save`."""

    def make(directory: Path) -> Path:
        state = copy.deepcopy(good())
        if change is not None:
            change(state)
        torch.save(state, directory / "theirs.pt", **settings)
        return directory / "theirs.pt"

    return make


def content(data: bytes, name: str = "theirs.pt") -> Make:
    """Return what makes a file."""

    def make(directory: Path) -> Path:
        (directory / name).write_bytes(data)
        return directory / name

    return make


def zipped(
    change: Callable[[str, bytes], bytes | None] = lambda _, data: data,
    *,
    method: int = zipfile.ZIP_STORED,
    more: dict[str, bytes] | None = None,
    tail: bytes = b"",
) -> Make:
    """Return what makes a good file whose records have been changed, by name within it."""

    def make(directory: Path) -> Path:
        torch.save(good(), directory / "good.pt")
        path = directory / "theirs.pt"
        with zipfile.ZipFile(directory / "good.pt") as source, zipfile.ZipFile(path, "w") as out:
            for name in source.namelist():
                data = change(name.partition("/")[2], source.read(name))
                if data is not None:
                    out.writestr(name, data, method)
            for name, data in (more or {}).items():
                out.writestr(f"good/{name}", data, method)
        if tail:
            with path.open("ab") as file:
                file.write(tail)
        return path

    return make


def structure(data: bytes) -> Make:
    """Return what makes a file whose structure is a pickle."""
    return zipped(lambda name, was: data if name == "data.pkl" else was)


def folder(**changes: Any) -> Make:
    """Return what makes a folder of the Trainer; None leaves a file out."""

    def make(directory: Path) -> Path:
        path = directory / "checkpoint-1"
        path.mkdir()
        state = good()
        torch.save(state["optimizer"], path / "optimizer.pt")
        safetensors.torch.save_file(state["model"], path / "model.safetensors")
        (path / "trainer_state.json").write_text('{"global_step": 1}')
        for name, what in changes.items():
            file = (
                path
                / {
                    "state": "trainer_state.json",
                    "index": "model.safetensors.index.json",
                    "weights": "model.safetensors",
                    "optimizer": "optimizer.pt",
                }[name]
            )
            file.unlink(missing_ok=True)
            if callable(what):
                what(file)
            elif what is not None:
                file.write_bytes(what if isinstance(what, bytes) else what.encode())
        return path

    return make


def index(text: str) -> Make:
    """Return what makes a folder whose model is in several files."""
    return folder(weights=None, index=text)


def distributed(change: Callable[[Path], object]) -> Make:
    """Return what makes a distributed checkpoint, changed."""

    def make(directory: Path) -> Path:
        path = directory / "dcp"
        state = good()
        names = state["optimizer"]["param_groups"][0].pop("param_names")
        numbers = dict(enumerate(names))
        optimizer = {
            "state": {numbers[i]: value for i, value in state["optimizer"]["state"].items()},
            "param_groups": [{**state["optimizer"]["param_groups"][0], "params": names}],
        }
        dcp.save({"model": state["model"], "optim": optimizer}, checkpoint_id=path, no_dist=True)
        change(path)
        return path

    return make


def metadata(data: bytes) -> Make:
    """Return what makes a distributed checkpoint with another description."""
    return distributed(lambda path: (path / ".metadata").write_bytes(data))


def edited(change: Callable[[Any], object]) -> Make:
    """Return what makes one whose description torch's own classes have written."""

    def edit(path: Path) -> None:
        with (path / ".metadata").open("rb") as file:
            found = pickle.load(file)
        change(found)
        (path / ".metadata").write_bytes(pickle.dumps(found))

    return distributed(edit)


def group(**changes: Any) -> Make:
    """Return what makes a file with another group of hyper-parameters; None leaves one out."""

    def change(state: dict[str, Any]) -> None:
        values = state["optimizer"]["param_groups"][0]
        for key, value in changes.items():
            if value is None:
                del values[key]
            else:
                values[key] = value

    return saved(change)


def optimizer(**changes: Any) -> Make:
    """Return what makes a file with another optimizer's state dict."""
    return saved(lambda state: state["optimizer"].update(changes))


def step_of_state(value: Any) -> Make:
    """Return what makes a file whose parameters have taken so many steps."""

    def change(state: dict[str, Any]) -> None:
        for own in state["optimizer"]["state"].values():
            own["step"] = value

    return saved(change)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _cases() -> Iterator[Hostile]:
    yield Hostile("good", saved())
    yield Hostile("good-folder", folder())
    yield Hostile("good-distributed", distributed(lambda _: None))
    yield Hostile("good-folder-of-links", folder(weights=_link))

    # Pickles that would run something.
    yield Hostile("evil", saved(lambda s: s.update(x=Evil())), r"posix\.mkdir")
    yield Hostile("legacy", saved(_use_new_zipfile_serialization=False), "zip format.*since")
    yield Hostile("evil-folder", folder(optimizer=_save({"state": Evil()})), "posix.mkdir")
    yield Hostile("evil-distributed", metadata(pickle.dumps(Evil())), "posix.mkdir")
    yield Hostile("torchscript", _torchscript, "TorchScript")

    # Archives that are not as torch.save writes them.
    big = b"\x80\x02X" + struct.pack("<I", 1 << 29) + b"a" * (1 << 29) + b"."
    yield Hostile(
        "deflated",
        zipped(lambda n, d: big if n == "data.pkl" else d, method=zipfile.ZIP_DEFLATED),
        "compressed",
    )
    yield Hostile("second-structure", zipped(more={"data.pkl": b"N."}), "two records")
    yield Hostile(
        "deep", structure(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."), "recursion"
    )
    yield Hostile("deep-state", optimizer(state={0: _nested(150)}), "is a list")
    yield Hostile("huge-integer", saved(lambda s: s.update(step=1 << 70)), "step")

    # Attributes of what is shared by the process.
    pollution = b"\x80\x04" + _global("pathlib", "Path") + b"N}" + b"\x8c\x06exists"
    pollution += _global("torch.serialization", "_get_layout") + b"s\x86b."
    yield Hostile("attributes-of-a-class", metadata(pollution), "a function, expected")
    yield Hostile(
        "a-file-outside",
        edited(lambda m: [_set(i, relative_path="../x") for i in m.storage_data.values()]),
        "outside its directory",
    )
    yield Hostile(
        "a-huge-shape",
        edited(
            lambda m: [
                _set(t, size=torch.Size([1 << 40]))
                for t in m.state_dict_metadata.values()
                if hasattr(t, "chunks")
            ]
        ),
        "a stored part lies outside the tensor",
    )
    yield Hostile("metadata-is-a-pipe", distributed(_pipe), "a pipe")

    # JSON of other programs.
    yield Hostile("state-is-no-json", folder(state="not json"), "trainer_state.json")
    yield Hostile("state-is-a-pipe", folder(state=os.mkfifo), "trainer_state.json.*a pipe")
    yield Hostile("state-is-large", folder(state=_hole(1 << 40)), "trainer_state.json")
    yield Hostile("state-is-not-finite", folder(state='{"global_step": 1, "loss": NaN}'))
    yield Hostile("step-is-a-fraction", folder(state='{"global_step": 1.5}'), "global_step")
    yield Hostile("step-is-negative", folder(state='{"global_step": -1}'), "global_step")
    yield Hostile("step-is-absurd", folder(state='{"global_step": 10000000000000000000}'), "step")
    yield Hostile("index-escapes", index('{"weight_map": {"a": "../../etc/passwd"}}'), "outside")
    yield Hostile("index-nul", index('{"weight_map": {"a": "a\\u0000b"}}'), "cannot be opened")
    yield Hostile("index-missing", index('{"weight_map": {"a": "b"}}'), "No such file")
    yield Hostile("weights-are-a-pipe", folder(weights=os.mkfifo), "a pipe")
    yield Hostile("weights-are-a-device", folder(weights=_zero), "device")
    yield Hostile("a-pipe", _fifo, "a pipe")

    # Structures of another shape.
    yield Hostile("groups-int", optimizer(param_groups=5), "param_groups")
    yield Hostile("no-groups", optimizer(param_groups=[]), "param_groups")
    yield Hostile("no-params", group(params=None), "params")
    yield Hostile("params-twice", group(params=[0, 0]), "expected float32 of shape")
    yield Hostile("state-of-others", optimizer(state={0: {"x": 1}}), "keeps")
    yield Hostile("betas-text", group(betas="ab"), "betas")
    yield Hostile("lr-nan", group(lr=float("nan")), "lr")
    yield Hostile("lr-text", group(lr="fast"), "lr")
    yield Hostile("lr-large-tensor", group(lr=torch.zeros(1000)), "lr")
    yield Hostile(
        "group-key",
        saved(lambda s: s["optimizer"]["param_groups"][0].update({7: 1})),
        "names for keys",
    )
    yield Hostile("model-is-a-list", saved(lambda s: s.update(model=[1])), "no model's state dict")
    yield Hostile("model-has-other-keys", saved(lambda s: s.update(model={1: torch.ones(2)})), "1")
    expanded = torch.zeros(1).expand(2, 4)
    yield Hostile("expanded", saved(lambda s: s["model"].update(weight=expanded)), "share memory")
    complex_ = torch.zeros(2, 4, dtype=torch.complex64)
    yield Hostile("complex", saved(lambda s: s["model"].update(weight=complex_)), "complex64")
    yield Hostile("name-with-a-surrogate", saved(_surrogate), "expected a list of names")

    # Steps.
    yield Hostile("step-in-a-tensor", saved(lambda s: s.update(step=torch.tensor(3))))
    for value in (-5, True, float("nan"), 1 << 62, "7", torch.ones(2)):
        label = "".join(c if c.isalnum() else "-" for c in str(value))
        yield Hostile(f"step={label}", saved(lambda s, v=value: s.update(step=v)), "step")
    for value in (float("nan"), 1e30, 2.5):
        yield Hostile(f"state-step={value}", step_of_state(torch.tensor(value)), "step")
    yield Hostile("step-given-negative", saved(), "", ("--step", "-3"))
    yield Hostile("step-given-absurd", saved(), "step", ("--step", str(1 << 62)))


def _save(value: Any) -> Callable[[Path], object]:
    return lambda file: torch.save({**value, "param_groups": []}, file)


def _set(record: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(record, name, value)


def _pipe(path: Path) -> None:
    (path / ".metadata").unlink()
    os.mkfifo(path / ".metadata")


def _link(file: Path) -> None:
    """As in the cache of the hub, where files are links into another folder."""
    blob = file.parent.parent / "blob"
    safetensors.torch.save_file(good()["model"], blob)
    file.symlink_to(blob)


def _zero(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _hole(nbytes: int) -> Callable[[Path], object]:
    def make(file: Path) -> None:
        file.touch()
        os.truncate(file, nbytes)

    return make


def _fifo(directory: Path) -> Path:
    os.mkfifo(directory / "theirs.pt")
    return directory / "theirs.pt"


def _torchscript(directory: Path) -> Path:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), directory / "theirs.pt")
    return directory / "theirs.pt"


def _surrogate(state: dict[str, Any]) -> None:
    state["model"]["a\ud800"] = state["model"].pop("weight")
    names = state["optimizer"]["param_groups"][0]["param_names"]
    names[names.index("weight")] = "a\ud800"


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of kinds of tensors that it is to give up
    CASES = list(_cases())
