"""The cut whose fullest rank holds least, for a schedule: rank r of 1F1B has pp - r microbatches in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf
from time import monotonic

from pipeline.partition.problem import ALWAYS_CLOSED, Counts, Problem
from pipeline.partition.uniform import uniform


@dataclass(frozen=True)
class Lightest:
    """What the search found."""

    counts: Counts
    peak_bytes: float
    """Of the fullest rank."""
    bound: float
    """In no cut the fullest rank holds less."""

    @property
    def proven(self) -> bool:
        """Whether no cut is lighter."""
        return self.bound >= self.peak_bytes


def lightest(problem: Problem, search_seconds: float = 10.0) -> Lightest:
    """The cut whose fullest rank holds least, by branch and bound; of equal ones, one whose ranks are more even.

    With one stage a rank the bound is exact and nothing is searched in vain. After `search_seconds` the best cut found
    is taken, unless there are 50,000 cuts or fewer. Every stage gets a layer.

    Raises:
        ValueError: more stages than layers.
    """
    deadline = monotonic() + search_seconds if problem.cuts > ALWAYS_CLOSED else inf
    search = _Search(problem, uniform(problem.layers, problem.stages), deadline)
    bound = search.follow([], 0.0, 0)
    counts = _evened(problem, search.best, deadline)
    return Lightest(counts, search.peak, min(bound, search.peak))


class _Search:
    """The lightest cut so far."""

    def __init__(self, problem: Problem, start: Counts, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.best, self.peak = start, problem.peak_bytes(start)

    def follow(self, stages: list[tuple[int, int]], held: float, start: int) -> float:
        """The least that the fullest rank of any cut that begins with `stages` holds, as far as it is known."""
        problem, stage = self.problem, len(stages)
        if stage == problem.stages:
            if held < self.peak:
                self.best, self.peak = tuple(end - begin for begin, end in stages), held
            return held
        children = []
        rank = problem.schedule.stage_to_rank[stage]
        for end in problem.ends(stage, start):
            bytes_held = max(held, problem.rank_bytes(rank, [*stages, (start, end)]))
            children.append((max(bytes_held, problem.least_bytes[stage + 1][end]), bytes_held, end))
        least = inf
        for bound, bytes_held, end in sorted(children):
            if bound < self.peak and monotonic() < self.deadline:
                bound = self.follow([*stages, (start, end)], bytes_held, end)
            least = min(least, bound)
        return least


def _evened(problem: Problem, counts: Counts, deadline: float) -> Counts:
    """Change sizes by a layer as long as the fullest rank holds no more and the squares of all add up to less."""

    def unevenness(cut: Counts) -> tuple[float, float]:
        held: Sequence[float] = problem.all_bytes(cut)
        return max(held), sum(size * size for size in held)

    value = unevenness(counts)
    while monotonic() < deadline:
        moved = min(_exchanges(counts), key=unevenness, default=counts)
        if unevenness(moved) >= value:
            break
        counts, value = moved, unevenness(moved)
    return counts


def _exchanges(counts: Counts) -> Iterator[Counts]:
    """The cuts with one layer less on one stage and one more on another; those between move on by a layer."""
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            yield tuple(count - (stage == giver) + (stage == taker) for stage, count in enumerate(counts))
