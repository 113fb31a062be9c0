"""The kernel is built, or left out with a reason, and the installation goes on: small sources."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from pathlib import Path

import pytest

from offload.update.kernel.sources import source_digest
from tests.install.trees import (
    KERNEL,
    LIBRARIES,
    TINY,
    build,
    copy_checkout,
    needs_compiler,
    script,
)

WARNING = "warning: the C++ update kernel is not built: "


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "tree", TINY)


def libraries(tree: Path) -> dict[str, Path]:
    return {path.name: path for path in (tree / KERNEL / "lib").glob("*.so")}


def times(tree: Path) -> dict[str, int]:
    return {name: path.stat().st_mtime_ns for name, path in libraries(tree).items()}


def source_of(library: Path) -> str:
    function = ctypes.CDLL(str(library)).offload_kernel_source
    function.restype = ctypes.c_char_p
    return function().decode()


def warning(said: str) -> str:
    (line,) = said.splitlines()
    assert line.startswith(WARNING)
    return line.removeprefix(WARNING)


@pytest.mark.parametrize(
    ("target", "compiler"), [("wheel", None), ("wheel", "/nonexistent"), ("editable", None)]
)
def test_without_a_compiler_one_line_says_so_and_the_package_is_built(
    tree: Path, target: str, compiler: str | None
) -> None:
    built = build(tree, target, compiler=compiler)
    assert built.status == 0
    assert built.path.name.endswith("-py3-none-any.whl")
    assert not built.libraries
    assert not libraries(tree)
    assert (compiler or "no C++ compiler was found") in warning(built.said)


BROKEN = {
    "fails": ("echo 'update.cpp:1: error: no such thing' >&2; exit 3", "error: no such thing"),
    "makes_something_else": (
        'while [ "$1" != -o ]; do shift; done; echo text >"$2"',
        "made no library",
    ),
    "is_killed": ("kill -9 $$", "status -9"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_compiler_breaks_no_installation(tree: Path, tmp_path: Path, how: str) -> None:
    text, expected = BROKEN[how]
    compiler = script(tmp_path / "broken", text)
    built = build(tree, compiler=compiler)
    assert built.status == 0
    assert built.path.name.endswith("-py3-none-any.whl")
    said = warning(built.said)
    assert expected in said
    assert str(compiler) in said
    assert not list((tree / KERNEL / "lib").iterdir())


def test_require_makes_it_an_error_which_has_all_that_the_compiler_said(
    tree: Path, tmp_path: Path
) -> None:
    words = [f"line {number}" for number in range(20)]
    compiler = script(tmp_path / "broken", f"printf '%s\\n' {' '.join(map(repr, words))}; exit 3")
    built = build(tree, compiler=compiler, asked="require")
    assert built.status == 1
    assert not built.path.is_file()
    assert built.said.startswith(f"error: the C++ update kernel is not built: {compiler} ended")
    assert {*words} <= {*built.said.splitlines()}
    assert "Traceback" not in built.said


def test_a_value_that_means_nothing_is_refused(tree: Path) -> None:
    built = build(tree, asked="require")
    assert (built.status, "no C++ compiler was found" in built.said) == (1, True)
    built = build(tree, asked="no")
    assert built.status == 1
    assert "OFFLOAD_KERNEL is 'no'; expected 'require', 'skip'" in built.said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86_64 machine")
@pytest.mark.skipif(not shutil.which("setarch"), reason="needs setarch, of util-linux")
def test_another_processor_gets_a_package_without_the_kernel(tree: Path) -> None:
    setarch = str(shutil.which("setarch"))
    built = build(tree, on_path=True, under=(setarch, "linux32"))
    assert built.path.name.endswith("-py3-none-any.whl")
    assert not libraries(tree)
    assert "this is i686 with Linux" in warning(built.said)


@needs_compiler
def test_an_editable_installation_has_the_libraries_in_the_checkout(tree: Path) -> None:
    built = build(tree, "editable", on_path=True, asked="require")
    assert (built.status, built.said) == (0, "")
    assert not built.libraries
    digest = source_digest(tree / KERNEL / "source")
    assert {name: source_of(path) for name, path in libraries(tree).items()} == dict.fromkeys(
        LIBRARIES, digest
    )


@needs_compiler
def test_libraries_are_compiled_again_if_and_only_if_their_sources_or_options_changed(
    tree: Path,
) -> None:
    build(tree, "editable", on_path=True, asked="require")
    first = times(tree)
    # Not even a compiler is needed: each target of make calls the hook.
    again = build(tree, "editable", asked="require")
    assert (again.status, times(tree)) == (0, first)
    (tree / KERNEL / "source/more.h").write_text("// new\n")
    build(tree, "editable", on_path=True, asked="require")
    second = times(tree)
    assert not {*first.values()} & {*second.values()}
    hook = tree / "hatch_build.py"
    hook.write_text(hook.read_text().replace('"-O3"', '"-O3", "-DNEW"'))
    build(tree, "editable", on_path=True, asked="require")
    assert not {*second.values()} & {*times(tree).values()}


@needs_compiler
def test_libraries_of_other_sources_are_neither_shipped_nor_left_in_a_checkout(tree: Path) -> None:
    build(tree, "editable", on_path=True, asked="require")
    (tree / KERNEL / "source/more.h").write_text("// new\n")
    wheel = build(tree)
    assert not wheel.libraries
    assert wheel.path.name.endswith("-py3-none-any.whl")
    assert libraries(tree).keys() == LIBRARIES  # building a wheel changes no installation
    build(tree, "editable")
    assert not libraries(tree)


@needs_compiler
def test_skip_leaves_the_kernel_out(tree: Path) -> None:
    build(tree, "editable", on_path=True, asked="require")
    wheel = build(tree, on_path=True, asked="skip")
    assert (wheel.libraries, wheel.said) == (set(), "")
    assert wheel.path.name.endswith("-py3-none-any.whl")
    build(tree, "editable", on_path=True, asked="skip")
    assert not libraries(tree)


@needs_compiler
def test_a_failed_build_leaves_the_libraries_as_they_were_in_whole(
    tree: Path, tmp_path: Path
) -> None:
    build(tree, "editable", on_path=True, asked="require")
    before = {name: path.read_bytes() for name, path in libraries(tree).items()}
    (tree / KERNEL / "source/more.h").write_text("// new\n")
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    half = script(
        tmp_path / "half",
        f'case "$*" in *v4*) exit 1;; esac; PATH={os.environ["PATH"]} {real} "$@"',
    )
    assert build(tree, compiler=half, asked="require").status == 1
    assert {name: path.read_bytes() for name, path in libraries(tree).items()} == before
    assert {path.name for path in (tree / KERNEL / "lib").iterdir()} == LIBRARIES


@needs_compiler
@pytest.mark.parametrize("target", ["wheel", "editable"])
def test_a_folder_that_cannot_be_made_breaks_no_installation(tree: Path, target: str) -> None:
    (tree / KERNEL / "lib").write_text("a file")
    built = build(tree, target, on_path=True)
    assert built.status == 0
    assert "lib" in warning(built.said)


@needs_compiler
def test_a_kernel_that_needs_the_cpp_library_is_refused(tmp_path: Path) -> None:
    text = TINY + '#include <string>\nextern "C" __attribute__((visibility("default")))\n'
    text += "size_t length(const char *s) { return std::stol(s); }\n"
    tree = copy_checkout(tmp_path / "tree", text)
    built = build(tree, on_path=True)
    assert built.path.name.endswith("-py3-none-any.whl")
    assert "needs " in warning(built.said)
    assert "libstdc++.so.6" in built.said


@needs_compiler
@pytest.mark.skipif(
    tuple(map(int, (platform.libc_ver()[1] or "0.0").split("."))) < (2, 33),
    reason="needs glibc 2.33, whose fstat has a version of its own",
)
def test_a_kernel_that_needs_a_new_glibc_is_not_called_manylinux(tmp_path: Path) -> None:
    text = TINY + '#include <sys/stat.h>\nextern "C" __attribute__((visibility("default")))\n'
    text += "int call(int fd, struct stat *at) { return fstat(fd, at); }\n"
    built = build(copy_checkout(tmp_path / "tree", text), on_path=True, asked="require")
    assert built.libraries == LIBRARIES
    assert built.path.name.endswith("-py3-none-linux_x86_64.whl")
