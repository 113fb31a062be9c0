"""Every attack on a store is refused by name, in bounded memory and time, and nothing is harmed.

Nothing in a store is compiled, executed, imported or unpickled, as Python's own audit events say.

A short run carries out a few attacks of each kind; FULL_TESTS=1 all of them. All that
are bytes in a file are met by a reader, or by the restore.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import offload
from offload.format.manifest import decode
from offload.format.part_file import decode_part
from tests.attacks import good
from tests.attacks.attacked import Attacked, chosen, make_store, open_store
from tests.attacks.make import all_attacks
from tests.campaigns import FULL
from tests.dying import dying
from tests.stores.small import make_model

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


def refuse(attacked: Attacked) -> None:
    """Meet an attack where it is first noticed."""
    if attacked.attack.stage == "restore":
        with open_store(make_model(*good.WIDTHS), attacked.directories) as optimizer:
            attacked.refused("restore", optimizer.restore)
        return
    newest = offload.list_checkpoints(attacked.store, parts=attacked.parts)[-1]
    attacked.expect("listed", newest.valid == (attacked.attack.stage == "read"), newest)
    if newest.valid:
        with offload.open_checkpoint(attacked.checkpoint) as opened:
            attacked.refused("train_state", lambda: opened.train_state)
    else:
        attacked.good_message("list_checkpoints", newest.reason)


@pytest.mark.parametrize("num_directories", [1, 2])
def test_all_that_are_bytes_in_a_file_are_refused_with_the_reason(
    num_directories: int, tmp_path: Path
) -> None:
    directories = [tmp_path / f"drive-{index}" for index in range(num_directories)]
    make_store(directories)
    complaints = {}
    for number, attack in enumerate(all_attacks()):
        is_of_bytes = attack.content is not None and attack.num_directories == num_directories
        if not is_of_bytes or attack.stage not in ("open", "store", "read", "restore"):
            continue
        attacked = Attacked(attack, directories, tmp_path / f"{number}", thorough=False)
        was = attacked.target.read_bytes()
        attacked.inflict()
        refuse(attacked)
        attacked.target.write_bytes(was)
        complaints[attack.id] = attacked.complaints
    assert {name: found for name, found in complaints.items() if found} == {}
    assert len(complaints) > 10
