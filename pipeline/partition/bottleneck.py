"""The cut whose heaviest stage is lightest: what the slowest stage costs is what a pipeline's period costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf


def bottleneck(costs: Sequence[float], stages: int, boundaries: Sequence[float] | None = None) -> tuple[int, ...]:
    """How many consecutive layers each stage holds so that the largest sum of `costs` on a stage is minimal.

    Exact, by dynamic programs over prefixes, O(layers^2 x stages). Every stage gets a layer. Of the cuts with the
    smallest largest stage, one with the smallest sum of squares is taken: a single heavy layer fixes the largest stage,
    and the others should still be even.

    Args:
        costs: one non-negative number a layer (parameters, seconds, bytes).
        stages: at least one, at most one a layer.
        boundaries: what a cut after each layer costs, in the same unit: then the costliest cut counts as the largest
            stage does (PipeDream's objective: the slower of computing and sending). None: nothing.

    Raises:
        ValueError: there are more stages than layers, or another number of boundaries than of layers.
    """
    layers = len(costs)
    if boundaries is not None and len(boundaries) != layers:
        raise ValueError(f"{len(boundaries)} boundaries for {layers} layers: give what a cut after each layer costs")
    if stages > layers:
        raise ValueError(
            f"{stages} stages need at least {stages} layers, the model has {layers}: "
            "use fewer stages (pp x schedule.stages_per_rank) or a deeper model"
        )
    prefix = [0.0, *accumulate(float(cost) for cost in costs)]
    cuts = [0.0, *(boundaries or [0.0] * layers)]
    largest, _ = _best_cut(prefix, cuts, stages, lambda so_far, held, cut: max(so_far, held, cut))
    _, counts = _best_cut(
        prefix, cuts, stages, lambda so_far, held, cut: so_far + held * held if max(held, cut) <= largest else inf
    )
    return counts


def _best_cut(
    prefix: Sequence[float], cuts: Sequence[float], stages: int, add: Callable[[float, float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The cut with the smallest total; `add` joins the stages before, what a stage holds and the cut between them."""
    layers = len(prefix) - 1
    best = [add(0.0, total, 0.0) for total in prefix]
    chosen: list[list[int]] = []
    for stage in range(2, stages + 1):
        following, starts = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage, layers + 1):
            for start in range(stage - 1, end):
                total = add(best[start], prefix[end] - prefix[start], cuts[start])
                if total < following[end]:
                    following[end], starts[end] = total, start
        best = following
        chosen.append(starts)
    return best[layers], _counts(chosen, layers)


def _counts(chosen: Sequence[Sequence[int]], layers: int) -> tuple[int, ...]:
    counts, end = [], layers
    for starts in reversed(chosen):
        counts.append(end - starts[end])
        end = starts[end]
    return (end, *reversed(counts))
