"""Forward passes alone, for validation: each microbatch runs through every stage, nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library._common import check_counts, microbatch_groups
from pipeline.schedule.schedule import Schedule


def forward_only(stage_to_rank: Sequence[int], microbatches: int) -> Schedule:
    """Over any placement: group by group of about pp microbatches, a rank's stages in order.

    All ranks follow the order (group, stage, microbatch), which no input contradicts: it cannot deadlock.

    ValueError for no stage, a negative rank, a rank without a stage, or fewer than 1 microbatch.
    """
    if not stage_to_rank or set(stage_to_rank) != set(range(max(stage_to_rank) + 1)):
        raise ValueError(f"stage_to_rank is {list(stage_to_rank)}: give every rank from 0 on at least one stage")
    pp = max(stage_to_rank) + 1
    check_counts(pp, microbatches)
    groups = microbatch_groups(pp, microbatches)
    held = [[stage for stage, holder in enumerate(stage_to_rank) if holder == rank] for rank in range(pp)]
    rows = tuple(
        tuple(Action(stage, ActionType.F, microbatch) for group in groups for stage in stages for microbatch in group)
        for stages in held
    )
    return Schedule("forward_only", rows, tuple(stage_to_rank), microbatches, forward_only=True)
