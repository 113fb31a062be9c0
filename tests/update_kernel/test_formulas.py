"""Every change of a formula that has been tried was noticed by a test, or has a reason."""

from __future__ import annotations

import json

from tests.update_kernel.formulas import CHANGES, RECORD, REDUNDANT, ROOT, SOURCE


def test_each_change_fits_the_sources() -> None:
    for change in CHANGES:
        assert (ROOT / SOURCE / change.file).read_text().count(change.old) == 1, change.name


def test_each_change_that_was_tried_was_noticed_or_is_redundant() -> None:
    found = json.loads(RECORD.read_text())
    assert set(found) <= {change.name for change in CHANGES}
    assert {name for name, test in found.items() if not test} <= REDUNDANT.keys()
    for file, _, function in (test.partition("::") for test in found.values() if test):
        assert f"def {function}(" in (ROOT / file).read_text()
