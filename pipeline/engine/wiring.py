"""What an executor looks up of an action in every step, found out once."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.schedule.actions import Action
from pipeline.schedule.schedule import Channel, Message, Schedule, channel, makes, message, takes


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a send or receive moves."""

    message: Message
    channel: Channel
    stage: int
    """The stage before whose input the message crosses: its spec is that of this stage's input."""


@dataclass(frozen=True, slots=True)
class Wire:
    """How one action of a row is joined to others."""

    takes: Message | None
    """What it takes of a neighboring stage, on this rank or another."""
    makes: Message | None
    """What it makes for one."""
    awaits: tuple[Message, ...]
    """What it takes of other ranks, the parts of an overlapped pair together."""
    transfer: Transfer | None
    """Of a send or receive."""


def wires(schedule: Schedule, rank: int) -> dict[Action, Wire]:
    """The wire of every action of a rank's row, and of every part of one. A channel has the numbers of all ranks."""
    replica, row = divmod(rank, schedule.pp)
    holders = tuple(replica * schedule.pp + holder for holder in schedule.stage_to_rank)
    actions = {part for action in schedule.rows[row] for part in (action, *action.parts)}
    return {action: _wire(action, schedule, holders) for action in actions}


def _wire(action: Action, schedule: Schedule, ranks: tuple[int, ...]) -> Wire:
    if action.type.is_communication:
        moved = message(action)
        return Wire(None, None, (), Transfer(moved, channel(action, ranks), moved.boundary + 1))
    taken = [takes(part, schedule.stages) for part in action.compute]
    awaits = tuple(
        moved for moved in taken if moved is not None and ranks[moved.source_stage] != ranks[moved.destination_stage]
    )
    return Wire(takes(action, schedule.stages), makes(action, schedule.stages), awaits, None)
