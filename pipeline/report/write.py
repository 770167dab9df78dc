"""A whole report of run directories: tables on the console, and the files that hold the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.report.rows import Row, compare_runs
from pipeline.report.run_files import RunFiles
from pipeline.report.runs import find_runs, read_runs
from pipeline.report.tables import console_tables, csv_text, markdown, remarks


def write_report(
    places: Sequence[Path],
    out: Path,
    console: Console,
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
) -> None:
    """Compare the runs at or below `places`: training runs with each other, plans with each other.

    Of training runs `out` gets comparison.csv and comparison.md, of two plans or more comparison.png and
    comparison.svg. `baseline` and `target_loss` are those of `compare_runs`.

    Raises:
        ValueError: a place holds no run, there is nothing to compare, or no row answers to `baseline`.
        OSError: `out` cannot be written to.
    """
    runs, problems = read_runs(places)
    plans = _plans(places)
    if not runs and len(plans) < 2:
        where = ", ".join(map(str, places))
        raise ValueError(f"nothing to compare in {where}: give one training run or more, or two plans or more")
    out.mkdir(parents=True, exist_ok=True)
    if runs:
        _report_runs(compare_runs(runs, baseline=baseline, target_loss=target_loss), problems, out, console)
    if len(plans) > 1:
        _report_plans(plans, out, console)


def _report_runs(rows: Sequence[Row], problems: Sequence[str], out: Path, console: Console) -> None:
    for table in console_tables(rows):
        console.print(table)
    for line in remarks(rows):
        _say(console, line)
    for line in problems:
        _say(console, f"WARNING: {line}")
    (out / "comparison.csv").write_text(csv_text(rows), encoding="utf-8")
    (out / "comparison.md").write_text(markdown(rows, problems), encoding="utf-8")
    _say(console, f"comparison: {out / 'comparison.md'}, and .csv")


def _plans(places: Sequence[Path]) -> list[dict[str, object]]:
    directories = dict.fromkeys(directory.resolve() for place in places for directory in find_runs(place))
    return [plan for directory in directories if (plan := RunFiles(directory).mapping("plan.json"))]


def _report_plans(plans: Sequence[dict[str, object]], out: Path, console: Console) -> None:
    from pipeline.report.pareto import comparison_table, draw_pareto  # with matplotlib: only plans wait for it

    console.print(comparison_table(plans))
    pictures = [out / "comparison.png", out / "comparison.svg"]
    draw_pareto(pictures, plans)
    _say(console, f"makespan against memory: {pictures[0]}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
