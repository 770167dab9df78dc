"""The cut whose heaviest stage is lightest: what the slowest stage costs is what a pipeline's period costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def bottleneck(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many consecutive layers each stage holds so that the largest sum of `costs` on a stage is minimal.

    An exact dynamic program over prefixes, O(layers^2 x stages). Every stage gets a layer. Of equally good cuts, the
    one whose last stages start earliest is taken, so that the first stages, which hold the most microbatches in
    flight under 1F1B, stay light.

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
    # best[end]: the smallest bottleneck of layers[:end] on the stages so far; cuts[stage][end]: where its last starts
    best = prefix[:]
    cuts: list[list[int]] = []
    for stage in range(2, stages + 1):
        following, starts = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for end in range(stage, layers + 1):
            for start in range(stage - 1, end):
                largest = max(best[start], prefix[end] - prefix[start])
                if largest < following[end]:
                    following[end], starts[end] = largest, start
        best = following
        cuts.append(starts)
    return _counts(cuts, layers)


def _counts(cuts: Sequence[Sequence[int]], layers: int) -> tuple[int, ...]:
    counts, end = [], layers
    for starts in reversed(cuts):
        counts.append(end - starts[end])
        end = starts[end]
    return (end, *reversed(counts))
