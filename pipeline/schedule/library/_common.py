"""What several schedules share: checked counts, placements, groups and numbers of microbatches, the 1F1B merge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

from pipeline.schedule.actions import Action, ActionType

Turn = tuple[ActionType, int]
"""What a rank does next, and for which stage: an action whose microbatch `numbered` fills in."""


def check_counts(pp: int, microbatches: int, stages_per_rank: int = 1) -> None:
    """ValueError unless every count is 1 or more."""
    counts = {"pp": pp, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}: use 1 or more")


def looped_placement(pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage s on rank s mod p."""
    return tuple(stage % pp for stage in range(pp * stages_per_rank))


def v_placement(pp: int) -> tuple[int, ...]:
    """Two stages a rank, down the ranks and back up: stages r and 2p-1-r on rank r."""
    return (*range(pp), *reversed(range(pp)))


def microbatch_groups(pp: int, microbatches: int) -> list[range]:
    """The microbatches a stage runs before its rank turns to the next stage: max(1, m // p) groups, larger first.

    Groups of nearly equal size, in place of full ones and a partial last one (Megatron-LM), never deadlock.
    """
    count = max(1, microbatches // pp)
    size, larger = divmod(microbatches, count)
    bounds = [group * size + min(group, larger) for group in range(count + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def in_groups(kind: ActionType, stages: Sequence[int], groups: Sequence[range]) -> list[Action]:
    """Group by group: the first stage on all of the group, then the next stage."""
    return [Action(stage, kind, microbatch) for group in groups for stage in stages for microbatch in group]


def warm_up_then_alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards (or all there are), then forward and backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    paired = len(forwards) - warmup
    steady = chain.from_iterable(zip(forwards[warmup:], backwards[:paired], strict=True))
    return (*forwards[:warmup], *steady, *backwards[paired:])


def numbered(turns: Iterable[Turn]) -> list[Action]:
    """The turns as actions: every stage takes its microbatches in order, in each of forward, backward and W.

    A full backward counts as a backward and as a W.
    """
    taken: Counter[Turn] = Counter()
    actions = []
    for kind, stage in turns:
        counted = ActionType.I if kind is ActionType.B else kind
        actions.append(Action(stage, kind, taken[counted, stage]))
        taken[counted, stage] += 1
        taken[ActionType.W, stage] += kind is ActionType.B
    return actions
