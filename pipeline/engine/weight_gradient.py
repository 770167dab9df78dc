"""The deferred weight gradient: I computes gradients of inputs, W those of the weights.

    F   y = module(x)           a store is opened for the microbatch
    I   autograd's backward     gives x.grad; each split module leaves (x, y.grad) or a finished small gradient behind
    W   store.apply()           weight.grad += ..., module by module, and what was kept is freed

`pipeline.engine.split_modules` says which modules leave what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """In which a parameter's gradient is added up: its own, unless it says otherwise (torch 2.10)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class WeightGradients:
    """What one microbatch leaves for W in one stage.

    Args:
        hold: called with each tensor that is kept, if somebody counts; what it returns lives as long as the tensor.
    """

    def __init__(self, hold: Callable[[Tensor], object] | None = None) -> None:
        self._hold = hold
        self.taken = True
        """Whether gradients that come up now belong here. Outside the engine's own backward, such as for a force that a
        model computes as a gradient within its forward, every gradient goes where autograd sends it."""
        self._pending: list[tuple[Callable[[], None], list[object] | None]] = []

    def defer(self, compute: Callable[[], None], *kept: Tensor) -> None:
        """Run `compute` in W; it refers to the tensors `kept`."""
        self._pending.append((compute, [self._hold(tensor) for tensor in kept] if self._hold else None))

    def apply(self) -> None:
        """Add every deferred gradient, freeing what each needed; the first layer's first, for I left that last."""
        with torch.no_grad():
            while self._pending:
                self._pending.pop()[0]()


class AddedAtOnce(WeightGradients):
    """Of a whole backward: leaves nothing, every gradient is added where it comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = False

    def defer(self, compute: Callable[[], None], *kept: Tensor) -> None:
        """Run `compute` now."""
        with torch.no_grad():
            compute()


@dataclass
class Deferral:
    """Says where the modules of a stage leave their weight gradients: nowhere, unless `store` is set."""

    store: WeightGradients | None = None
