"""Every change of a formula that is listed has been tried, and a test noticed it."""

from __future__ import annotations

import json

from tests.update_kernel.formulas import CHANGES, RECORD, ROOT, SOURCE


def test_each_change_fits_the_sources() -> None:
    for change in CHANGES:
        assert (ROOT / SOURCE / change.file).read_text().count(change.old) == 1, change.name


def test_each_change_was_noticed() -> None:
    found = json.loads(RECORD.read_text())
    assert list(found) == [change.name for change in CHANGES]
    assert [name for name, test in found.items() if not test] == []
    for test in found.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text()
