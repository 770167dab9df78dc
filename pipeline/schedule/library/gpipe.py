"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library._common import check_counts
from pipeline.schedule.schedule import Schedule


def gpipe(pp: int, microbatches: int) -> Schedule:
    """One stage a rank, backwards in microbatch order.

    Makespan (m+p-1)(F+B), and m microbatches in flight on every rank. ValueError unless both counts are 1 or more.
    """
    check_counts(pp, microbatches)
    rows = tuple(
        tuple(
            Action(rank, kind, microbatch)
            for kind in (ActionType.F, ActionType.B)
            for microbatch in range(microbatches)
        )
        for rank in range(pp)
    )
    return Schedule("gpipe", rows, tuple(range(pp)), microbatches)
