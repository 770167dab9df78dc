"""Looped breadth-first (Lamy-Poirier, arXiv 2211.05953): all microbatches through each of a rank's stages in turn."""

from __future__ import annotations

from pipeline.schedule.actions import ActionType
from pipeline.schedule.library._common import check_counts, in_groups, looped_placement
from pipeline.schedule.schedule import Schedule


def looped_bfs(pp: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Stage s on rank s mod p, backwards in reverse order of the forwards, any number of microbatches.

    A rank uses each stage's weights in one stretch a direction. Makespan (mv+p-1)(F+B) in the times of one stage for
    every m >= p, as interleaved 1F1B, but all mv stage inputs in flight. ValueError unless every count is 1 or more.
    """
    check_counts(pp, microbatches, stages_per_rank)
    order = range(microbatches)
    held = [range(rank, pp * stages_per_rank, pp) for rank in range(pp)]
    rows = tuple(
        (
            *in_groups(ActionType.F, stages, [order]),
            *in_groups(ActionType.B, stages[::-1], [order[::-1]]),
        )
        for stages in held
    )
    return Schedule("looped_bfs", rows, looped_placement(pp, stages_per_rank), microbatches)
