"""The kernel is built, or left out with a reason, and the installation goes on: small sources."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import hatch_build
from hatch_build import KernelError, find_compiler, needed_by, platform_tag
from offload.update.kernel.sources import source_digest
from tests.install.trees import (
    KERNEL,
    LIBRARIES,
    ROOT,
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


@pytest.mark.parametrize("target", ["wheel", "editable"])
@pytest.mark.parametrize("compiler", [None, "/nonexistent"])
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
    "makes_nothing": ("exit 0", "made no library"),
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


def test_require_without_a_compiler_is_an_error(tree: Path) -> None:
    built = build(tree, asked="require")
    assert built.status == 1
    assert "no C++ compiler was found" in built.said


def test_a_value_that_means_nothing_is_refused(tree: Path) -> None:
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


@pytest.mark.parametrize("machine", ["aarch64", "i686"])
def test_nothing_is_compiled_for_another_processor(
    machine: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has run the kernel there: a compiler that is there must not be asked, either."""
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(KernelError, match=f"this is {machine} with "):
        hatch_build.build(tree / KERNEL)
    assert not libraries(tree)


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


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump, of binutils")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads libraries of x86_64")
def test_what_libraries_need_is_read_as_objdump_reads_it() -> None:
    folder = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    files = [*sorted(folder.glob("*.so")), *Path("/lib/x86_64-linux-gnu").glob("lib*.so.6")]
    assert len(files) > 20
    seen = set[tuple[int, ...]]()
    for file in files:
        said = subprocess.run(
            ["objdump", "-p", file], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        words = [line.split() for line in said]
        needed = {line[1] for line in words if line[:1] == ["NEEDED"]}
        references = (
            said[said.index("Version References:") :] if "Version References:" in said else []
        )
        versions = {
            tuple(map(int, line.split("GLIBC_")[1].split(".")))
            for line in references
            if "GLIBC_" in line and "GLIBC_PRIVATE" not in line and "ABI" not in line
        }
        files_needed, versions_needed = needed_by(file.read_bytes())
        assert files_needed == needed, file
        assert {version for version in versions_needed if version[0] == 2} == versions, file
        seen |= versions
    assert len(seen) > 3


@pytest.mark.parametrize("content", [b"", b"text", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" * 99])
def test_what_is_no_library_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="ELF"):
        needed_by(content)


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh -c 'two words'")
    assert find_compiler() == ["sh", "-c", "two words"]
    monkeypatch.setenv("CXX", "sh 'open")
    with pytest.raises(KernelError, match="no command"):
        find_compiler()


def test_no_library_at_all_needs_nothing_new() -> None:
    assert platform_tag([]) == "manylinux_2_28_x86_64"


def test_the_digest_is_that_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "update.cpp").write_text("int x;\n")
    (tmp_path / "a.h").write_text("//\n")
    (tmp_path / "notes.txt").write_text("not compiled\n")
    expected = subprocess.run(
        ["sh", "-c", r"printf 'a.h\0//\nupdate.cpp\0int x;\n' | sha256sum"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout[:16]
    assert source_digest(tmp_path) == expected
    (tmp_path / "a.h").rename(tmp_path / "b.h")
    assert source_digest(tmp_path) != expected
    for path in tmp_path.glob("*.[ch]*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no C\+\+ sources"):
        source_digest(tmp_path)


def test_the_digest_covers_every_file_beside_the_sources_but_licences() -> None:
    files = {path.name for path in (ROOT / KERNEL / "source").iterdir()}
    assert not {n for n in files if not n.endswith((".cpp", ".h")) and "LICENSE" not in n}
