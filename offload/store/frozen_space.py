"""Warning about the disk space that a store spends on parameters that are not trained."""

from __future__ import annotations

import warnings

from offload.format.layout import Layout
from offload.store.state_store import StateStore

_LEAST_BYTES = 1 << 30
"""Smallest number of frozen bytes in a checkpoint that is worth a warning."""

_RATIO = 10
"""Smallest ratio of frozen bytes to trained bytes that is worth a warning. Smaller ratios occur in
models with large buffers as well."""


class FrozenSpace:
    """Warns once if most of each checkpoint will be parameters and buffers that are not trained."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._has_looked = False

    @property
    def is_due(self) -> bool:
        """Whether `warn` is due: it has not been called yet, and the store has no checkpoint."""
        return not self._has_looked and not self._store.keeping.current

    def warn(self, layout: Layout) -> None:
        """Warn of the disk space that frozen bytes will take, if the amount is large.

        The warning names the line of code of the caller's caller, which should be the user's call.
        """
        self._has_looked = True
        trained_names = {parameter.name for parameter in layout.parameters}
        trained = sum(t.nbytes for t in layout.model if t.name in trained_names)
        frozen = sum(t.nbytes for t in layout.model) - trained
        if frozen < _LEAST_BYTES or frozen < _RATIO * trained:
            return
        store = self._store
        num_slots = store.keeping.num_slots()
        if not num_slots:
            return  # another rank writes the store, and warns
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
    """Return a size in bytes with its unit, for people, such as ``14.0 GiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"
