"""Who holds which layers: a model's layers cut into contiguous stages."""

from __future__ import annotations

from pipeline.partition.bottleneck import bottleneck
from pipeline.partition.manual import manual
from pipeline.partition.uniform import uniform

__all__ = ["bottleneck", "manual", "uniform"]
