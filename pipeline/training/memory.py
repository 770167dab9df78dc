"""The most memory a rank's process or GPU has used since training began."""

from __future__ import annotations

from pathlib import Path

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak so far. A new process starts with its parent's, which says nothing about its own training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # "5" resets the peak resident set size (VmHWM); Linux only, see proc(5)
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        try:
            clear_refs.write_text("5")
        except OSError:  # a container may forbid it; the peak then includes the start
            return


def peak_memory_bytes(device: torch.device) -> int | None:
    """Allocated bytes at most on a GPU, resident bytes at most (VmHWM) on a CPU; None where the system can't tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
