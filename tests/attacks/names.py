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

Make = Callable[[Path, Path], None]

_SOMETHING_ELSE = "something else .a symbolic link, a pipe or a device."


def _directory(target: Path, outside: Path) -> None:
    target.mkdir()


def _pipe(target: Path, outside: Path) -> None:
    os.mkfifo(target)


def _socket(target: Path, outside: Path) -> None:
    before = os.getcwd()
    os.chdir(target.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(target.name)
    finally:
        os.chdir(before)


def _loop(target: Path, outside: Path) -> None:
    target.symlink_to(target.name)


def _dangling(target: Path, outside: Path) -> None:
    target.symlink_to(outside / "nothing")


def _to_what_was_there(target: Path, outside: Path) -> None:
    """Link to the very same content, outside: only the link is wrong."""
    target.symlink_to(outside / target.name)


def _hard_link_to_a_pipe(target: Path, outside: Path) -> None:
    os.mkfifo(outside / "pipe")
    target.symlink_to(outside / "pipe")


def _link_to(path: str) -> Make:
    def make(target: Path, outside: Path) -> None:
        target.symlink_to(path)

    return make


def _device(path: str) -> Make:
    def make(target: Path, outside: Path) -> None:
        os.mknod(target, 0o666 | stat.S_IFCHR, os.stat(path).st_rdev)

    return make


def _hole(size: int) -> Make:
    def make(target: Path, outside: Path) -> None:
        with target.open("wb") as file:
            file.truncate(size)

    return make


def _file(target: Path, outside: Path) -> None:
    target.write_bytes(b"not a directory")


def _pipes_inside(target: Path, outside: Path) -> None:
    target.mkdir()
    for name in ("manifest.json", "model.safetensors"):
        os.mkfifo(target / name)


def _directory_inside(target: Path, outside: Path) -> None:
    (target / "inside").mkdir(parents=True)


def can_make_devices() -> bool:
    """Return whether this process may, as only root on a real machine may."""
    return os.geteuid() == 0


_ALL: dict[str, Make] = {
    "directory": _directory,
    "pipe": _pipe,
    "socket": _socket,
    "link-loop": _loop,
    "link-dangling": _dangling,
    "link-to-the-same-outside": _to_what_was_there,
    "link-to-etc-passwd": _link_to("/etc/passwd"),
    "link-to-dev-zero": _link_to("/dev/zero"),
    "link-to-a-pipe": _hard_link_to_a_pipe,
}
_DEVICES: dict[str, Make] = {"dev-zero": _device("/dev/zero"), "dev-tty": _device("/dev/tty")}

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


def attacks() -> Iterator[Attack]:
    """Yield all of them."""
    made = {**_ALL, **(_DEVICES if can_make_devices() else {})}
    for file, target, stage, number in _FILES:
        for name, make in made.items():
            if file != "manifest" and name not in _SOME:
                continue  # what is asked of one file is asked of all, in the same words
            if file == "store" and name == "directory":
                continue  # which is in the way of the file that is to be written there
            reason = f"(a directory|{_SOMETHING_ELSE}) .*expected a file|expected a file"
            yield Attack(
                f"{file}-{name}",
                "names",
                target,
                reason,
                make=make,
                stage=stage,
                num_directories=number,
            )
    yield Attack(
        "manifest-hole-of-a-terabyte",
        "names",
        "{step}/manifest.json",
        "expected a file of at most",
        make=_hole(1 << 40),
    )
    yield Attack(
        "manifest-hole-at-the-limit",
        "names",
        "{step}/manifest.json",
        "zero bytes",
        make=_hole(128 << 20),
    )
    yield Attack(
        "model-hole-of-a-terabyte",
        "names",
        "{step}/model.safetensors",
        "expected a file of",
        make=_hole(1 << 40),
    )
    for name, size, reason in (
        ("terabyte", 1 << 40, "expected at most 100000008"),
        ("at-the-limit", 100_000_008, "zero bytes in its header"),
    ):
        yield Attack(
            f"train_state-hole-{name}",
            "names",
            "{step}/train_state.safetensors",
            reason,
            make=_hole(size),
            stage="read",
        )
    directories = {
        key: value for key, value in made.items() if key not in ("directory", "link-to-etc-passwd")
    }
    for name, make in {**directories, "file": _file}.items():
        yield Attack(
            f"step-{name}",
            "names",
            "{step}",
            f"expected the directory of a checkpoint|no manifest.json|{_SOMETHING_ELSE}|a file",
            make=make,
        )
        yield Attack(
            f"whole-part-{name}",
            "names",
            "{part}",
            "expected a directory",
            make=make,
            num_directories=2,
        )
        yield Attack(
            f"slot-{name}", "names", "{slot}", "expected a directory", make=make, stage="left"
        )
    yield Attack(
        "slot-with-a-directory",
        "names",
        "{slot}",
        "it holds the directory 'inside'",
        make=_directory_inside,
        stage="left",
    )
    yield Attack(
        "step-with-pipes", "names", "{step}", "expected a file of at most", make=_pipes_inside
    )
    for name in ("pipe", "socket", "link-loop", "link-to-etc-passwd", "link-to-dev-zero"):
        yield Attack(
            f"lock-{name}",
            "names",
            "LOCK",
            "LOCK|cannot keep a store here",
            make=made[name],
            stage="writer",
        )
