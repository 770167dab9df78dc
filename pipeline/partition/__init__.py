"""Who holds which layers: a model's layers cut into contiguous stages."""

from __future__ import annotations

from pipeline.partition.auto import auto
from pipeline.partition.bottleneck import bottleneck
from pipeline.partition.layer_costs import LayerCosts
from pipeline.partition.manual import manual
from pipeline.partition.uniform import uniform

__all__ = ["LayerCosts", "auto", "bottleneck", "manual", "uniform"]
