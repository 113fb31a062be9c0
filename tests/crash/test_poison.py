"""What a process says and refuses after a rename or a sync has failed."""

from __future__ import annotations

import warnings

import pytest

from offload.errors import StoreError
from offload.store.poison import Poison


def poisoned(*reasons: str) -> Poison:
    poison = Poison("/run")
    for reason in reasons:
        with pytest.raises(OSError, match="the drive"), poison.fatal(reason):
            raise OSError("the drive")
    return poison


def test_nothing_is_said_or_refused_before_anything_has_failed() -> None:
    poison = poisoned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        poison.warn_once()
    poison.require_healthy("/run/step-00000001")
    assert not poison


def test_what_failed_is_said_once() -> None:
    poison = poisoned("a sync failed")
    assert poison
    with pytest.warns(RuntimeWarning, match=r"/run: a sync failed \(the drive\).*no slot"):
        poison.warn_once()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        poison.warn_once()


def test_it_is_said_once_also_where_warnings_are_errors() -> None:
    poison = poisoned("a sync failed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="a sync failed"):
            poison.warn_once()
        poison.warn_once()


def test_the_first_failure_is_the_one_that_is_named() -> None:
    poison = poisoned("a sync failed", "then a rename failed")
    with pytest.raises(StoreError, match=r"a sync failed \(the drive\)") as refused:
        poison.require_healthy("/run/step-00000001")
    assert refused.value.filename == "/run/step-00000001"
    assert "rename" not in f"{refused.value}"


def test_any_error_counts() -> None:
    poison = Poison("/run")
    with pytest.raises(KeyboardInterrupt), poison.fatal("a sync failed"):
        raise KeyboardInterrupt
    assert poison
