from __future__ import annotations

import itertools
import random
from math import inf

import pytest

from pipeline.partition.auto import auto
from pipeline.partition.layer_costs import LayerCosts
from pipeline.partition.problem import Problem, all_again
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
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

    costs = [
        LayerCosts(
            f"layer.{i}",
            *(number() for _ in range(3)),
            activation_bytes=1 + number(),
            boundary_bytes=number() / 4,
            parameter_bytes=number(),
            backward=draw.choice((None, number())),
            recompute=draw.choice((None, number())),
            checkpoint_bytes=1 + number() / 4,
            rebuilt_bytes=draw.choice((None, 2.0)),
            kept_output_bytes=draw.choice((0.0, 0.25)),
        )
        for i in range(layers)
    ]
    heavy = draw.randrange(layers)
    if draw.random() < 0.3:
        costs[heavy] = LayerCosts("head", 5.0, 4.0, 6.0, 0.5, 0.1, 2.0)
    return costs


def every_second(layers: int):
    return [layer % 2 == 0 for layer in range(layers)]


def problem_of(draw: random.Random, name: str, pp: int, microbatches: int, more_layers: int, **options):
    """Random layers for a schedule; in half of the cases with recomputations, of all layers or every second."""
    schedule = write(name, pp, microbatches)
    kind = draw.choice(("never", "never", "always", "except_last")) if name != "dualpipe_v" else "never"
    schedule = lower(schedule, activation_checkpoint=kind).compute_only()
    costs = random_layers(draw, schedule.stages + more_layers)
    return Problem(costs, schedule, repeated=draw.choice((all_again, every_second)), **options)


def simulated(problem, counts, bandwidth, repeated):
    """The makespan of a cut by the simulator itself."""
    ends = list(itertools.accumulate(counts))
    stages = [problem.costs[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def total(field):
        return tuple(sum(getattr(layer, field) for layer in stage) for stage in stages)

    again = [[layer.again for layer, r in zip(stage, repeated(len(stage)), strict=True) if r] for stage in stages]
    return simulate(
        problem.schedule,
        Costs(
            forward=total("forward"),
            backward=total("full_backward"),
            backward_input=total("backward_input"),
            backward_weight=total("backward_weight"),
            recompute=tuple(map(sum, again)),
            bandwidth=bandwidth,
            boundary_bytes=tuple(stage[-1].boundary_bytes for stage in stages),
        ),
    ).makespan


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_no_cut_takes_less(name, number):
    draw = random.Random(f"{name} {number}")
    bandwidth, repeated = draw.choice((0.5, 20.0)), draw.choice((all_again, every_second))
    schedule = write(name, draw.randint(2, 3) if name != "dualpipe_v" else 2, 6)
    if name != "dualpipe_v":
        schedule = lower(schedule, activation_checkpoint=draw.choice(("never", "always", "except_last"))).compute_only()
    costs = random_layers(draw, schedule.stages + draw.randint(0, 3))
    problem = Problem(costs, schedule, bandwidth=bandwidth, repeated=repeated)
    choice = auto(problem, search_seconds=0.0)
    best = min(simulated(problem, cut, bandwidth, repeated) for cut in all_cuts(len(costs), schedule.stages))
    assert choice.proven
    assert choice.makespan == pytest.approx(best, rel=1e-8)
    assert simulated(problem, choice.counts, bandwidth, repeated) == pytest.approx(choice.makespan, rel=1e-12)
    assert all(choice.makespan <= other for other in choice.others.values())


@pytest.mark.parametrize(("name", "pp", "layers"), [("1f1b", 4, 24), ("interleaved_1f1b", 2, 22), ("zbv", 2, 20)])
def test_no_cut_of_thousands_takes_less(name, pp, layers):
    draw = random.Random(f"thousands {name}")
    problem = Problem(random_layers(draw, layers), write(name, pp, 8))
    cuts = list(all_cuts(layers, problem.stages))
    assert 900 < problem.cuts == len(cuts) <= 50_000
    sizes = sorted(map(problem.peak_bytes, cuts))
    for limit in (inf, sizes[len(sizes) // 20]):
        best = min(problem.longest(cut).makespan for cut in cuts if problem.peak_bytes(cut) <= limit)
        choice = auto(problem, memory_limit=limit, search_seconds=0.0)
        assert choice.proven
        assert choice.makespan == pytest.approx(best, rel=1e-8)
        assert choice.examined < len(cuts) / 4


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_no_cut_that_fits_takes_less(name, number):
    draw = random.Random(f"memory {name} {number}")
    problem = problem_of(draw, name, 2, 4, 3)
    cuts = list(all_cuts(problem.layers, problem.stages))
    sizes = sorted(map(problem.peak_bytes, cuts))
    limit = sizes[len(sizes) // 4]
    best = min(problem.longest(cut).makespan for cut in cuts if problem.peak_bytes(cut) <= limit)
    choice = auto(problem, memory_limit=limit)
    assert choice.makespan == pytest.approx(best, rel=1e-8)
    assert problem.peak_bytes(choice.counts) <= limit
    with pytest.raises(ValueError, match=rf"no cut fits schedule .*; {sizes[0]:.0f} bytes would do"):
        auto(problem, memory_limit=sizes[0] * 0.99 - 1e-6)


def test_a_limit_needs_bytes_that_are_known():
    layers = [LayerCosts(str(i), 1, 1, 1, None, 1, 1) for i in range(4)]
    problem = Problem(layers, write("1f1b", 2, 4))
    assert auto(problem).counts == (2, 2)
    with pytest.raises(ValueError, match="memory_limit=5 bytes a rank: what the layers hold is not known"):
        auto(problem, memory_limit=5)


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
    choice = auto(Problem(layers, write("1f1b", 3, 12)))
    assert choice.counts == (4, 4, 2)
    assert choice.makespan == 3 * (12 + 11 * 4)
    assert choice.others["uniform"] == 3 * (12 + 11 * 5)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_fifty_layers_on_eight_ranks_are_proven(name):
    draw = random.Random(0)
    layers = [LayerCosts(f"block.{i}", *(1 + draw.random() / 10 for _ in range(3)), 1, 1, 1) for i in range(49)]
    layers.append(LayerCosts("head", 2.5, 2.5, 2.5, 1, 1, 1))
    choice = auto(Problem(layers, write(name, 8, 16)), search_seconds=60)
    assert choice.cuts == 85_900_584
    assert choice.proven
    assert choice.examined < 2000
    assert choice.makespan <= min(choice.others.values())


def test_a_search_out_of_time_says_how_far_it_may_be():
    draw = random.Random(1)
    layers = [LayerCosts(f"layer.{i}", *(draw.random() for _ in range(6))) for i in range(40)]
    choice = auto(Problem(layers, write("zb_h1", 6, 8)), search_seconds=0.0)
    assert choice.cuts == 575757
    assert not choice.proven
    assert choice.bound < choice.makespan <= min(choice.others.values())


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 stages need at least 2 layers"):
        auto(Problem([LayerCosts("only", 1, 1, 1, 1, 1, 1)], write("1f1b", 2, 4)))
