"""Run directories read back, whole ones and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.report.runs import Point, Run, Span, find_runs, read_runs
from tests.report.made_runs import fail, made_run, made_sweep, write


def only(place: Path) -> tuple[Run, list[str]]:
    (run,), problems = read_runs([place])
    return run, problems


def test_a_whole_run(tmp_path: Path):
    run, problems = only(made_run(tmp_path / "run", schedule="gpipe"))
    assert (problems, run.status, run.reason, run.job) == ([], "finished", "", None)
    assert (run.settings["schedule"], run.settings["schedule.stages_per_rank"], run.settings["model"]) == (
        "gpipe",
        1,
        "gpt",
    )
    assert run.overridden == {"schedule", "model"}
    assert run.training[0] == Point(5, 5.0, 3.5)
    assert run.validation == (Point(20, 21.0, 2.5),)
    assert run.measured == ((Span(0.0, 10.0, "F", "0F0"),), (Span(10.0, 10.0, "F", "1F0"),))
    assert run.predicted == ()
    assert run.step_quartiles == (0.3, 0.34)
    assert run.ranks("peak_memory_bytes") == (5 << 20, 6 << 20)
    assert run.idle("measured")["tail"] == 0.002


def test_runs_are_found_below_in_the_order_of_their_numbers(tmp_path: Path):
    for number in (10, 9, 2):
        made_run(tmp_path / "sweeps" / "moment" / str(number))
    (tmp_path / "sweeps" / "moment" / "wandb" / "3").mkdir(parents=True)
    write(tmp_path / "sweeps" / "moment" / "wandb" / "3" / "summary.json", {})
    assert [run.name for run in find_runs(tmp_path)] == ["2", "9", "10"]
    runs, _ = read_runs([tmp_path, tmp_path / "sweeps" / "moment" / "9"])
    assert len(runs) == 3


def test_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no run"):
        find_runs(tmp_path)
    with pytest.raises(ValueError, match="is no directory"):
        find_runs(tmp_path / "nothing")


def test_jobs_have_numbers_and_ends(tmp_path: Path):
    sweep = made_sweep(tmp_path / "sweep", repeats=2)
    fail(sweep / "1", "a line\nand a grid")
    fail(sweep / "2", "needs pp=4", status="skipped")
    write(sweep / "3" / "summary.json", {"status": "interrupted", "error": "Ctrl-C"})
    runs, problems = read_runs([sweep])
    assert [run.job for run in runs] == [0, 1, 2, 3]
    assert [(run.status, run.reason) for run in runs] == [
        ("finished", ""),
        ("failed", "a line"),
        ("skipped", "needs pp=4"),
        ("interrupted", "Ctrl-C"),
    ]
    assert problems == []


@pytest.mark.parametrize(
    "name", ["summary.json", "status.json", "metrics.jsonl", "timeline.json", ".hydra/config.yaml"]
)
@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00\x01", '{"traceEvents": [3]}'])
def test_damage_is_a_line(tmp_path: Path, name: str, text: str):
    directory = made_run(tmp_path / "run")
    (directory / name).write_text(text)
    run, problems = only(directory)
    assert all(str(directory / name) in line and "\n" not in line for line in problems)
    if name == "summary.json":
        assert run.status == "unfinished"
    else:
        assert run.number("samples_per_second") == 100.0
    if text == "{":
        assert len(problems) == 1


def test_missing_files_are_said(tmp_path: Path):
    directory = made_run(tmp_path / "run")
    for name in ("metrics.jsonl", "timeline.json", "status.json"):
        (directory / name).unlink()
    run, problems = only(directory)
    assert (run.status, len(problems)) == ("finished", 2)
    (directory / "summary.json").unlink()
    assert only(directory)[0].reason == "there is no summary.json"


def test_wrong_types_in_a_summary_are_unknown(tmp_path: Path):
    odd = {"samples_per_second": "fast", "step_seconds": True, "ranks": 3, "idle": [None], "step_quartiles": [1]}
    run, _ = only(made_run(tmp_path / "run", summary=odd))
    assert (run.number("samples_per_second"), run.number("step_seconds"), run.step_quartiles) == (None, None, None)
    assert (run.ranks("peak_memory_bytes"), run.idle("measured")) == ((), {})


def test_a_cut_line_and_losses_that_are_no_numbers_are_left_out(tmp_path: Path):
    directory = made_run(tmp_path / "run")
    lines = [{"step": 1, "loss": None, "seconds": 1.0}, {"step": 2, "loss": 3.0, "seconds": 2.0}]
    (directory / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), '{"step": 3, "lo']))
    run, problems = only(directory)
    assert run.training == (Point(2, 2.0, 3.0),)
    assert problems == [f"{directory / 'metrics.jsonl'}: 1 of 3 lines are no JSON objects"]


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path):
    """Steps 1 to 3, then again from step 2 on with a clock that starts anew."""
    directory = made_run(tmp_path / "run")
    rows = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 0.5), (3, 1.5)]
    lines = [json.dumps({"step": step, "loss": 9.0, "seconds": seconds}) for step, seconds in rows]
    (directory / "metrics.jsonl").write_text("\n".join(lines))
    run, _ = only(directory)
    assert [(point.step, point.seconds) for point in run.training] == [(1, 1.0), (2, 1.5), (3, 2.5)]


def test_other_tasks_are_left_out(tmp_path: Path):
    made_run(tmp_path / "plan", task="plan")
    assert read_runs([tmp_path]) == ([], [])


def test_without_a_configuration_the_summary_tells(tmp_path: Path):
    facts = {"status": "finished", "schedule": "zbv", "pp": 4}
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "summary.json", facts)
    run, _ = only(tmp_path)
    assert run.settings == {"schedule": "zbv", "pp": 4}
