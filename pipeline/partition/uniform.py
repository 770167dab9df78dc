"""The same number of layers on every stage."""

from __future__ import annotations


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """How many consecutive layers each stage holds: equal counts, the remainder one each to the first stages.

    Raises:
        ValueError: there are more stages than layers, so that a stage would be empty.
    """
    if stages > layers:
        raise ValueError(
            f"{stages} stages need at least {stages} layers, the model has {layers}: "
            "use fewer stages (pp x schedule.stages_per_rank) or a deeper model"
        )
    share, rest = divmod(layers, stages)
    return tuple(share + (stage < rest) for stage in range(stages))
