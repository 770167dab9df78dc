"""What a rank holds: activations in flight, in microbatch x stage, and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pipeline.schedule.actions import ActionType
from pipeline.schedule.costs import Times, at_stage, check_times
from pipeline.schedule.events import Event
from pipeline.schedule.schedule import Message, Schedule, takes


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
        kinds = [part.type for part in action.compute]
        held += kinds.count(ActionType.F)
        yield held
        held -= sum(kind in releases for kind in kinds)


def peak_in_flight(schedule: Schedule, *, released_at_input: bool = False) -> tuple[int, ...]:
    """The most that `in_flight` says, for each rank."""
    ranks = range(schedule.pp)
    return tuple(max(in_flight(schedule, rank, released_at_input=released_at_input), default=0) for rank in ranks)


@dataclass(frozen=True)
class Footprint:
    """Bytes that one microbatch takes at a stage: one number for every stage, or an entry a stage."""

    activation: Times
    """From the start of F to the end of B or I. A recomputed microbatch takes it from the start of R."""
    weight_gradient: Times | None = None
    """What of it I leaves for W. None: all."""
    checkpoint: Times = 0.0
    """What a recomputed microbatch keeps from the start of F to that of R: the stage's input."""
    boundary: Times = 0.0
    """A stage's output, and the gradient that comes back for it, in a buffer that is sent from or received into."""

    def __post_init__(self) -> None:
        for name in ("activation", "weight_gradient", "checkpoint", "boundary"):
            check_times(name, getattr(self, name), "bytes")


class Transfer(NamedTuple):
    """One message between two ranks: when it was handed over, its receive posted, and when it was there."""

    message: Message
    sent: float
    posted: float
    arrived: float


def peak_bytes(
    schedule: Schedule, events: Sequence[Sequence[Event]], transfers: Sequence[Transfer], footprint: Footprint
) -> tuple[float, ...]:
    """The most bytes of activations and boundary buffers that each rank holds at a time.

    A message takes a buffer of its sender until it has arrived, and one of its receiver from the posted receive to the
    end of the action that consumes it.
    """
    changes: list[list[_Change]] = [[] for _ in events]
    ends: dict[Message, tuple[float, int]] = {}
    recomputed = {(e.action.stage, e.action.microbatch) for row in events for e in row if e.action.type is ActionType.R}
    sizes = [_activation_changes(footprint, stage, schedule.forward_only) for stage in range(schedule.stages)]
    for rank, row in enumerate(events):
        for at, event in enumerate(row):
            for part in event.action.compute:
                kept = (part.stage, part.microbatch) not in recomputed
                before, after = sizes[part.stage][part.type, kept or part.type is not ActionType.F]
                changes[rank].append(_Change(event.start, 2 * at, before))
                changes[rank].append(_Change(event.end, 2 * at + 1, after))
                needed = takes(part, schedule.stages)
                if needed is not None:
                    ends[needed] = event.end, 2 * at + 1
    for moved, sent, posted, arrived in transfers:
        source, destination = (schedule.stage_to_rank[s] for s in (moved.source_stage, moved.destination_stage))
        size = at_stage(footprint.boundary, moved.boundary)
        changes[source] += [_Change(sent, inf, size), _Change(arrived, -inf, -size)]
        changes[destination] += [_Change(posted, inf, size), _Change(*ends[moved], -size)]
    return tuple(_peak(row) for row in changes)


class _Change(NamedTuple):
    """Bytes that a rank takes or gives back; `order` sorts what happens at one time: as in its row."""

    time: float
    order: float
    size: float


def _activation_changes(
    footprint: Footprint, stage: int, forward_only: bool
) -> Mapping[tuple[ActionType, bool], tuple[float, float]]:
    """By how much an action changes the bytes at its start and at its end; a forward also by whether it keeps all."""
    whole = at_stage(footprint.activation, stage)
    for_weight = whole if footprint.weight_gradient is None else at_stage(footprint.weight_gradient, stage)
    checkpoint = at_stage(footprint.checkpoint, stage)
    return {
        (ActionType.F, True): (whole, -whole if forward_only else 0.0),
        (ActionType.F, False): (checkpoint, 0.0),
        (ActionType.R, True): (whole - checkpoint, 0.0),
        (ActionType.B, True): (0.0, -whole),
        (ActionType.I, True): (0.0, for_weight - whole),
        (ActionType.W, True): (0.0, -for_weight),
    }


def _peak(changes: list[_Change]) -> float:
    held = peak = 0.0
    for change in sorted(changes):
        held += change.size
        peak = max(peak, held)
    return peak
