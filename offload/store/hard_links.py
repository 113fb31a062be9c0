"""Files with further hard links, such as a backup by ``cp -al``, ``ln`` or ``rsync -H``.

Slots are rewritten in place, which would change the backup as well. Therefore a slot or part that
has a file with several links is never rewritten: it is removed, and a new one is created.
"""

from __future__ import annotations

from gds import Backend


def has_other_names(backend: Backend, directory: str) -> bool:
    """Return whether a file in a directory has another hard link, in the directory or elsewhere.

    Raises:
        gds.StorageError: The files cannot be examined.
    """
    stats = (backend.stat(f"{directory}/{name}") for name in backend.list_dir(directory))
    return any(stat is not None and stat.num_links > 1 for stat in stats)
