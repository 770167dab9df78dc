"""Floating-point formats of a run: parameters, autocast, and the loss scale that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.engine.boundary import Autocast
from pipeline.training.settings import PrecisionSettings

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parameter_dtype(settings: PrecisionSettings) -> torch.dtype:
    """The dtype of parameters; and of gradients and optimizer state, unless the parameters have copies."""
    return _dtype("precision.parameters", settings.parameters)


def master_dtype(settings: PrecisionSettings) -> torch.dtype | None:
    """The dtype of the copies that the optimizer moves, and of gradients; None: there are no copies."""
    return None if settings.masters is None else _dtype("precision.masters", settings.masters)


def crossing_dtype(settings: PrecisionSettings) -> torch.dtype | None:
    """The dtype of floating-point tensors on their way from rank to rank; None: their own."""
    return None if settings.boundary is None else _dtype("precision.boundary", settings.boundary)


def autocast(settings: PrecisionSettings, device_type: str) -> Autocast:
    """Makes the context that every forward pass and loss runs under."""
    if settings.autocast is None:
        return nullcontext
    return partial(_autocast, device_type, _dtype("precision.autocast", settings.autocast))


def _autocast(device_type: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast(device_type, dtype=dtype)


def _dtype(field: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{field}={name} is unknown: use {', '.join(list(_DTYPES)[:-1])} or {list(_DTYPES)[-1]}")
    return _DTYPES[name]


@dataclass
class LossScale:
    """fp16's dynamic loss scale: halved when a gradient overflows, doubled after a run of good steps.

    Every rank holds one and gives it the same verdicts, so all hold the same value.
    """

    value: float
    dynamic: bool
    growth_interval: int = 2000
    good_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may cure an overflow: below 1 the numbers themselves are at fault."""
        return self.dynamic and self.value > 1

    @classmethod
    def start(cls, initial: float) -> LossScale:
        """A dynamic scale from `initial`; with 1.0 a scale that stays 1.0.

        Raises:
            ValueError: `initial` is under 1.
        """
        if not initial >= 1:
            raise ValueError(f"precision.loss_scale={initial:g} is under 1: use 1 (no scaling) or more, such as 65536")
        return cls(initial, dynamic=initial > 1)

    def resume(self, value: float, good_steps: int) -> None:
        """Go on from a checkpoint's scale; a scale that stays 1.0 does."""
        if self.dynamic and value > 1:
            self.value, self.good_steps = value, good_steps

    def update(self, *, overflow: bool) -> None:
        """Take in one step's verdict, the same on every rank."""
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
