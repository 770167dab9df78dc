"""How fast a pipeline could be at best: bounds that no order of the same work beats, whatever it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.costs import CostModel
from pipeline.schedule.schedule import Schedule

Backward = Literal["full", "split", "either"]
"""How stages go backward: each microbatch as B, as I and W, or as whichever is shorter in the place considered."""


def lower_bound(
    stage_to_rank: Sequence[int],
    microbatches: int,
    costs: CostModel,
    *,
    backward: Backward = "split",
    memory_cap: int | Sequence[int] | None = None,
) -> float:
    """A makespan that no schedule with this placement and these costs is under, in the costs' unit.

    The largest over ranks of: the earliest arrival of its first input, its work, and the shortest tail after its last
    action. With one stage a rank and equal costs also: the last rank's last I has to travel back before the first
    rank's last W (arXiv 2401.10241's counting, for split backwards); and a rank that holds at most `memory_cap`
    activations from F to W (microbatch x stage, one number or one a rank) starts no more than that in the time one
    lives (Little's law). ValueError for a cap below 1 or of the wrong length.
    """
    pipeline = _Pipeline.of(tuple(stage_to_rank), microbatches, costs, backward)
    return pipeline.bound([microbatches * sum(map(pipeline.work, held)) for held in pipeline.held], memory_cap)


def schedule_lower_bound(
    schedule: Schedule, costs: CostModel, *, memory_cap: int | Sequence[int] | None = None
) -> float:
    """The same for the very actions of `schedule`, its recomputation and overlapped pairs included, in any order.

    Takes an overlapped pair to last at least as long as either of its two actions.
    """
    work = [sum(costs.duration(action) for action in row if action.type.is_compute) for row in schedule.rows]
    kinds = {part.type for row in schedule.rows for action in row if action.type.is_compute for part in action.compute}
    backward: Backward = "split" if ActionType.B not in kinds else "either" if ActionType.I in kinds else "full"
    pipeline = _Pipeline.of(schedule.stage_to_rank, schedule.microbatches, costs, backward)
    if schedule.forward_only:
        return max(map(sum, zip(pipeline.heads(), work, pipeline.forward_tails(), strict=True)))
    return pipeline.bound(work, memory_cap)


@dataclass(frozen=True)
class _Pipeline:
    ranks: tuple[int, ...]
    microbatches: int
    split: Backward
    forward: tuple[float, ...]
    passing: tuple[float, ...]
    """Of each stage, the shortest time from a gradient's arrival to the end of what sends it on: I or B."""
    backward: tuple[float, ...]
    """Of each stage, the whole backward: I and W, or B."""
    up: tuple[float, ...]
    """From a stage to the next; the last entry has no meaning."""
    down: tuple[float, ...]
    """From a stage to the one before; the first entry has no meaning."""

    @classmethod
    def of(cls, ranks: tuple[int, ...], microbatches: int, costs: CostModel, split: Backward) -> _Pipeline:
        stages = range(len(ranks))

        def times(kind: ActionType) -> list[float]:
            return [costs.duration(Action(stage, kind, 0)) for stage in stages]

        def transfer(source: int, destination: int) -> float:
            crossing = destination in stages and ranks[source] != ranks[destination]
            return costs.transfer_time(source, destination) if crossing else 0.0

        passing, whole = [times(ActionType.B)] * 2
        if split != "full":
            inputs = times(ActionType.I)
            both = [sum(pair) for pair in zip(inputs, times(ActionType.W), strict=True)]
            passing = inputs if split == "split" else list(map(min, inputs, passing))
            whole = both if split == "split" else list(map(min, both, whole))
        return cls(
            ranks,
            microbatches,
            split,
            tuple(times(ActionType.F)),
            tuple(passing),
            tuple(whole),
            tuple(transfer(stage, stage + 1) for stage in stages),
            tuple(transfer(stage, stage - 1) for stage in stages),
        )

    @property
    def held(self) -> list[list[int]]:
        """The stages of each rank."""
        return [[stage for stage, r in enumerate(self.ranks) if r == rank] for rank in range(max(self.ranks) + 1)]

    def work(self, stage: int) -> float:
        """What one microbatch keeps the stage busy."""
        return self.forward[stage] + self.backward[stage]

    def bound(self, work: Sequence[float], memory_cap: int | Sequence[int] | None) -> float:
        """`work`: how long each rank is busy."""
        bounds = list(map(sum, zip(self.heads(), work, self.tails(), strict=True)))
        cap = per_rank(memory_cap, len(work))
        if self.is_even:
            bounds.extend(self.travel_bounds())
            bounds.extend(self.memory_bounds(cap) if cap else ())
        return max(bounds)

    def heads(self) -> list[float]:
        """When the first input can be at each rank."""
        return [sum(self.forward[s] + self.up[s] for s in range(held[0])) for held in self.held]

    def tails(self) -> list[float]:
        """What must still follow each rank's last action: nothing after a W; after a B, its gradient's way to the first
        stage."""
        if self.split != "full":
            return [0.0] * len(self.held)
        return [sum(self.down[s] + self.passing[s - 1] for s in range(1, held[0] + 1)) for held in self.held]

    def forward_tails(self) -> list[float]:
        """The same without backwards: an output's way to the last stage."""
        last = len(self.ranks) - 1
        return [sum(self.up[s] + self.forward[s + 1] for s in range(held[-1], last)) for held in self.held]

    @property
    def is_even(self) -> bool:
        """One stage a rank, in order, all alike."""
        alike = (self.forward, self.passing, self.backward, self.up[:-1] + self.down[1:])
        return self.ranks == tuple(range(len(self.ranks))) and all(len(set(times)) <= 1 for times in alike)

    def travel_bounds(self) -> list[float]:
        """(p-1)(F+I+2c) + m(F+I) + W: the last rank's last I, all the way back, then the first rank's last W."""
        if self.split != "split":
            return []
        there_and_back = sum(self.forward[:-1]) + sum(self.up[:-1]) + sum(self.down[1:]) + sum(self.passing[1:])
        on_last = self.microbatches * (self.forward[-1] + self.passing[-1])
        return [there_and_back + on_last + self.backward[0] - self.passing[0]]

    def memory_bounds(self, cap: Sequence[int]) -> list[float]:
        """Every M-th forward of a rank waits for a whole life span: floor((m-1)/M) L + ((m-1) mod M) F, and one more L,
        from where its first input can arrive to where its last output can have gone back."""
        bounds = []
        for rank, (head, most, tail) in enumerate(zip(self.heads(), cap, self.tails(), strict=True)):
            after = len(cap) - 1 - rank
            hops = sum(self.up[rank:-1]) + sum(self.down[rank + 1 :])
            life = hops + after * (self.forward[0] + self.passing[0]) + self.forward[0] + self.backward[0]
            rounds, rest = divmod(self.microbatches - 1, most)
            bounds.append(head + rounds * life + rest * self.forward[0] + life + tail)
        return bounds


def per_rank(memory_cap: int | Sequence[int] | None, pp: int) -> tuple[int, ...] | None:
    """A memory cap (microbatch x stage, one number or one a rank) as one a rank. ValueError as `lower_bound` says."""
    if memory_cap is None:
        return None
    cap = (memory_cap,) * pp if isinstance(memory_cap, int) else tuple(memory_cap)
    if len(cap) != pp:
        raise ValueError(f"memory_cap has {len(cap)} entries for {pp} ranks: use one number, or one a rank")
    if min(cap) < 1:
        raise ValueError(f"memory_cap is {min(cap)}: use 1 or more (microbatch x stage)")
    return cap
