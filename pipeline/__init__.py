"""Pipeline-parallel training: schedules as data, and the partition, engine, training and report built on them.

`from pipeline import Pipeline` is the whole of it from Python. It takes torch; the packages below import as much as
they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.training.pipeline import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    if name != "Pipeline":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from pipeline.training.pipeline import Pipeline  # not at the top: schedules need no torch

    return Pipeline
