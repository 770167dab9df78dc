"""What a rank holds: activations in flight, in microbatch x stage, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pipeline.schedule.actions import Action, ActionType
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
    """Bytes that one microbatch takes at a stage: one number for every stage, or an entry a stage.

    What is held for the backward, each memory once. Not the parameters, their gradients and their low-precision copies,
    nor what an action needs while it runs alone.
    """

    activation: Times
    """From the start of F to the end of B or I. A recomputed microbatch takes it from the start of R."""
    weight_gradient: Times | None = None
    """What of it, and of the gradients, I leaves for W. None: as much as `activation`."""
    checkpoint: Times = 0.0
    """What a recomputed microbatch keeps from the start of F to that of R: the stage's input."""
    boundary: Times = 0.0
    """A stage's output, and the gradient that comes back for it, in a buffer that is sent from or received into."""
    during_recompute: Times = 0.0
    """What R holds beyond `activation` at most, before a B or before an I, whichever is more."""
    during_input: Times = 0.0
    """What I holds beyond `activation` at most: it leaves something for W before all that it needs is used up."""
    kept_output: Times = 0.0
    """The part of `activation` that is F's output: on one rank it is the next stage's input as well."""
    input_for_weight: Times = 0.0
    """The part of `weight_gradient` that is the stage's input."""
    recomputed: Footprint | None = None
    """Of a recomputed microbatch. None: the same, but for an output, which R makes anew."""

    def __post_init__(self) -> None:
        for name in _Sizes._fields:
            check_times(name, getattr(self, name), "bytes")

    def stage(self, stage: int) -> _Sizes:
        """One stage's entries."""
        whole = {"weight_gradient": self.activation} if self.weight_gradient is None else {}
        sizes = {name: getattr(self, name) for name in _Sizes._fields} | whole
        return _Sizes(**{name: at_stage(size, stage) for name, size in sizes.items()})

    def recomputed_stage(self, stage: int) -> _Sizes:
        """One stage's entries for a recomputed microbatch."""
        return self.stage(stage)._replace(kept_output=0.0) if self.recomputed is None else self.recomputed.stage(stage)


class _Sizes(NamedTuple):
    """One stage's entries of a `Footprint`."""

    activation: float
    weight_gradient: float
    checkpoint: float
    boundary: float
    during_recompute: float
    during_input: float
    kept_output: float
    input_for_weight: float


Footprints = Footprint | Sequence[Footprint]
"""One for all microbatches, or one for each."""


class Transfer(NamedTuple):
    """One message between two ranks: when it was handed over, its receive posted, and when it was there."""

    message: Message
    sent: float
    posted: float
    arrived: float


def peak_activation_bytes(schedule: Schedule, footprint: Footprints) -> tuple[float, ...]:
    """The most bytes of activations that each rank holds: what its order alone says, without messages under way.

    It is what the engine's meter counts (pipeline/engine/activations.py). ValueError unless there is a footprint for
    all microbatches, or one for each.
    """
    peaks = []
    for rank in range(schedule.pp):
        held = peak = 0.0
        for before, after in _Activations(schedule, rank, footprint).changes():
            peak = max(peak, held + before)
            held += before + after
        peaks.append(peak)
    return tuple(peaks)


def peak_bytes(
    schedule: Schedule, events: Sequence[Sequence[Event]], transfers: Sequence[Transfer], footprint: Footprint
) -> tuple[float, ...]:
    """The most bytes of activations and boundary buffers that each rank holds at a time.

    A message takes a buffer of its sender until it has arrived, and one of its receiver from the posted receive to the
    end of the action that consumes it.
    """
    changes: list[list[_Change]] = [[] for _ in events]
    ends: dict[Message, tuple[float, int]] = {}
    for rank, row in enumerate(events):
        for at, (event, change) in enumerate(zip(row, _Activations(schedule, rank, footprint).changes(), strict=True)):
            changes[rank].append(_Change(event.start, 2 * at, change[0]))
            changes[rank].append(_Change(event.end, 2 * at + 1, change[1]))
            for needed in (takes(part, schedule.stages) for part in event.action.compute):
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


class _Activations:
    """One rank's activations as its actions come and go."""

    def __init__(self, schedule: Schedule, rank: int, footprint: Footprints) -> None:
        if not isinstance(footprint, Footprint) and len(footprint) != schedule.microbatches:
            raise ValueError(
                f"{len(footprint)} footprints for {schedule.microbatches} microbatches: give one, or one for each"
            )
        self._row = [action for action in schedule.rows[rank] if action.type.is_compute]
        self._forward_only = schedule.forward_only
        self._recomputed = {(a.stage, a.microbatch) for a in self._row if a.type is ActionType.R}
        self._footprint = footprint
        self._known: dict[tuple[int, int, bool], _Sizes] = {}
        self._shared = _SharedBoundaries(schedule, self._sizes)

    def changes(self) -> Iterator[tuple[float, float]]:
        """By how many bytes each compute action changes what is held: when it starts, and when it ends."""
        for action in self._row:
            before = after = 0.0
            for part in action.compute:
                start, end = self._change(part)
                before += start - self._shared.joined(part)
                after += end + self._shared.parted(part)
            yield before, after

    def _change(self, part: Action) -> tuple[float, float]:
        sizes = self._sizes(part.stage, part.microbatch)
        match part.type:
            case ActionType.F if self._forward_only:
                return sizes.activation, -sizes.activation
            case ActionType.F:
                kept = (part.stage, part.microbatch) not in self._recomputed
                return sizes.activation if kept else sizes.checkpoint, 0.0
            case ActionType.R:
                more = sizes.activation - sizes.checkpoint
                return more + sizes.during_recompute, -sizes.during_recompute
            case ActionType.I:
                return sizes.during_input, sizes.weight_gradient - sizes.activation - sizes.during_input
            case ActionType.W:
                return 0.0, -sizes.weight_gradient
            case _:
                return 0.0, -sizes.activation

    def _sizes(self, stage: int, microbatch: int) -> _Sizes:
        one = self._footprint if isinstance(self._footprint, Footprint) else self._footprint[microbatch]
        key = id(one), stage, (stage, microbatch) in self._recomputed
        if key not in self._known:
            self._known[key] = one.recomputed_stage(stage) if key[2] else one.stage(stage)
        return self._known[key]


class _SharedBoundaries:
    """Outputs that their stage keeps and that the next stage on the same rank takes: one memory with two users."""

    def __init__(self, schedule: Schedule, sizes: Callable[[int, int], _Sizes]) -> None:
        ranks = schedule.stage_to_rank
        self._inner = {s for s in range(schedule.stages - 1) if ranks[s] == ranks[s + 1] and not schedule.forward_only}
        self._sizes = sizes
        self._users: dict[tuple[int, int], int] = {}

    def joined(self, part: Action) -> float:
        """The bytes that an action's start seems to take and does not: they are there already."""
        if part.type is not ActionType.F:
            return 0.0
        if part.stage in self._inner:
            self._users[part.stage, part.microbatch] = 1
        boundary = part.stage - 1, part.microbatch
        if boundary not in self._users:
            return 0.0
        self._users[boundary] += 1
        return self._sizes(*boundary).kept_output

    def parted(self, part: Action) -> float:
        """The bytes that an action's end seems to free and does not: the other stage still holds them."""
        stage, microbatch = part.stage, part.microbatch
        remaining = 0.0
        if part.type.is_backward:
            remaining += self._leave(stage, microbatch)
        if part.type is ActionType.B or part.type is _last_use_of_input(self._sizes(stage, microbatch)):
            remaining += self._leave(stage - 1, microbatch)
        return remaining

    def _leave(self, stage: int, microbatch: int) -> float:
        if (stage, microbatch) not in self._users:
            return 0.0
        self._users[stage, microbatch] -= 1
        return self._sizes(stage, microbatch).kept_output if self._users[stage, microbatch] else 0.0


def _last_use_of_input(sizes: _Sizes) -> ActionType:
    return ActionType.W if sizes.input_for_weight else ActionType.I


def _peak(changes: list[_Change]) -> float:
    held = peak = 0.0
    for change in sorted(changes):
        held += change.size
        peak = max(peak, held)
    return peak
