"""Collects the pages of the site: README.md, those of docs/, and every file that they lead to.

python -m docs.pages SCRIPTS FOLDER

The site has the layout of the repository. So a link leads to the same file on the site as on
GitHub, and the results and tests that a page cites can be read without a network. The page of the
commands is made from what they say with `--help`. `make site` puts the scripts into their folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final
from urllib.parse import unquote

ROOT: Final = Path(__file__).parent.parent

COMMANDS: Final = {"offload": "offload.cli.app", "gds": "gds.cli"}
"""Commands, and the modules that have their typer applications."""

SCRIPTS: Final = {
    "mermaid.min.js": "package/dist/mermaid.min.js",
    "iframe-worker.js": "package/shim/index.js",
}
"""Scripts that `mkdocs.yml` names, and where npm's packages have them."""

_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_SHORTENED = re.compile(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", re.MULTILINE)


def linked_files() -> set[Path]:
    """Return README.md, the pages of docs/, and every file that one of them leads to.

    Raises:
        ValueError: A link leads out of the repository.
    """
    found: set[Path] = set()
    todo = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    while todo:
        path = todo.pop()
        if path.relative_to(ROOT) in found or not path.is_file():
            continue  # the build says where a link leads nowhere
        found.add(path.relative_to(ROOT))
        if path.suffix == ".md":
            text = _FENCED.sub("", path.read_text())
            todo += [(path.parent / unquote(target)).resolve() for target in _LINK.findall(text)]
    return found


def page_of_commands() -> str:
    """Return a page in Markdown of what the commands say with `--help`."""
    parts = ["# Commands\n\nWhat `offload`, `gds` and their commands say with `--help`.\n"]
    for name, module in COMMANDS.items():
        command = [sys.executable, "-m", "typer", module, "utils", "docs", "--name", name]
        said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        # The list of commands cuts their sentences, and the site has a better one beside the page.
        parts.append(re.sub(r"^#", "##", _SHORTENED.sub("", said.stdout), flags=re.MULTILINE))
    return "\n".join(parts)


def collect(scripts: Path, folder: Path) -> None:
    """Write all pages to a folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {ROOT / name: folder / name for name in linked_files()}
    files |= {scripts / source: folder / "assets" / name for name, source in SCRIPTS.items()}
    for source, target in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    (folder / "docs/cli.md").write_text(page_of_commands())


if __name__ == "__main__":
    collect(Path(sys.argv[1]), Path(sys.argv[2]))
