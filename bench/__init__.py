"""Measurements: one script per claim, each a ratio to something measured in the same run.

python -m bench.step --directory /path/on/the/drive
"""

import os

# Before torch is imported: OpenMP threads that spin while they wait for each other take the cores
# from whatever else runs. Results record what was set.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
