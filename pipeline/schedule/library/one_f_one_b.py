"""1F1B, also PipeDream-flush (Narayanan et al., arXiv 2006.09503; Megatron-LM, arXiv 2104.04473)."""

from __future__ import annotations

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library._common import check_counts, warm_up_then_alternate
from pipeline.schedule.schedule import Schedule


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """One stage a rank: rank r runs min(m, p-1-r) forwards, then pairs of forward and backward, then what is left.

    Makespan (m+p-1)(F+B) as in GPipe, but at most min(m, p-r) microbatches in flight on rank r. ValueError unless both
    counts are 1 or more.
    """
    check_counts(pp, microbatches)
    rows = tuple(
        warm_up_then_alternate(
            [Action(rank, ActionType.F, microbatch) for microbatch in range(microbatches)],
            [Action(rank, ActionType.B, microbatch) for microbatch in range(microbatches)],
            warmup=pp - 1 - rank,
        )
        for rank in range(pp)
    )
    return Schedule("1f1b", rows, tuple(range(pp)), microbatches)
