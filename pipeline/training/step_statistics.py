"""What several steps have in common, measured or simulated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.schedule.idle import CAUSES, Idle, split_idle
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Event, bubbles

Rows = tuple[tuple[Event, ...], ...]
"""The compute actions of a step in seconds, one row a rank, those of all replicas of a pipeline one after the other."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Several steps in one: bubbles, idle times and the most typical of them."""

    bubble: float
    """The median makespan bubble."""
    bubble_span: float
    """The median span bubble."""
    idle: tuple[Idle, ...]
    """Seconds of each rank: the mean over the half of the steps with middling makespans, so that the shares add up and
    a step that the machine held up doesn't count."""
    events: Rows
    """The step with the median makespan, its times counted from its first start."""


def summarize(steps: Sequence[Rows], program: Schedule) -> StepStatistics:
    """What `steps` (one or more, each with the rows of all ranks) of a program have in common."""
    ordered = sorted(steps, key=makespan)
    both = [bubbles(step, len(step)) for step in steps]
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    splits = [_split_idle(step, program) for step in middle]
    return StepStatistics(
        bubble=statistics.median(makespan_bubble for makespan_bubble, _ in both),
        bubble_span=statistics.median(span_bubble for _, span_bubble in both),
        idle=tuple(map(_mean, zip(*splits, strict=True))),
        events=_from_zero(ordered[len(ordered) // 2]),
    )


def of_replicas(step: Sequence[Sequence[Event]], program: Schedule) -> list[Rows]:
    """A step's rows, replica by replica."""
    rows = tuple(map(tuple, step))
    return [rows[first : first + program.pp] for first in range(0, len(step), program.pp)]


def _split_idle(step: Rows, program: Schedule) -> list[Idle]:
    """Of all ranks, within the makespan of all replicas."""
    span = _begin(step), _end(step)
    return [idle for rows in of_replicas(step, program) for idle in split_idle(rows, program, span)]


def makespan(step: Sequence[Sequence[Event]]) -> float:
    """Seconds from the first start to the last end anywhere."""
    return _end(step) - _begin(step)


def busy(step: Sequence[Sequence[Event]]) -> float:
    """Seconds of work, summed over the ranks."""
    return sum(event.end - event.start for row in step for event in row)


def _mean(idles: Sequence[Idle]) -> Idle:
    return Idle(*(statistics.fmean(getattr(idle, cause) for idle in idles) for cause in CAUSES))


def _from_zero(step: Rows) -> Rows:
    origin = _begin(step)
    return tuple(
        tuple(Event(event.rank, event.action, event.start - origin, event.end - origin) for event in row)
        for row in step
    )


def _begin(step: Sequence[Sequence[Event]]) -> float:
    return min(row[0].start for row in step)


def _end(step: Sequence[Sequence[Event]]) -> float:
    return max(row[-1].end for row in step)
