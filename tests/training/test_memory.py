from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.training.memory import peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")
MEGABYTE = 1 << 20

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


@linux
def test_the_peak_rises_and_can_be_forgotten():
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    block = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
    assert block.sum() == 64 * MEGABYTE
    peak = peak_memory_bytes(CPU)
    assert peak > before + 56 * MEGABYTE
    del block
    assert peak_memory_bytes(CPU) == peak, "a peak stays"
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < peak - 48 * MEGABYTE


def test_a_system_without_proc_cannot_tell(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: False)
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) is None


def test_a_container_may_forbid_the_reset(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    reset_peak_memory(CPU)


def test_a_status_without_a_peak_cannot_tell(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: "VmRSS:\t12 kB\n")
    assert peak_memory_bytes(CPU) is None


def test_kilobytes_become_bytes(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: "Name:\tpython\nVmHWM:\t      12 kB\n")
    assert peak_memory_bytes(CPU) == 12 * 1024
