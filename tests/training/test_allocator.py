"""Memory that was let go stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from pipeline.training.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(16)]
    tensors.clear()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """Of the third time that a process takes 64 MB and lets them go."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=100, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_step_takes_no_new_pages_for_what_the_step_before_let_go():
    assert page_faults("kept") < 100
    assert page_faults("given back") > 500
