"""Cuts as the settings ask for them, with what the plan says of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.engine.segments import Recomputed
from pipeline.partition import LayerCosts
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import write
from pipeline.training import partitioning
from pipeline.training.partitioning import Cut, searched_cut, seconds_text, simple_cut
from pipeline.training.profiling import to_costs
from pipeline.training.settings import (
    ActivationCheckpointSettings,
    CostsSettings,
    PartitionSettings,
    Settings,
)
from tests.engine.harness import settings_for

PARAMETERS = {"a": 1, "b": 1, "c": 1, "d": 7}
BLOCKS = [LayerCosts(f"block.{i}", 0.001, 0.001, 0.001, 1024, 16, 512) for i in range(9)]
LAYERS = [*BLOCKS, LayerCosts("head", 0.003, 0.003, 0.003, 4096, 16, 2048)]


def settings(name: str, schedule: str = "1f1b", pp: int = 3, **options: object) -> Settings:
    chosen = {key: options.pop(key) for key in ("layers", "memory_limit", "search_seconds") if key in options}
    found = settings_for(schedule, pp, 12, 12, **options)
    found.partition = PartitionSettings(name, **chosen)
    found.check()
    return found


def no_costs(counts: tuple[int, ...]) -> Costs | None:
    return None


@pytest.mark.parametrize(
    ("chosen", "cut"),
    [
        (settings("uniform", pp=2), Cut((2, 2), "uniform: 2+2 layers")),
        (settings("manual", pp=2, layers=[3, 1]), Cut((3, 1), "manual: 3+1 layers")),
        (settings("manual", pp=2, layers=["a", "d"]), Cut((3, 1), "manual: 3+1 layers")),
        (
            settings("parameters", pp=2),
            Cut((3, 1), "parameters: 3+1 layers, largest stage 7 parameters (uniform: 8 parameters)"),
        ),
        (
            settings("parameters", pp=4),
            Cut((1, 1, 1, 1), "parameters: 1+1+1+1 layers, largest stage 7 parameters (as uniform)"),
        ),
    ],
)
def test_cuts_that_need_no_costs(chosen, cut):
    assert simple_cut(chosen, PARAMETERS, chosen.pp) == cut


@pytest.mark.parametrize("name", ["time", "memory", "auto"])
def test_the_others_do(name):
    with pytest.raises(ValueError, match=f"partition={name} needs what the layers cost: use uniform, parameters or ma"):
        simple_cut(settings(name), PARAMETERS, 2)


def test_by_time():
    found = searched_cut(settings("time"), LAYERS, no_costs)
    assert found == Cut((4, 4, 2), "time: 4+4+2 layers, slowest stage 12.0 ms (uniform: 15.0 ms)")


def test_a_cut_is_no_faster_than_its_messages():
    """Activation and gradient of a megabyte each, at 100 MB/s, take longer than three blocks."""
    layers = [BLOCKS[0], replace(BLOCKS[1], boundary_bytes=1e6), *BLOCKS[2:4]]
    assert searched_cut(settings("time", pp=2), layers, no_costs).counts == (2, 2)
    slow = searched_cut(settings("time", pp=2, costs=CostsSettings(bandwidth=1e8)), layers, no_costs)
    assert slow.counts in ((1, 3), (3, 1))
    assert slow.why.endswith("slowest stage or message 9.00 ms (uniform: 20.0 ms)")


def test_by_memory_rank_0_gets_fewer_layers():
    found = searched_cut(settings("memory", pp=2), [*BLOCKS, BLOCKS[0]], no_costs)
    assert found == Cut((4, 6), "memory: 4+6 layers, fullest rank 10.0 KiB, lightest (uniform: 12.5 KiB)")


def test_by_the_simulated_makespan():
    found = searched_cut(settings("auto"), LAYERS, no_costs)
    assert found.counts == (4, 4, 2)
    words = "simulated makespan 168.0 ms, proven smallest (uniform: 201.0 ms)"
    assert found.why == f"auto: 4+4+2 layers, {words}"


def test_a_limit_moves_layers_to_later_ranks():
    free = searched_cut(settings("auto", "gpipe", pp=2), LAYERS, no_costs)
    assert free.counts == (6, 4)
    found = searched_cut(settings("auto", "1f1b", pp=2, memory_limit="14KiB"), LAYERS, no_costs)
    assert found.counts == (5, 5)
    assert "at most 12.5 KiB a rank" in found.why
    with pytest.raises(
        ValueError, match=r"partition.memory_limit=1024 bytes a rank: no cut fits schedule 1f1b; \d+ by"
    ):
        searched_cut(settings("auto", "1f1b", pp=2, memory_limit=1024), LAYERS, no_costs)
    with pytest.raises(ValueError, match=r"partition.memory_limit=much is not a size: use one such as 2GiB"):
        searched_cut(settings("auto", memory_limit="much"), LAYERS, no_costs)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1", "zbv", "gpipe"])
@pytest.mark.parametrize("checkpoint", ["never", "always", "selective"])
def test_recomputation_counts_in_time_and_memory(schedule, checkpoint):
    """What is printed is what the simulator says of the run's own program."""
    chosen = settings("auto", schedule, pp=2, checkpoint=checkpoint)
    found = searched_cut(chosen, LAYERS, no_costs)
    assert "proven smallest" in found.why
    assert sum(found.counts) == len(LAYERS)


def test_out_of_time():
    layers = [
        LayerCosts(f"{i}", *((7 * i * k % 11 + 1) / 1e3 for k in (1, 2, 3)), 1000 + i * 37 % 13, 1, i * 31 % 17)
        for i in range(40)
    ]
    found = searched_cut(settings("auto", "zb_h1", pp=6, search_seconds=0.0), layers, no_costs)
    assert r"% above the best (partition.search_seconds=0)" in found.why
    found = searched_cut(settings("memory", "interleaved_1f1b", pp=3, search_seconds=0.0), layers, no_costs)
    assert r"% above the best (partition.search_seconds=0)" in found.why


def test_an_order_that_is_searched_for_the_cut():
    """zb_auto finds another order once the cut is known."""
    chosen = settings("auto", "zb_auto")

    def costs_of(counts):
        return to_costs(LAYERS, counts, Recomputed(), chosen)

    found = searched_cut(chosen, LAYERS, costs_of)
    assert found.counts == (4, 4, 2)
    assert "for an order searched after the cut" in found.why or "proven smallest" in found.why


def test_an_order_that_holds_more_than_the_one_before_is_held_to_the_limit(monkeypatch):
    """GPipe's takes the place of 1F1B's once the cut is known."""

    def written(chosen, costs=None):
        return write("1f1b" if costs is None else "gpipe", 2, 12)

    monkeypatch.setattr(partitioning, "write_schedule", written)
    chosen = settings("auto", pp=2, memory_limit="20KiB")

    def costs_of(counts):
        return None if counts == (5, 5) else Costs()

    with pytest.raises(ValueError, match="20480 bytes a rank: the order that zb_auto finds for the cut holds"):
        searched_cut(chosen, LAYERS, costs_of)


def test_what_a_search_can_not_reckon_with():
    with pytest.raises(ValueError, match=r"costs.transfer=\[0, 1, 0\] has an entry a stage, and partition=auto still"):
        searched_cut(settings("auto", costs=CostsSettings(transfer=[0, 1, 0])), LAYERS, no_costs)
    with pytest.raises(ValueError, match=r"costs.bandwidth is 0.0: use more than 0"):
        searched_cut(settings("time", costs=CostsSettings(bandwidth=0.0)), LAYERS, no_costs)
    window = ActivationCheckpointSettings("window", memory_limit="1GiB")
    with pytest.raises(ValueError, match="memory_limit=1GiB recomputes as the cut needs it, and partition=memory"):
        searched_cut(settings("memory", checkpoint=window), LAYERS, no_costs)
    unknown = [LayerCosts(str(i), 1, 1, 1, None, 1, 1) for i in range(4)]
    with pytest.raises(ValueError, match="partition=memory: what the layers hold is not known"):
        searched_cut(settings("memory", pp=2), unknown, no_costs)


def test_ranks_of_a_launcher_take_the_cut_of_rank_0(monkeypatch):
    """Each of them looks for the same agreement, and another run of the process for another one."""
    asked = []

    def agree(name, choose):
        asked.append(name)
        return '{"counts": [1, 1, 8], "why": "of rank 0"}'

    monkeypatch.setattr(partitioning.rendezvous, "agree", agree)
    assert searched_cut(settings("auto"), LAYERS, no_costs) == Cut((1, 1, 8), "of rank 0")
    searched_cut(settings("auto"), LAYERS, no_costs)
    searched_cut(settings("auto", pp=2), LAYERS, no_costs)
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.35 s"), (0.9994, "999.4 ms"), (0.0412, "41.2 ms"), (0.00412, "4.12 ms"), (0.000873, "0.873 ms")],
)
def test_seconds_for_people(seconds, text):
    assert seconds_text(seconds) == text
