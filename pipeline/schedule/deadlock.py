"""Who waits for whom: the message of a schedule whose ranks wait forever, and the queues that messages stand in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.schedule.actions import Action
from pipeline.schedule.errors import Place, ScheduleError, schedule_error
from pipeline.schedule.schedule import Message, Schedule

Key = tuple[str, int, int]
"""Something an action waits for: a Message that arrived, or ("forward" | "backward", stage, microbatch) that ran."""


@dataclass(slots=True, eq=False)
class Queue:
    """What one rank has issued on one communicator and what has not met its match, first in, first out."""

    operations: deque[End] = field(default_factory=deque)
    time: float = 0.0
    """When the last operation that left it did."""


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """One end of a transfer: the send as issued, or the receive as posted."""

    action: Action
    message: Message
    time: float
    place: Place
    mine: Queue
    peers: Queue

    def meets(self, other: End) -> bool:
        """Whether the two are a send and a receive of one channel."""
        return (
            other.peers is self.mine
            and other.message.kind == self.message.kind
            and other.action.type.is_send != self.action.type.is_send
        )


def deadlock(
    schedule: Schedule,
    position: Sequence[int],
    needs: Callable[[Action], tuple[Key, ...]],
    available: Mapping[Key, float],
    queues: Sequence[Queue],
) -> ScheduleError:
    """The error of ranks that stand at `position` for good: a circle of them, or one whose input will never come."""
    stuck = {
        rank: _Waiter(rank, action, next(key for key in needs(action) if key not in available))
        for rank, (row, at) in enumerate(zip(schedule.rows, position, strict=True))
        for action in row[at : at + 1]
    }
    issued = [end for queue in queues for end in queue.operations]
    waits = {rank: _wait(waiter, schedule, stuck, issued) for rank, waiter in stuck.items()}
    circle = _circle(waits)
    reasons = [f"rank {rank} at {stuck[rank].action} waits for {waits[rank].reason}" for rank in circle]
    marks = [(rank, position[rank]) for rank in circle] + [place for rank in circle for place in waits[rank].marks]
    return schedule_error(f"deadlock: {'; '.join(reasons)}", schedule, marks)


@dataclass(frozen=True, slots=True)
class _Waiter:
    rank: int
    action: Action
    missing: Key


@dataclass(frozen=True, slots=True)
class _Wait:
    """Why a rank waits; `rank` is whom it waits for, if that one is stuck as well; `marks` are further culprits."""

    reason: str
    rank: int | None
    marks: tuple[Place, ...] = ()


def _wait(waiter: _Waiter, schedule: Schedule, stuck: Mapping[int, _Waiter], issued: Sequence[End]) -> _Wait:
    what, stage, microbatch = waiter.missing
    owner = schedule.stage_to_rank[stage]
    sender = "this rank" if owner == waiter.rank else f"rank {owner}"
    text = f"the {what} of stage {stage}, microbatch {microbatch}, from {sender}"
    ends = [end for end in issued if end.message == waiter.missing]
    sent = any(end.action.type.is_send for end in ends)
    if sent and len(ends) == 1:
        return _Wait(f"{text}, which has sent it, but its receive is not posted", None)
    if sent:
        return _held_up(text, ends, schedule, stuck)
    if owner not in stuck:
        return _Wait(f"{text}, which has ended", None)
    return _Wait(text, owner)


def _held_up(text: str, ends: Sequence[End], schedule: Schedule, stuck: Mapping[int, _Waiter]) -> _Wait:
    """Send and receive are both issued, but another operation stands before one of them on its communicator."""
    end = next(end for end in ends if end.mine.operations[0] is not end)
    head = end.mine.operations[0]
    seen = [head]
    # What stands first may itself wait for something that stands behind another: find the one without a match.
    while any(head.meets(other) for other in head.peers.operations):
        head = head.peers.operations[0]
        if head in seen:
            break
        seen.append(head)
    first = seen[0]
    behind = f"but {end.action} stands behind {first.action} of rank {first.place[0]} on one communicator"
    peer = _peer(seen[-1], schedule)
    if seen[-1] is not first:
        behind += f", and that behind {seen[-1].action} of rank {seen[-1].place[0]}"
    marks = tuple(other.place for other in (end, *seen))
    if head in seen[:-1]:
        return _Wait(f"{text}, {behind}: they wait for each other", None, marks)
    if peer not in stuck:
        return _Wait(f"{text}, {behind}, which rank {peer} never meets", None, marks)
    return _Wait(f"{text}, {behind}, until rank {peer} meets it", peer, marks)


def _peer(end: End, schedule: Schedule) -> int:
    moved = end.message
    other = moved.destination_stage if end.action.type.is_send else moved.source_stage
    return schedule.stage_to_rank[other]


def _circle(waits: Mapping[int, _Wait]) -> list[int]:
    """Ranks that wait for each other in turn; or one alone, if what it waits for will never come."""
    rank = next(iter(waits))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        follow = waits[rank].rank
        if follow is None:
            return [rank]
        rank = follow
    return seen[seen.index(rank) :]
