"""The cut whose heaviest stage is lightest: what the slowest stage costs is what a pipeline's period costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf


def bottleneck(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many consecutive layers each stage holds so that the largest sum of `costs` on a stage is minimal.

    Exact, by dynamic programs over prefixes, O(layers^2 x stages). Every stage gets a layer. Of the cuts with the
    smallest largest stage, one with the smallest sum of squares is taken: a single heavy layer fixes the largest stage,
    and the others should still be even.

    Args:
        costs: one non-negative number a layer (parameters, seconds, bytes).
        stages: at least one, at most one a layer.

    Raises:
        ValueError: there are more stages than layers.
    """
    layers = len(costs)
    if stages > layers:
        raise ValueError(
            f"{stages} stages need at least {stages} layers, the model has {layers}: "
            "use fewer stages (pp x schedule.stages_per_rank) or a deeper model"
        )
    prefix = [0.0, *accumulate(float(cost) for cost in costs)]
    largest, _ = _best_cut(prefix, stages, lambda so_far, held: max(so_far, held))
    _, counts = _best_cut(prefix, stages, lambda so_far, held: so_far + held * held if held <= largest else inf)
    return counts


def _best_cut(
    prefix: Sequence[float], stages: int, add: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The cut with the smallest total, where `add` joins the total of the stages before with what a stage holds."""
    layers = len(prefix) - 1
    best = [add(0.0, total) for total in prefix]
    cuts: list[list[int]] = []
    for stage in range(2, stages + 1):
        following, starts = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage, layers + 1):
            for start in range(stage - 1, end):
                total = add(best[start], prefix[end] - prefix[start])
                if total < following[end]:
                    following[end], starts[end] = total, start
        best = following
        cuts.append(starts)
    return best[layers], _counts(cuts, layers)


def _counts(cuts: Sequence[Sequence[int]], layers: int) -> tuple[int, ...]:
    counts, end = [], layers
    for starts in reversed(cuts):
        counts.append(end - starts[end])
        end = starts[end]
    return (end, *reversed(counts))
