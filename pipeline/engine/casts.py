"""Autocast's copies of the weights: one for all microbatches of a step, not one each.

autocast drops its copies whenever its outermost context closes. A stage opens a context for each forward, and autograd
would then hold another low-precision copy of every weight for each microbatch in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Kept(threading.local):
    """Copies without a graph by their weight's id, with the weight and its version; autocast keeps its own likewise."""

    def __init__(self) -> None:
        self.steps = 0
        self.copies: dict[int, tuple[Tensor, int, Tensor]] = {}


_kept = _Kept()


@contextmanager
def casts_kept_for_a_step() -> Iterator[None]:
    """While open, contexts of autocast that close inside keep their copies. The optimizer runs outside."""
    torch.autocast_increment_nesting()
    _kept.steps += 1
    try:
        yield
    finally:
        _kept.steps -= 1
        _kept.copies.clear()  # by then: fused optimizers don't move the versions of what they change
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` without a graph in `dtype`, converted once in a step."""
    if weight.dtype == dtype:
        return weight.detach()
    _, version, copy = _kept.copies.get(id(weight), (weight, -1, weight))
    if version != weight._version or copy.dtype != dtype:
        with torch.no_grad():
            copy = weight.to(dtype)
        if _kept.steps:
            _kept.copies[id(weight)] = (weight, weight._version, copy)
    return copy


@contextmanager
def graph_kept(wanted: bool) -> Iterator[None]:
    """Forwards inside build a graph, or none; without one they keep no copies either.

    A copy made without a graph would be found again by a forward that needs one, and the weight would silently get no
    gradient.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and wanted)
    try:
        with torch.set_grad_enabled(wanted):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
