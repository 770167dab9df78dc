"""What several schedules share: checked counts, groups of microbatches, the 1F1B merge of forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from pipeline.schedule.actions import Action


def check_counts(pp: int, microbatches: int, stages_per_rank: int = 1) -> None:
    """ValueError unless every count is 1 or more."""
    counts = {"pp": pp, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}: use 1 or more")


def microbatch_groups(pp: int, microbatches: int) -> list[range]:
    """The microbatches a stage runs before its rank turns to the next stage: max(1, m // p) groups, larger first.

    Groups of nearly equal size, in place of full ones and a partial last one (Megatron-LM), never deadlock.
    """
    count = max(1, microbatches // pp)
    size, larger = divmod(microbatches, count)
    bounds = [group * size + min(group, larger) for group in range(count + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def warm_up_then_alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards (or all there are), then forward and backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    paired = len(forwards) - warmup
    steady = chain.from_iterable(zip(forwards[warmup:], backwards[:paired], strict=True))
    return (*forwards[:warmup], *steady, *backwards[paired:])
