"""Memory that was let go stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from pipeline.training.allocator import keep_freed_memory

keep_freed_memory()
faults = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(16)]
    tensors.clear()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_step_takes_no_new_pages_for_what_the_step_before_let_go():
    """Left alone, most processes take 14,000 or more of the 16,384 pages anew each time."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=True)
    faults = [int(word) for word in done.stdout.split()]
    assert faults[0] > 16_000
    assert sum(faults[8:]) < 100, faults  # the blocks find their places in the first rounds
