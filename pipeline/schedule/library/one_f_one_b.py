"""1F1B, also PipeDream-flush (Narayanan et al., arXiv 2006.09503; Megatron-LM, arXiv 2104.04473), and eager 1F1B."""

from __future__ import annotations

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library._common import check_counts, warm_up_then_alternate
from pipeline.schedule.schedule import Row, Schedule


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """One stage a rank: rank r runs min(m, p-1-r) forwards, then pairs of forward and backward, then what is left.

    Makespan (m+p-1)(F+B) as in GPipe, but at most min(m, p-r) microbatches in flight on rank r. ValueError unless both
    counts are 1 or more.
    """
    check_counts(pp, microbatches)
    rows = tuple(_row(rank, microbatches, warmup=pp - 1 - rank) for rank in range(pp))
    return Schedule("1f1b", rows, tuple(range(pp)), microbatches)


def eager_1f1b(pp: int, microbatches: int) -> Schedule:
    """1F1B with the warm-up doubled (Zhuang et al., arXiv 2211.05322; DAPPLE's policy B, arXiv 2007.01045).

    A gradient is due two forwards later for each hop to the last rank, which hides the transfers: makespan
    (m+p-1)(F+B) + 2(p-1)c for a latency c of up to (F+B)/2, at min(m, 2(p-r)-1) microbatches in flight on rank r.
    ValueError unless both counts are 1 or more.
    """
    check_counts(pp, microbatches)
    rows = tuple(_row(rank, microbatches, warmup=2 * (pp - 1 - rank)) for rank in range(pp))
    return Schedule("eager_1f1b", rows, tuple(range(pp)), microbatches)


def _row(rank: int, microbatches: int, warmup: int) -> Row:
    order = range(microbatches)
    return warm_up_then_alternate(
        [Action(rank, ActionType.F, microbatch) for microbatch in order],
        [Action(rank, ActionType.B, microbatch) for microbatch in order],
        warmup,
    )
