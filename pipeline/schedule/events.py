"""What ran when, simulated or measured, and the two bubbles of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class Event:
    """One compute action that ran, simulated or measured, in any one unit of time. An overlapped pair is one event."""

    rank: int
    action: Action
    start: float
    end: float


def bubbles(events: Iterable[Sequence[Event]], pp: int) -> tuple[float, float]:
    """The makespan bubble and the span bubble of simulated or measured events, each a fraction.

    With busy the summed durations over all ranks: 1 - busy / (pp x makespan), makespan from the first start to the last
    end anywhere; and 1 - busy / (pp x the longest span of a rank), from its first start to its last end.
    """
    ran = [row for row in events if row]
    busy = sum(event.end - event.start for row in ran for event in row)
    starts = [min(event.start for event in row) for row in ran]
    ends = [max(event.end for event in row) for row in ran]
    makespan = max(ends, default=0.0) - min(starts, default=0.0)
    span = max((end - start for start, end in zip(starts, ends, strict=True)), default=0.0)
    return bubble(busy, pp, makespan), bubble(busy, pp, span)


def bubble(busy: float, pp: int, time: float) -> float:
    """The fraction of `pp` ranks' time during which they do nothing: 1 - busy / (pp x time)."""
    return 1 - busy / (pp * time) if time > 0 else 0.0
