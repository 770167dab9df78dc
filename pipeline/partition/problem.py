"""Layers, a schedule, and what a cut of the one takes and holds under the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from math import comb, inf

from pipeline.partition.holdings import holdings
from pipeline.partition.layer_costs import LayerCosts
from pipeline.partition.timing import Path, StageTimes, Timer
from pipeline.schedule.schedule import Schedule

Counts = tuple[int, ...]
"""How many consecutive layers each stage holds."""

ALWAYS_CLOSED = 50_000
"""Up to so many cuts a search goes on until it has its proof, whatever the time."""


def all_again(layers: int) -> Sequence[bool]:
    """Of a stage of so many layers a recomputation repeats every one."""
    return [True] * layers


class Problem:
    """What is to be cut, and for which schedule.

    Args:
        costs: one entry a layer.
        schedule: its sends and receives don't matter: a message moves as soon as it is made. With its recomputations.
        latency: seconds that a message between ranks is under way, whatever its size.
        bandwidth: bytes of it that pass in a second.
        repeated: which layers of a stage, given their number, a recomputation repeats.
    """

    def __init__(
        self,
        costs: Sequence[LayerCosts],
        schedule: Schedule,
        latency: float = 0.0,
        bandwidth: float = inf,
        repeated: Callable[[int], Sequence[bool]] = all_again,
    ) -> None:
        self.costs, self.schedule = costs, schedule
        self.layers, self.stages = len(costs), schedule.stages
        self.cuts = comb(self.layers - 1, self.stages - 1)
        self.knows_bytes = all(layer.activation_bytes is not None for layer in costs)
        self._sums = [
            _sums([getattr(layer, field) for layer in costs])
            for field in ("forward", "full_backward", "backward_input", "backward_weight")
        ]
        self._transfers = [0.0, *(latency + layer.boundary_bytes / bandwidth for layer in costs)]
        self._parameters = _sums([layer.parameter_bytes for layer in costs])
        self._bytes = _StageBytes(costs, repeated)
        self._repeated = [repeated(count) for count in range(self.layers + 1)]
        self._held = [holdings(schedule, rank) for rank in range(schedule.pp)]
        self._timer = Timer(schedule)
        self._times: dict[tuple[int, int], StageTimes] = {}
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
        if (start, end) not in self._times:
            self._times[start, end] = self._times_of(start, end)
        return self._times[start, end]

    def _times_of(self, start: int, end: int) -> StageTimes:
        forward, backward, backward_input, backward_weight = (row[end] - row[start] for row in self._sums)
        again = zip(self.costs[start:end], self._repeated[end - start], strict=True)
        recompute = sum(layer.again for layer, repeats in again if repeats)
        return StageTimes(forward, backward, backward_input, backward_weight, recompute, self._transfers[end])

    def longest(self, counts: Counts) -> Path:
        """The makespan of a cut."""
        return self._timer.longest([self.times(*run) for run in runs(counts)])

    def ends(self, stage: int, start: int) -> Sequence[int]:
        """Where a stage that begins with layer `start` can end: the number of the layer after its last."""
        after = self.stages - stage - 1
        return range(start + 1 if after else self.layers, self.layers - after + 1)

    def rank_bytes(self, rank: int, stages: Sequence[tuple[int, int]]) -> float:
        """What a rank holds, of its stages that are in `stages` (all, or the first ones).

        Parameters, the activations of the microbatches in flight, and for each boundary to another rank two buffers:
        a message down and one up. A tied parameter counts at each of its layers, and an output for both of two stages
        of a rank that follow each other: a little more than is held.
        """
        return self._bytes_of({s: run for s, run in enumerate(stages) if self.schedule.stage_to_rank[s] == rank}, rank)

    def stage_bytes(self, stage: int, start: int, end: int) -> float:
        """What a stage's rank holds of that stage alone."""
        return self._bytes_of({stage: (start, end)}, self.schedule.stage_to_rank[stage])

    def _bytes_of(self, stages: Mapping[int, tuple[int, int]], rank: int) -> float:
        ranks, fixed = self.schedule.stage_to_rank, 0.0
        for stage, (start, end) in stages.items():
            fixed += self._parameters[end] - self._parameters[start]
            if stage > 0 and ranks[stage - 1] != rank:
                fixed += 2 * self.costs[start - 1].boundary_bytes
            if stage + 1 < self.stages and ranks[stage + 1] != rank:
                fixed += 2 * self.costs[end - 1].boundary_bytes
        taken = {stage: self._bytes.of(*run) for stage, run in stages.items()}
        return fixed + max(
            sum(count * size for s, sizes in taken.items() for count, size in zip(moment[s], sizes, strict=True))
            for moment in self._held[rank]
        )

    @cached_property
    def least_bytes(self) -> list[list[float]]:
        """By stage and first layer: what in any cut from there on some stage's rank holds, at least, of that stage."""
        least = [[inf] * (self.layers + 1) for _ in range(self.stages + 1)]
        least[self.stages][self.layers] = 0.0
        for stage, start, end in reversed(self.places):
            held = max(self.stage_bytes(stage, start, end), least[stage + 1][end])
            least[stage][start] = min(least[stage][start], held)
        return least

    def peak_bytes(self, counts: Counts) -> float:
        """What the fullest rank holds."""
        return max(self.all_bytes(counts))

    def all_bytes(self, counts: Counts) -> tuple[float, ...]:
        """What each rank holds."""
        stages = list(runs(counts))
        return tuple(self.rank_bytes(rank, stages) for rank in range(self.schedule.pp))


class _StageBytes:
    """What one microbatch takes in a stage, from what its layers take alone: neighbors share what is between them."""

    def __init__(self, costs: Sequence[LayerCosts], repeated: Callable[[int], Sequence[bool]]) -> None:
        self._costs, self._repeated = costs, repeated
        self._shared = [0.0, *(layer.kept_output_bytes or 0.0 for layer in costs)]
        self._alone = [layer.activation_bytes or 0.0 for layer in costs]
        self._known: dict[tuple[int, int], tuple[float, float, float]] = {}

    def of(self, start: int, end: int) -> tuple[float, float, float]:
        """Kept from F to the end of the backward; and where it is recomputed from F to R, and from R on."""
        if (start, end) not in self._known:
            kept = self._kept(range(start, end))
            layers = zip(range(start, end), self._repeated(end - start), strict=True)
            parts = [([layer for layer, _ in run], again) for again, run in groupby(layers, lambda one: one[1])]
            self._known[start, end] = kept, self._waiting(parts), self._rebuilt(parts)
        return self._known[start, end]

    def _kept(self, layers: Sequence[int]) -> float:
        return sum(self._alone[layer] for layer in layers) - sum(self._shared[layer] for layer in layers[1:])

    def _waiting(self, parts: Sequence[tuple[Sequence[int], bool]]) -> float:
        total = 0.0
        for number, (layers, again) in enumerate(parts):
            if again:
                total += sum(self._costs[layer].checkpoint_bytes or 0.0 for layer in layers)
                total -= sum(self._costs[layer - 1].handed_on for layer in layers[1:])
                total -= self._shared[layers[0]] if number else 0.0  # the output that the part before keeps
            else:
                total += self._kept(layers)
        return total

    def _rebuilt(self, parts: Sequence[tuple[Sequence[int], bool]]) -> float:
        """An output that R makes anew is another one than F's, which the next part has as its input."""
        total = 0.0
        for number, (layers, again) in enumerate(parts):
            total += self._kept(layers)
            if again:
                more = [(self._costs[layer].rebuilt_bytes, self._alone[layer]) for layer in layers]
                total += sum(size - alone for size, alone in more if size is not None)
                total -= self._shared[layers[0]] if number else 0.0
        return total


def runs(counts: Counts) -> Iterator[tuple[int, int]]:
    """First layer and the one after the last, of each stage."""
    end = 0
    for count in counts:
        end += count
        yield end - count, end


def _sums(numbers: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(numbers)]
