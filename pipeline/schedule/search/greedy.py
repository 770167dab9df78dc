"""List scheduling: the rank that can start something first does, and a rule says what.

The rules' switches (who goes first, whether to wait for what arrives soon) are those of sail-sg's zero-bubble scheduler
(arXiv 2401.10241, section 3.1). Beyond the memory cap, two limits of Little's law keep a rank from running ahead: how
many microbatches a stage has forward and not yet back, and, where a rank holds a later stage too, how many have left
the earlier stage and not come to the later one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.schedule.search.problem import Codes, F, I, Problem, W

UNLIMITED = math.inf


@dataclass(frozen=True)
class Rule:
    """The switches of one greedy run."""

    order: tuple[int, int, int] = (I, F, W)
    """What a rank prefers of what it could start now."""
    in_flight: float = UNLIMITED
    """How many times as many microbatches as its period asks for may be between F and I of a stage."""
    turning: float = UNLIMITED
    """The same between F of a stage and F of the rank's later stage."""
    wait: float = 0.0
    """A W gives way to an F or I that arrives within this part of it."""
    hold: float = 0.0
    """An F gives way to an I that arrives within this part of it."""
    later_forward: bool = False
    """Of two stages' F, prefer the later stage's."""
    later_input: bool = False
    """Of two stages' I, prefer the later stage's."""


Choice = tuple[float, int, int, int, int]
"""Start, place in the rule's order, place among the stages, kind, stage: the smallest of those startable is chosen."""

_NOTHING: Choice = (math.inf, 0, 0, 0, 0)


def greedy(problem: Problem, cap: Sequence[int], rule: Rule) -> list[Codes]:
    """One order of every rank under `cap` (microbatch x stage of each rank, held from F to W, 1 or more a stage).

    Never deadlocks: where a rank holds a later stage too, the last free slot is left to it, and microbatches stay in
    order at every stage, so that the first one unfinished can always go on.
    """
    run = _Run(problem, cap, rule)
    for _ in range(problem.actions):
        run.step()
    return run.rows


class _Run:
    def __init__(self, problem: Problem, cap: Sequence[int], rule: Rule) -> None:
        self.problem, self.cap, self.rule = problem, cap, rule
        self.priority = tuple(rule.order.index(kind) for kind in (F, I, W))
        period = problem.period(cap)
        self.most_in_flight = [_limit(rule.in_flight, span, period) for span in problem.until_input]
        self.most_turning = [
            min(_limit(rule.turning, span, period), cap[rank] - 1)
            for span, rank in zip(problem.until_turn, problem.stage_to_rank, strict=True)
        ]
        stages = problem.stages
        self.done = [[0] * stages for _ in (F, I, W)]
        self.arrived: tuple[list[list[float]], list[list[float]]] = (
            [[0.0] * problem.microbatches if stage == 0 else [] for stage in range(stages)],
            [[] for _ in range(stages)],
        )
        """When each microbatch's input, and its gradient, is at each stage."""
        self.clock = [0.0] * problem.pp
        self.held = [0] * problem.pp
        self.rows: list[Codes] = [[] for _ in range(problem.pp)]
        self.choices = [self.choose(rank) for rank in range(problem.pp)]
        self.starts = [choice[0] for choice in self.choices]

    def step(self) -> None:
        rank = self.starts.index(min(self.starts))
        woken = self.run(rank, self.choices[rank])
        for changed in (rank, woken):
            if changed is not None:
                self.choices[changed] = choice = self.choose(changed)
                self.starts[changed] = choice[0]

    def run(self, rank: int, choice: Choice) -> int | None:
        """Run it; the rank for which its output is the next input, if it goes anywhere."""
        start, _, _, kind, stage = choice
        problem = self.problem
        end = start + problem.durations[kind][stage]
        self.rows[rank].append(problem.code(kind, stage, self.done[kind][stage]))
        self.done[kind][stage] += 1
        self.clock[rank] = end
        if kind == W:
            self.held[rank] -= 1
            return None
        if kind == F:
            self.held[rank] += 1
            if stage + 1 < problem.stages:
                return self.hand_on(F, stage + 1, end + problem.up[stage])
            return self.hand_on(I, stage, end)
        return self.hand_on(I, stage - 1, end + problem.down[stage]) if stage > 0 else None

    def hand_on(self, kind: int, stage: int, at: float) -> int | None:
        arrived = self.arrived[kind][stage]
        arrived.append(at)
        return self.problem.stage_to_rank[stage] if len(arrived) == self.done[kind][stage] + 1 else None

    def choose(self, rank: int) -> Choice:
        """What the rule starts next on `rank`, of what has an arrival time by now; `_NOTHING` if nothing has."""
        startable = self.startable(rank)
        if len(startable) < 2:
            return startable[0] if startable else _NOTHING
        tolerance, rule = self.problem.tolerance, self.rule
        first = min(startable)[0] + tolerance
        best = min([choice for choice in startable if choice[0] <= first], key=_preference)
        kind = best[3]
        if kind == W and rule.wait:
            before = best[0] + rule.wait * self.problem.durations[W][best[4]] - tolerance
            return min((choice for choice in startable if choice[3] != W and choice[0] < before), default=best)
        if kind == F and rule.hold:
            before = best[0] + rule.hold * self.problem.durations[F][best[4]] - tolerance
            return min((choice for choice in startable if choice[3] == I and choice[0] < before), default=best)
        return best

    def startable(self, rank: int) -> list[Choice]:
        found: list[Choice] = []
        clock, rule = self.clock[rank], self.rule
        forwards, inputs, weights = self.done
        for stage in self.problem.stages_of[rank]:
            done = inputs[stage]
            if done < len(self.arrived[I][stage]):
                at = self.arrived[I][stage][done]
                found.append((max(at, clock), self.priority[I], -stage if rule.later_input else stage, I, stage))
            if weights[stage] < done:
                found.append((clock, self.priority[W], -stage, W, stage))
            done = forwards[stage]
            if done < len(self.arrived[F][stage]) and self.may_go_forward(rank, stage, done):
                at = self.arrived[F][stage][done]
                found.append((max(at, clock), self.priority[F], -stage if rule.later_forward else stage, F, stage))
        return found

    def may_go_forward(self, rank: int, stage: int, done: int) -> bool:
        if self.held[rank] >= self.cap[rank] or done - self.done[I][stage] >= self.most_in_flight[stage]:
            return False
        later = self.problem.next_on_rank[stage]
        return not later or done - self.done[F][later] < self.most_turning[stage]


def _preference(choice: Choice) -> tuple[int, int]:
    return choice[1], choice[2]


def _limit(factor: float, span: float, period: float) -> float:
    """At least 1: the microbatches that a stretch of `span` holds at one a `period`, times `factor`."""
    if factor == UNLIMITED or period <= 0:
        return UNLIMITED
    return max(1, math.ceil(factor * span / period - 1e-9))
