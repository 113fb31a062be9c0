"""Directory of a slot or of an owner's part, with the folder of its shard file of the model.

All files of a slot are in its directory. Only a shard file of the model is in a folder in it; see
`offload.format.model_shard`. Files are named with their folder: ``model/shard-....safetensors``.
A user may have made other directories, so a directory that has any is not rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable

from gds import Backend
from offload.format.names import SHARD_FOLDER, is_shard_name


def make_folder(backend: Backend, path: str, names: Iterable[str]) -> None:
    """Create the directory of a slot or part, and the folder of its shard file if it has one."""
    backend.make_dir(path)
    if any(_is_inside(name) for name in names):
        backend.make_dir(f"{path}/{SHARD_FOLDER}")


def files_in(backend: Backend, path: str) -> list[str]:
    """Return the names of all in a directory, with the content of the folder of its shard."""
    names = backend.list_dir(path)
    if not _has_folder(backend, path, names):
        return names
    inside = [f"{SHARD_FOLDER}/{name}" for name in backend.list_dir(f"{path}/{SHARD_FOLDER}")]
    return [name for name in names if name != SHARD_FOLDER] + inside


def directories_in(backend: Backend, path: str) -> list[str]:
    """Return the names of the directories in a slot or part that this library has not made."""
    found = ((name, backend.stat(f"{path}/{name}")) for name in files_in(backend, path))
    return [name for name, stat in found if stat is not None and stat.kind == "directory"]


def sync_names(backend: Backend, path: str, names: Iterable[str]) -> None:
    """Make the names of the files of a slot or part durable, its folder's before its own."""
    if any(_is_inside(name) for name in names):
        backend.sync_dir(f"{path}/{SHARD_FOLDER}")
    backend.sync_dir(path)


def remove_folder(backend: Backend, path: str, *, first: str = "") -> None:
    """Remove a directory and the files in it, and the folder of its shard file."""
    names = backend.list_dir(path)
    folder = [SHARD_FOLDER] if _has_folder(backend, path, names) else []
    for name in sorted(files_in(backend, path), key=lambda name: name != first):
        backend.remove(f"{path}/{name}")
    for name in folder:
        backend.remove_dir(f"{path}/{name}")
    backend.remove_dir(path)


def _has_folder(backend: Backend, path: str, names: Iterable[str]) -> bool:
    """Return whether a directory has the folder of a shard file, and not one that a user has made.

    A folder with anything but shard files is a user's.
    """
    folder = f"{path}/{SHARD_FOLDER}"
    if SHARD_FOLDER not in names:
        return False
    stat = backend.stat(folder)
    if stat is None or stat.kind != "directory":
        return False
    return all(is_shard_name(name) for name in backend.list_dir(folder))


def _is_inside(name: str) -> bool:
    return name.startswith(f"{SHARD_FOLDER}/")
