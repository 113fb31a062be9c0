"""Files that have further names elsewhere: a backup made with ``cp -al``, ``ln`` or ``rsync -H``.

Slots are rewritten in place, which would change the backup as well. So a slot or a part that has
such a file is never rewritten: its names are removed, and another one is made.
"""

from __future__ import annotations

from gds import Backend


def has_other_names(backend: Backend, directory: str) -> bool:
    """Return whether a file in a directory has another name, there or elsewhere.

    Raises:
        gds.StorageError: It cannot be told.
    """
    stats = (backend.stat(f"{directory}/{name}") for name in backend.list_dir(directory))
    return any(stat is not None and stat.num_links > 1 for stat in stats)
