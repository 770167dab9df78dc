"""A cut given by the user."""

from __future__ import annotations

from collections.abc import Sequence


def manual(counts: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """The given number of layers a stage, checked.

    Raises:
        ValueError: the counts are not one a stage, one is under 1, or they do not add up to the model's layers.
    """
    if len(counts) != stages:
        raise ValueError(
            f"partition.layers={list(counts)} names {len(counts)} stages, the schedule has {stages}: "
            f"give {stages} numbers that add up to {layers}"
        )
    if min(counts) < 1:
        raise ValueError(f"partition.layers={list(counts)} leaves a stage empty: every stage needs at least one layer")
    if sum(counts) != layers:
        raise ValueError(
            f"partition.layers={list(counts)} adds up to {sum(counts)}, the model has {layers} layers: make them equal"
        )
    return tuple(counts)
