"""Attacks that are no content: links, pipes, devices, directories and holes in the place of a file.

No repository can hold them, so they are made where they are needed.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.attacks.attack import Attack, Stage

Make = Callable[[Path, Path], object]

_SOMETHING_ELSE = "something else .a symbolic link, a pipe or a device."


def _socket(target: Path, outside: Path) -> None:
    before = os.getcwd()
    os.chdir(target.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(target.name)
    finally:
        os.chdir(before)


def _link_to_a_pipe(target: Path, outside: Path) -> None:
    os.mkfifo(outside / "pipe")
    target.symlink_to(outside / "pipe")


def _link_to(path: str) -> Make:
    return lambda target, _: target.symlink_to(path)


def _device(path: str) -> Make:
    return lambda target, _: os.mknod(target, 0o666 | stat.S_IFCHR, os.stat(path).st_rdev)


def _hole(size: int) -> Make:
    def make(target: Path, outside: Path) -> None:
        target.touch()
        os.truncate(target, size)

    return make


def _pipes_inside(target: Path, outside: Path) -> None:
    target.mkdir()
    for name in ("manifest.json", "model.safetensors"):
        os.mkfifo(target / name)


_ALL: dict[str, Make] = {
    "directory": lambda target, _: target.mkdir(),
    "pipe": lambda target, _: os.mkfifo(target),
    "socket": _socket,
    "link-loop": lambda target, _: target.symlink_to(target.name),
    "link-dangling": lambda target, outside: target.symlink_to(outside / "nothing"),
    # to the very same content: only the link is wrong
    "link-to-the-same-outside": lambda target, outside: target.symlink_to(outside / target.name),
    "link-to-etc-passwd": _link_to("/etc/passwd"),
    "link-to-dev-zero": _link_to("/dev/zero"),
    "link-to-a-pipe": _link_to_a_pipe,
}
if os.geteuid() == 0:  # only root may make devices
    _ALL |= {"dev-zero": _device("/dev/zero"), "dev-tty": _device("/dev/tty")}

_SOME = ("directory", "pipe", "link-to-the-same-outside", "dev-zero")

_FILES: tuple[tuple[str, str, Stage, int], ...] = (
    ("manifest", "{step}/manifest.json", "open", 1),
    ("model", "{step}/model.safetensors", "open", 1),
    ("exp_avg", "{step}/exp_avg.safetensors", "open", 1),
    ("train_state", "{step}/train_state.safetensors", "open", 1),
    ("part", "{part}/part.json", "open", 2),
    ("part-exp_avg", "{part}/exp_avg.safetensors", "open", 2),
    ("store", "store.json", "ignored", 2),
    ("calibration", "calibration.json", "ignored", 1),
)


_OF_A_STEP = f"expected the directory of a checkpoint|no manifest.json|{_SOMETHING_ELSE}|a file"
_LARGEST_STATE = 100_000_008

_OTHERS: tuple[tuple[str, str, str, Make, Stage], ...] = (
    (
        "manifest-hole-of-a-terabyte",
        "{step}/manifest.json",
        "expected a file of at most",
        _hole(1 << 40),
        "open",
    ),
    (
        "manifest-hole-at-the-limit",
        "{step}/manifest.json",
        "zero bytes",
        _hole(128 << 20),
        "open",
    ),
    (
        "model-hole-of-a-terabyte",
        "{step}/model.safetensors",
        "expected a file of",
        _hole(1 << 40),
        "open",
    ),
    (
        "train_state-hole-terabyte",
        "{step}/train_state.safetensors",
        f"expected at most {_LARGEST_STATE}",
        _hole(1 << 40),
        "read",
    ),
    (
        "train_state-hole-at-the-limit",
        "{step}/train_state.safetensors",
        "zero bytes in its header",
        _hole(_LARGEST_STATE),
        "read",
    ),
    (
        "slot-with-a-directory",
        "{slot}",
        "it holds the directory 'inside'",
        lambda target, _: (target / "inside").mkdir(parents=True),
        "left",
    ),
    ("step-with-pipes", "{step}", "expected a file of at most", _pipes_inside, "open"),
)


def attacks() -> Iterator[Attack]:
    """Yield all of them."""
    for file, target, stage, number in _FILES:
        for name, make in _ALL.items():
            if file != "manifest" and name not in _SOME:
                continue  # what is asked of one file is asked of all, in the same words
            if file == "store" and name == "directory":
                continue  # which is in the way of the file that is to be written there
            yield Attack(
                f"{file}-{name}",
                "names",
                target,
                f"(a directory|{_SOMETHING_ELSE}) .*expected a file|expected a file",
                make=make,
                stage=stage,
                num_directories=number,
            )
    for name, target, reason, make, stage in _OTHERS:
        yield Attack(name, "names", target, reason, make=make, stage=stage)
    no_directories = {
        key: make for key, make in _ALL.items() if key not in ("directory", "link-to-etc-passwd")
    }
    no_directories["file"] = lambda target, _: target.write_bytes(b"not a directory")
    for name, make in no_directories.items():
        for of, target, reason, stage, number in (
            ("step", "{step}", _OF_A_STEP, "open", 1),
            ("whole-part", "{part}", "expected a directory", "open", 2),
            ("slot", "{slot}", "expected a directory", "left", 1),
        ):
            yield Attack(
                f"{of}-{name}",
                "names",
                target,
                reason,
                make=make,
                stage=stage,  # type: ignore[arg-type]
                num_directories=number,
            )
    for name in ("pipe", "socket", "link-loop", "link-to-etc-passwd", "link-to-dev-zero"):
        yield Attack(
            f"lock-{name}",
            "names",
            "LOCK",
            "LOCK|cannot keep a store here",
            make=_ALL[name],
            stage="writer",
        )
