"""``python -m gds.calibration DIRECTORY``: find out what suits a directory, and show it."""

from gds.calibration.calibration import main

raise SystemExit(main())
