from __future__ import annotations

import random

import pytest

from pipeline.partition import LayerCosts, Problem, lightest
from pipeline.schedule.library import write
from tests.partition.test_auto import NAMES, all_cuts, problem_of, random_layers


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_no_cut_has_a_lighter_fullest_rank(name, number):
    draw = random.Random(f"{name} {number}")
    problem = problem_of(draw, name, 2 if name == "dualpipe_v" else draw.randint(2, 3), 6, draw.randint(0, 4))
    found = lightest(problem, search_seconds=0.0)
    best = min(map(problem.peak_bytes, all_cuts(problem.layers, problem.stages)))
    assert found.proven
    assert found.peak_bytes == pytest.approx(best, rel=1e-12)
    assert problem.peak_bytes(found.counts) == pytest.approx(best, rel=1e-12)


def test_early_ranks_of_1f1b_get_fewer_layers():
    """Rank r holds 4 - r microbatches of its layers: 4 x 3 = 3 x 4 = 2 x 6 = 12."""
    layers = [LayerCosts(f"layer.{i}", 1, 1, 1, 1.0, 0, 0) for i in range(3 + 4 + 6 + 12)]
    found = lightest(Problem(layers, write("1f1b", 4, 8)))
    assert (found.counts, found.peak_bytes) == ((3, 4, 6, 12), 12)


def test_the_ranks_below_the_fullest_are_even():
    layers = [LayerCosts("embedding", 1, 1, 1, 0.0, 0, 100)]
    layers += [LayerCosts(f"block.{i}", 1, 1, 1, 0.0, 0, 10) for i in range(9)]
    found = lightest(Problem(layers, write("1f1b", 4, 8)))
    assert (found.counts, found.peak_bytes) == ((1, 3, 3, 3), 100)


def test_a_search_out_of_time_says_how_light_it_may_be():
    problem = Problem(random_layers(random.Random(3), 40), write("interleaved_1f1b", 3, 6))
    found = lightest(problem, search_seconds=0.0)
    assert not found.proven
    assert found.bound < found.peak_bytes == problem.peak_bytes(found.counts)


def test_fifty_layers_on_eight_ranks_are_proven():
    layers = random_layers(random.Random(0), 50)
    for name in ("1f1b", "zb_h1"):
        problem = Problem(layers, write(name, 8, 16))
        assert lightest(problem, search_seconds=20).proven


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 stages need at least 2 layers"):
        lightest(Problem([LayerCosts("only", 1, 1, 1, 1, 1, 1)], write("1f1b", 2, 4)))
