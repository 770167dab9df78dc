"""Schedules for every memory cap at once: a ladder of caps, each searched greedily and improved.

The ladder doesn't depend on any cap asked for. A caller keeps what fits its own, so that more memory only adds choice.
All budgets count actions placed, not seconds: the same problem gives the same schedules everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from pipeline.schedule.search.greedy import UNLIMITED, Rule, greedy
from pipeline.schedule.search.improve import Objective, Score, improve, peak, score
from pipeline.schedule.search.problem import Codes, F, I, Problem, W
from pipeline.schedule.search.timing import Clock

Rows = tuple[tuple[int, ...], ...]

_GREEDY_BUDGET = 400_000
"""Actions placed by greedy runs, for the whole ladder; each rung gets its share, within bounds."""
_FEWEST_RUNS, _MOST_RUNS = 10, 80

_IMPROVEMENT_BUDGET = 100_000
"""Actions timed to improve one schedule."""
_MOST_TRIALS = 300

_LARGE = 2_000
"""Actions of a problem whose ladder has fewer rungs."""

_FACTORS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, UNLIMITED)
_ORDERS = ((I, F, W), (F, I, W), (I, W, F))


@lru_cache(maxsize=16)
def candidates(problem: Problem, objective: Objective, floor: float, starts: tuple[Rows, ...]) -> tuple[Rows, ...]:
    """Rows by rank, as codes: the best found for each cap of the ladder, then each of `starts` improved.

    `floor` is a value no schedule's objective is under: the ladder ends where it is reached.
    """
    clock = Clock(problem)
    found = [*_climb(clock, objective, floor)]
    for start in starts:
        rows = [list(row) for row in start]
        found.append(improve(clock, rows, [peak(problem, row) for row in rows], objective, _trials(problem), floor))
    return tuple(tuple(map(tuple, rows)) for rows in found)


def _climb(clock: Clock, objective: Objective, floor: float) -> Iterator[list[Codes]]:
    """One schedule a rung, to the rung that reaches the floor, or to where a step up twice gains nothing."""
    problem = clock.problem
    rungs = ladder(problem)
    runs = max(_FEWEST_RUNS, min(_MOST_RUNS, _GREEDY_BUDGET // (problem.actions * len(rungs))))
    enough = 2 * problem.pp
    best, idle = float("inf"), 0
    for cap in rungs:
        rows = _search(clock, cap, objective, runs)
        rows = improve(clock, rows, cap, objective, _trials(problem), floor)
        yield rows
        reached = _score(clock, rows, objective).objective
        gained = reached < best - problem.tolerance
        best = min(best, reached)
        idle = 0 if gained or max(cap) < enough else idle + 1
        if best <= floor + problem.tolerance or idle == 2:
            return


def _trials(problem: Problem) -> int:
    return min(_MOST_TRIALS, _IMPROVEMENT_BUDGET // problem.actions)


def ladder(problem: Problem) -> list[tuple[int, ...]]:
    """Caps of every rank, from the least to all a rank could hold: each at first, then in steps of an eighth or, of a
    large problem, a quarter."""
    part = 8 if problem.actions <= _LARGE else 4
    least = max(map(len, problem.stages_of))
    most = least * problem.microbatches
    marks = {problem.stages, 2 * problem.stages - least, most}
    at = least
    while at < most:
        marks.add(at)
        at += max(1, at // part)
    return [(mark,) * problem.pp for mark in sorted(marks) if least <= mark <= most]


def _search(clock: Clock, cap: Sequence[int], objective: Objective, runs: int) -> list[Codes]:
    """The best of at most `runs` greedy runs: some starting rules, then the best of them with one switch changed."""
    tried: dict[Rule, tuple[Score, list[Codes]]] = {}

    def value(rule: Rule) -> Score | None:
        if rule not in tried:
            if len(tried) == runs:
                return None
            rows = greedy(clock.problem, cap, rule)
            tried[rule] = (_score(clock, rows, objective), rows)
        return tried[rule][0]

    for factor, order in product((1.0, 1.5, 3.0, UNLIMITED), _ORDERS[:2]):
        value(Rule(order, in_flight=factor, turning=factor))
    for start in sorted(tried, key=lambda rule: tried[rule][0])[:3]:
        best, improved = start, True
        while improved:
            improved = False
            for rule in _one_switch_away(best, turns=clock.problem.stages > clock.problem.pp):
                outcome = value(rule)
                if outcome is not None and outcome < tried[best][0]:
                    best, improved = rule, True
    return min(tried.values(), key=lambda outcome: outcome[0])[1]


def _one_switch_away(rule: Rule, turns: bool) -> Iterator[Rule]:
    yield from (replace(rule, order=order) for order in _ORDERS)
    yield from (replace(rule, in_flight=factor) for factor in _FACTORS)
    yield from (replace(rule, wait=part) for part in (0.0, 0.5, 1.0))
    yield from (replace(rule, hold=part) for part in (0.0, 0.5, 1.0))
    if turns:
        yield from (replace(rule, turning=factor) for factor in _FACTORS)
        yield replace(rule, later_forward=not rule.later_forward)
        yield replace(rule, later_input=not rule.later_input)


def _score(clock: Clock, rows: Sequence[Codes], objective: Objective) -> Score:
    timing = clock.time(rows)
    assert timing is not None, "a greedy run finishes"
    return score(timing, objective)
