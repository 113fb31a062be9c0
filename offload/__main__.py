"""Entry point of ``python -m offload``, which is the command ``offload``."""

from offload.cli import main

main()
