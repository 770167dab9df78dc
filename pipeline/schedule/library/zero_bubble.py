"""Zero-bubble schedules of a line and a loop (Qi et al., arXiv 2401.10241): W, which nobody waits for, fills the idle.

All three are 1F1B with the backward split: they differ in how many forwards warm up and by how much W lags behind I.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library._common import (
    check_counts,
    in_groups,
    looped_placement,
    microbatch_groups,
    warm_up_then_alternate,
)
from pipeline.schedule.schedule import Row, Schedule


def zb_h1(pp: int, microbatches: int) -> Schedule:
    """One stage a rank, 1F1B's warm-up, W of rank r delayed by r microbatches (section 2.1).

    Makespan m(F+I+W) + (p-1)(F+I-W) for W <= min(F, I) and m >= p, at 1F1B's peak of p microbatches, now on every rank.
    ValueError unless both counts are 1 or more.
    """
    check_counts(pp, microbatches)
    rows = _rows(pp, microbatches, 1, per_hop=1)
    return Schedule("zb_h1", rows, tuple(range(pp)), microbatches)


def zb_h2(pp: int, microbatches: int) -> Schedule:
    """One stage a rank, 1F1B's warm-up doubled, W of rank r delayed by 2r microbatches (section 2.2).

    For F=I=W and m >= 2p-1 no rank idles between its first and its last action. The makespan is ZB-H1's there: ranks
    end one after the other. Up to 2p-1 microbatches in flight. ValueError unless both counts are 1 or more.
    """
    check_counts(pp, microbatches)
    rows = _rows(pp, microbatches, 1, per_hop=2)
    return Schedule("zb_h2", rows, tuple(range(pp)), microbatches)


def interleaved_zb(pp: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """ZB-H1 over several stages a rank, stage s on rank s mod p, any number of microbatches (as torch.pipelining).

    Makespan mv(F+I+W) + (p-1)(F+I-W) in the times of one stage for W <= min(F, I) and p dividing m, at vp stage inputs
    in flight. ValueError unless every count is 1 or more.
    """
    check_counts(pp, microbatches, stages_per_rank)
    rows = _rows(pp, microbatches, stages_per_rank, per_hop=1)
    return Schedule("interleaved_zb", rows, looped_placement(pp, stages_per_rank), microbatches)


def _rows(pp: int, microbatches: int, stages_per_rank: int, per_hop: int) -> tuple[Row, ...]:
    """`per_hop` more forwards before the first backward for each rank that follows, W later for each that precedes."""
    groups = microbatch_groups(pp, microbatches)
    held = [range(rank, pp * stages_per_rank, pp) for rank in range(pp)]
    unweighted = (
        warm_up_then_alternate(
            in_groups(ActionType.F, stages, groups),
            in_groups(ActionType.I, stages[::-1], groups),
            warmup=per_hop * (pp - 1 - rank) + (stages_per_rank - 1) * len(groups[0]),
        )
        for rank, stages in enumerate(held)
    )
    return tuple(tuple(_with_weights(row, delay=per_hop * rank)) for rank, row in enumerate(unweighted))


def _with_weights(row: Iterable[Action], delay: int) -> Iterator[Action]:
    """After each I the W of the one `delay` before it, and at the end the W that are left."""
    due: deque[Action] = deque()
    for action in row:
        yield action
        if action.type is ActionType.I:
            due.append(Action(action.stage, ActionType.W, action.microbatch))
            if len(due) > delay:
                yield due.popleft()
    yield from due
