"""Boundary buffers: what a rank receives messages into, and how many of them it holds at a time."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.schedule import Message, Row, Schedule, message, takes


def held_buffers(schedule: Schedule, rank: int) -> Iterator[int]:
    """How many boundary buffers a rank of a lowered schedule holds while each action of its row runs.

    A buffer is held from the posted receive on. An activation's is let go by the microbatch's last action in the stage
    (B or W; of a forward-only schedule F), a gradient's by the B or I that takes it.
    """
    released = Releases(schedule, rank)
    held = 0
    for action in schedule.rows[rank]:
        held += action.type.is_receive
        yield held
        held -= released.by(action)


def peak_buffers(schedule: Schedule, rank: int) -> int:
    """The most that `held_buffers` says."""
    return max(held_buffers(schedule, rank), default=0)


class Releases:
    """Which actions of a rank's row let go of boundary buffers."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        row: Row = schedule.rows[rank]
        self._stages = schedule.stages
        self._forward_only = schedule.forward_only
        self._received = {message(action) for action in row if action.type.is_receive}
        self._split = {(part.stage, part.microbatch) for part in row if part.type is ActionType.W}

    def by(self, action: Action) -> int:
        """How many are free when `action` has ended."""
        return sum(moved in self._received for part in action.compute for moved in self._let_go(part))

    def _let_go(self, action: Action) -> Iterator[Message | None]:
        inputs = Message("activation", action.stage - 1, action.microbatch)
        if action.type is ActionType.F and self._forward_only:
            yield inputs
        if action.type.is_backward:
            yield takes(action, self._stages)
        whole = action.type is ActionType.B and (action.stage, action.microbatch) not in self._split
        if whole or action.type is ActionType.W:
            yield inputs
