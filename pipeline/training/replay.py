"""What ranks that took turns in one process would have done side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Event, simulate


class MeasuredCosts:
    """The measured duration of every action; messages take no time."""

    def __init__(self, events: Sequence[Sequence[Event]]) -> None:
        self._durations = {event.action: event.end - event.start for row in events for event in row}
        # a forward inside an overlapped pair has no event of its own: it counts as the stage's others
        forwards: dict[int, list[float]] = {}
        for action, seconds in self._durations.items():
            if action.type is ActionType.F:
                forwards.setdefault(action.stage, []).append(seconds)
        self._forwards = {stage: statistics.fmean(seconds) for stage, seconds in forwards.items()}

    def duration(self, action: Action) -> float:
        """Seconds."""
        measured = self._durations.get(action)
        return self._forwards[action.stage] if measured is None else measured

    def transfer_time(self, source_stage: int, destination_stage: int) -> float:
        """Nothing: the ranks share memory."""
        return 0.0


def replay(program: Schedule, events: Sequence[Sequence[Event]]) -> tuple[tuple[Event, ...], ...]:
    """The events of `program` with the measured durations, each rank running beside the others."""
    return simulate(program, MeasuredCosts(events)).events
