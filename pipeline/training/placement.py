"""How every rank of a run computes, from its settings."""

from __future__ import annotations

import torch

from pipeline.engine.compilation import Compiler
from pipeline.engine.stage import Placement
from pipeline.training.precision import autocast, master_dtype, parameter_dtype
from pipeline.training.settings import Settings


def place(settings: Settings, device: torch.device) -> Placement:
    """The same for all stages on `device`, which share compiled code."""
    return Placement(
        device,
        parameter_dtype(settings.precision),
        autocast(settings.precision, device.type),
        settings.seed,
        Compiler() if settings.compile else None,
        defers_batch_norm=settings.batch_norm == "deferred",
        syncs_batch_norm=settings.batch_norm == "sync",
        masters=master_dtype(settings.precision),
    )
