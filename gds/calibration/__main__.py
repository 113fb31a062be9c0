"""Command ``python -m gds.calibration DIRECTORY``: measures a directory and prints the result."""

from gds.calibration.calibration import main

raise SystemExit(main())
