"""Pipeline-parallel training: schedules as data, and the partition, engine, training and report built on them.

`from pipeline import Pipeline` is the whole of it from Python. It takes torch; the packages below import as much as
they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.training.pipeline import Microbatched, Pipeline

__all__ = ["Microbatched", "Pipeline"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from pipeline.training import pipeline  # not at the top: schedules need no torch

    return getattr(pipeline, name)
