"""Warnings of one rank, which are errors of all ranks if the user has made warnings errors."""

from __future__ import annotations

import warnings

from offload.engine.ranks import Ranks


def warn_together(ranks: Ranks, call: str, message: str, level: int) -> None:
    """Warn on this rank, if there is something to warn of. Collective.

    With Python's ``-W error`` a warning ends the call on the rank that has it. The other ranks must
    not go on, and wait for that rank.
    """
    errors: list[Warning] = []
    if message:
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=level + 1)
        except RuntimeWarning as error:
            errors.append(error)

    def settle() -> None:
        """Raise the warning if it is an error to the user."""
        for error in errors:
            raise error

    ranks.together(call, settle)
