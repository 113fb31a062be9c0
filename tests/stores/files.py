"""Files of a store, read and damaged through its backend."""

from __future__ import annotations

from pathlib import Path

from gds import Backend


def read(backend: Backend, path: str) -> bytes:
    """Return the content of a file."""
    file = backend.open(path)
    try:
        return file.read_bytes(0, file.size_bytes)
    finally:
        file.close()


def write(backend: Backend, path: str, data: bytes) -> None:
    """Put a new file with this content in the place of the file at `path`, if there is one."""
    if backend.stat(path) is not None:
        backend.remove(path)
    file = backend.create(path, len(data))
    if data:
        file.write_bytes(data, 0)
    file.close()


def overwrite(backend: Backend, path: str, data: bytes, offset: int = 0) -> None:
    """Change some bytes of a file, whose size stays."""
    file = backend.open(path, writable=True)
    file.write_bytes(data, offset)
    file.close()


def flip(backend: Backend, path: str, at: int = -9, mask: int = 1) -> None:
    """Flip bits of one byte of a file, durably.

    Args:
        backend: Backend that has the file.
        path: Path of the file.
        at: Offset of the byte; a negative one counts from the end of the file.
        mask: Bits of the byte to flip.
    """
    file = backend.open(path, writable=True)
    try:
        at %= file.size_bytes
        (byte,) = file.read_bytes(at, 1)
        file.write_bytes(bytes([byte ^ mask]), at)
        file.sync()
    finally:
        file.close()


def contents(backend: Backend, directory: str) -> dict[str, bytes]:
    """Return the content of every file of a directory without directories, by name."""
    return {name: read(backend, f"{directory}/{name}") for name in backend.list_dir(directory)}


def everything(backend: Backend, directory: str = "/") -> dict[str, bytes | None]:
    """Return the content of every file below a directory, and None for every directory."""
    found: dict[str, bytes | None] = {}
    for name in backend.list_dir(directory):
        path = f"{directory.rstrip('/')}/{name}"
        stat = backend.stat(path)
        assert stat is not None
        if stat.kind == "directory":
            found[path] = None
            found |= everything(backend, path)
        else:
            found[path] = read(backend, path)
    return found


def remove_tree(backend: Backend, path: str) -> None:
    """Remove a directory and all that is below it."""
    for name in backend.list_dir(path):
        stat = backend.stat(f"{path}/{name}")
        assert stat is not None
        if stat.kind == "directory":
            remove_tree(backend, f"{path}/{name}")
        else:
            backend.remove(f"{path}/{name}")
    backend.remove_dir(path)


def flip_on_disk(path: Path, at: int = 5000, mask: int = 1) -> None:
    """Flip bits of the byte at an offset of a file of the machine."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def tree(*directories: Path) -> dict[Path, bytes]:
    """Return the content of every file below some directories of the machine."""
    return {p: p.read_bytes() for place in directories for p in place.rglob("*") if p.is_file()}


def steps(store: Path) -> list[int]:
    """Return the steps that the names of a store's checkpoints say, in the order of the names."""
    return [int(path.name[5:]) for path in sorted(store.glob("step-*"))]
