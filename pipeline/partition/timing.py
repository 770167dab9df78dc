"""How long a fixed schedule takes for changing costs: the longest path through its actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.schedule import Message, Schedule, makes, takes


class StageTimes(NamedTuple):
    """Seconds of one stage for a microbatch."""

    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    recompute: float
    transfer: float
    """Of a message over the boundary after the stage, either way."""


Counts = tuple[int, int, int, int, int, int]


class Path(NamedTuple):
    """The longest path: its length, and how often it takes each of a stage's times."""

    makespan: float
    counts: tuple[Counts, ...]


class _Input(NamedTuple):
    node: int
    boundary: int
    """Whose transfer lies between; -1 on one rank."""


_FIELD = {kind: at for at, kind in enumerate((ActionType.F, ActionType.B, ActionType.I, ActionType.W, ActionType.R))}
_TRANSFER = StageTimes._fields.index("transfer")


class Timer:
    """A schedule's compute actions in an order that respects all they wait for; says what `simulate` says, faster."""

    def __init__(self, schedule: Schedule) -> None:
        self._stages = schedule.stages
        self._actions: list[Action] = []
        self._inputs: list[list[_Input]] = []
        made: dict[Message, int] = {}
        rows = [[action for action in row if action.type.is_compute] for row in schedule.rows]
        position, last = [0] * len(rows), [-1] * len(rows)
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row):
                    parts = row[position[rank]].compute
                    needed = [message for part in parts if (message := takes(part, schedule.stages)) is not None]
                    if not all(message in made for message in needed):
                        break
                    self._append(parts, [_Input(made[m], _boundary(m, schedule)) for m in needed], last, rank)
                    self._note_outputs(parts, made, schedule)
                    position[rank] += 1
                    progress = True
        if any(at < len(row) for at, row in zip(position, rows, strict=True)):
            raise ValueError(f"schedule {schedule.name} deadlocks: see pipeline.schedule.validate for where")

    def _append(self, parts: Sequence[Action], needed: list[_Input], last: list[int], rank: int) -> None:
        for part in parts:
            before = [_Input(last[rank], -1)] if last[rank] >= 0 else []
            last[rank] = len(self._actions)
            self._actions.append(part)
            self._inputs.append(before + needed)
            needed = []

    def _note_outputs(self, parts: Sequence[Action], made: dict[Message, int], schedule: Schedule) -> None:
        final = len(self._actions) - 1
        for offset, part in enumerate(parts):
            output = makes(part, schedule.stages)
            if output is not None:
                own = final - len(parts) + 1 + offset
                made[output] = own if schedule.release == "each" else final

    def ends(self, times: Sequence[StageTimes]) -> list[float]:
        """When each action ends."""
        transfer = [*(one.transfer for one in times), 0.0]
        ends: list[float] = []
        for action, inputs in zip(self._actions, self._inputs, strict=True):
            start = 0.0
            for node, boundary in inputs:
                arrived = ends[node] + transfer[boundary]
                if arrived > start:
                    start = arrived
            ends.append(start + times[action.stage][_FIELD[action.type]])
        return ends

    def longest(self, times: Sequence[StageTimes]) -> Path:
        """The makespan, and a path that takes that long."""
        ends = self.ends(times)
        transfer = [*(one.transfer for one in times), 0.0]
        counts = [[0] * len(StageTimes._fields) for _ in range(self._stages)]
        node = max(range(len(ends)), key=ends.__getitem__)
        makespan = ends[node]
        while True:
            action = self._actions[node]
            counts[action.stage][_FIELD[action.type]] += 1
            if not self._inputs[node]:
                return Path(makespan, tuple((a, b, c, d, e, f) for a, b, c, d, e, f in counts))
            node, boundary = max(self._inputs[node], key=lambda one: ends[one.node] + transfer[one.boundary])
            if boundary >= 0:
                counts[boundary][_TRANSFER] += 1


def _boundary(moved: Message, schedule: Schedule) -> int:
    ranks = schedule.stage_to_rank
    return moved.boundary if ranks[moved.source_stage] != ranks[moved.destination_stage] else -1
