"""When does each action run? A schedule and costs in; events, makespan, bubbles, idle times and peaks out.

A rank runs its row in order: an action starts when the rank is free and its inputs have arrived. A transfer is a pure
latency that keeps nobody busy. Where the schedule holds sends and receives, a message starts to move once its send is
issued and its receive posted, and both head what their ranks have issued on its communicator; none blocks its rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.costs import CostModel, Costs, nominal_costs
from pipeline.schedule.deadlock import End, Key, Queue, deadlock
from pipeline.schedule.errors import ScheduleError, schedule_error
from pipeline.schedule.events import Event, bubbles
from pipeline.schedule.idle import Idle, split_idle
from pipeline.schedule.memory import (
    Footprint,
    Footprints,
    Transfer,
    in_flight,
    peak_activation_bytes,
    peak_bytes,
    peak_in_flight,
)
from pipeline.schedule.schedule import Communicator, Schedule, makes, message, one_a_channel, route, takes

__all__ = ["CostModel", "Costs", "Event", "Footprint", "Idle", "Simulation", "bubbles", "in_flight", "nominal_costs"]
__all__ += ["simulate"]


@dataclass(frozen=True)
class Simulation:
    """What a schedule does under given costs."""

    schedule: Schedule = field(repr=False)
    events: tuple[tuple[Event, ...], ...]
    """The compute actions of each rank, in order."""
    transfers: tuple[Transfer, ...] = field(repr=False)
    """The messages between ranks. Of a compute-only schedule each is received as if posted when it is sent."""
    makespan: float
    """From the start to the last end anywhere."""
    makespan_bubble: float
    span_bubble: float

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Of each rank, in microbatch x stage: counted from the start of F to the end of B or W."""
        return peak_in_flight(self.schedule)

    @cached_property
    def peak_in_flight_released_at_input(self) -> tuple[int, ...]:
        """The same, released at the end of B or I already."""
        return peak_in_flight(self.schedule, released_at_input=True)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each rank, split."""
        return split_idle(self.events, self.schedule)

    def peak_activation_bytes(self, footprint: Footprints) -> tuple[float, ...]:
        """The most bytes of activations that each rank holds, whatever its messages do."""
        return peak_activation_bytes(self.schedule, footprint)

    def peak_bytes(self, footprint: Footprint) -> tuple[float, ...]:
        """The most bytes of activations and boundary buffers that each rank holds at a time."""
        return peak_bytes(self.schedule, self.events, self.transfers, footprint)


def simulate(schedule: Schedule, costs: CostModel, *, communicator: Communicator = one_a_channel) -> Simulation:
    """Run `schedule` under `costs`, in time linear in its actions.

    Takes compute-only and lowered schedules alike; `communicator` matters to lowered ones only. Raises ScheduleError,
    naming who waits for whom, where ranks wait for each other forever or a communicator's n-th receive expects another
    message than its n-th send brings.
    """
    run = _Run(schedule, costs, communicator)
    run.finish()
    events = tuple(map(tuple, run.events))
    makespan_bubble, span_bubble = bubbles(events, schedule.pp)
    return Simulation(
        schedule=schedule,
        events=events,
        transfers=tuple(run.transfers),
        makespan=max(run.clock, default=0.0),
        makespan_bubble=makespan_bubble,
        span_bubble=span_bubble,
    )


class _Run:
    """The state of one simulation. Ranks take turns: each runs until it waits for a key, whoever makes it wakes it."""

    def __init__(self, schedule: Schedule, costs: CostModel, communicator: Communicator) -> None:
        self.schedule = schedule
        self.costs = costs
        self.communicator = communicator
        self.lowered = schedule.is_lowered
        self.position = [0] * schedule.pp
        self.clock = [0.0] * schedule.pp
        self.events: list[list[Event]] = [[] for _ in schedule.rows]
        self.transfers: list[Transfer] = []
        self.available: dict[Key, float] = {}
        self.waiting: dict[Key, list[int]] = defaultdict(list)
        self.runnable = deque(range(schedule.pp))
        self.queues: dict[tuple[Hashable, int], Queue] = defaultdict(Queue)
        self.routes: dict[tuple[ActionType, int], tuple[Queue, Queue]] = {}

    def finish(self) -> None:
        while self.runnable:
            self.advance(self.runnable.popleft())
        if any(at < len(row) for at, row in zip(self.position, self.schedule.rows, strict=True)):
            raise deadlock(self.schedule, self.position, self.needs, self.available, tuple(self.queues.values()))

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
            elif action.type.is_communication:
                self.issue(rank, action)
            self.position[rank] += 1

    def needs(self, action: Action) -> tuple[Key, ...]:
        """What must be there before `action` starts."""
        kind, stage, microbatch = action.type, action.stage, action.microbatch
        if action.parts:
            return tuple(key for part in action.parts for key in self.needs(part))
        if kind.is_receive or kind is ActionType.REDUCE_GRAD:
            return ()
        if kind is ActionType.W or kind is ActionType.SEND_B:
            return (("backward", stage, microbatch),)
        taken = takes(action, self.schedule.stages)
        if kind is ActionType.F:
            return () if taken is None else (taken,)
        forward = ("forward", stage, microbatch)
        return (forward,) if taken is None else (forward, taken)

    def compute(self, rank: int, action: Action, needs: tuple[Key, ...]) -> None:
        start = max([self.clock[rank], *(self.available[key] for key in needs)])
        end = start + self.costs.duration(action)
        self.clock[rank] = end
        self.events[rank].append(Event(rank, action, start, end))
        for part in action.compute:
            self.release(part, self.output_time(action, part, start, end))

    def output_time(self, action: Action, part: Action, start: float, end: float) -> float:
        """When a part's output leaves: at the end, or a pair's forward after its own share."""
        if action.parts and part.type is ActionType.F and self.schedule.release == "each":
            return min(end, start + self.costs.duration(part))
        return end

    def release(self, action: Action, time: float) -> None:
        """Make available what an action produced, unless a send and a receive of the schedule will."""
        if action.type is ActionType.F:
            self.supply(("forward", action.stage, action.microbatch), time)
        elif action.type.is_backward:
            self.supply(("backward", action.stage, action.microbatch), time)
        made = makes(action, self.schedule.stages)
        if made is None:
            return
        source, destination = made.source_stage, made.destination_stage
        if self.schedule.stage_to_rank[source] == self.schedule.stage_to_rank[destination]:
            self.supply(made, time)
        elif not self.lowered:
            arrived = time + self.costs.transfer_time(source, destination)
            self.transfers.append(Transfer(made, time, time, arrived))
            self.supply(made, arrived)

    def issue(self, rank: int, action: Action) -> None:
        """Queue one end of a transfer on its communicator; move what heads both of its queues now."""
        key = action.type, action.stage
        if key not in self.routes:
            used = route(message(action), self.schedule.stage_to_rank)
            ends = [self.queues[self.communicator(used), end] for end in (used.source, used.destination)]
            self.routes[key] = (ends[0], ends[1]) if action.type.is_send else (ends[1], ends[0])
        mine, peers = self.routes[key]
        time = self.clock[rank]
        if action.type.is_send and self.schedule.release == "each":
            time = self.handed_over(rank, action)
        end = End(action, message(action), time, (rank, self.position[rank]), mine, peers)
        mine.operations.append(end)
        if mine.operations[0] is end:
            self.move(mine)

    def handed_over(self, rank: int, send: Action) -> float:
        """The time of a send right after the overlapped pair that makes its message: a forward's has left early."""
        last = self.events[rank][-1].action
        if any(makes(part, self.schedule.stages) == message(send) for part in last.parts):
            return self.available[
                "forward" if send.type is ActionType.SEND_F else "backward", send.stage, send.microbatch
            ]
        return self.clock[rank]

    def move(self, queue: Queue) -> None:
        """Let what heads `queue` and its match's queue start to move; then what stood behind them."""
        unsettled = [queue]
        while unsettled:
            queue = unsettled.pop()
            if not queue.operations:
                continue
            one = queue.operations[0]
            peers = one.peers
            other = peers.operations[0] if peers.operations else None
            if other is None or not one.meets(other):
                continue
            send, receive = (one, other) if one.action.type.is_send else (other, one)
            if send.message != receive.message:
                raise self.crossed(send, receive)
            queue.operations.popleft()
            peers.operations.popleft()
            self.transfer(send, receive)
            unsettled += [queue, peers]

    def transfer(self, send: End, receive: End) -> None:
        # Where a communicator is shared, an operation also waits for those before it to have started.
        start = max(send.time, receive.time, send.mine.time, receive.mine.time)
        send.mine.time = receive.mine.time = start
        moved = send.message
        arrived = start + self.costs.transfer_time(moved.source_stage, moved.destination_stage)
        self.transfers.append(Transfer(moved, send.time, receive.time, arrived))
        self.supply(moved, arrived)

    def supply(self, key: Key, time: float) -> None:
        self.available[key] = time
        self.runnable.extend(self.waiting.pop(key, ()))

    def crossed(self, send: End, receive: End) -> ScheduleError:
        used = route(send.message, self.schedule.stage_to_rank)
        return schedule_error(
            f"the {used.kind} that {send.action} sends from rank {used.source} meets {receive.action} on rank "
            f"{used.destination}: post a channel's receives in the order of its sends",
            self.schedule,
            [send.place, receive.place],
        )
