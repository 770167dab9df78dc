"""Plans compared: on one model, in a table and a figure."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.report import pareto
from pipeline.report.comparison import compare, pareto_front
from pipeline.report.pareto import comparison_table, draw_pareto
from pipeline.report.place_labels import Box, place_labels
from pipeline.report.plan import assess
from pipeline.schedule.costs import Costs, place_costs
from pipeline.schedule.library import SCHEDULES, write
from pipeline.schedule.memory import Footprint


def plan(name: str, pp: int = 4, microbatches: int = 8, costs: Costs | None = None, **options: Any) -> dict[str, Any]:
    """Costs are said of a stage, as by default, and compared as a rank's share."""
    held = {"stages_per_rank": options.pop("stages_per_rank")} if "stages_per_rank" in options else {}
    schedule = write(name, pp, microbatches, **held)
    stated = costs or Costs()
    share = place_costs(stated, schedule.stage_to_rank, "rank")
    return assess(schedule, place_costs(stated, schedule.stage_to_rank), share_costs=share, **options).to_json()


THREE = [plan("1f1b"), plan("interleaved_1f1b", stages_per_rank=2), plan("zbv")]


def printed(rows: list[dict[str, Any]], width: int = 120) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(comparison_table(rows))
    return file.getvalue()


def cells(text: str, name: str) -> list[str]:
    return next(line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name])


def test_the_comparison_is_of_one_equal_model() -> None:
    assert [row["makespan"] for row in THREE] == [33, 57, 51]
    found = {entry.label: (entry.makespan, entry.peak) for entry in compare(THREE).entries}
    assert found == {"1f1b": (33, 4), "interleaved_1f1b": (28.5, 5.5), "zbv": (25.5, 4)}


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_says_what_is_compared(width: int) -> None:
    text = printed(THREE, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert cells(text, "1f1b") == ["1", "33", "27.3", "%", "27.3", "%", "4", "4"]
    assert cells(text, "interleaved_1f1b")[:2] == ["2", "28.5"]
    assert cells(text, "zbv") == ["2", "25.5", "5.9", "%", "0.0", "%", "4", "4", "yes"]
    said = " ".join(text.split())
    assert "One model at pp=4 and 8 microbatches. Costs and bytes are a rank's share" in said
    assert "F 1, B 2, I 1, W 1, transfer 0" in said
    assert "Peaks in microbatches are divided by the stages a rank holds" in said


def test_rows_that_differ_come_last_and_say_why() -> None:
    rows = [
        plan("gpipe", pp=8),
        plan("gpipe", costs=Costs(transfer=0.5)),
        plan("gpipe", microbatches=12),
        plan("gpipe", unit="ms"),
        *THREE,
    ]
    comparison = compare(rows)
    assert [entry.label for entry in comparison.comparable] == ["zbv", "interleaved_1f1b", "1f1b"]
    assert {entry.differs for entry in comparison.entries[3:]} == {
        "pp=8",
        "other costs (transfer)",
        "12 microbatches",
        "another unit (ms)",
    }
    assert not any(entry.on_front for entry in comparison.entries[3:])
    text = printed(rows, 80)
    for entry in comparison.entries[3:]:
        assert f"not comparable: {entry.differs}" in text


def test_unequal_costs_compare_entry_by_entry() -> None:
    uneven, other = Costs(forward=(1.0, 2.0, 1.0, 1.0)), Costs(forward=(2.0, 1.0, 1.0, 1.0))
    rows = [plan("1f1b", costs=uneven), plan("zb_h1", costs=uneven), plan("gpipe", costs=other), plan("gpipe")]
    entries = compare(rows).entries
    assert [entry.label for entry in entries if entry.differs == "other costs (F, R)"] == ["gpipe", "gpipe"]
    assert len(entries) == 4


def test_the_front() -> None:
    assert pareto_front([(1, 5), (2, 3), (2, 4), (3, 3), (9, 1)]) == [True, True, False, False, True]
    assert pareto_front([(1, 1), (1 + 1e-15, 1)]) == [True, True]
    front = {entry.label for entry in compare(everything()).entries if entry.on_front}
    assert {"v_min", "v_half", "zbv"} <= front
    assert not {"1f1b", "gpipe", "dualpipe_v"} & front


def everything() -> list[dict[str, Any]]:
    return [plan(name) for name in SCHEDULES]


def test_bytes_decide_where_all_know_them() -> None:
    """Two stages that hold less than half of one: v=2 is the lighter."""
    rows = [
        plan("1f1b", share_footprint=Footprint(4 * 2.0**20)),
        plan("interleaved_1f1b", share_footprint=Footprint(2.0**20)),
    ]
    entries = {entry.label: entry for entry in compare(rows).entries}
    assert [entries[name].peak_bytes for name in ("1f1b", "interleaved_1f1b")] == [16 * 2**20, 11 * 2**20]
    assert not entries["1f1b"].on_front
    text = printed(rows)
    assert "MiB" in text
    assert cells(text, "1f1b")[-1] == "16"
    assert not compare([rows[0], plan("zbv")]).in_bytes
    assert "MiB" in printed([rows[0], plan("zbv")])


def test_plans_of_one_name_are_told_apart() -> None:
    rows = [plan("interleaved_1f1b", stages_per_rank=count) for count in (1, 2, 2)] + [plan("zbv")]
    rows.append({**plan("zbv"), "label": "zbv, mine"})
    labels = {entry.label for entry in compare(rows).entries}
    assert labels == {
        "interleaved_1f1b v=1",
        "interleaved_1f1b v=2 #1",
        "interleaved_1f1b v=2 #2",
        "zbv",
        "zbv, mine",
    }


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no plan to compare: give the contents of one plan\.json or more"):
        comparison_table([])
    with pytest.raises(ValueError, match="no plan to compare"):
        draw_pareto(tmp_path / "it.png", [])


def figure_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[dict[str, Any]]) -> Any:
    kept: list[Any] = []
    save = pareto.save
    monkeypatch.setattr(pareto, "save", lambda figure, path: (kept.append(figure), save(figure, path)))
    draw_pareto([tmp_path / "pareto.png", tmp_path / "pareto.svg"], rows)
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "pareto.svg").read_text()
    return kept[0]


def test_the_figure_has_a_point_and_a_name_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figure_of(monkeypatch, tmp_path, [*everything(), plan("gpipe", pp=2)])
    (axes,) = figure.axes
    names = [name for text in axes.texts for name in text.get_text().split("\n")]
    assert sorted(names) == sorted(SCHEDULES)
    at = {name: text.xy for text in axes.texts for name in text.get_text().split("\n")}
    assert (at["1f1b"], at["interleaved_1f1b"], at["zbv"]) == ((4, 33), (5.5, 28.5), (4, 25.5))
    points = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1}
    assert points == set(at.values())
    assert "microbatches" in axes.get_xlabel()
    assert "not comparable: gpipe (pp=2)" in [text.get_text() for text in figure.texts]


def test_no_name_covers_another_or_a_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were really drawn."""
    figure = figure_of(monkeypatch, tmp_path, everything())
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    for at, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[at + 1 :])
        for line in axes.lines:
            if len(line.get_xdata()) == 1:
                assert not box.contains(*axes.transData.transform(line.get_xydata()[0]))
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_the_front_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = figure_of(monkeypatch, tmp_path, THREE).axes
    bold = {text.get_text() for text in axes.texts if text.get_fontweight() == "bold"}
    assert bold == {"zbv"}
    stairs = next(line for line in axes.lines if len(line.get_xdata()) > 1)
    assert (4, 25.5) in [tuple(place) for place in stairs.get_xydata()]


def test_one_plan_and_plans_in_bytes_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = figure_of(monkeypatch, tmp_path, [plan("zbv", share_footprint=Footprint(2.0**30))]).axes
    assert axes.texts[0].xy == (8, 25.5)
    assert axes.get_xlabel() == "peak memory of a rank, in GiB"


def test_labels_of_a_crowd_find_room() -> None:
    points = [(100.0 + 8 * at, 100.0) for at in range(8)]
    within = Box(0, 0, 400, 300)
    boxes = place_labels(points, ["a schedule"] * 8, 9.0, within)
    assert all(one.overlap(other) == 0 for at, one in enumerate(boxes) for other in boxes[at + 1 :])
    assert all(box.overlap(within) == pytest.approx(box.area) for box in boxes)
