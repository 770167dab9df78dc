from __future__ import annotations

import itertools
import random

import pytest

from pipeline.partition.auto import Problem, auto
from pipeline.partition.layer_costs import LayerCosts
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import write
from pipeline.schedule.simulate import simulate

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb"]
NAMES += ["zbv", "v_half", "v_min", "dualpipe_v"]


def all_cuts(layers: int, stages: int):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *inner, layers)
        yield tuple(end - start for start, end in itertools.pairwise(edges))


def random_layers(draw: random.Random, layers: int):
    def number():
        return draw.choice((0.0, draw.random(), draw.random(), 1.0))

    costs = [LayerCosts(f"layer.{i}", *(number() for _ in range(6))) for i in range(layers)]
    heavy = draw.randrange(layers)
    if draw.random() < 0.3:
        costs[heavy] = LayerCosts("head", 5.0, 4.0, 6.0, 0.5, 0.1, 2.0)
    return costs


def simulated(costs, schedule, counts, bandwidth):
    """The makespan of a cut by the simulator itself."""
    ends = list(itertools.accumulate(counts))
    stages = [costs[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def total(field):
        return tuple(sum(getattr(layer, field) for layer in stage) for stage in stages)

    return simulate(
        schedule,
        Costs(
            forward=total("forward"),
            backward_input=total("backward_input"),
            backward_weight=total("backward_weight"),
            bandwidth=bandwidth,
            boundary_bytes=tuple(stage[-1].boundary_bytes for stage in stages),
        ),
    ).makespan


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_no_cut_takes_less(name, number):
    draw = random.Random(f"{name} {number}")
    schedule = write(name, draw.randint(2, 3) if name != "dualpipe_v" else 2, 6)
    costs = random_layers(draw, schedule.stages + draw.randint(0, 3))
    bandwidth = draw.choice((0.5, 20.0))
    choice = auto(costs, schedule, bandwidth=bandwidth, search_seconds=0.0)
    best = min(simulated(costs, schedule, cut, bandwidth) for cut in all_cuts(len(costs), schedule.stages))
    assert choice.proven
    assert choice.makespan == pytest.approx(best, rel=1e-8)
    assert simulated(costs, schedule, choice.counts, bandwidth) == pytest.approx(choice.makespan, rel=1e-12)
    assert all(choice.makespan <= other for other in choice.others.values())


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_no_cut_that_fits_takes_less(name, number):
    draw = random.Random(f"memory {name} {number}")
    schedule = write(name, 2, 4)
    costs = random_layers(draw, schedule.stages + 3)
    problem = Problem(costs, schedule)
    cuts = list(all_cuts(len(costs), schedule.stages))
    sizes = sorted(map(problem.peak_bytes, cuts))
    limit = sizes[len(sizes) // 4]
    best = min(problem.longest(cut).makespan for cut in cuts if problem.peak_bytes(cut) <= limit)
    choice = auto(costs, schedule, memory_limit=limit)
    assert choice.makespan == pytest.approx(best, rel=1e-8)
    assert problem.peak_bytes(choice.counts) <= limit
    with pytest.raises(ValueError, match=r"no cut fits schedule .* bytes would do"):
        auto(costs, schedule, memory_limit=sizes[0] * 0.99 - 1e-6)


def test_a_rank_holds_what_its_schedule_has_in_flight():
    layers = [
        LayerCosts(f"layer.{i}", 1, 1, 1, activation_bytes=10, boundary_bytes=1, parameter_bytes=100) for i in range(4)
    ]
    stages = [(i, i + 1) for i in range(4)]
    one = Problem(layers, write("1f1b", 4, 8))
    assert [one.rank_bytes(rank, stages) for rank in range(4)] == [142, 134, 124, 112]
    all_first = Problem(layers, write("gpipe", 4, 8))
    assert [all_first.rank_bytes(rank, stages) for rank in range(4)] == [182, 184, 184, 182]


def test_the_layer_beside_a_heavy_head_moves_away():
    layers = [LayerCosts(f"block.{i}", 1, 1, 1, 1, 1, 1) for i in range(9)]
    layers.append(LayerCosts("head", 3, 3, 3, 1, 1, 1))
    choice = auto(layers, write("1f1b", 3, 12))
    assert choice.counts == (4, 4, 2)
    assert choice.makespan == 3 * (12 + 11 * 4)
    assert choice.others["uniform"] == 3 * (12 + 11 * 5)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_fifty_layers_on_eight_ranks_are_proven(name):
    draw = random.Random(0)
    layers = [LayerCosts(f"block.{i}", *(1 + draw.random() / 10 for _ in range(3)), 1, 1, 1) for i in range(49)]
    layers.append(LayerCosts("head", 2.5, 2.5, 2.5, 1, 1, 1))
    choice = auto(layers, write(name, 8, 16), search_seconds=60)
    assert choice.cuts == 85_900_584
    assert choice.proven
    assert choice.examined < 2000
    assert choice.makespan <= min(choice.others.values())


def test_a_search_out_of_time_says_how_far_it_may_be():
    draw = random.Random(1)
    layers = [LayerCosts(f"layer.{i}", *(draw.random() for _ in range(6))) for i in range(40)]
    choice = auto(layers, write("zb_h1", 6, 8), search_seconds=0.0)
    assert choice.cuts == 575757
    assert not choice.proven
    assert choice.bound < choice.makespan <= min(choice.others.values())


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 stages need at least 2 layers"):
        auto([LayerCosts("only", 1, 1, 1, 1, 1, 1)], write("1f1b", 2, 4))
