"""Runs that are the same bit for bit, time after time on the same machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(wanted: bool, *, compiled: bool = False) -> Iterator[None]:
    """While open, if wanted, torch takes algorithms alone that give the same numbers every time.

    An operation that has no such algorithm raises a RuntimeError that names it. What the engine itself decides (the
    order in which gradients and losses are added up, dropout, starting weights) is the same every time anyway.

    Args:
        wanted: else nothing changes.
        compiled: whether layers are compiled, whose kernels are then chosen without timing them.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # cuBLAS reads it when it is first used, and otherwise takes whichever of its workspaces is free
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it times algorithms and takes the fastest
    try:
        with _kernels_untimed() if compiled else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warned)
        torch.backends.cudnn.benchmark = before[1]


def _kernels_untimed() -> AbstractContextManager[object]:
    from torch._inductor import config  # takes seconds: only for those who compile

    # older ones have no such choice, and don't time anything unless they are told to
    changes = {"deterministic": True} if hasattr(config, "deterministic") else {}
    patched: AbstractContextManager[object] = config.patch(changes)
    return patched
