"""Entry point of ``python -m gds``, which is the command ``gds``."""

from gds.cli import main

main()
