"""The build hook: it compiles the C++ update kernel for wheels and for editable installs.

The kernel makes steps faster and changes no result, so an installation does not fail because of it:
where it cannot be compiled, the hook warns and the package is built without it. The environment
variable OFFLOAD_KERNEL changes that:

    OFFLOAD_KERNEL=require    an error, with all that the compiler said, instead of the warning
    OFFLOAD_KERNEL=skip       do not compile the kernel, and leave it out

The compiler is $CXX, or else the first of c++, g++ and clang++ on PATH. CXXFLAGS is not used:
options such as -ffast-math would change results.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNEL: Final = "offload/update/kernel"
"""Where the kernel is in the checkout, and in the wheel."""

COMPILERS: Final = ("c++", "g++", "clang++")

VARIANTS: Final = {
    "update_avx2.so": ("-march=x86-64-v3",),
    "update_avx512.so": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
"""The libraries, and the instructions that each is compiled for."""

OPTIONS: Final = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",  # a fused multiply-add would round once where torch rounds twice
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wl,-s",  # no symbols but the exported ones
    "-Wl,-z,defs",  # what is not defined is an error now, not when the library is loaded
    "-Wl,--as-needed",  # the C++ library is linked only if it is used, which `check` refuses
)

MAY_NEED: Final = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
"""Shared libraries that every Linux with glibc has."""

GLIBC: Final = (2, 28)
"""The newest version of glibc that a wheel for manylinux_2_28 may need."""

_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC_SECTION, _VERSIONS_SECTION = 6, 0x6FFFFFFE
_DT_NEEDED: Final = 1


class KernelError(Exception):
    """The kernel cannot be built here.

    Args:
        reason: One line that says why.
        output: All that the compiler said.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


class KernelBuildHook(BuildHookInterface[BuilderConfig]):
    """Puts the libraries of the update kernel into a wheel, or into the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, unless those that are there are of the same sources and options.

        Args:
            version: ``"standard"`` for a wheel, ``"editable"`` for an editable install, which uses
                the libraries where they are in the checkout.
            build_data: What the wheel is built from; the libraries and the tag are added to it.
        """
        asked = os.environ.get("OFFLOAD_KERNEL", "")
        if asked not in ("", "require", "skip"):
            self.app.abort(
                f"error: OFFLOAD_KERNEL is {asked!r}; expected 'require', 'skip', or nothing"
            )
        kernel = Path(self.root, KERNEL)
        try:
            libraries = [] if asked == "skip" else build(kernel)
        except (KernelError, OSError) as error:
            if asked == "require":
                output = getattr(error, "output", "")
                self.app.abort(f"error: the C++ update kernel is not built: {error}\n{output}")
            self.app.display_warning(
                f"warning: the C++ update kernel is not built: {error}. The package works without "
                "it, with the same results; updates on the CPU take longer."
            )
            libraries = []
        if version == "editable":
            if not libraries:
                remove(kernel)  # older libraries must not be used in the place of these
        elif libraries:
            build_data["artifacts"] += [f"/{KERNEL}/lib/{path.name}" for path in libraries]
            build_data["pure_python"] = False
            build_data["infer_tag"] = False
            build_data["tag"] = f"py3-none-{platform_tag(libraries)}"


def build(kernel: Path) -> list[Path]:
    """Compile the libraries of the kernel, all at the same time, where they are missing or old.

    Args:
        kernel: The folder that has ``source``; the libraries go to its folder ``lib``.

    Returns:
        The paths of the libraries.

    Raises:
        KernelError: There is no compiler, or it fails, or this is another system or processor.
        OSError: The folder cannot be written to.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        here = f"{platform.machine()} with {platform.system()}"
        raise KernelError(f"it is written for x86_64 with Linux, and this is {here}")
    folder = kernel / "lib"
    libraries = {folder / name: options for name, options in VARIANTS.items()}
    digest = source_digest(kernel / "source")
    if all(is_current(path, digest, options) for path, options in libraries.items()):
        return [*libraries]
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch,
        ThreadPoolExecutor(len(libraries)) as threads,
    ):
        new = {path: Path(scratch, path.name) for path in libraries}
        calls = [
            threads.submit(compile_variant, compiler, kernel / "source", new[path], digest, options)
            for path, options in libraries.items()
        ]
        for call in calls:
            call.result()
        for path, partial in new.items():
            partial.replace(path)
    return [*libraries]


def remove(kernel: Path) -> None:
    """Remove the libraries that an earlier installation has left, as far as that is possible."""
    for name in VARIANTS:
        with contextlib.suppress(OSError):
            (kernel / "lib" / name).unlink()


def source_digest(folder: Path) -> str:
    """Return the digest of the sources, computed by the module that checks it later."""
    path = folder.with_name("sources.py")
    spec = importlib.util.spec_from_file_location("offload_kernel_sources", path)
    if spec is None or spec.loader is None:
        raise KernelError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.source_digest(folder))


def build_id(digest: str, options: Sequence[str]) -> bytes:
    """Return 20 bytes that name sources and options; the linker puts them into the library."""
    text = "\0".join((digest, *OPTIONS, *options))
    return hashlib.sha256(text.encode()).digest()[:20]


def is_current(library: Path, digest: str, options: Sequence[str]) -> bool:
    """Return whether a library exists and is of these sources and options."""
    return library.exists() and build_id(digest, options) in library.read_bytes()


def find_compiler() -> list[str]:
    """Return the command that runs the C++ compiler; $CXX may have arguments.

    Raises:
        KernelError: There is none.
    """
    own = os.environ.get("CXX", "")
    try:
        command = shlex.split(own)
    except ValueError as error:
        raise KernelError(f"CXX is {own!r}, which is no command: {error}") from None
    if command:
        if shutil.which(command[0]) is None:
            raise KernelError(f"CXX names {command[0]!r}, and there is no such program")
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    names = ", ".join(COMPILERS)
    raise KernelError(f"no C++ compiler was found: CXX is not set, and PATH has none of {names}")


def compile_variant(
    compiler: Sequence[str], source: Path, library: Path, digest: str, options: Sequence[str]
) -> None:
    """Compile one library, and check that it can be loaded on other machines.

    Raises:
        KernelError: The compiler fails, or the library is not what it should be.
    """
    command = [
        *(*compiler, *OPTIONS, *options),
        f'-DSOURCE_DIGEST="{digest}"',
        f"-Wl,--build-id=0x{build_id(digest, options).hex()}",
        *("-o", str(library.absolute()), "update.cpp", "-lm"),
    ]
    # In the folder of the sources, so that no path of this machine gets into the library.
    done = subprocess.run(
        command,
        cwd=source,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    output = f"{shlex.join(command)}\n{done.stdout}"
    name = shlex.join(compiler)
    if done.returncode:
        lines = done.stdout.splitlines()
        said = next((line for line in lines if "error" in line), "".join(lines[:1]))
        raise KernelError(f"{name} ended with status {done.returncode}: {said.strip()}", output)
    try:
        files, _ = needed_by(library.read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise KernelError(
            f"{name} ended with status 0 and made no library: {error}", output
        ) from None
    if files - MAY_NEED:
        names = ", ".join(sorted(files - MAY_NEED))
        raise KernelError(f"{library.name} needs {names}, which not every Linux has", output)


def platform_tag(libraries: Sequence[Path]) -> str:
    """Return the platform that a wheel with these libraries is for."""
    versions = set[tuple[int, ...]]().union(*(needed_by(p.read_bytes())[1] for p in libraries))
    old_enough = all(version <= GLIBC for version in versions)
    return "manylinux_2_28_x86_64" if old_enough else "linux_x86_64"


def needed_by(library: bytes) -> tuple[set[str], set[tuple[int, ...]]]:
    """Return what a shared library needs.

    Args:
        library: A shared library for x86_64, an ELF file.

    Returns:
        The names of other shared libraries, and versions of glibc, as ``(2, 28)``; a version that
        is not a number counts as newer than all others.

    Raises:
        ValueError: It is no such library.
    """
    try:
        return _needed_by(library)
    except (struct.error, IndexError) as error:
        raise ValueError(f"no ELF file, or a damaged one: {error}") from None


def _needed_by(library: bytes) -> tuple[set[str], set[tuple[int, ...]]]:
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count = struct.unpack_from("<HH", library, 0x3A)
    sections = [_SECTION.unpack_from(library, table + size * i) for i in range(count)]
    files, versions = set[str](), set[tuple[int, ...]]()
    for _, kind, _, _, at, num_bytes, link, _, _, _ in sections:
        if kind == _DYNAMIC_SECTION:
            for tag, value in struct.iter_unpack("<qQ", library[at : at + num_bytes]):
                if tag == _DT_NEEDED:
                    files.add(_text(library, sections[link][4] + value))
        elif kind == _VERSIONS_SECTION:
            following = 1
            while following:  # a library, and the versions of its symbols
                _, num_versions, _, offset, following = struct.unpack_from("<HHIII", library, at)
                entry = at + offset
                for _ in range(num_versions):
                    _, _, _, name, step = struct.unpack_from("<IHHII", library, entry)
                    versions |= _glibc_version(_text(library, sections[link][4] + name))
                    entry += step
                at += following
    return files, versions


def _text(library: bytes, at: int) -> str:
    return library[at : library.index(b"\0", at)].decode()


def _glibc_version(name: str) -> set[tuple[int, ...]]:
    maker, _, number = name.partition("_")
    if maker != "GLIBC":
        return set()
    numeric = all(part.isdecimal() for part in number.split("."))
    return {tuple(map(int, number.split("."))) if numeric else (sys.maxsize,)}
