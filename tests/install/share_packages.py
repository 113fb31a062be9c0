"""Lets a fresh virtual environment see the packages of the Python that runs this.

    python -m tests.install.share_packages .venv

`make gpu WHEELS=folder` runs this, so that the PyTorch and NumPy of the machine are used. What venv
calls system packages are those of the interpreter alone: PyTorch is often in an environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDERS = ("site-packages", "dist-packages")


def main() -> None:
    """Add the folders of this Python's packages to those of the environment, after its own."""
    environment = Path(sys.argv[1])
    (own,) = environment.glob("lib/python*/site-packages")
    folders = [folder for folder in sys.path if Path(folder).name in _FOLDERS]
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (own / "machine.pth").write_text("".join(lines))


if __name__ == "__main__":
    main()
