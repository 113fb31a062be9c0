"""Imports between the wings of a package run one way, and a wing knows no more than it may."""

from __future__ import annotations

import ast
import graphlib
import importlib
import subprocess
import sys

import pytest
import torch

import offload
from tests.wings import (
    PAGE,
    ROOT,
    TABLES,
    drawn,
    files,
    imported,
    modules_imported,
    names_imported,
    wing_of,
)

ALL = [(package, wing) for package, table in TABLES.items() for wing in table]
FOLDERS = [(package, wing) for package, wing in ALL if (ROOT / package / wing).is_dir()]


@pytest.mark.parametrize(("package", "wing"), ALL)
def test_a_wing_imports_only_what_it_may_know(package: str, wing: str) -> None:
    table = TABLES[package]
    watched = {"torch", "offload", "gds", *table} - {wing}
    known = {package, *table[wing]}
    found = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        if wing_of(path) == wing
        for name in imported(path)
        if name in watched - known
    }
    assert not found


def test_offload_imports_nothing_private_of_gds() -> None:
    found = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("offload")
        for name in names_imported(path)
        if name.startswith("gds.") and any(part.startswith("_") for part in name.split("."))
    }
    assert not found


def test_integrations_use_nothing_private_of_offload() -> None:
    """What they need is public, so that integrations of other people can be made as they are."""
    face = {name for name in imported_names("integrations") if name.startswith("offload.")}
    own = {name for name in face if name.startswith("offload.integrations.")}
    assert {name.removeprefix("offload.") for name in face - own} <= {*offload.__all__}
    private = {*dir(offload.OffloadedOptimizer), *dir(offload.Checkpoint), "_engine"}
    private -= {*dir(torch.optim.Optimizer)}
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in files("offload")
        if wing_of(path) == "integrations"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr in private
    }
    assert not found


def imported_names(wing: str) -> set[str]:
    paths = (path for path in files("offload") if wing_of(path) == wing)
    return {name for path in paths for name in names_imported(path)}


@pytest.mark.parametrize("package", TABLES)
def test_every_file_belongs_to_a_wing(package: str) -> None:
    assert {wing_of(path) for path in files(package)} == {*TABLES[package]}


@pytest.mark.parametrize("package", TABLES)
def test_the_table_has_no_circle(package: str) -> None:
    below = {"torch", "gds"} if package == "offload" else set[str]()
    for wing, known in TABLES[package].items():
        assert known <= below, f"{wing} may know {known - below}, which is above it"
        below.add(wing)


@pytest.mark.parametrize("package", TABLES)
def test_modules_import_each_other_in_no_circle(package: str) -> None:
    graphlib.TopologicalSorter(modules_imported(package)).prepare()  # names the circle


@pytest.mark.parametrize(("package", "wing"), FOLDERS)
def test_a_wing_has_a_face_of_at_most_ten_names(package: str, wing: str) -> None:
    face = importlib.import_module(f"{package}.{wing}")
    assert "may know" in (face.__doc__ or "").partition("\n\n")[2]
    assert len(getattr(face, "__all__", ())) <= 10


def test_a_step_loads_no_code_of_tiers() -> None:
    code = "import sys, offload.engine.stepping; print([m for m in sys.modules if 'tiers' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"


def test_the_picture_is_that_of_the_imports() -> None:
    assert drawn() in PAGE.read_text(), "draw it anew: python -m tests.wings"
