"""Local improvement: move actions along their rows where they hold up the end, keep what makes it come sooner."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pipeline.schedule.search.problem import Codes, F, Problem, W
from pipeline.schedule.search.timing import Clock, Timing

Objective = Literal["makespan", "span"]

_FARTHEST = 4
"""How many places an action moves at once."""

_MOST_SHAKES = 8


class _Move(NamedTuple):
    rank: int
    source: int
    target: int


class Score(NamedTuple):
    """Smaller is better, the first difference decides."""

    objective: float
    other: float
    finish: float

    def beats(self, other: Score, tolerance: float) -> bool:
        """Whether it is smaller by more than rounding."""
        for mine, its in zip(self, other, strict=True):
            if abs(mine - its) > tolerance:
                return mine < its
        return False


def score(timing: Timing, objective: Objective) -> Score:
    """What the search minimizes: the objective, the other of makespan and span, the ranks' ends."""
    first, second = (timing.makespan, timing.span) if objective == "makespan" else (timing.span, timing.makespan)
    return Score(first, second, timing.finish)


def improve(
    clock: Clock, rows: Sequence[Codes], cap: Sequence[int], objective: Objective, trials: int, floor: float
) -> list[Codes]:
    """Rows at least as good, in flight on no rank more than `cap`: the best that `trials` timings lead to.

    Downhill first; then, for as long as trials are left and the objective is over `floor`, shaken and downhill again
    from where it got no worse (iterated local search, with a random generator of its own and always the same seed).
    """
    walk = _Walk(clock, cap, objective, trials)
    best = walk.downhill(walk.start(rows))
    generator = random.Random(0)
    while walk.trials > 0 and best.score.objective > floor + clock.problem.tolerance:
        shaken = walk.shaken(best, generator)
        if shaken is not None:
            found = walk.downhill(shaken)
            if not best.score.beats(found.score, clock.problem.tolerance):
                best = found
    return best.rows


class _State(NamedTuple):
    rows: list[Codes]
    timing: Timing
    score: Score


class _Walk:
    """Steps from one order to another; each timing is one trial."""

    def __init__(self, clock: Clock, cap: Sequence[int], objective: Objective, trials: int) -> None:
        self.clock, self.cap, self.objective, self.trials = clock, cap, objective, trials

    def start(self, rows: Sequence[Codes]) -> _State:
        state = self.timed([list(row) for row in rows])
        assert state is not None, "the rows to improve are a schedule that finishes"
        return state

    def downhill(self, state: _State) -> _State:
        """Moves along the critical path, as none other can make the end come sooner, until none is better."""
        while (better := self.better(state)) is not None:
            state = better
        return state

    def better(self, state: _State) -> _State | None:
        for move in _moves(self.clock, state.rows, state.timing, self.objective):
            if self.trials <= 0:
                return None
            tried = self.moved(state.rows, move)
            outcome = None if tried is None else self.timed(tried)
            if outcome is not None and outcome.score.beats(state.score, self.clock.problem.tolerance):
                return outcome
        return None

    def shaken(self, state: _State, generator: random.Random) -> _State | None:
        """After some random moves; None if they don't fit together."""
        rows = state.rows
        for _ in range(generator.randint(2, _MOST_SHAKES)):
            rank = generator.randrange(len(rows))
            source = generator.randrange(len(rows[rank]))
            target = source + generator.choice((-1, 1)) * generator.randint(1, _FARTHEST)
            if 0 <= target < len(rows[rank]):
                rows = self.moved(rows, _Move(rank, source, target)) or rows
        return self.timed(rows)

    def moved(self, rows: list[Codes], move: _Move) -> list[Codes] | None:
        row = _moved(self.clock.problem, rows[move.rank], move, self.cap[move.rank])
        return None if row is None else [*rows[: move.rank], row, *rows[move.rank + 1 :]]

    def timed(self, rows: list[Codes]) -> _State | None:
        self.trials -= 1
        timing = self.clock.time(rows)
        return None if timing is None else _State(rows, timing, score(timing, self.objective))


def _moves(clock: Clock, rows: Sequence[Codes], timing: Timing, objective: Objective) -> Iterator[_Move]:
    """Of each two neighbors in a row that follow each other on the critical path: the later one sooner, or the earlier
    one later, by one place and by more."""
    path = list(_critical_neighbors(clock, rows, timing, objective))
    for distance in range(1, _FARTHEST + 1):
        for rank, at in path:
            if at - distance >= 0:
                yield _Move(rank, at, at - distance)
            if distance > 1 and at - 1 + distance < len(rows[rank]):
                yield _Move(rank, at - 1, at - 1 + distance)


def _critical_neighbors(
    clock: Clock, rows: Sequence[Codes], timing: Timing, objective: Objective
) -> Iterator[tuple[int, int]]:
    """Rank and place of each action on the critical path that started when the one before it on its rank ended."""
    position = {code: (rank, at) for rank, row in enumerate(rows) for at, code in enumerate(row)}
    starts, ends = timing.starts, timing.ends
    code = max((row[-1] for row in rows), key=lambda last: ends[last])
    if objective == "span":
        code = max(rows, key=lambda row: ends[row[-1]] - starts[row[0]])[-1]
    while True:
        rank, at = position[code]
        if at > 0 and ends[rows[rank][at - 1]] == starts[code]:
            yield rank, at
            code = rows[rank][at - 1]
        elif clock.inputs[code] >= 0:
            code = clock.inputs[code]
        else:
            return


def _moved(problem: Problem, row: Codes, move: _Move, cap: int) -> Codes | None:
    """The row after a move; None if that breaks the order within a stage or a microbatch, or the cap."""
    code = row[move.source]
    low, high = sorted((move.source, move.target))
    if any(_in_order(problem, code, other) for other in row[low : high + 1] if other != code):
        return None
    moved = [*row[: move.source], *row[move.source + 1 :]]
    moved.insert(move.target, code)
    return moved if peak(problem, moved) <= cap else None


def _in_order(problem: Problem, code: int, other: int) -> bool:
    """Whether two actions of a rank keep their order: one kind and stage, or one stage and microbatch."""
    (place, microbatch), (its_place, its_microbatch) = (divmod(each, problem.microbatches) for each in (code, other))
    return place == its_place or (microbatch == its_microbatch and (place - its_place) % problem.stages == 0)


def peak(problem: Problem, row: Codes) -> int:
    """The most activations a row holds from F to W, in microbatch x stage."""
    size = problem.stages * problem.microbatches
    held = most = 0
    for code in row:
        kind = code // size
        if kind == F:
            held += 1
            most = max(most, held)
        elif kind == W:
            held -= 1
    return most
