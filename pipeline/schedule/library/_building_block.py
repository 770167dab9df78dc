"""A schedule of a V from its building block (Qi et al., arXiv 2405.15362, section 4): repeat, tighten, squeeze.

Time is in slots, one a step, as if F, I and W took equally long. The block gives each rank four slots of microbatch 0:
forward on its first stage (on the way down) and on its second (on the way up), then I on the second and on the first.
Every six slots the next microbatch follows. W goes wherever a slot is free.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pipeline.schedule.actions import ActionType
from pipeline.schedule.library._common import numbered
from pipeline.schedule.schedule import Row

Block = Sequence[tuple[int, int, int, int]]
"""Of each rank: the slots of microbatch 0, in the order it passes through them."""

_PERIOD = 6
_FIRST_FORWARD, _LAST_INPUT, _WEIGHT = 0, 3, 4


class _Step(NamedTuple):
    leg: int
    """0 to 3: the block's column. 4: a W."""
    number: int
    """The microbatch; of a W, which of its rank's it is."""


class _Place(NamedTuple):
    slot: int
    rank: int
    step: _Step


_Line = list[_Step | None]
"""The slots of one rank."""


def repeat_block(block: Block, microbatches: int) -> tuple[Row, ...]:
    """The rows of the repeated block, warm-up and cool-down pulled together without a higher peak in flight.

    Linear in the microbatches, quadratic in the ranks.
    """
    lines = _squeezed(_tightened([_with_weights(line) for line in _repeated(block, microbatches)], microbatches))
    lines = _tightened([_without_weights(line) for line in lines], microbatches)
    lines = _squeezed([_with_weights(line) for line in lines])
    return tuple(_row(_without_weights(line), rank, len(lines)) for rank, line in enumerate(lines))


def _repeated(block: Block, microbatches: int) -> list[_Line]:
    return [
        _line(
            (slot + _PERIOD * number, _Step(leg, number))
            for leg, slot in enumerate(slots)
            for number in range(microbatches)
        )
        for slots in block
    ]


def _line(steps: Iterable[tuple[int, _Step]]) -> _Line:
    at = dict(steps)
    return [at.get(slot) for slot in range(max(at) + 1)]


def _with_weights(line: _Line) -> _Line:
    """A W in each of the first free slots after the I."""
    filled, due, number = list(line), 0, 0
    for slot, step in enumerate(line):
        if step is not None:
            due += step.leg >= 2
        elif due > 0:
            filled[slot] = _Step(_WEIGHT, number)
            due, number = due - 1, number + 1
    return [*filled, *(_Step(_WEIGHT, number + more) for more in range(due))]


def _without_weights(line: _Line) -> _Line:
    return [step if step is not None and step.leg != _WEIGHT else None for step in line]


def _in_time(lines: Sequence[_Line]) -> list[_Place]:
    return sorted(
        _Place(slot, rank, step)
        for rank, line in enumerate(lines)
        for slot, step in enumerate(line)
        if step is not None
    )


def _inputs(rank: int, step: _Step, pp: int) -> Iterator[tuple[int, _Step]]:
    """The steps that come before `step`, with their ranks: its inputs, and the same step of the microbatch before."""
    leg, number = step
    if leg != _WEIGHT:
        sender = rank - 1 if leg % 2 == 0 else rank + 1
        if 0 <= sender < pp:
            yield sender, step
        if leg > 0:
            yield rank, _Step(leg - 1, number)
    if number > 0:
        yield rank, _Step(leg, number - 1)


def _squeezed(lines: Sequence[_Line]) -> list[_Line]:
    """Every step in the first slot that its inputs and its rank's order allow."""
    slots: dict[tuple[int, _Step], int] = {}
    free = [0] * len(lines)
    for _, rank, step in _in_time(lines):
        earliest = [slots[before] + 1 for before in _inputs(rank, step, len(lines))]
        slots[rank, step] = max([free[rank], *earliest])
        free[rank] = slots[rank, step] + 1
    return [_line((slots[rank, step], step) for step in line if step is not None) for rank, line in enumerate(lines)]


def _tightened(lines: Sequence[_Line], microbatches: int) -> list[_Line]:
    """Steps outside the steady phase moved, in the order of time, to the first free slot that keeps the peak.

    Steady is from the first I that ends a microbatch to the last F that starts one. Lines without W are taken to run
    one in every free slot; then the warm-up too stays as it is.
    """
    pp = len(lines)
    places = _in_time(lines)
    starts = next(place for place in places if place.rank == 0 and place.step.leg == _LAST_INPUT)
    last = _Step(_FIRST_FORWARD, microbatches - 1)
    ends = max(starts, next(place for place in places if place.rank == 0 and place.step == last))
    weighted = any(place.step.leg == _WEIGHT for place in places)
    ranks = [_Rank(line, weighted) for line in lines]
    cap = max(rank.peak for rank in ranks)
    settled: dict[tuple[int, _Step], int] = {}
    inputs: list[list[int]] = [[] for _ in lines]
    for place in places:
        slot, rank, step = place
        if place > ends or (weighted and place < starts):
            before = [settled[key] for key in _inputs(rank, step, pp)]
            if step.leg == _WEIGHT:
                before.append(inputs[rank][step.number])
            slot = ranks[rank].move(slot, max(before, default=-1) + 1, cap)
        settled[rank, step] = slot
        if step.leg in (2, 3):
            bisect.insort(inputs[rank], slot)
    return [rank.line for rank in ranks]


class _Rank:
    """One rank's line while steps move in it, with what is held before each slot."""

    def __init__(self, line: _Line, weighted: bool) -> None:
        self.line = list(line)
        self.weighted = weighted
        self.states = [(0, 0)]
        for step in line:
            self.states.append(self._after(self.states[-1], step))
        self.peak = max(held for held, _ in self.states)

    def move(self, source: int, earliest: int, cap: int) -> int:
        """Move the step at `source` to the first slot from `earliest` on that is free and keeps to `cap`; the slot."""
        for target in range(earliest, source):
            if self.line[target] is None and self._fits(source, target, cap):
                return target
        return source

    def _fits(self, source: int, target: int, cap: int) -> bool:
        """Move the step if no more than `cap` are held then."""
        changed = list(self.line[target : source + 1])
        changed[0], changed[-1] = changed[-1], None
        states = [self.states[target]]
        for slot in range(target, len(self.line)):
            step = changed[slot - target] if slot <= source else self.line[slot]
            states.append(self._after(states[-1], step))
            if states[-1][0] > cap:
                return False
            if slot >= source and states[-1] == self.states[slot + 1]:
                break
        self.line[target : source + 1] = changed
        self.states[target : target + len(states)] = states
        return True

    def _after(self, state: tuple[int, int], step: _Step | None) -> tuple[int, int]:
        """What is held, and how many I lack their W, after one slot."""
        held, due = state
        if step is None:
            return (held - 1, due - 1) if due > 0 else state
        if step.leg == _WEIGHT:
            return held - 1, due
        if step.leg < 2:
            return held + 1, due
        return held, due + (not self.weighted)


def _row(line: _Line, rank: int, pp: int) -> Row:
    """The actions of a line, its free slots filled with W: the second stage's first."""
    down, up = rank, 2 * pp - 1 - rank
    legs = [(ActionType.F, down), (ActionType.F, up), (ActionType.I, up), (ActionType.I, down)]
    due = {up: 0, down: 0}
    turns = []
    for step in line:
        if step is not None:
            kind, stage = legs[step.leg]
            turns.append((kind, stage))
            due[stage] += kind is ActionType.I
        elif any(due.values()):
            stage = up if due[up] else down
            turns.append((ActionType.W, stage))
            due[stage] -= 1
    turns += [(ActionType.W, stage) for stage, left in due.items() for _ in range(left)]
    return tuple(numbered(turns))
