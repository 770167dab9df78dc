"""Who holds which layers: a model's layers cut into contiguous stages."""

from __future__ import annotations

from pipeline.partition.auto import Choice, auto
from pipeline.partition.bottleneck import bottleneck
from pipeline.partition.layer_costs import LayerCosts
from pipeline.partition.lightest import Lightest, lightest
from pipeline.partition.manual import manual
from pipeline.partition.problem import Problem
from pipeline.partition.uniform import uniform

__all__ = ["Choice", "LayerCosts", "Lightest", "Problem", "auto", "bottleneck", "lightest", "manual", "uniform"]
