"""The kernel's own sources, compiled once: the wheel, the sdist, the wheel made from the sdist."""

from __future__ import annotations

import fcntl
import pickle
import re
import shutil
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from hatch_build import needed_by
from offload.update.kernel.sources import source_digest
from tests.install.trees import (
    KERNEL,
    LIBRARIES,
    ROOT,
    TINY,
    Build,
    build,
    copy_checkout,
    needs_compiler,
)

SOURCES = ROOT / KERNEL / "source"
GROWTH_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Shipped:
    """A wheel with the kernel, which was compiled in the folder that an sdist unpacks to."""

    unpacked: Path
    wheel: Build


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    """One for all workers, since the compiler takes long: the first of them builds it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if own.name.startswith("popen-") else own) / "shipped"
    folder.mkdir(exist_ok=True)
    kept = folder / "kept"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            sdist = build(copy_checkout(folder / "tree"), "sdist")
            with tarfile.open(sdist.path) as opened:
                opened.extractall(folder / "unpacked", filter="data")
            (unpacked,) = (folder / "unpacked").iterdir()
            wheel = build(unpacked, on_path=True, asked="require")
            kept.write_bytes(pickle.dumps(Shipped(unpacked, wheel)))
    found = pickle.loads(kept.read_bytes())
    assert isinstance(found, Shipped)
    assert found.wheel.status == 0, found.wheel.said
    return found


def contents(wheel: Build) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel.path) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@needs_compiler
def test_one_wheel_for_all_pythons_has_both_libraries_and_no_sources(shipped: Shipped) -> None:
    assert shipped.wheel.said == "", "no warning"
    tag = "py3-none-manylinux_2_28_x86_64"
    assert shipped.wheel.path.name.endswith(f"-{tag}.whl")
    found = contents(shipped.wheel)
    (about,) = (text.decode() for name, text in found.items() if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in about
    assert re.findall(r"^Tag: (.*)$", about, re.MULTILINE) == [tag]
    in_kernel = {name for name in found if name.startswith(f"{KERNEL}/")}
    assert {name for name in in_kernel if not name.endswith(".py")} == {
        f"{KERNEL}/lib/{name}" for name in LIBRARIES
    }


@needs_compiler
@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_a_library_names_its_sources_and_needs_nothing_but_glibc(
    shipped: Shipped, name: str
) -> None:
    library = contents(shipped.wheel)[f"{KERNEL}/lib/{name}"]
    assert source_digest(SOURCES).encode() in library
    files, versions = needed_by(library)
    assert files <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    assert all(version <= (2, 28) for version in versions)
    assert str(ROOT.parent).encode() not in library
    assert str(shipped.unpacked).encode() not in library


@needs_compiler
def test_the_wheel_grows_by_at_most_a_megabyte(shipped: Shipped, tmp_path: Path) -> None:
    with_kernel = shipped.wheel.path.stat().st_size
    without = build(copy_checkout(tmp_path / "tree"), asked="skip").path.stat().st_size
    assert 0 < with_kernel - without <= GROWTH_BYTES


@needs_compiler
def test_a_wheel_made_from_the_sdist_is_that_of_the_checkout(
    shipped: Shipped, tmp_path: Path
) -> None:
    tree = copy_checkout(tmp_path / "tree")
    shutil.copytree(shipped.unpacked / KERNEL / "lib", tree / KERNEL / "lib")
    assert contents(build(tree, asked="require")) == contents(shipped.wheel)


def test_the_sdist_has_the_sources_and_the_hook_and_no_libraries(tmp_path: Path) -> None:
    tree = copy_checkout(tmp_path / "tree")
    (tree / KERNEL / "lib").mkdir()
    for name in LIBRARIES:
        (tree / KERNEL / "lib" / name).write_bytes(b"old")
    with tarfile.open(build(tree, "sdist").path) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    sources = {f"{KERNEL}/source/{path.name}" for path in SOURCES.iterdir()}
    assert {"hatch_build.py", "pyproject.toml", f"{KERNEL}/sources.py", *sources} <= names
    assert not {name for name in names if name.endswith(".so")}


@pytest.mark.parametrize("source", [None, TINY], ids=["as_it_is", "without_code_by_others"])
def test_licences_of_code_by_others_are_in_the_wheel(tmp_path: Path, source: str | None) -> None:
    tree = copy_checkout(tmp_path / "tree", source)
    by_others = [p for p in (tree / KERNEL / "source").glob("*.*") if "Copyright" in p.read_text()]
    found = contents(build(tree))
    texts = {name: text for name, text in found.items() if "/licenses/" in name}
    assert any(name.endswith("/licenses/LICENSE") for name in texts)
    expected = {p.name: p.read_bytes() for p in (tree / KERNEL / "source").glob("*LICENSE*")}
    shipped = {n.rpartition("/")[2]: t for n, t in texts.items() if "/kernel/source/" in n}
    assert shipped == expected
    assert bool(expected) == bool(by_others), "code by others has its licence beside it"
