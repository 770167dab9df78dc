"""Passes from a schedule to a schedule that turn bare compute rows into a complete program.

Each pass is pure. `lower` runs them all: recomputation, reductions, sends and receives, then earlier receives.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from pipeline.schedule.actions import NO_MICROBATCH, Action, ActionType
from pipeline.schedule.buffers import Releases
from pipeline.schedule.errors import Place, ScheduleError, schedule_error
from pipeline.schedule.memory import in_flight
from pipeline.schedule.recomputation import Window, place_recomputation, recomputed
from pipeline.schedule.schedule import Channel, Message, Row, Schedule, channel, makes, message, takes


def lower(
    schedule: Schedule, *, activation_checkpoint: str | Window = "never", prefetch: int = 2, replicas: int = 1
) -> Schedule:
    """The complete program: compute, recomputation, sends and receives, and with several `replicas` reductions.

    `activation_checkpoint` says which microbatches are recomputed (`pipeline.schedule.recomputation`). A schedule that
    holds sends and receives already, such as one from a file, keeps them as they stand. ValueError for an unknown word,
    a window that is too small, a negative prefetch, or fewer replicas than one.
    """
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}: use 1 or more")
    program = place_recomputation(schedule, recomputed(schedule, activation_checkpoint))
    if replicas > 1:
        program = place_reductions(program)
    return program if schedule.is_lowered else hoist_receives(add_communication(program), prefetch)


def place_reductions(schedule: Schedule) -> Schedule:
    """Put a REDUCE_GRAD after the last B or W of each stage that has a backward and no reduction yet.

    As early as the stage's gradients are complete, so that reducing them overlaps with the rank's other stages and with
    the rest of the pipeline; but after the sends that directly follow, which other ranks wait for.
    """
    return schedule.with_rows(_with_reductions(row) for row in schedule.rows)


def add_communication(schedule: Schedule) -> Schedule:
    """Put each send directly after its producer and each receive directly before its consumer.

    Only where the two stages are on different ranks. A receive comes earlier where the sender's order asks for it: the
    n-th receive of a channel takes its n-th send. ValueError for a schedule lowered already, ScheduleError where a
    consumer's producer is missing.
    """
    if schedule.is_lowered:
        raise ValueError(f"schedule {schedule.name} holds sends and receives already: use compute_only() first")
    sending = schedule.with_rows(_with_sends(schedule, row) for row in schedule.rows)
    unreceived: dict[Channel, deque[Message]] = defaultdict(deque)
    for action in (action for row in sending.rows for action in row if action.type.is_send):
        unreceived[channel(action, schedule.stage_to_rank)].append(message(action))
    return sending.with_rows(_with_receives(sending, rank, unreceived) for rank in range(schedule.pp))


def hoist_receives(schedule: Schedule, prefetch: int) -> Schedule:
    """Post receives earlier, in the order they have, so that transfers overlap with compute.

    Directly before a compute action, at most `prefetch` receives are posted beyond those that it and the actions before
    it need, and none for which the rank would hold more boundary buffers than its peak in flight plus `prefetch`.
    0 changes nothing. ValueError for a negative prefetch.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}: use 0 or more")
    return schedule.with_rows(_hoisted(schedule, rank, prefetch) for rank in range(schedule.pp))


def _with_reductions(row: Row) -> Iterator[Action]:
    parts = [(position, part) for position, action in enumerate(row) for part in action.compute]
    last = {part.stage: at for at, part in parts if part.type in (ActionType.B, ActionType.W)}
    reduced = {action.stage for action in row if action.type is ActionType.REDUCE_GRAD}
    complete: list[int] = []
    for position, action in enumerate(row):
        if not action.type.is_send:
            yield from map(_reduction, complete)
            complete.clear()
        yield action
        complete += [stage for stage, at in last.items() if at == position and stage not in reduced]
    yield from map(_reduction, complete)


def _reduction(stage: int) -> Action:
    return Action(stage, ActionType.REDUCE_GRAD, NO_MICROBATCH)


def _with_sends(schedule: Schedule, row: Iterable[Action]) -> Iterator[Action]:
    for action in row:
        yield action
        for part in action.compute:
            made = makes(part, schedule.stages)
            if made is not None and _crosses_ranks(schedule, made):
                kind = ActionType.SEND_F if made.kind == "activation" else ActionType.SEND_B
                yield Action(part.stage, kind, part.microbatch)


def _with_receives(schedule: Schedule, rank: int, unreceived: dict[Channel, deque[Message]]) -> Iterator[Action]:
    posted: set[Action] = set()
    for position, action in enumerate(schedule.rows[rank]):
        for receive in filter(None, (_receive_for(schedule, part) for part in action.compute)):
            while receive not in posted:
                waiting = unreceived[channel(receive, schedule.stage_to_rank)]
                if not waiting:
                    raise _never_made(schedule, receive, (rank, position))
                moved = waiting.popleft()
                post = Action(moved.destination_stage, receive.type, moved.microbatch)
                posted.add(post)
                yield post
        yield action


def _never_made(schedule: Schedule, receive: Action, place: Place) -> ScheduleError:
    rank, position = place
    wanted = message(receive)
    return schedule_error(
        f"{schedule.rows[rank][position]} on rank {rank} takes the {wanted.kind} of stage {wanted.source_stage}, "
        f"microbatch {wanted.microbatch}, which no rank computes for it",
        schedule,
        [place],
    )


def _receive_for(schedule: Schedule, action: Action) -> Action | None:
    """The receive that brings what `action` consumes, if another rank makes it."""
    taken = takes(action, schedule.stages)
    if taken is None or not _crosses_ranks(schedule, taken):
        return None
    kind = ActionType.RECV_F if taken.kind == "activation" else ActionType.RECV_B
    return Action(action.stage, kind, action.microbatch)


def _crosses_ranks(schedule: Schedule, moved: Message) -> bool:
    return schedule.stage_to_rank[moved.source_stage] != schedule.stage_to_rank[moved.destination_stage]


def _hoisted(schedule: Schedule, rank: int, prefetch: int) -> Iterator[Action]:
    row, released = schedule.rows[rank], Releases(schedule, rank)
    receives = [action for action in row if action.type.is_receive]
    most = max(in_flight(schedule, rank), default=0) + prefetch
    needed = posted = let_go = 0
    for action in row:
        if action.type.is_receive:
            needed += 1
            continue
        if action.type.is_compute:
            window = max(needed, min(needed + prefetch, len(receives), let_go + most))
            yield from receives[posted:window]
            posted = max(posted, window)
            let_go += released.by(action)
        yield action
    yield from receives[posted:]
