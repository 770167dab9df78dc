"""How many microbatches a rank holds of each of its stages: what memory limits are reckoned with."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.schedule.actions import ActionType
from pipeline.schedule.schedule import Schedule

Holding = Mapping[int, tuple[int, int]]
"""By stage: microbatches whose activations are held in full, and those that wait for their recomputation."""


def holdings(schedule: Schedule, rank: int) -> list[Holding]:
    """What a rank holds at every moment where that may be the most; at least one.

    From the start of F to the end of B or W, as `pipeline.schedule.memory` counts where I frees nothing. Microbatches
    are recomputed where the schedule has an R for them.
    """
    row = [part for action in schedule.rows[rank] for part in action.compute]
    again = {(part.stage, part.microbatch) for part in row if part.type is ActionType.R}
    full, waiting = (dict.fromkeys(schedule.stages_of(rank), 0) for _ in range(2))
    moments = {_moment(full, waiting)}
    for action in schedule.rows[rank]:
        for part in action.compute:
            if part.type is ActionType.F and (part.stage, part.microbatch) in again:
                waiting[part.stage] += 1
            elif part.type is ActionType.F:
                full[part.stage] += 1
            elif part.type is ActionType.R:
                waiting[part.stage] -= 1
                full[part.stage] += 1
        moments.add(_moment(full, waiting))
        for part in action.compute:
            full[part.stage] -= part.type in (ActionType.B, ActionType.W)
    most = [one for one in moments if not any(one != other and _within(one, other) for other in moments)]
    return [dict(zip(full, moment, strict=True)) for moment in sorted(most)]


def _moment(full: Mapping[int, int], waiting: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((full[stage], waiting[stage]) for stage in full)


def _within(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    """Whether the other moment holds as much of everything."""
    return all(a <= c and b <= d for (a, b), (c, d) in zip(one, other, strict=True))
