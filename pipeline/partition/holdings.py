"""How many microbatches a rank holds of each of its stages: what memory limits are reckoned with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.schedule import Schedule

Holding = Mapping[int, "Held"]
"""By stage."""


class Held(NamedTuple):
    """So many microbatches of a stage."""

    kept: int
    """Whose activations are there from F on."""
    waiting: int
    """That wait for their recomputation."""
    rebuilt: int
    """That are recomputed, and wait for their backward or are in it."""


def holdings(schedule: Schedule, rank: int) -> list[Holding]:
    """What a rank holds at every moment where that may be the most; at least one.

    From the start of F to the end of B or W, as `pipeline.schedule.memory` counts where I frees nothing. Microbatches
    are recomputed where the schedule has an R for them.
    """
    row = [part for action in schedule.rows[rank] for part in action.compute]
    again = {(part.stage, part.microbatch) for part in row if part.type is ActionType.R}
    stages = schedule.stages_of(rank)
    held = {stage: Held(0, 0, 0) for stage in stages}
    moments = {tuple(held.values())}
    for action in schedule.rows[rank]:
        for part in action.compute:
            held[part.stage] = _begun(held[part.stage], part, (part.stage, part.microbatch) in again)
        moments.add(tuple(held.values()))
        for part in action.compute:
            held[part.stage] = _ended(held[part.stage], part, (part.stage, part.microbatch) in again)
    most = [one for one in moments if not any(one != other and _within(one, other) for other in moments)]
    return [dict(zip(stages, moment, strict=True)) for moment in sorted(most)]


def _begun(held: Held, part: Action, again: bool) -> Held:
    kept, waiting, rebuilt = held
    if part.type is ActionType.F:
        return Held(kept, waiting + 1, rebuilt) if again else Held(kept + 1, waiting, rebuilt)
    return Held(kept, waiting - 1, rebuilt + 1) if part.type is ActionType.R else held


def _ended(held: Held, part: Action, again: bool) -> Held:
    kept, waiting, rebuilt = held
    if part.type not in (ActionType.B, ActionType.W):
        return held
    return Held(kept, waiting, rebuilt - 1) if again else Held(kept - 1, waiting, rebuilt)


def _within(one: Sequence[Held], other: Sequence[Held]) -> bool:
    """Whether the other moment holds as much of everything."""
    return all(less <= more for pair in zip(one, other, strict=True) for less, more in zip(*pair, strict=True))
