"""The wings of `offload` and `gds`: what each may import, read from its files and drawn from them.

python -m tests.wings      # draws docs/architecture.md anew
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by python -m tests.wings -->", "<!-- end of what is drawn -->"


_FORMAT = {"gds", "errors", "ambient"}
_READERS = {"gds", "errors", "interactive", "units", "format", "retention"}
_ARITHMETIC = {"torch", "gds", "errors", "ambient", "format", "device"}

MAY_KNOW = {
    "interactive": set(),
    "units": set(),
    "journal": set(),
    "errors": {"gds"},
    "ambient": {"torch"},
    "format": _FORMAT | {"torch"},  # within functions that are given a tensor
    "options": {"gds", "format"},
    "retention": {"gds", "errors", "format"},
    "checkpoint": _READERS,
    "store": _READERS | {"journal", "checkpoint"},
    "tiers": _READERS | {"journal", "checkpoint", "store"},  # of store: sealing a filled slot
    "sizing": {"gds", "errors", "units", "format", "options", "checkpoint"},  # no torch
    "record": {"gds", "errors", "journal", "format"},  # no torch
    "device": {"torch", "gds", "format"},
    "gradients": _ARITHMETIC,
    "update": _ARITHMETIC | {"gradients"},
    "model": _ARITHMETIC | {"update", "checkpoint"},
    "stream": _ARITHMETIC
    | {"units", "journal", "update", "model", "options", "checkpoint", "store"},
    "placement": _ARITHMETIC | {"update", "model", "options", "stream", "sizing"},
    "exchange": _ARITHMETIC
    | _READERS
    | {"update", "model", "options", "checkpoint", "store", "stream"},
    "distributed": _ARITHMETIC
    | {"ambient", "journal", "units", "options", "retention"}
    | {"checkpoint", "device", "model", "store", "stream"},
}
"""Every wing may import itself and these; from the ground up."""

BELOW_ENGINE = {*MAY_KNOW} | {"torch", "gds"}
MAY_KNOW["engine"] = BELOW_ENGINE
MAY_KNOW["overlap"] = BELOW_ENGINE | {"engine"}
MAY_KNOW["blocks"] = BELOW_ENGINE | {"engine"}
MAY_KNOW["near"] = BELOW_ENGINE | {"engine", "overlap"}
MAY_KNOW["optimizer"] = BELOW_ENGINE | {"engine", "overlap", "blocks", "near"}
MAY_KNOW["serve"] = BELOW_ENGINE | {"engine", "near", "optimizer"}
MAY_KNOW["classes"] = MAY_KNOW["grad_scaler"] = BELOW_ENGINE | {"optimizer"}
MAY_KNOW["__init__"] = BELOW_ENGINE | {"engine", "optimizer", "classes", "grad_scaler"}
MAY_KNOW["integrations"] = {"torch", "errors", "__init__"}
MAY_KNOW["demo"] = {"torch", "errors", "units", "__init__"}
MAY_KNOW["report"] = {"errors", "units", "format", "checkpoint", "record"}  # no torch
MAY_KNOW["cli"] = BELOW_ENGINE - {"device", "update", "model", "stream"} | {
    "demo",
    "near",
    "report",
    "serve",
    "__init__",
}

GDS_MAY_KNOW: dict[str, set[str]] = {
    "libc": set(),
    "waiting": set(),
    "paths": set(),
    "errors": set(),
    "contract": set(),
    "buffers": {"contract", "errors", "waiting"},
    "probe": {"buffers", "contract", "errors", "libc"},
    "memory_directories": {"buffers", "errors", "libc", "probe"},
    "check": {"buffers", "contract", "libc", "paths", "probe"},
    "backends": {"buffers", "check", "contract", "errors", "libc", "paths", "probe", "waiting"},
    "small_files": {"backends"},
    "calibration": {"backends", "contract", "errors", "probe", "small_files"},
    "opening": {"backends", "contract", "errors", "paths"},
}
"""The same for `gds`, which knows nothing of `offload`, and imports no torch."""

GDS_MAY_KNOW["bench"] = {*GDS_MAY_KNOW}
GDS_MAY_KNOW["testing"] = {"buffers", "contract", "errors"}
GDS_MAY_KNOW["kvikio"] = {"backends", "buffers"}
GDS_MAY_KNOW["cli"] = {"bench", "check", "errors", "paths"}
GDS_MAY_KNOW["_platform"] = set()
GDS_MAY_KNOW["__init__"] = {*GDS_MAY_KNOW}

TABLES = {"offload": MAY_KNOW, "gds": GDS_MAY_KNOW}


def files(package: str) -> list[Path]:
    """Return the files of a package, without the one that starts its command."""
    return sorted({*(ROOT / package).rglob("*.py")} - {ROOT / package / "__main__.py"})


def wing_of(path: Path) -> str:
    """Return the wing that a file is in; a single file is one of its own."""
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def names_imported(path: Path) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(path: Path) -> Iterator[str]:
    """Yield what a file imports, anywhere in it: wings by name, and other packages."""
    own = path.relative_to(ROOT).parts[0]
    for name in names_imported(path):
        package, _, rest = name.partition(".")
        wing = rest.partition(".")[0]
        if package != own:
            yield package
        else:
            yield wing if wing in TABLES[own] else "__init__"


def arrows() -> dict[str, set[str]]:
    """Return which wings each wing imports."""
    found: dict[str, set[str]] = {wing: set() for wing in MAY_KNOW}
    for path in files("offload"):
        wing = wing_of(path)
        found[wing] |= {name for name in imported(path) if name in MAY_KNOW and name != wing}
    return found


def modules_imported(package: str) -> dict[str, set[str]]:
    """Return which modules of a package each of its modules imports, anywhere in it.

    The package's own face is left out: it imports lazily, or nearly everything.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files(package)
    }
    del paths[package]
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = set(names_imported(path))
        names |= {name.rpartition(".")[0] for name in names - paths.keys()}
        found[module] = names & paths.keys() - {module}
    return found


def drawn() -> str:
    """Return the picture, and a list of the wings, as Markdown."""
    every = arrows()
    lines = ["```mermaid", "flowchart TD"]
    shown = [wing for wing in reversed(MAY_KNOW) if wing not in _GROUND]
    lines += [f"    {_node(wing)}[{_title(wing)}]" for wing in shown]
    for wing in shown:
        below = every[wing] - _GROUND
        # What is reached by way of another wing needs no arrow of its own.
        implied = {far for near in below for far in _reached(near, every)}
        names = [name for name in shown if name in below - implied]
        lines += [f"    {_node(wing)} --> {_node(name)}" for name in names]
    lines += ["```", ""]
    lines += [f"- `{_title(wing)}`: {_role(wing)}" for wing in reversed(MAY_KNOW)]
    return "\n".join([BEGIN, *lines, END])


_GROUND = {"errors", "interactive", "units", "journal", "ambient"}
"""Known nearly everywhere: their arrows would hide the others."""


def _node(wing: str) -> str:
    return wing.strip("_")


def _title(wing: str) -> str:
    return "offload" if wing == "__init__" else wing


def _reached(wing: str, every: dict[str, set[str]]) -> set[str]:
    return every[wing] | {far for near in every[wing] for far in _reached(near, every)}


def _role(wing: str) -> str:
    folder, file = ROOT / "offload" / wing / "__init__.py", ROOT / "offload" / f"{wing}.py"
    text = ast.get_docstring(ast.parse((folder if folder.exists() else file).read_text())) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def main() -> None:
    """Draw the page anew."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + drawn() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
