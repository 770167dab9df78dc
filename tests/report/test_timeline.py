"""The trace and the picture of a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.image import imread

from pipeline.report import timeline
from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library import write
from pipeline.schedule.simulate import Costs, Event, nominal_costs, simulate

PREDICTED = simulate(write("1f1b", 2, 4), nominal_costs(1)).events
# The same step measured: 10 ms a unit, on a clock that has been running for long, forwards a bit slow.
MEASURED = tuple(
    tuple(Event(event.rank, event.action, 5000 + event.start, 5000 + event.end) for event in row)
    for row in simulate(write("1f1b", 2, 4), Costs(forward=0.016, backward=0.020)).events
)


def trace(tmp_path: Path, measured: timeline.Rows, predicted: timeline.Rows) -> list[dict[str, Any]]:
    path = tmp_path / "timeline.json"
    timeline.write_trace(path, measured, predicted)
    loaded: dict[str, Any] = json.loads(path.read_text())
    entries: list[dict[str, Any]] = loaded["traceEvents"]
    return entries


def event(rank: int, word: str, start: float, end: float) -> Event:
    return Event(rank, Action.parse(word), start, end)


def test_the_trace_has_two_processes_with_a_thread_a_rank(tmp_path: Path) -> None:
    entries = trace(tmp_path, MEASURED, PREDICTED)
    named = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert named == {(0, 0): "rank 0", (0, 1): "rank 1", (1, 0): "rank 0", (1, 1): "rank 1"}
    processes = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert processes == ["measured", "predicted"]


def test_each_action_is_one_complete_event_from_the_start_of_the_step(tmp_path: Path) -> None:
    entries = [entry for entry in trace(tmp_path, MEASURED, PREDICTED) if entry["ph"] == "X"]
    assert len(entries) == 2 * sum(map(len, PREDICTED))
    measured = [entry for entry in entries if entry["pid"] == 0]
    assert min(entry["ts"] for entry in measured) == 0
    first = measured[0]
    assert (first["name"], first["cat"], first["tid"]) == ("0F0", "F", 0)
    assert first["dur"] == pytest.approx(16_000, abs=1)
    assert first["args"]["start"] == 5000
    assert {key: first["args"][key] for key in ("stage", "type", "microbatch")} == {
        "stage": 0,
        "type": "F",
        "microbatch": 0,
    }


def test_both_timelines_hold_the_same_work_on_one_axis(tmp_path: Path) -> None:
    entries = [entry for entry in trace(tmp_path, MEASURED, PREDICTED) if entry["ph"] == "X"]
    work = [sum(entry["dur"] for entry in entries if entry["pid"] == process) for process in (0, 1)]
    assert work[0] == pytest.approx(work[1], rel=1e-6)
    assert timeline.unit_seconds(MEASURED, PREDICTED) == pytest.approx(0.036 / 3)
    assert timeline.unit_seconds((), PREDICTED) == 1.0


def test_a_trace_of_the_prediction_alone(tmp_path: Path) -> None:
    entries = trace(tmp_path, (), PREDICTED)
    assert {entry["pid"] for entry in entries} == {1}
    assert max(entry["ts"] + entry["dur"] for entry in entries if entry["ph"] == "X") == pytest.approx(15e6)


def drawn(tmp_path: Path, *rows: timeline.Rows, title: str = "") -> Any:
    timeline.draw(tmp_path / "timeline.png", *rows, title=title)
    return imread(tmp_path / "timeline.png")[:, :, :3]


def has_color(image: Any, color: str) -> bool:
    """Whether more than a speck of the picture has this very color."""
    wanted = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return bool((abs(image - wanted).max(axis=2) < 0.004).sum() > 50)


def test_the_picture_shows_every_type_in_its_own_color(tmp_path: Path) -> None:
    words = ["0F0", "0R0", "0I0", "0W0", "0F1", "0B1"]
    row = [event(0, word, at, at + 1) for at, word in enumerate(words)]
    image = drawn(tmp_path, [row], [row], title="all types")
    faces = [timeline._LOOKS[kind].face for kind in ActionType if kind.is_compute]
    assert len(set(faces)) == 5
    assert all(has_color(image, face) for face in faces)


def test_types_differ_in_gray_or_by_hatch() -> None:
    def lightness(face: str) -> float:
        red, green, blue = (int(face[at : at + 2], 16) for at in (1, 3, 5))
        return (0.299 * red + 0.587 * green + 0.114 * blue) / 255

    looks = list(timeline._LOOKS.values())
    for at, one in enumerate(looks):
        for other in looks[at + 1 :]:
            assert one.hatch != other.hatch or abs(lightness(one.face) - lightness(other.face)) > 0.15


def texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *rows: timeline.Rows, title: str = "") -> list[str]:
    """Everything written in the picture."""
    seen: list[str] = []
    save = timeline.Figure.savefig

    def keep(figure: Any, *args: Any, **named: Any) -> None:
        for axes in figure.axes:
            seen.extend(text.get_text() for text in (*axes.texts, axes._left_title, axes.xaxis.label))
            seen.extend(label.get_text() for label in axes.get_yticklabels())
        seen.extend(text.get_text() for text in figure.texts)
        seen.extend(text.get_text() for legend in figure.legends for text in legend.get_texts())
        save(figure, *args, **named)

    monkeypatch.setattr(timeline.Figure, "savefig", keep)
    timeline.draw(tmp_path / "timeline.png", *rows, title=title)
    return seen


def test_the_picture_names_both_bubbles_axes_ranks_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = texts(monkeypatch, tmp_path, MEASURED, PREDICTED, title="1f1b, gpt")
    assert "1f1b, gpt" in seen
    assert "makespan bubble: measured 20.0 %, predicted 20.0 %" in seen
    assert "Measured: one step, 180.0 ms" in seen
    assert "Predicted: 15 units" in seen
    assert seen.index("seconds") < seen.index("nominal units")
    assert seen.count("rank 1") == 2
    assert [text for text in seen if text in ("F forward", "B backward", "R recompute", "idle")] == [
        "F forward",
        "B backward",
        "idle",
    ]
    assert [seen.count(str(microbatch)) for microbatch in range(4)] == [8, 8, 8, 8]  # 2 panels, 2 ranks, F and B


def test_the_stage_is_shown_where_a_rank_holds_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = simulate(write("interleaved_1f1b", 2, 2, stages_per_rank=2), nominal_costs(2)).events
    seen = texts(monkeypatch, tmp_path, (), events)
    assert [seen.count(f"s{stage}") for stage in range(4)] == [4, 4, 4, 4]
    assert not [text for text in texts(monkeypatch, tmp_path, (), PREDICTED) if text.startswith("s0")]


def test_numbers_that_do_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [event(0, "0F0", 0, 1000), event(0, "0F77", 1000, 1001)]
    seen = texts(monkeypatch, tmp_path, [long], ())
    assert "0" in seen
    assert "77" not in seen


def test_many_ranks_make_a_picture_of_bounded_size(tmp_path: Path) -> None:
    events = simulate(write("1f1b", 32, 64), nominal_costs(1)).events
    height, width = drawn(tmp_path, events, events).shape[:2]
    assert (width, height) <= (1800, 2150)


def test_both_panels_have_one_scale(tmp_path: Path) -> None:
    late = [[event(0, "0F0", 0, 1), event(0, "0B0", 4, 6)]]
    prompt = [[event(0, "0F0", 0, 1), event(0, "0B0", 1, 3)]]
    image = drawn(tmp_path, late, prompt)
    blue = [int(timeline._LOOKS[ActionType.B].face[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    is_backward = (abs(image - blue).max(axis=2) < 0.004)[:-45]  # without the legend
    half = image.shape[0] // 2
    first = [columns.any(axis=0).nonzero()[0].min() for columns in (is_backward[:half], is_backward[half:])]
    left = 0.75 / 12 * image.shape[1]
    assert (first[0] - left) / (first[1] - left) == pytest.approx(4, rel=0.03)


def test_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    before = matplotlib.rcParams.copy()
    pyplot = "matplotlib.pyplot" in sys.modules
    drawn(tmp_path, MEASURED, PREDICTED)
    assert matplotlib.rcParams.copy() == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no event to draw: give the events of a step"):
        timeline.draw(tmp_path / "timeline.png", ((), ()), ())
