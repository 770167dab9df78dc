"""For all tests: one thread a process, as ranks that share a small machine have."""

from __future__ import annotations

import os

# before torch is imported, and for the processes that tests start
os.environ.setdefault("OMP_NUM_THREADS", "1")
