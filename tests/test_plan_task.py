"""`task=plan` as users give it: what it prints, what it leaves, and that it touches neither model nor data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedule.library import write
from pipeline.schedule.schedule import Schedule
from tests.command import TINY, Ran, train


def plan(folder: Path, *arguments: str) -> dict[str, Any]:
    """The plan.json of a command that must succeed."""
    folder.mkdir(exist_ok=True)
    ran = train(folder, "task=plan", *arguments)
    assert ran.status == 0, ran.err
    loaded: dict[str, Any] = json.loads(ran.file("plan.json").read_text())
    return loaded


def test_a_plan_leaves_numbers_pictures_and_the_schedule(tmp_path: Path):
    ran = train(tmp_path, "task=plan", "schedule=zbv", "pp=4", "microbatches=8")
    assert (ran.status, ran.err) == (0, "")
    for words in ("zbv: 4 ranks, 8 microbatches", "peak", "lower bound   51 units", "makespan 5.9 %, span 0.0 %"):
        assert words in ran.out
    found = json.loads(ran.file("plan.json").read_text())
    schedule = write("zbv", 4, 8)
    assert found["schedule"] == "zbv"
    assert (found["pp"], found["stages_per_rank"], found["microbatches"]) == (4, 2, 8)
    assert found["makespan"] == found["lower_bound"] == 51  # arXiv 2401.10241: 6mF, and (p-1)F before the last rank
    assert found["bubble_makespan"] == pytest.approx(1 - 4 * 48 / (4 * 51))
    assert found["bubble_span"] == 0
    assert found["peak_in_flight"] == found["peak_in_flight_released_at_input"] == [8, 8, 8, 8]
    assert found["actions"] == [[str(action) for action in row] for row in schedule.rows]
    assert Schedule.from_text(ran.file("schedule.txt").read_text()).rows == schedule.rows
    assert ran.file("schedule.csv").read_text().startswith("0F0,0F1,")
    for picture in ("timeline.png", "timeline.svg"):
        assert ran.file(picture).stat().st_size > 5_000


def test_neither_model_nor_data_is_touched(tmp_path: Path):
    """More stages than the model has layers, more microbatches than the batch has samples, data that isn't there."""
    found = plan(tmp_path, "pp=64", "microbatches=100", "data=tokens")
    assert found["makespan"] == 3 * (100 + 64 - 1)


def test_costs_per_rank_and_recomputation(tmp_path: Path):
    found = plan(
        tmp_path,
        *("schedule=interleaved_1f1b", "pp=4", "microbatches=8", "costs.per=rank", "costs.transfer=0"),
    )
    assert found["makespan"] == 28.5
    early = plan(tmp_path / "early", "schedule=1f1b", "pp=4", "microbatches=8", "activation_checkpoint=always")
    assert early["makespan"] == 8 * 4 + 3 * 3  # m(2F+B) + (p-1)(F+B): R runs before the gradient arrives


def test_a_part_is_recomputed(tmp_path: Path):
    """m(F+R+B) + (p-1)(F+B), R half of F; a window of what fits costs an R for each of the others."""
    counts = ("schedule=gpipe", "pp=4", "microbatches=8", "costs.activation_bytes=10")
    half = plan(tmp_path / "half", *counts, "activation_checkpoint=selective", "activation_checkpoint.every=2")
    assert half["makespan"] == 8 * 3.5 + 3 * 3
    assert half["peak_bytes"] == [8 * 5 + 5] * 4, "half of each, and the other half of the one that is rebuilt"
    limit = "activation_checkpoint.memory_limit=30"
    some = plan(tmp_path / "some", *counts, "activation_checkpoint=window", limit)
    assert some["makespan"] == 8 * 3 + 3 * 3 + 5
    assert some["peak_bytes"] == [30] * 4


def test_costs_of_the_real_model(tmp_path: Path):
    found = plan(tmp_path, *TINY[:6], "costs.source=profile", "pp=2")
    assert found["unit"] == "s"
    assert len(found["costs"]["forward"]) == 2
    assert all(peak > 0 for peak in found["peak_bytes"])


def test_a_file_is_planned_and_trained(tmp_path: Path):
    """The CSV that a plan left trains in place of the schedule it came from, with the same losses."""
    for name in ("plan", "file", "library"):
        (tmp_path / name).mkdir()
    left = train(tmp_path / "plan", "task=plan", "schedule=zb_h1", "microbatches=4").file("schedule.csv")
    quick = [*TINY, "logger=none", "launch=in_process"]
    from_file = train(tmp_path / "file", "schedule=file", f"schedule.path={left}", *quick)
    from_library = train(tmp_path / "library", "schedule=zb_h1", *quick)
    assert from_file.status == from_library.status == 0, from_file.err
    assert from_file.summary["train_loss"] == from_library.summary["train_loss"]


def test_a_sweep_of_plans_is_compared(tmp_path: Path):
    ran: Ran = train(tmp_path, "-m", "task=plan", "schedule=1f1b,interleaved_1f1b,zbv", "pp=4", "microbatches=8")
    assert ran.status == 0, ran.err
    rows = {words[0]: words[1:] for words in map(str.split, ran.out.splitlines()) if len(words) >= 8}
    assert rows["1f1b"][:2] == ["1", "33"]
    assert rows["interleaved_1f1b"][:2] == ["2", "28.5"]
    assert rows["zbv"][:2] == ["2", "25.5"]
    assert "a rank's share" in ran.out
    (picture,) = tmp_path.rglob("comparison.png")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["schedule=dualpipe_v", "pp=4", "microbatches=6"],
            "dualpipe_v needs microbatches (6) to be at least 2 x pp (8)",
        ),
        (["schedule=zb_auto", "schedule.memory_cap=0"], "memory_cap"),
        (["costs.forward=fast"], "costs.forward=fast is not a number"),
        (["schedule=file", "schedule.path=nowhere.csv"], "can't be read"),
        (["schedule=custom", "schedule.target=no.such:thing"], "can't be imported"),
        (["schedule=file"], "schedule=file needs a file"),
        (
            ["activation_checkpoint=selective", "activation_checkpoint.every=0"],
            "activation_checkpoint.every=0 is too s",
        ),
        (
            ["activation_checkpoint=selective", "activation_checkpoint.keep=all"],
            "keep=all is unknown: use costly or nu",
        ),
        (["activation_checkpoint=window"], "activation_checkpoint=window takes one limit and has none"),
        (
            ["activation_checkpoint=window", "activation_checkpoint.memory_limit=5", "costs.activation_bytes=10"],
            "activation_checkpoint.memory_limit=5: rank 0 needs 10 even with all its microbatches recomputed: use that",
        ),
    ],
)
def test_what_can_not_be_is_one_line(tmp_path: Path, arguments: list[str], line: str):
    ran = train(tmp_path, "task=plan", *arguments)
    assert ran.status == 2
    assert len(ran.errors) == 1
    assert line in ran.errors[0]


def test_zb_auto_trains_on_an_order_searched_for_the_measured_costs(tmp_path: Path):
    ran = train(tmp_path, "schedule=zb_auto", "costs.source=profile", "logger=none", "launch=in_process")
    assert ran.status == 0, ran.err
    assert ran.summary["schedule"] == "zb_auto"
