"""Exact versions are within the ranges that are promised, and each is stated once."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.versions import COMBINATIONS, without_torch

ROOT = Path(__file__).parent.parent


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
    assert len(dict(found)) == len(found), "a package is pinned twice"
    return {package.lower(): version for package, version in found}


def test_what_the_gpu_extra_adds_is_pinned_within_its_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [Requirement(text) for text in project["optional-dependencies"]["gpu"]]
    assert {requirement.name for requirement in extra} == {"kvikio-cu13", "cupy-cuda13x"}
    found = pins("constraints-gpu.txt")
    for requirement in extra:
        assert requirement.specifier.contains(found[requirement.name]), requirement
    # KvikIO and its C++ library are of one release.
    assert found["kvikio-cu13"].split(".")[:2] == found["libkvikio-cu13"].split(".")[:2]


def test_the_versions_that_are_promised_are_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    tried = {tuple(name.split(":")) for name in COMBINATIONS}
    assert {python for python, _ in tried} == set(found)
    (torch,) = [Requirement(text) for text in project["dependencies"] if text.startswith("torch")]
    assert str(torch.specifier) == ">=2.11"
    assert {"2.11.0", pins("constraints.txt")["torch"]} == {version for _, version in tried}


def test_the_pins_of_a_gpu_are_added_to_all_others() -> None:
    text = (ROOT / "constraints-gpu.txt").read_text()
    assert re.findall(r"^-c (\S+)$", text, re.MULTILINE) == ["constraints.txt"]
    found = pins("constraints-gpu.txt")
    assert list(found) == sorted(found)
    assert not found.keys() & pins("constraints.txt").keys()
    # torch's build decides on those: a pin here would keep one of both from being installed.
    assert not [name for name in found if name.startswith(("nvidia-", "cuda-toolkit"))]


def test_nothing_is_to_be_installed_from_an_index_that_does_not_have_it() -> None:
    """The package is on none: every command installs a checkout (``.``)."""
    pages = [ROOT / "README.md"]
    for folder in ("gds", "offload", "bench", "docs"):
        pages += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md")]
    assert len(pages) > 100
    asked = {
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages
        for line in page.read_text().splitlines()
        if re.search(r"pip install ['\"]?ssd-offload\b", line)
    }
    assert not asked


def test_what_is_tried_without_torch_is_collected_without_torch() -> None:
    """Where a build of torch cannot be had, `make versions` runs these files all the same."""
    code = (
        "import sys, pytest; sys.modules['torch'] = None; "
        "sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, *without_torch()]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
