"""When each action of some rows runs: what `simulate` says, in fewer words and less time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.schedule.search.problem import Codes, F, I, Problem


class Timing(NamedTuple):
    """Start and end of each action by its code, and how long it all takes."""

    starts: list[float]
    ends: list[float]
    makespan: float
    span: float
    """The longest time of a rank from its first start to its last end."""
    finish: float
    """The ranks' last ends, added up: of two orders as long, the one with more air is easier to improve."""


class Clock:
    """Times rows of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        stages, microbatches = problem.stages, problem.microbatches
        each = range(microbatches)
        self.durations = [time for kind in problem.durations for time in kind for _ in each]
        self.inputs: list[int] = []
        self.delays: list[float] = []
        for kind in range(3):
            for stage in range(stages):
                source, delay = _source(problem, kind, stage)
                self.inputs.extend(-1 if source is None else problem.code(*source, microbatch) for microbatch in each)
                self.delays.extend(delay for _ in each)

    def time(self, rows: Sequence[Codes]) -> Timing | None:
        """None where ranks would wait for each other forever."""
        starts = [-1.0] * self.problem.actions
        ends = [-1.0] * self.problem.actions
        position, clock = [0] * len(rows), [0.0] * len(rows)
        waiting: dict[int, int] = {}
        runnable = list(range(len(rows)))
        left = sum(map(len, rows))
        while runnable:
            rank = runnable.pop()
            row, now, at = rows[rank], clock[rank], position[rank]
            while at < len(row):
                code = row[at]
                source = self.inputs[code]
                if source >= 0:
                    arrival = ends[source]
                    if arrival < 0:
                        waiting[source] = rank
                        break
                    arrival += self.delays[code]
                    if arrival > now:
                        now = arrival
                starts[code] = now
                now += self.durations[code]
                ends[code] = now
                at += 1
                if code in waiting:
                    runnable.append(waiting.pop(code))
            left -= at - position[rank]
            position[rank], clock[rank] = at, now
        if left:
            return None
        spans = [ends[row[-1]] - starts[row[0]] for row in rows]
        return Timing(starts, ends, max(clock), max(spans), sum(clock))


def _source(problem: Problem, kind: int, stage: int) -> tuple[tuple[int, int] | None, float]:
    """Kind and stage of what an action takes in, and how long it is under way."""
    if kind == F:
        return ((F, stage - 1), problem.up[stage - 1]) if stage > 0 else (None, 0.0)
    if kind == I and stage + 1 < problem.stages:
        return (I, stage + 1), problem.down[stage + 1]
    return (kind - 1, stage), 0.0
