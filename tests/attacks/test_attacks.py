"""Every attack on a store is refused by name, in bounded memory and time, and nothing is harmed.

Nothing in a store is compiled, executed, imported or unpickled, as Python's own audit events say.

A short run carries out a few attacks of each kind; FULL_TESTS=1 all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.format.manifest import decode
from offload.format.part_file import decode_part
from tests.attacks import good
from tests.attacks.attacked import chosen
from tests.attacks.make import all_attacks
from tests.campaigns import FULL
from tests.dying import dying

SHARES = ["0/3", "1/3", "2/3"] if FULL else ["some"]
"""Each process takes seconds to import torch, and then a tenth of one for an attack."""

MOST_GROWN_BYTES = 200 << 20


def test_the_documents_that_are_spoilt_are_good_and_attacks_have_names_of_their_own() -> None:
    assert decode(good.manifest(), "run/step-00000002/manifest.json").step == 2
    assert decode(good.manifest(good.two_drives()), "run/manifest.json").layout.shares == (1, 1)
    assert decode_part(good.as_json(good.part()), "part.json").drive == 1
    attacks = all_attacks()
    assert len({attack.id for attack in attacks}) == len(attacks)


@pytest.mark.parametrize("share", SHARES)
def test_every_attack_is_refused(
    share: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    attacks = chosen(share)
    done = subprocess.run(
        dying([sys.executable, "-m", "tests.attacks.attacked", share, str(tmp_path)]),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"died at {lines[-1:]}: {done.stderr[-2000:]}"
    report = json.loads(lines[-1])
    assert report["complaints"].keys() == {attack.id for attack in attacks}
    wrong = {name: found for name, found in report["complaints"].items() if found}
    assert wrong == {}
    assert report["marks"] == [], "a pickle was loaded"
    # A torch that is built with CUDA looks for a driver, in a library whose name is torch's own.
    noted = [what for what in report["ran"] if what != "ctypes.dlopen ('libnvidia-ml.so.1',)"]
    ran = [what.partition(" ")[0] for what in noted]
    assert ran == ["compile", "exec"], f"more than the test's own line was run: {report['ran']}"
    assert report["grown_bytes"] < MOST_GROWN_BYTES
    record_property("attacks", len(attacks))
