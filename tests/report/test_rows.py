"""Runs compared: named by what differs, repeats drawn together, each against its baseline and target."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.report.__main__ import main
from pipeline.report.naming import value_text
from pipeline.report.rows import Row, compare_runs
from pipeline.report.runs import Point, read_runs
from pipeline.report.tables import console_tables, csv_text, markdown, remarks
from pipeline.report.target_loss import smoothed
from pipeline.report.write import write_report
from tests.report.made_runs import fail, made_run, made_sweep, write


def rows(place: Path, **options: Any) -> list[Row]:
    return compare_runs(read_runs([place])[0], **options)


def shown(found: list[Row]) -> str:
    file = io.StringIO()
    for table in console_tables(found):
        Console(file=file, width=120).print(table)
    return file.getvalue()


def test_rows_are_named_by_what_was_varied(tmp_path: Path):
    """Seeds and the logger's tags make no row of their own, nor what a model brings along."""
    made_run(tmp_path / "0", schedule="gpipe", microbatches=4)
    made_run(tmp_path / "1", schedule="gpipe", microbatches=8, seed=3, logger__tags=["a"])
    made_run(tmp_path / "2", schedule="gpipe", microbatches=8)
    made_run(tmp_path / "3", schedule="gpipe", model="resnet18", data="glyphs", microbatches=8)
    found = rows(tmp_path)
    names = ["gpt microbatches=4", "gpt microbatches=8", "resnet18 microbatches=8"]
    assert [row.name for row in found] == names
    assert [len(row.runs) for row in found] == [1, 2, 1]


def test_a_setting_that_nobody_gave_names_rows_where_it_must(tmp_path: Path):
    for number, width in enumerate((64, 128)):
        made_run(tmp_path / str(number), model__width=width)
        (tmp_path / str(number) / ".hydra" / "overrides.yaml").write_text("[]\n")
    assert [row.name for row in rows(tmp_path)] == ["model.width=64", "model.width=128"]


def test_a_single_run_is_named_by_its_schedule(tmp_path: Path):
    assert [row.name for row in rows(made_run(tmp_path / "run"))] == ["1f1b"]


@pytest.mark.parametrize(
    ("value", "text"), [(1e-3, "0.001"), (None, "null"), (True, "true"), ([1, [2.5]], "[1,[2.5]]"), ("a", "a")]
)
def test_values_are_said_as_the_command_line_takes_them(value: object, text: str):
    assert value_text(value) == text


def test_interleaved_repeats_are_paired(tmp_path: Path):
    """The machine slows down by a tenth each round; the ratio stays near 1.2, and its interval is narrow."""
    first, second = rows(made_sweep(tmp_path / "sweep", repeats=3))
    assert (first.is_baseline, first.ratio, second.is_baseline) == (True, None, False)
    assert second.ratio is not None
    assert second.ratio.paired
    assert second.ratio.value == pytest.approx(1.2, rel=0.002)
    low, high = second.ratio.interval or (0, 0)
    assert 1.19 < low < 1.2 < high < 1.21
    assert second.samples_per_second == pytest.approx(second.ratio.value * (first.samples_per_second or 0))


def test_repeats_one_after_the_other_are_not(tmp_path: Path):
    place = made_sweep(tmp_path / "sweep", repeats=2)
    for number, name in enumerate(("0", "2", "1", "3")):
        status = json.loads((place / name / "status.json").read_text())
        write(place / name / "status.json", {**status, "job": number})
    _, second = rows(place)
    assert second.ratio is not None
    assert not second.ratio.paired
    assert second.ratio.interval is not None
    assert second.ratio.interval[0] < 1 < second.ratio.interval[1], "the drift is noise then"


def test_a_baseline_is_a_name_or_a_number(tmp_path: Path):
    place = made_sweep(tmp_path / "sweep")
    for baseline in ("1f1b", "2"):
        first, second = rows(place, baseline=baseline)
        assert second.is_baseline
        assert first.ratio is not None
        assert first.ratio.value == pytest.approx(100 / 120)
    with pytest.raises(ValueError, match=r"--baseline zbv names no row: use 1 \(gpipe\) or 2 \(1f1b\)"):
        rows(place, baseline="zbv")
    made_run(place / "2", schedule="gpipe", microbatches=4)
    with pytest.raises(ValueError, match="--baseline gpipe may be"):
        rows(place, baseline="gpipe")


def test_each_problem_has_its_own_baseline_and_target(tmp_path: Path):
    for number, (model, schedule) in enumerate((m, s) for m in ("gpt", "resnet18") for s in ("gpipe", "1f1b")):
        made_run(tmp_path / str(number), model=model, schedule=schedule, rate=10.0 * (number + 1))
    found = rows(tmp_path, baseline="1f1b gpt")
    assert [row.is_baseline for row in found] == [False, True, False, True]
    assert found[2].ratio is not None
    assert found[2].ratio.value == pytest.approx(30 / 40)


def test_the_target_is_what_all_reached(tmp_path: Path):
    """Validated once, so training losses count, the mean of those so far: 3.5, 3.25, 3.0, 2.75 at 5, 10, 15, 20."""
    made_run(tmp_path / "0", schedule="gpipe")
    other = made_run(tmp_path / "1", schedule="1f1b")
    (other / "metrics.jsonl").write_text(json.dumps({"step": 7, "loss": 3.1, "seconds": 4.0}))
    first, second = rows(tmp_path)
    assert first.target is not None
    assert (first.target.loss, first.target.kind) == (3.1, "training")
    assert (first.steps_to_target, first.seconds_to_target) == (15, 15.0)
    assert (second.steps_to_target, second.seconds_to_target) == (7, 4.0)
    assert rows(tmp_path, target_loss=1.0)[0].steps_to_target is None


def test_validations_count_where_there_are_two(tmp_path: Path):
    run = made_run(tmp_path / "0")
    lines = [{"step": step, "validation_loss": loss, "seconds": 1.0 * step} for step, loss in ((1, 3.0), (2, 2.0))]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (row,) = rows(tmp_path)
    assert row.target is not None
    assert (row.target.kind, row.target.loss, row.steps_to_target) == ("validation", 2.0, 2)


def test_smoothing_is_the_mean_of_the_last_five():
    points = [Point(step, 0.0, float(step)) for step in range(1, 8)]
    assert [point.loss for point in smoothed(points)] == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]


def test_failed_runs_are_rows_with_their_reason(tmp_path: Path):
    place = made_sweep(tmp_path / "sweep", repeats=2)
    fail(place / "1", "needs [8] microbatches")
    first, second = rows(place)
    assert (second.status, second.reason) == ("1 of 2 finished", "failed: needs [8] microbatches")
    assert second.samples_per_second is not None
    fail(place / "3", "needs [8] microbatches")
    first, second = rows(place)
    assert (first.status, second.status, second.samples_per_second, second.ratio) == ("finished", "failed", None, None)
    assert "2 (1f1b) failed: needs [8] microbatches" in remarks([first, second])


def test_no_finished_run_is_a_table_all_the_same(tmp_path: Path):
    fail(made_run(tmp_path / "0"), "no")
    (row,) = rows(tmp_path)
    assert (row.is_baseline, row.target, row.peak_memory) == (False, None, ())
    assert "1f1b" in markdown([row])
    assert csv_text([row]).count("\n") == 2


def test_what_the_tables_say(tmp_path: Path):
    found = rows(made_sweep(tmp_path / "sweep", repeats=3))
    for text in ("gpipe", "baseline", "1.20", "20.0/17.5", "15.0/12.5", "6", "10.0/10.0", "2.0/2.0"):
        assert text in shown(found)
    page = markdown(found, ["a|b is *damaged*"])
    assert "| 1 | gpipe |" in page
    assert "- a\\|b is \\*damaged\\*" in page
    assert "geometric means of up to 3 repeats, with its 95 % interval" in remarks(found)[0]
    (first, second) = csv.DictReader(io.StringIO(csv_text(found)))
    assert (first["name"], first["schedule"], first["is_baseline"], first["ratio"]) == ("gpipe", "gpipe", "True", "")
    assert float(second["ratio_low"]) < float(second["ratio"]) < float(second["ratio_high"])
    assert [second[f"peak_memory_bytes_rank_{rank}"] for rank in (0, 1)] == [str(5 << 20), str(6 << 20)]
    assert float(second["idle_measured"]) == pytest.approx(0.01)
    assert float(second["bubble_predicted"]) == 0.175


def test_tables_fit_a_narrow_terminal(tmp_path: Path):
    for table in console_tables(rows(made_sweep(tmp_path / "sweep", repeats=3))):
        file = io.StringIO()
        Console(file=file, width=80).print(table)
        lines = file.getvalue().splitlines()
        assert len([line for line in lines if "gpipe" in line or "1f1b" in line]) == 2
        assert "…" not in file.getvalue()


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = made_sweep(tmp_path / "sweep")
    (place / "0" / "timeline.json").write_text("{")
    assert main([str(place), "--out", str(tmp_path / "out"), "--baseline", "2", "--target-loss", "3.3"]) == 0
    said = capsys.readouterr().out
    assert "WARNING: " in said
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"comparison.csv", "comparison.md"}
    assert main([str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.startswith("ERROR: ")


def test_one_plan_is_nothing_to_compare(tmp_path: Path):
    write(tmp_path / "plan.json", {"schedule": "1f1b"})
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("task: plan\n")
    with pytest.raises(ValueError, match="nothing to compare in"):
        write_report([tmp_path], tmp_path, Console())
