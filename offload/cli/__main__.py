"""Entry point of ``python -m offload.cli``."""

from offload.cli import main

main()
