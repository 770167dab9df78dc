"""Why does a rank do nothing? Its idle time, split five ways, of simulated and of measured events alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.events import Event
from pipeline.schedule.schedule import Message, Schedule, takes


@dataclass(frozen=True, slots=True)
class Idle:
    """The idle time of one rank within the makespan, in the events' unit. The five shares add up to it."""

    warmup: float = 0.0
    """Before its first action."""
    communication: float = 0.0
    """Its next action's inputs are all sent, but not all arrived."""
    imbalance: float = 0.0
    """The stage that makes an input is still at it, for longer than stages of equal cost would be."""
    dependency: float = 0.0
    """The rest: its next action's inputs cannot be there yet, or nothing is known to keep it."""
    tail: float = 0.0
    """After its last action."""

    @property
    def total(self) -> float:
        """All of it: the makespan less what the rank computes."""
        return self.warmup + self.communication + self.imbalance + self.dependency + self.tail


CAUSES = tuple(field.name for field in fields(Idle))
"""Of idle time, the shares of `Idle` in order."""


def split_idle(
    events: Sequence[Sequence[Event]], schedule: Schedule, span: tuple[float, float] | None = None
) -> tuple[Idle, ...]:
    """The idle time of each rank, with `events[rank]` in the order they ran; all ranks' clocks must agree.

    An input counts as sent when the action that makes it has ended (of an overlapped pair with `release` each: its
    forward's share). Equal stages are ones that take what all stages take on average, type by type. With `span`, idle
    time is what the ranks have of it, from its begin to its end; without, from the first start to the last end.
    """
    ran = [event for row in events for event in row]
    begin, end = span or (
        min((event.start for event in ran), default=0.0),
        max((event.end for event in ran), default=0.0),
    )
    made = outputs(ran, schedule)
    return tuple(_split(row, begin, end, made, schedule) for row in events)


@dataclass(frozen=True, slots=True)
class Output:
    """When a stage worked on something that another rank takes."""

    start: float
    sent: float
    excess: float
    """By how much the stage takes longer than the average one."""


def _split(
    row: Sequence[Event], begin: float, end: float, outputs: Mapping[Message, Output], schedule: Schedule
) -> Idle:
    if not row:
        return Idle(warmup=end - begin)
    communication = imbalance = dependency = 0.0
    for earlier, later in pairwise(row):
        gap = later.start - earlier.end
        in_transit, beyond_equal = _reasons(earlier.end, later, outputs, schedule) if gap > 0 else (0.0, 0.0)
        communication += in_transit
        imbalance += beyond_equal
        dependency += gap - in_transit - beyond_equal
    return Idle(row[0].start - begin, communication, imbalance, dependency, end - row[-1].end)


def _reasons(
    idle_since: float, waiting: Event, outputs: Mapping[Message, Output], schedule: Schedule
) -> tuple[float, float]:
    """How much of the wait before an action is communication, and how much imbalance."""
    inputs = [outputs[needed] for needed in remote_inputs(waiting.action, schedule) if needed in outputs]
    if not inputs:
        return 0.0, 0.0
    last = max(inputs, key=lambda output: output.sent)
    # Clocks of two machines agree only so far: what was sent after its arrival was in transit for no time.
    computed = min(max(last.sent, idle_since), waiting.start)
    while_computing = computed - max(idle_since, last.start)
    return waiting.start - computed, max(0.0, min(while_computing, last.excess))


def remote_inputs(action: Action, schedule: Schedule) -> Iterator[Message]:
    """What `action` takes from other ranks."""
    ranks = schedule.stage_to_rank
    for part in action.compute:
        needed = takes(part, schedule.stages)
        if needed is not None and ranks[needed.source_stage] != ranks[part.stage]:
            yield needed


def outputs(ran: Sequence[Event], schedule: Schedule) -> dict[Message, Output]:
    """When what each stage made for the next, or for the one before, was worked on and sent."""
    means = _means(ran)
    found = {}
    for event in ran:
        for part in event.action.compute:
            if part.type is ActionType.F:
                first = len(event.action.parts) > 0 and schedule.release == "each"
                # A stage without a forward of its own to go by has half the pair.
                share = means.get((ActionType.F, part.stage), (event.end - event.start) / 2)
                sent = min(event.end, event.start + share) if first else event.end
                made = Message("activation", part.stage, part.microbatch)
            elif part.type.is_backward:
                sent, made = event.end, Message("gradient", part.stage, part.microbatch)
            else:
                continue
            found[made] = Output(event.start, sent, _excess(event.action, means))
    return found


def _means(ran: Sequence[Event]) -> dict[tuple[ActionType, int | None], float]:
    """What each stage takes for each type of action on average; under stage None: the mean over the stages."""
    durations: dict[tuple[ActionType, int], list[float]] = defaultdict(list)
    for event in ran:
        durations[event.action.type, event.action.stage].append(event.end - event.start)
    means: dict[tuple[ActionType, int | None], float] = {key: fmean(values) for key, values in durations.items()}
    for kind in {kind for kind, _ in durations}:
        means[kind, None] = fmean(mean for (other, _), mean in means.items() if other is kind)
    return means


def _excess(action: Action, means: Mapping[tuple[ActionType, int | None], float]) -> float:
    return means[action.type, action.stage] - means[action.type, None]
