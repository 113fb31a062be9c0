"""Calls of `tests.ranks_training.test_reencoding`."""

from __future__ import annotations

import warnings

from tests.ranks_training.calls import Calls


def restore_strictly(calls: Calls) -> str:
    """Restore with warnings as errors, as some programs have them; the value is the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            calls.optimizer.restore(reencode=True)
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            return type(error).__name__
    return ""
