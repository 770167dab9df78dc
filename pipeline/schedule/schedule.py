"""A schedule: one frozen value that says what every rank does, in order, with its text form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from pipeline.schedule.actions import Action, ActionType

Row = tuple[Action, ...]

Release = Literal["end", "each"]


class Phases(NamedTuple):
    """A row's compute actions, cut in three; together they are the row."""

    warmup: Row
    steady: Row
    cooldown: Row


@dataclass(frozen=True)
class Schedule:
    """What each rank does: `rows[rank]` in order, `stage_to_rank[stage]` the rank that holds a stage."""

    name: str
    rows: tuple[Row, ...]
    stage_to_rank: tuple[int, ...]
    microbatches: int
    forward_only: bool = False
    release: Release = "end"
    """When the outputs of an overlapped pair leave: both at its end, or each once its part is done."""

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.stage_to_rank)

    @property
    def is_lowered(self) -> bool:
        """Whether the rows hold sends and receives (at pp=1 there are none to hold)."""
        return any(action.type.is_communication for row in self.rows for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank)

    def with_rows(self, rows: Iterable[Iterable[Action]]) -> Schedule:
        """The same schedule with other rows."""
        return replace(self, rows=tuple(tuple(row) for row in rows))

    def compute_only(self) -> Schedule:
        """The same schedule without sends, receives and reductions."""
        return self.with_rows(_compute(row) for row in self.rows)

    def phases(self, rank: int) -> Phases:
        """Warmup, steady and cooldown of a rank's compute actions.

        Steady runs from the first forward directly followed by a backward to the last backward directly preceded by a
        forward (`R` and `W` in between don't count; an overlapped pair is both). Warmup is what comes before, cooldown
        what comes after; a row without such a pair is all warmup.
        """
        row = tuple(_compute(self.rows[rank]))
        parts = ((i, part.type) for i, action in enumerate(row) for part in action.compute)
        turns = [(i, kind) for i, kind in parts if kind is ActionType.F or kind.is_backward]
        pairs = [(i, j) for (i, one), (j, next_one) in pairwise(turns) if one is ActionType.F and next_one.is_backward]
        if not pairs:
            return Phases(row, (), ())
        first, last = pairs[0][0], pairs[-1][1] + 1
        return Phases(row[:first], row[first:last], row[last:])

    def to_text(self) -> str:
        """A readable form that `from_text` reads back without loss. ValueError for a name of several lines."""
        if "\n" in self.name:
            raise ValueError(f"the schedule's name {self.name!r} spans several lines: use a name of one line")
        header = [
            f"schedule: {self.name}",
            f"stage_to_rank: {' '.join(map(str, self.stage_to_rank))}",
            f"microbatches: {self.microbatches}",
            f"forward_only: {'yes' if self.forward_only else 'no'}",
            *([f"release: {self.release}"] if self.release != "end" else []),
        ]
        rows = [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows)]
        return "\n".join(header + rows) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read what `to_text` wrote; ValueError names the line that doesn't fit."""
        lines = iter(text.split("\n"))
        name = _field(lines, "schedule")
        placement = tuple(_integer(word) for word in _field(lines, "stage_to_rank").split())
        microbatches = _integer(_field(lines, "microbatches").strip())
        forward_only = _field(lines, "forward_only").strip()
        if forward_only not in ("yes", "no"):
            raise ValueError(f"forward_only is {forward_only!r}: use yes or no")
        rest = [line for line in lines if line.strip()]
        release = rest.pop(0).removeprefix("release:").strip() if rest and rest[0].startswith("release:") else "end"
        if release not in ("end", "each"):
            raise ValueError(f"release is {release!r}: use end or each")
        rows = [
            tuple(map(Action.parse, _field(iter([line]), f"rank {rank}").split())) for rank, line in enumerate(rest)
        ]
        return cls(name, tuple(rows), placement, microbatches, forward_only == "yes", release)  # type: ignore[arg-type]


class Channel(NamedTuple):
    """One direction of traffic between two ranks: a FIFO of its own, one communicator each."""

    source: int
    destination: int
    kind: Literal["activation", "gradient"]


Communicator = Callable[[Channel], Hashable]
"""Names the communicator that a channel uses. Each rank's operations on one communicator are one FIFO."""


def one_a_channel(channel: Channel) -> Hashable:
    """The communicators that the engine makes: none is shared."""
    return channel


class Message(NamedTuple):
    """What travels over a boundary: the output of a stage's forward, or the input gradient of its backward."""

    kind: Literal["activation", "gradient"]
    source_stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.source_stage}, microbatch {self.microbatch}"

    @property
    def destination_stage(self) -> int:
        """The stage that takes it."""
        return self.source_stage + (1 if self.kind == "activation" else -1)

    @property
    def boundary(self) -> int:
        """The boundary it crosses: the stage before it."""
        return min(self.source_stage, self.destination_stage)


def takes(action: Action, stages: int) -> Message | None:
    """What an F, B or I consumes of a neighboring stage, on another rank or the same. None where there is no such."""
    if action.type is ActionType.F and action.stage > 0:
        return Message("activation", action.stage - 1, action.microbatch)
    if action.type.is_backward and action.stage < stages - 1:
        return Message("gradient", action.stage + 1, action.microbatch)
    return None


def makes(action: Action, stages: int) -> Message | None:
    """What an F, B or I produces for a neighboring stage, on another rank or the same. None where there is no such."""
    if action.type is ActionType.F and action.stage < stages - 1:
        return Message("activation", action.stage, action.microbatch)
    if action.type.is_backward and action.stage > 0:
        return Message("gradient", action.stage, action.microbatch)
    return None


def message(action: Action) -> Message:
    """The message a send or receive moves: equal for the two ends of one transfer.

    `2SEND_F5` and `3RECV_F5` share one, and so do `3SEND_B5` and `2RECV_B5`. ValueError for a compute action.
    """
    if action.type is ActionType.SEND_F:
        return Message("activation", action.stage, action.microbatch)
    if action.type is ActionType.RECV_F:
        return Message("activation", action.stage - 1, action.microbatch)
    if action.type is ActionType.SEND_B:
        return Message("gradient", action.stage, action.microbatch)
    if action.type is ActionType.RECV_B:
        return Message("gradient", action.stage + 1, action.microbatch)
    raise ValueError(f"{action} moves no message: use a SEND or RECV action")


def channel(action: Action, stage_to_rank: tuple[int, ...]) -> Channel:
    """The channel a send or receive uses. ValueError for a compute action or a boundary that doesn't exist."""
    return route(message(action), stage_to_rank)


def route(moved: Message, stage_to_rank: tuple[int, ...]) -> Channel:
    """The channel a message takes. ValueError for a boundary that doesn't exist."""
    source, destination = moved.source_stage, moved.destination_stage
    last = len(stage_to_rank) - 1
    if not (0 <= source <= last and 0 <= destination <= last):
        raise ValueError(f"nothing moves from stage {source} to stage {destination}: use stages 0 to {last}")
    return Channel(stage_to_rank[source], stage_to_rank[destination], moved.kind)


def _compute(row: Iterable[Action]) -> Iterator[Action]:
    return (action for action in row if action.type.is_compute)


def _field(lines: Iterator[str], key: str) -> str:
    line = next(lines, None)
    if line is None or not line.startswith(f"{key}:"):
        raise ValueError(f"the schedule's text has {line!r} where a line '{key}: ...' must stand")
    return line.removeprefix(f"{key}:").removeprefix(" ")


def _integer(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise ValueError(f"{word!r} in the schedule's text is not a count: use digits")
    return int(word)
