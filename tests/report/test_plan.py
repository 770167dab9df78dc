"""A schedule assessed: the numbers, what is printed, what is written."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.report.plan import Assessment, assess, print_assessment, rank_costs, write_plan
from pipeline.schedule.costs import Costs, place_costs
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import Footprint
from pipeline.schedule.recomputation import place_recomputation
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.torch_csv import read_csv

FOOTPRINT = Footprint(activation=3 * 2.0**30, boundary=2.0**28)


def printed(assessment: Assessment, width: int) -> str:
    file = io.StringIO()
    print_assessment(assessment, Console(file=file, width=width))
    return file.getvalue()


def test_an_assessment_of_1f1b() -> None:
    it = assess(write("1f1b", 4, 8), Costs())
    assert (it.simulation.makespan, it.lower_bound, it.distance) == (33, 33, 0)
    assert it.stages_per_rank == 1
    assert it.peak_bytes is None


def test_the_distance_is_a_fraction_of_the_bound() -> None:
    it = assess(write("1f1b", 4, 8), Costs(transfer=1.0))
    assert it.lower_bound == 33 + 6
    assert it.distance == pytest.approx(it.simulation.makespan / 39 - 1)
    assert it.distance > 0.1


def test_a_memory_cap_counts_in_the_bound() -> None:
    schedule = write("1f1b", 4, 8)
    assert assess(schedule, Costs(), memory_cap=2).lower_bound > assess(schedule, Costs()).lower_bound


def test_costs_of_nothing_have_no_distance() -> None:
    nothing = Costs(forward=0.0, backward_input=0.0, backward_weight=0.0)
    assert assess(write("1f1b", 2, 2), nothing).distance == 0


def test_json_has_every_field() -> None:
    loaded = json.loads(json.dumps(assess(write("zbv", 4, 8), Costs(), FOOTPRINT).to_json()))
    assert {key: loaded[key] for key in ("schedule", "pp", "stages_per_rank", "microbatches")} == {
        "schedule": "zbv",
        "pp": 4,
        "stages_per_rank": 2,
        "microbatches": 8,
    }
    assert (loaded["makespan"], loaded["lower_bound"]) == (51, 51)
    assert loaded["bubble_makespan"] == pytest.approx(3 / 51)
    assert loaded["bubble_span"] == 0
    assert loaded["peak_in_flight"] == [8, 8, 8, 8]
    assert len(loaded["peak_in_flight_released_at_input"]) == 4
    assert loaded["actions"][0][:3] == ["0F0", "0F1", "0F2"]
    assert [sum(idle.values()) + busy for idle, busy in zip(loaded["idle"], loaded["busy"], strict=True)] == [51] * 4
    assert set(loaded["idle"][0]) == {"warmup", "communication", "imbalance", "dependency", "tail"}
    assert len(loaded["peak_bytes"]) == 4
    assert loaded["comparison"]["peak_bytes"] == max(loaded["peak_bytes"])


def test_the_share_has_costs_and_bytes_of_its_own() -> None:
    schedule = write("zbv", 4, 8)
    share = place_costs(Costs(), schedule.stage_to_rank, "rank")
    it = assess(schedule, Costs(), FOOTPRINT, share_costs=share, share_footprint=Footprint(activation=1.0))
    assert it.simulation.makespan == 51
    said = it.to_json()["comparison"]
    assert isinstance(said, dict)
    assert (said["makespan"], said["peak_in_flight"], said["peak_bytes"]) == (25.5, 4, 8)
    assert said["costs"] == {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1, "transfer": 0}


def test_costs_by_rank_are_one_number_where_all_are_equal() -> None:
    schedule = write("zbv", 2, 4)
    costs = Costs(forward=(1.0, 2.0, 3.0, 4.0), transfer=(0.5, 0.0, 0.5, 0.5))
    said = rank_costs(schedule, costs)
    assert said["F"] == 5  # stages 0 and 3, 1 and 2
    assert said["transfer"] == [0.5, 0.0, 0.5, 0.5]  # 0 to 1 and back, 2 to 3 and back
    assert rank_costs(schedule, Costs(forward=(1.0, 1.0, 1.0, 4.0)))["F"] == [5, 2]
    assert rank_costs(write("1f1b", 1, 2), Costs(transfer=1.0))["transfer"] == 0


def test_stages_per_rank_where_they_differ() -> None:
    from_text = "schedule: odd\nstage_to_rank: 0 1 0\nmicrobatches: 1\nforward_only: no\n"
    odd = Schedule.from_text(from_text + "rank 0: 0F0 2F0 2B0 0B0\nrank 1: 1F0 1B0\n")
    it = assess(odd, Costs())
    assert it.stages_per_rank == [2, 1]
    assert it.to_json()["comparison"]["peak_in_flight"] == 1  # type: ignore[index]
    assert "odd" in printed(it, 80)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "dualpipe_v", "zb_h1"])
def test_what_is_printed_fits_the_console(name: str, width: int) -> None:
    schedule = write(name, 8, 16)
    text = printed(assess(schedule, Costs(transfer=0.123), FOOTPRINT, unit="ms"), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines if line and line[0].isdigit()] == [str(rank) for rank in range(8)]


def test_what_is_printed_says_it_all() -> None:
    text = printed(assess(write("1f1b", 4, 8), Costs(transfer=1.0), FOOTPRINT), 120)
    lines = text.splitlines()
    assert lines[0].startswith("1f1b: 4 ranks, 8 microbatches")
    table = {words[0]: words[1:] for line in lines if (words := line.split())}
    assert table["0"][:5] == ["0", "24", "25", "0", "7"]
    assert table["3"][1:4] == ["24", "25", "6"]
    assert table["all"][0] == "96"
    assert "makespan      49 units, 25.6 % above the lower bound" in lines
    assert "lower bound   39 units: no order of these actions takes less" in lines
    assert "bubble        makespan 51.0 %, span 51.0 %" in lines
    assert "in flight     at most 4 microbatches x stages, released after B or W" in lines
    assert "GiB" in text


def test_a_large_schedule_prints_no_grid_and_a_table_of_bounded_length() -> None:
    text = printed(assess(write("1f1b", 64, 128), Costs(), FOOTPRINT), 80)
    assert "…" not in text
    assert "(48 ranks)" in text
    assert len(text.splitlines()) < 35
    assert "F0" not in text
    assert "1f1b: pp=64, 128 microbatches" in text


def test_a_long_schedule_is_clipped() -> None:
    text = printed(assess(write("1f1b", 2, 200), Costs()), 80)
    assert " ... " in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    schedule = lower(write("interleaved_1f1b", 2, 4))
    assessment = assess(schedule, Costs(transfer=0.1), FOOTPRINT)
    assert write_plan(tmp_path, assessment) == ()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"plan.json", "timeline.png", "timeline.svg", "schedule.csv", "schedule.txt"}
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(assessment.to_json()))
    assert Schedule.from_text((tmp_path / "schedule.txt").read_text()) == schedule
    assert read_csv((tmp_path / "schedule.csv").read_text()).schedule.rows == schedule.rows
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "timeline.svg").read_text()


def test_what_torch_cannot_read_is_told(tmp_path: Path) -> None:
    schedule = place_recomputation(write("1f1b", 2, 2), lambda stage, microbatch: True)
    notes = write_plan(tmp_path, assess(schedule, Costs()))
    assert notes == ("1f1b: left out 4 R, which torch's reader refuses; the text form keeps them",)
    assert Schedule.from_text((tmp_path / "schedule.txt").read_text()) == schedule


def test_times_are_written_without_what_rounding_left(tmp_path: Path) -> None:
    write_plan(tmp_path, assess(write("1f1b", 4, 8), Costs(transfer=0.1)))
    text = (tmp_path / "plan.json").read_text()
    assert "00000" not in text
    assert "99999" not in text


def test_a_large_table_fits_80_columns() -> None:
    schedule = write("interleaved_1f1b", 64, 128, stages_per_rank=8)
    text = printed(assess(schedule, Costs(transfer=0.123), FOOTPRINT), 80)
    assert "…" not in text
    assert "0,64.." in text
