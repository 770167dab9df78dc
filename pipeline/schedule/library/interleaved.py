"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): several stages a rank, 1F1B over them in turn."""

from __future__ import annotations

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library._common import check_counts, microbatch_groups, warm_up_then_alternate
from pipeline.schedule.schedule import Schedule


def interleaved_1f1b(pp: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Stage s on rank s mod p, any number of microbatches.

    Makespan (mv+p-1)(F+B) in the times of one stage for every m >= p: the idle time of 1F1B divided by v. In flight on
    rank r: at most 2(p-1-r) + (v-1)g + 1 stage inputs, g the size of the first group. ValueError unless every count is
    1 or more.
    """
    check_counts(pp, microbatches, stages_per_rank)
    groups = microbatch_groups(pp, microbatches)
    rows = tuple(
        warm_up_then_alternate(
            _actions(ActionType.F, [turn * pp + rank for turn in range(stages_per_rank)], groups),
            _actions(ActionType.B, [turn * pp + rank for turn in reversed(range(stages_per_rank))], groups),
            warmup=2 * (pp - 1 - rank) + (stages_per_rank - 1) * len(groups[0]),
        )
        for rank in range(pp)
    )
    placement = tuple(stage % pp for stage in range(pp * stages_per_rank))
    return Schedule("interleaved_1f1b", rows, placement, microbatches)


def _actions(kind: ActionType, stages: list[int], groups: list[range]) -> list[Action]:
    """Group by group: the first stage on all of the group, then the next stage."""
    return [Action(stage, kind, microbatch) for group in groups for stage in stages for microbatch in group]
