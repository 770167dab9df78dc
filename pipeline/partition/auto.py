"""The cut with the smallest simulated makespan under a memory limit, by branch and bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb, inf
from time import monotonic

from pipeline.partition.bottleneck import bottleneck
from pipeline.partition.layer_costs import LayerCosts
from pipeline.partition.timing import Path, StageTimes, Timer
from pipeline.partition.uniform import uniform
from pipeline.schedule.actions import ActionType
from pipeline.schedule.schedule import Schedule

Counts = tuple[int, ...]
ALWAYS_CLOSED = 50_000
"""Up to so many cuts the search goes on until it has its proof, whatever the time."""
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


class Problem:
    """Layers, a schedule, and what a cut of the one takes and holds under the other."""

    def __init__(
        self, costs: Sequence[LayerCosts], schedule: Schedule, latency: float = 0.0, bandwidth: float = inf
    ) -> None:
        self.costs, self.schedule = costs, schedule
        self.layers, self.stages = len(costs), schedule.stages
        self.sums = [
            [0.0, *accumulate(getattr(layer, field) for layer in costs)]
            for field in ("forward", "backward_input", "backward_weight")
        ]
        self.transfers = [0.0, *(latency + layer.boundary_bytes / bandwidth for layer in costs)]
        self.activations = [0.0, *accumulate(layer.activation_bytes or 0.0 for layer in costs)]
        self.parameters = [0.0, *accumulate(layer.parameter_bytes for layer in costs)]
        self.held = [_held(schedule, rank) for rank in range(schedule.pp)]
        self.timer = Timer(schedule)
        spare = self.layers - self.stages
        self.places = [
            (stage, start, end)
            for stage in range(self.stages)
            for start in range(stage, stage + spare + 1 if stage else 1)
            for end in range(start + 1 if stage + 1 < self.stages else self.layers, stage + spare + 2)
        ]
        """Each stage's number, first layer and the one after its last, wherever a cut can have them."""

    def times(self, start: int, end: int) -> StageTimes:
        """A stage of the layers from `start` to before `end`."""
        forward, backward_input, backward_weight = (row[end] - row[start] for row in self.sums)
        return StageTimes(forward, backward_input, backward_weight, self.transfers[end])

    def longest(self, counts: Counts) -> Path:
        """The makespan of a cut."""
        return self.timer.longest([self.times(*run) for run in runs(counts)])

    def rank_bytes(self, rank: int, stages: Sequence[tuple[int, int]]) -> float:
        """What a rank holds, of its stages that are in `stages` (all, or the first ones).

        Parameters, the activations of the microbatches in flight, and for each boundary to another rank two buffers:
        a message down and one up.
        """
        ranks, held, fixed = self.schedule.stage_to_rank, dict[int, float](), 0.0
        for stage, (start, end) in enumerate(stages):
            if ranks[stage] != rank:
                continue
            held[stage] = self.activations[end] - self.activations[start]
            fixed += self.parameters[end] - self.parameters[start]
            if stage > 0 and ranks[stage - 1] != rank:
                fixed += 2 * self.costs[start - 1].boundary_bytes
            if stage + 1 < self.stages and ranks[stage + 1] != rank:
                fixed += 2 * self.costs[end - 1].boundary_bytes
        return fixed + max((sum(row[s] * size for s, size in held.items()) for row in self.held[rank]), default=0.0)

    def peak_bytes(self, counts: Counts) -> float:
        """What the fullest rank holds."""
        stages = list(runs(counts))
        return max(self.rank_bytes(rank, stages) for rank in range(self.schedule.pp))


def auto(
    costs: Sequence[LayerCosts],
    schedule: Schedule,
    *,
    latency: float = 0.0,
    bandwidth: float = inf,
    memory_limit: float = inf,
    search_seconds: float = 10.0,
) -> Choice:
    """The cut whose simulated makespan is smallest among those where no rank holds more than `memory_limit` bytes.

    Every path through the schedule's actions bounds every cut from below, and its smallest length over the ways to cut
    the rest is a small dynamic program. The search collects the longest paths of the cuts it simulates and follows only
    what none of them excludes, alone or for the place of a stage. For 1F1B that is (microbatches - 1) x the longest
    stage + all stages. Every stage gets a layer.

    Args:
        costs: one entry a layer.
        schedule: taken without its sends and receives: a message moves as soon as it is made.
        latency: seconds that a message between ranks is under way, whatever its size.
        bandwidth: bytes of it that pass in a second.
        memory_limit: bytes a rank.
        search_seconds: after so long the best cut found is taken, unless there are 50,000 cuts or fewer.

    Raises:
        ValueError: more stages than layers, or no cut fits (or none was found in time).
    """
    begun = monotonic()
    problem = Problem(costs, schedule, latency, bandwidth)
    simple = {
        "uniform": uniform(len(costs), schedule.stages),
        "time": bottleneck([layer.seconds for layer in costs], schedule.stages),
        "parameters": bottleneck([layer.parameter_bytes for layer in costs], schedule.stages),
    }
    search = _Search(problem, memory_limit, begun + search_seconds)
    for counts in simple.values():
        search.climb(counts)
    others = {name: problem.longest(c).makespan for name, c in simple.items() if problem.peak_bytes(c) <= memory_limit}
    bound = search.close()
    if search.best is None:
        least = min(map(problem.peak_bytes, simple.values()))
        found = "no cut fits" if bound == inf else f"no cut that fits was found in {search_seconds:g} s"
        raise ValueError(
            f"partition.memory_limit={memory_limit:.0f} bytes a rank: {found} schedule {schedule.name}; "
            f"{least:.0f} bytes would do, or use a schedule with fewer microbatches in flight or more ranks"
        )
    proven = bound >= search.makespan * _EQUAL
    return Choice(
        counts=search.best,
        makespan=search.makespan,
        bound=min(bound, search.makespan),
        proven=proven,
        examined=len(search.seen),
        cuts=search.cuts,
        seconds=monotonic() - begun,
        others=others,
    )


class _Search:
    """The best cut so far, and the paths that bound the others."""

    def __init__(self, problem: Problem, limit: float, deadline: float) -> None:
        self.problem, self.limit = problem, limit
        self.cuts = comb(problem.layers - 1, problem.stages - 1)
        self.deadline = deadline if self.cuts > ALWAYS_CLOSED else inf
        self.best: Counts | None = None
        self.makespan = inf
        self.seen: dict[Counts, float] = {}
        self.paths: dict[tuple[tuple[int, int, int, int], ...], _Bound] = {}
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
        left = problem.stages - len(stages)
        if left == 0:
            return self.look(tuple(end - begin for begin, end in stages))
        ends = [problem.layers] if left == 1 else range(start + 1, problem.layers - left + 2)
        children = [(self.bound([*stages, (start, end)]), end) for end in ends if self.fits([*stages, (start, end)])]
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
        rank = self.problem.schedule.stage_to_rank[len(stages) - 1]
        return self.problem.rank_bytes(rank, stages) <= self.limit


class _Bound:
    """One path through the schedule, and the least it takes over all ways to cut the layers beside a stage."""

    def __init__(self, problem: Problem, path: Sequence[tuple[int, int, int, int]]) -> None:
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


def _length(counts: tuple[int, int, int, int], times: StageTimes) -> float:
    return sum(count * time for count, time in zip(counts, times, strict=True) if count)


def _neighbors(counts: Counts) -> Iterator[Counts]:
    for boundary in range(len(counts) - 1):
        for step in (-1, 1):
            moved = list(counts)
            moved[boundary] += step
            moved[boundary + 1] -= step
            if moved[boundary] and moved[boundary + 1]:
                yield tuple(moved)


def runs(counts: Counts) -> Iterator[tuple[int, int]]:
    """First layer and the one after the last, of each stage."""
    end = 0
    for count in counts:
        end += count
        yield end - count, end


def _held(schedule: Schedule, rank: int) -> list[dict[int, int]]:
    """How many microbatches of each of its stages a rank holds, at every moment where that may be the most."""
    held = dict.fromkeys(schedule.stages_of(rank), 0)
    moments = {tuple(held.values())}
    for part in (part for action in schedule.rows[rank] for part in action.compute):
        held[part.stage] += part.type is ActionType.F
        moments.add(tuple(held.values()))
        held[part.stage] -= part.type in (ActionType.B, ActionType.W)
    most = [m for m in moments if not any(m != o and all(a <= b for a, b in zip(m, o, strict=True)) for o in moments)]
    return [dict(zip(held, moment, strict=True)) for moment in most]
