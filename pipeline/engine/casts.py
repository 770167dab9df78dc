"""Autocast's copies of the weights: one for all microbatches of a step, not one each.

autocast drops its copies whenever its outermost context closes. A stage opens a context for each forward, and autograd
would then hold another low-precision copy of every weight for each microbatch in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def casts_kept_for_a_step() -> Iterator[None]:
    """While open, contexts of autocast that close inside keep their copies. The optimizer runs outside."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


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
