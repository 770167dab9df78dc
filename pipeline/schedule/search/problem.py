"""What is to be scheduled, as tables of numbers: actions are integers here, for a search writes millions of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.costs import CostModel
from pipeline.schedule.schedule import Row

KINDS = (ActionType.F, ActionType.I, ActionType.W)
F, I, W = range(3)  # noqa: E741

Times = tuple[float, ...]
Codes = list[int]
"""One rank's row as codes: see `Problem.code`."""


@dataclass(frozen=True)
class Problem:
    """A placement, a number of microbatches, and what each stage's F, I and W and each message take."""

    stage_to_rank: tuple[int, ...]
    microbatches: int
    durations: tuple[Times, Times, Times]
    """Of F, I and W, by stage."""
    up: Times
    """From the end of a stage's F to where its next stage can start; 0 between two stages of one rank."""
    down: Times
    """From the end of a stage's I to where the stage before can start."""

    @classmethod
    def of(cls, stage_to_rank: Sequence[int], microbatches: int, costs: CostModel) -> Problem:
        """Read the numbers out of a cost model."""
        ranks = tuple(stage_to_rank)
        stages = range(len(ranks))
        forward, backward_input, backward_weight = (
            tuple(float(costs.duration(Action(stage, kind, 0))) for stage in stages) for kind in KINDS
        )

        def transfer(source: int, destination: int) -> float:
            if destination not in stages or ranks[source] == ranks[destination]:
                return 0.0
            return float(costs.transfer_time(source, destination))

        return cls(
            ranks,
            microbatches,
            (forward, backward_input, backward_weight),
            up=tuple(transfer(stage, stage + 1) for stage in stages),
            down=tuple(transfer(stage, stage - 1) for stage in stages),
        )

    @cached_property
    def pp(self) -> int:
        """Number of ranks."""
        return max(self.stage_to_rank) + 1

    @cached_property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.stage_to_rank)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        held: list[list[int]] = [[] for _ in range(self.pp)]
        for stage, rank in enumerate(self.stage_to_rank):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @cached_property
    def actions(self) -> int:
        """Number of actions of a schedule."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def until_input(self) -> Times:
        """Of each stage, the least time from the start of a microbatch's F to the end of its I."""
        forward, backward_input, _ = self.durations
        spans = [0.0] * self.stages
        beyond = 0.0
        for stage in reversed(range(self.stages)):
            spans[stage] = forward[stage] + beyond + backward_input[stage]
            if stage > 0:
                beyond = self.up[stage - 1] + spans[stage] + self.down[stage]
        return tuple(spans)

    @cached_property
    def until_turn(self) -> Times:
        """Of each stage, the least time from the start of a microbatch's F to where its rank's next stage starts it.

        0 where the rank has no later stage.
        """
        later = self.next_on_rank
        forward = self.durations[F]
        return tuple(
            sum(forward[stage] + self.up[stage] for stage in range(first, last)) if last else 0.0
            for first, last in enumerate(later)
        )

    @cached_property
    def next_on_rank(self) -> tuple[int, ...]:
        """Of each stage, the next one its rank holds; 0 where there is none (no stage has stage 0 after it)."""
        following = [0] * self.stages
        for held in self.stages_of:
            for stage, later in pairwise(held):
                following[stage] = later
        return tuple(following)

    @cached_property
    def tolerance(self) -> float:
        """Two times closer than this are one."""
        return 1e-9 * sum(map(sum, self.durations)) / (3 * self.stages)

    def period(self, cap: Sequence[int]) -> float:
        """The least time between two microbatches once all ranks are busy: work, or activations held over the cap.

        Little's law: a rank that holds at most `cap` activations, each for its life span, starts no more.
        """
        work = [sum(self.durations[kind][stage] for kind in (F, I, W)) for stage in range(self.stages)]
        life = [span + weight for span, weight in zip(self.until_input, self.durations[W], strict=True)]
        return max(
            max(sum(work[stage] for stage in held), sum(life[stage] for stage in held) / cap[rank])
            for rank, held in enumerate(self.stages_of)
        )

    def code(self, kind: int, stage: int, microbatch: int) -> int:
        """An action's number."""
        return (kind * self.stages + stage) * self.microbatches + microbatch

    def row(self, codes: Iterable[int]) -> Row:
        """The actions that `codes` stand for."""
        return tuple(self._action(code) for code in codes)

    def codes(self, row: Iterable[Action]) -> Codes:
        """A row as codes, a full backward as an I and a W."""
        split: Codes = []
        for action in row:
            kinds = (I, W) if action.type is ActionType.B else (KINDS.index(action.type),)
            split.extend(self.code(kind, action.stage, action.microbatch) for kind in kinds)
        return split

    def _action(self, code: int) -> Action:
        place, microbatch = divmod(code, self.microbatches)
        kind, stage = divmod(place, self.stages)
        return Action(stage, KINDS[kind], microbatch)
