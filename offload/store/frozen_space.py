"""What a store spends on parameters that are not trained, and the warning that says so."""

from __future__ import annotations

import warnings

from offload.format.layout import Layout
from offload.store.store import Store

_LEAST_BYTES = 1 << 30
"""Of frozen bytes in a checkpoint: less is not worth a word."""

_RATIO = 10
"""Of frozen bytes to trained ones: less is what a model with large buffers has as well."""


class FrozenSpace:
    """Warns once of checkpoints that hold little that is trained.

    Args:
        store: Where they will be.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._has_looked = False

    @property
    def is_due(self) -> bool:
        """Whether nobody has looked yet, and the store has no checkpoint: then `warn` is due."""
        return not self._has_looked and not self._store.keeping.current

    def warn(self, layout: Layout) -> None:
        """Name the disk space that frozen bytes will take, if it is much; for a user's own call.

        Args:
            layout: Of the first checkpoint.
        """
        self._has_looked = True
        trained_names = {parameter.name for parameter in layout.parameters}
        trained = sum(t.nbytes for t in layout.model if t.name in trained_names)
        frozen = sum(t.nbytes for t in layout.model) - trained
        if frozen < _LEAST_BYTES or frozen < _RATIO * trained:
            return
        store = self._store
        num_slots = store.keeping.num_slots()
        space = size(num_slots * frozen)
        if store.backend.capabilities(store.directory).clones:
            space = (
                f"{size(frozen)} in all, and not {space}, as this file system lets checkpoints "
                "share what is the same in them"
            )
        warnings.warn(
            f"{store.directory}: each checkpoint holds {size(frozen)} of frozen parameters and "
            f"buffers beside {size(trained)} that are trained, and the store keeps {num_slots} "
            f"slots: {space}. To keep only what is trained, construct without model=, give the "
            "optimizer only the parameters that are trained, and use another directory",
            RuntimeWarning,
            stacklevel=3,
        )


def size(nbytes: int) -> str:
    """Return a size for people, with its unit: ``14.0 GiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"
