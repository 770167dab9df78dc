"""When does each action run? A schedule and costs in; events, makespan, both bubbles and the peak in flight out.

A rank runs its row in order: an action starts when the rank is free and its inputs have arrived. A transfer is a pure
latency that keeps nobody busy. Where the schedule holds sends and receives, a message starts to move once its send is
issued and its receive posted, the n-th send of a channel meeting the n-th receive; neither blocks its rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.costs import CostModel, Costs, nominal_costs
from pipeline.schedule.errors import Place, ScheduleError, schedule_error
from pipeline.schedule.schedule import Channel, Message, Schedule, message, route

__all__ = ["CostModel", "Costs", "Event", "Simulation", "bubbles", "in_flight", "nominal_costs", "simulate"]


@dataclass(frozen=True, slots=True)
class Event:
    """One compute action that ran, simulated or measured, in any one unit of time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule does under given costs."""

    events: tuple[tuple[Event, ...], ...]
    """The compute actions of each rank, in order."""
    makespan: float
    """From the start to the last end anywhere."""
    makespan_bubble: float
    span_bubble: float
    peak_in_flight: tuple[int, ...]
    """Of each rank, in microbatch x stage: counted from the start of F to the end of B or W."""
    peak_in_flight_released_at_input: tuple[int, ...]
    """The same, released at the end of B or I already."""


def simulate(schedule: Schedule, costs: CostModel) -> Simulation:
    """Run `schedule` under `costs`, in time linear in its actions.

    Takes compute-only and lowered schedules alike. Raises ScheduleError, naming who waits for whom, where ranks wait
    for each other forever or a channel's n-th receive expects another message than its n-th send brings.
    """
    run = _Run(schedule, costs)
    run.finish()
    events = tuple(map(tuple, run.events))
    makespan_bubble, span_bubble = bubbles(events, schedule.pp)
    return Simulation(
        events=events,
        makespan=max(run.clock, default=0.0),
        makespan_bubble=makespan_bubble,
        span_bubble=span_bubble,
        peak_in_flight=_peaks(schedule),
        peak_in_flight_released_at_input=_peaks(schedule, released_at_input=True),
    )


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
    return _idle_fraction(busy, pp * makespan), _idle_fraction(busy, pp * span)


def _idle_fraction(busy: float, available: float) -> float:
    return 1 - busy / available if available > 0 else 0.0


def in_flight(schedule: Schedule, rank: int, *, released_at_input: bool = False) -> Iterator[int]:
    """How many activations, in microbatch x stage, a rank holds while each action of its row runs.

    Counted from the start of F to the end of B or W, or with `released_at_input` of B or I; of a forward-only schedule
    to the end of F. A rank runs one action at a time, so its order alone says it.
    """
    releases = (ActionType.B, ActionType.I if released_at_input else ActionType.W)
    if schedule.forward_only:
        releases = (ActionType.F, ActionType.F)
    held = 0
    for action in schedule.rows[rank]:
        held += action.type is ActionType.F
        yield held
        held -= action.type in releases


def _peaks(schedule: Schedule, *, released_at_input: bool = False) -> tuple[int, ...]:
    ranks = range(schedule.pp)
    return tuple(max(in_flight(schedule, rank, released_at_input=released_at_input), default=0) for rank in ranks)


Key = tuple[str, int, int]
"""Something an action waits for: a Message that arrived, or ("forward" | "backward", stage, microbatch) that ran."""


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a transfer: the send as issued, or the receive as posted."""

    message: Message
    time: float
    place: Place


class _Run:
    """The state of one simulation. Ranks take turns: each runs until it waits for a key, whoever makes it wakes it."""

    def __init__(self, schedule: Schedule, costs: CostModel) -> None:
        self.schedule = schedule
        self.costs = costs
        self.lowered = schedule.is_lowered
        self.position = [0] * schedule.pp
        self.clock = [0.0] * schedule.pp
        self.events: list[list[Event]] = [[] for _ in schedule.rows]
        self.available: dict[Key, float] = {}
        self.waiting: dict[Key, list[int]] = defaultdict(list)
        self.runnable = deque(range(schedule.pp))
        self.sends: dict[Channel, deque[_End]] = defaultdict(deque)
        self.receives: dict[Channel, deque[_End]] = defaultdict(deque)

    def finish(self) -> None:
        while self.runnable:
            self.advance(self.runnable.popleft())
        if any(map(self.is_stuck, range(self.schedule.pp))):
            raise self.deadlock()

    def advance(self, rank: int) -> None:
        row = self.schedule.rows[rank]
        while self.position[rank] < len(row):
            action = row[self.position[rank]]
            needs = self.needs(action)
            for key in needs:
                if key not in self.available:
                    self.waiting[key].append(rank)
                    return
            if action.type.is_compute:
                self.compute(rank, action, needs)
            elif action.type.is_send:
                self.meet(rank, action, self.sends, self.receives)
            else:
                self.meet(rank, action, self.receives, self.sends)
            self.position[rank] += 1

    def needs(self, action: Action) -> tuple[Key, ...]:
        """What must be there before `action` starts."""
        kind, stage, microbatch = action.type, action.stage, action.microbatch
        if kind is ActionType.F:
            return (Message("activation", stage - 1, microbatch),) if stage > 0 else ()
        if kind.is_receive:
            return ()
        if kind is ActionType.W or kind is ActionType.SEND_B:
            return (("backward", stage, microbatch),)
        forward = ("forward", stage, microbatch)
        if kind.is_backward and stage < self.schedule.stages - 1:
            return forward, Message("gradient", stage + 1, microbatch)
        return (forward,)

    def compute(self, rank: int, action: Action, needs: tuple[Key, ...]) -> None:
        start = max([self.clock[rank], *(self.available[key] for key in needs)])
        end = start + self.costs.duration(action)
        self.clock[rank] = end
        self.events[rank].append(Event(rank, action, start, end))
        if action.type is ActionType.F:
            self.supply(("forward", action.stage, action.microbatch), end)
            self.pass_on(Message("activation", action.stage, action.microbatch), end)
        elif action.type.is_backward:
            self.supply(("backward", action.stage, action.microbatch), end)
            self.pass_on(Message("gradient", action.stage, action.microbatch), end)

    def pass_on(self, output: Message, end: float) -> None:
        """Make an output available to the neighbor, unless a send and a receive of the schedule will."""
        source, destination = output.source_stage, output.destination_stage
        ranks = self.schedule.stage_to_rank
        if not 0 <= destination < len(ranks):
            return
        if ranks[source] == ranks[destination]:
            self.supply(output, end)
        elif not self.lowered:
            self.supply(output, end + self.costs.transfer_time(source, destination))

    def meet(
        self, rank: int, action: Action, mine: dict[Channel, deque[_End]], peers: dict[Channel, deque[_End]]
    ) -> None:
        """Issue one end of a transfer. The first that still waits on the other side is its match; none: it waits."""
        moved = message(action)
        used = route(moved, self.schedule.stage_to_rank)
        end = _End(moved, self.clock[rank], (rank, self.position[rank]))
        if not peers[used]:
            mine[used].append(end)
            return
        other = peers[used].popleft()
        if other.message != moved:
            raise self.crossed(used, (end, other) if action.type.is_send else (other, end))
        latency = self.costs.transfer_time(moved.source_stage, moved.destination_stage)
        self.supply(moved, max(end.time, other.time) + latency)

    def supply(self, key: Key, time: float) -> None:
        self.available[key] = time
        self.runnable.extend(self.waiting.pop(key, ()))

    def crossed(self, used: Channel, ends: tuple[_End, _End]) -> ScheduleError:
        places = [end.place for end in ends]
        send, receive = (self.schedule.rows[rank][at] for rank, at in places)
        return schedule_error(
            f"the {used.kind} that {send} sends from rank {used.source} meets {receive} on rank {used.destination}: "
            "post a channel's receives in the order of its sends",
            self.schedule,
            places,
        )

    def deadlock(self) -> ScheduleError:
        circle = self.circle()
        reasons = [f"rank {rank} at {self.action_at(rank)} waits for {self.reason(rank)}" for rank in circle]
        marks = [(rank, self.position[rank]) for rank in circle]
        return schedule_error(f"deadlock: {'; '.join(reasons)}", self.schedule, marks)

    def circle(self) -> list[int]:
        """Ranks that wait for each other in turn; or one alone, if what it waits for will never come."""
        rank = next(rank for rank in range(self.schedule.pp) if self.is_stuck(rank))
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            owner = self.schedule.stage_to_rank[self.missing(rank)[1]]
            if not self.is_stuck(owner) or self.was_sent(rank):
                return [rank]
            rank = owner
        return seen[seen.index(rank) :]

    def is_stuck(self, rank: int) -> bool:
        return self.position[rank] < len(self.schedule.rows[rank])

    def action_at(self, rank: int) -> Action:
        return self.schedule.rows[rank][self.position[rank]]

    def missing(self, rank: int) -> Key:
        return next(key for key in self.needs(self.action_at(rank)) if key not in self.available)

    def was_sent(self, rank: int) -> bool:
        """Whether what a stuck rank waits for was sent, so that only its receive is wanting."""
        return any(end.message == self.missing(rank) for ends in self.sends.values() for end in ends)

    def reason(self, rank: int) -> str:
        """What a stuck rank waits for, and from whom."""
        key = self.missing(rank)
        what, stage, microbatch = key
        owner = self.schedule.stage_to_rank[stage]
        sender = "this rank" if owner == rank else f"rank {owner}"
        text = f"the {what} of stage {stage}, microbatch {microbatch}, from {sender}"
        if self.was_sent(rank):
            return f"{text}, which has sent it, but its receive is not posted"
        if not self.is_stuck(owner):
            return f"{text}, which has ended"
        return text
