"""Measurements: one script per claim, each a ratio to something measured in the same run.

python -m bench.step --directory /path/on/the/drive
"""

import os

# This must come before the import of torch. Otherwise OpenMP threads spin while they wait for each
# other, and take cores from other threads. Results record the setting.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
