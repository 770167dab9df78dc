"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): several stages a rank, 1F1B over them in turn."""

from __future__ import annotations

from pipeline.schedule.actions import ActionType
from pipeline.schedule.library._common import (
    check_counts,
    in_groups,
    looped_placement,
    microbatch_groups,
    warm_up_then_alternate,
)
from pipeline.schedule.schedule import Schedule


def interleaved_1f1b(pp: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Stage s on rank s mod p, any number of microbatches.

    Makespan (mv+p-1)(F+B) in the times of one stage for every m >= p: the idle time of 1F1B divided by v. In flight on
    rank r: at most 2(p-1-r) + (v-1)g + 1 stage inputs, g the size of the first group. ValueError unless every count is
    1 or more.
    """
    check_counts(pp, microbatches, stages_per_rank)
    groups = microbatch_groups(pp, microbatches)
    held = [range(rank, pp * stages_per_rank, pp) for rank in range(pp)]
    rows = tuple(
        warm_up_then_alternate(
            in_groups(ActionType.F, stages, groups),
            in_groups(ActionType.B, stages[::-1], groups),
            warmup=2 * (pp - 1 - rank) + (stages_per_rank - 1) * len(groups[0]),
        )
        for rank, stages in enumerate(held)
    )
    return Schedule("interleaved_1f1b", rows, looped_placement(pp, stages_per_rank), microbatches)
