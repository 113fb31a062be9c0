"""Every attack on a store is refused by name, in bounded memory and time, and nothing is harmed."""

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
from tests.attacks.attack import FILES
from tests.attacks.make import all_attacks
from tests.dying import dying

GROUPS = {"manifest", "header", "train_state", "part", "small", "names"}
NUM_PROCESSES = 3
"""Each takes seconds to import torch, and then a tenth of one for an attack."""

MOST_GROWN_BYTES = 200 << 20


def test_the_files_are_those_that_the_script_makes() -> None:
    made = {attack.file: attack.content for attack in all_attacks() if attack.content is not None}
    kept = {path: path.read_bytes() for path in FILES.rglob("*") if path.is_file()}
    assert made.keys() == kept.keys(), "run python -m tests.attacks.make"
    assert {path.name for path in made if made[path] != kept[path]} == set()


def test_the_documents_that_they_spoil_are_good() -> None:
    assert decode(good.manifest(), "run/step-00000002/manifest.json").step == 2
    assert decode(good.manifest(good.two_drives()), "run/manifest.json").layout.shares == (1, 1)
    assert decode_part(good.as_json(good.part()), "part.json").drive == 1


def test_every_attack_belongs_to_a_group_and_has_a_name_of_its_own() -> None:
    attacks = all_attacks()
    assert {attack.group for attack in attacks} == GROUPS
    assert len({attack.id for attack in attacks}) == len(attacks)


@pytest.mark.parametrize("index", range(NUM_PROCESSES))
def test_every_attack_is_refused(
    index: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    attacks = all_attacks()[index::NUM_PROCESSES]
    share = f"{index}/{NUM_PROCESSES}"
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
    assert report["grown_bytes"] < MOST_GROWN_BYTES
    grown = report["grown_bytes"] >> 20
    print(f"\n{share}: attacks refused (all): {len(attacks)}; memory grew by {grown} MiB")
    record_property("attacks", len(attacks))
