"""The cut with the smallest simulated makespan under a memory limit, by branch and bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

from pipeline.partition.bottleneck import bottleneck
from pipeline.partition.lightest import lightest
from pipeline.partition.problem import ALWAYS_CLOSED, Counts, Problem
from pipeline.partition.timing import Counts as PathCounts
from pipeline.partition.timing import StageTimes
from pipeline.partition.uniform import uniform

_EQUAL = 1 - 1e-9


@dataclass(frozen=True)
class Choice:
    """What the search found."""

    counts: Counts
    makespan: float
    bound: float
    """No cut that fits takes less; the makespan itself (to 1e-9 of it) where the search closed."""
    proven: bool
    examined: int
    """Cuts simulated."""
    cuts: int
    seconds: float
    others: dict[str, float]
    """The makespans of the simple cuts that fit, by name."""


def auto(problem: Problem, *, memory_limit: float = inf, search_seconds: float = 10.0) -> Choice:
    """The cut whose simulated makespan is smallest among those where no rank holds more than `memory_limit` bytes.

    Every path through the schedule's actions bounds every cut from below, and its smallest length over the ways to cut
    the rest is a small dynamic program. The search collects the longest paths of the cuts it simulates and follows only
    what none of them excludes, alone or for the place of a stage. For 1F1B that is (microbatches - 1) x the longest
    stage + all stages. Every stage gets a layer.

    Args:
        memory_limit: bytes a rank.
        search_seconds: after so long the best cut found is taken, unless there are 50,000 cuts or fewer.

    Raises:
        ValueError: more stages than layers, no cut fits (or none was found in time), or bytes aren't known.
    """
    begun = monotonic()
    simple = _simple_cuts(problem, memory_limit, search_seconds)
    search = _Search(problem, memory_limit, begun + search_seconds)
    for counts in simple.values():
        search.climb(counts)
    others = {name: problem.longest(c).makespan for name, c in simple.items() if problem.peak_bytes(c) <= memory_limit}
    bound = search.close()
    if search.best is None:
        least = min(map(problem.peak_bytes, simple.values()))
        found = "no cut fits" if bound == inf else f"no cut that fits was found in {search_seconds:g} s"
        raise ValueError(
            f"partition.memory_limit={memory_limit:.0f} bytes a rank: {found} schedule {problem.schedule.name}; "
            f"{least:.0f} bytes would do, or use a schedule with fewer microbatches in flight or more ranks"
        )
    proven = bound >= search.makespan * _EQUAL
    return Choice(
        counts=search.best,
        makespan=search.makespan,
        bound=min(bound, search.makespan),
        proven=proven,
        examined=len(search.seen),
        cuts=problem.cuts,
        seconds=monotonic() - begun,
        others=others,
    )


def _simple_cuts(problem: Problem, memory_limit: float, search_seconds: float) -> dict[str, Counts]:
    """Where the search starts from, by name; the lightest cut where there is a limit to keep."""
    layers, stages = problem.costs, problem.stages
    simple = {
        "uniform": uniform(len(layers), stages),
        "time": bottleneck([layer.seconds for layer in layers], stages),
        "parameters": bottleneck([layer.parameter_bytes for layer in layers], stages),
    }
    if memory_limit == inf:
        return simple
    if not problem.knows_bytes:
        raise ValueError(
            f"partition.memory_limit={memory_limit:.0f} bytes a rank: what the layers hold is not known, for they are "
            "compiled or can't run without memory; use partition.memory_limit=null"
        )
    return {**simple, "memory": lightest(problem, search_seconds / 2).counts}


class _Search:
    """The best cut so far, and the paths that bound the others."""

    def __init__(self, problem: Problem, limit: float, deadline: float) -> None:
        self.problem, self.limit = problem, limit
        self.deadline = deadline if problem.cuts > ALWAYS_CLOSED else inf
        self.best: Counts | None = None
        self.makespan = inf
        self.seen: dict[Counts, float] = {}
        self.paths: dict[tuple[PathCounts, ...], _Bound] = {}
        self.stages = _Stages(problem)

    def look(self, counts: Counts) -> float:
        """Simulate a cut, once; keep its longest path as a bound, and the cut if it fits and is the best."""
        if counts not in self.seen:
            makespan, path = self.problem.longest(counts)
            self.seen[counts] = makespan
            if path not in self.paths:
                self.paths[path] = _Bound(self.problem, path)
                self.stages.add(self.paths[path])
            if makespan < self.makespan and self.problem.peak_bytes(counts) <= self.limit:
                self.best, self.makespan = counts, makespan
        return self.seen[counts]

    def climb(self, counts: Counts) -> None:
        """Move one layer over one boundary at a time as long as that helps."""
        value = self.look(counts)
        while monotonic() < self.deadline:
            moved = min(_neighbors(counts), key=self.look, default=counts)
            if self.look(moved) >= value:
                return
            counts, value = moved, self.look(moved)

    def close(self) -> float:
        """Search all that can be better; the least that any cut left out may take (inf: none fits at all)."""
        return self.follow([], 0)

    def follow(self, stages: list[tuple[int, int]], start: int) -> float:
        problem = self.problem
        if len(stages) == problem.stages:
            return self.look(tuple(end - begin for begin, end in stages))
        ends = [end for end in problem.ends(len(stages), start) if self.fits([*stages, (start, end)])]
        children = [(self.bound([*stages, (start, end)]), end) for end in ends]
        least = inf
        for bound, end in sorted(children):
            taken = [*stages, (start, end)]
            if bound < self.makespan * _EQUAL and monotonic() < self.deadline:
                bound = max(bound, self.bound(taken))
                if bound < self.makespan * _EQUAL:
                    bound = self.follow(taken, end)
            least = min(least, bound)
        return least

    def bound(self, stages: Sequence[tuple[int, int]]) -> float:
        """No cut that begins with `stages` takes less."""
        stage, (start, end) = len(stages) - 1, stages[-1]
        quick = max(self.stages.least[stage, start, end], self.stages.worst[stage + 1][end])
        if quick >= self.makespan * _EQUAL:
            return quick
        times = [self.problem.times(*run) for run in stages]
        return max((path.least(times, end) for path in self.paths.values()), default=quick)

    def fits(self, stages: Sequence[tuple[int, int]]) -> bool:
        """Whether a cut that begins with `stages` may keep the limit."""
        if self.limit == inf:
            return True
        if self.problem.least_bytes[len(stages)][stages[-1][1]] > self.limit:
            return False
        rank = self.problem.schedule.stage_to_rank[len(stages) - 1]
        return self.problem.rank_bytes(rank, stages) <= self.limit


class _Bound:
    """One path through the schedule, and the least it takes over all ways to cut the layers beside a stage."""

    def __init__(self, problem: Problem, path: Sequence[PathCounts]) -> None:
        self.path = path
        layers, stages = problem.layers, problem.stages
        self.rest = [[inf] * (layers + 1) for _ in range(stages + 1)]
        self.before = [[inf] * (layers + 1) for _ in range(stages + 1)]
        self.rest[stages][layers] = self.before[0][0] = 0.0
        self.lengths = {(s, i, k): _length(path[s], problem.times(i, k)) for s, i, k in problem.places}
        for (stage, start, end), length in self.lengths.items():
            self.before[stage + 1][end] = min(self.before[stage + 1][end], self.before[stage][start] + length)
        for (stage, start, end), length in reversed(self.lengths.items()):
            self.rest[stage][start] = min(self.rest[stage][start], self.rest[stage + 1][end] + length)

    def least(self, times: Sequence[StageTimes], start: int) -> float:
        """With stages of these times, and the next stage from layer `start` on."""
        return sum(map(_length, self.path, times)) + self.rest[len(times)][start]


class _Stages:
    """What the paths together say of each place a stage can have, and of the best way to cut the layers after it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.least = dict.fromkeys(problem.places, 0.0)
        self.worst = [[0.0] * (problem.layers + 1) for _ in range(problem.stages + 1)]

    def add(self, bound: _Bound) -> None:
        """Take in one more path. `worst[stage][start]`: the best cut from there on has a stage in a place so long."""
        worst = [[inf] * (self.problem.layers + 1) for _ in range(self.problem.stages + 1)]
        worst[self.problem.stages][self.problem.layers] = 0.0
        for place in reversed(self.problem.places):
            stage, start, end = place
            length = bound.before[stage][start] + bound.lengths[place] + bound.rest[stage + 1][end]
            self.least[place] = max(self.least[place], length)
            worst[stage][start] = min(worst[stage][start], max(self.least[place], worst[stage + 1][end]))
        self.worst = worst


def _length(counts: PathCounts, times: StageTimes) -> float:
    return sum(count * time for count, time in zip(counts, times, strict=True) if count)


def _neighbors(counts: Counts) -> Iterator[Counts]:
    """The cuts with one layer moved over one boundary."""
    for boundary in range(len(counts) - 1):
        for step in (-1, 1):
            moved = list(counts)
            moved[boundary] += step
            moved[boundary + 1] -= step
            if moved[boundary] and moved[boundary + 1]:
                yield tuple(moved)
