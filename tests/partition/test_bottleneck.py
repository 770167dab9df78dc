from __future__ import annotations

import itertools
import random

import pytest

from pipeline.partition import bottleneck


def all_cuts(layers: int, stages: int):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *inner, layers)
        yield tuple(end - start for start, end in itertools.pairwise(edges))


def heaviest(costs, counts):
    ends = list(itertools.accumulate(counts))
    return max(sum(costs[end - count : end]) for count, end in zip(counts, ends, strict=True))


def random_case(number: int):
    draw = random.Random(number)
    layers = draw.randint(1, 9)
    kind = draw.choice(("whole", "many zeros", "one giant"))
    costs = [draw.randint(0, 20) for _ in range(layers)]
    if kind == "many zeros":
        costs = [cost if draw.random() < 0.3 else 0 for cost in costs]
    if kind == "one giant":
        costs[draw.randrange(layers)] = 1000
    return costs, draw.randint(1, layers)


@pytest.mark.parametrize("number", range(300))
def test_no_cut_has_a_lighter_heaviest_stage(number):
    costs, stages = random_case(number)
    counts = bottleneck(costs, stages)
    assert len(counts) == stages
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    assert heaviest(costs, counts) == min(heaviest(costs, cut) for cut in all_cuts(len(costs), stages))


def test_of_equally_good_cuts_the_first_stages_are_the_lightest():
    assert bottleneck([1, 1, 1, 1], 3) == (1, 1, 2)
    assert bottleneck([0, 0, 5], 2) == (1, 2)


def test_costs_may_be_seconds():
    assert bottleneck([0.1, 0.2, 0.3, 0.6], 2) == (3, 1)


def test_bottleneck_refuses_more_stages_than_layers():
    with pytest.raises(ValueError, match="3 stages need at least 3 layers, the model has 2: use fewer stages"):
        bottleneck([1, 1], 3)


@pytest.mark.parametrize("number", range(200))
def test_no_cut_has_a_lighter_heaviest_stage_or_boundary(number):
    costs, stages = random_case(number)
    draw = random.Random(-number)
    boundaries = [draw.choice((0, draw.randint(0, 60))) for _ in costs]

    def heaviest_part(counts):
        cuts = list(itertools.accumulate(counts))[:-1]
        return max(heaviest(costs, counts), *(boundaries[end - 1] for end in cuts), 0)

    best = min(map(heaviest_part, all_cuts(len(costs), stages)))
    assert heaviest_part(bottleneck(costs, stages, boundaries)) == best


def test_bottleneck_refuses_boundaries_of_another_model():
    with pytest.raises(ValueError, match="1 boundaries for 2 layers: give what a cut after each layer costs"):
        bottleneck([1, 1], 2, [1])
