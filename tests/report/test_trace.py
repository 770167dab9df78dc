"""The trace of a step, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.trace import Rows, unit_seconds, write_trace
from pipeline.schedule.costs import Costs, nominal_costs
from pipeline.schedule.events import Event
from pipeline.schedule.library import write
from pipeline.schedule.simulate import simulate

PREDICTED = simulate(write("1f1b", 2, 4), nominal_costs(1)).events
# The same step measured: 10 ms a unit, on a clock that has been running for long, forwards a bit slow.
MEASURED = tuple(
    tuple(Event(event.rank, event.action, 5000 + event.start, 5000 + event.end) for event in row)
    for row in simulate(write("1f1b", 2, 4), Costs(forward=0.016, backward=0.020)).events
)


def trace(tmp_path: Path, measured: Rows, predicted: Rows) -> list[dict[str, Any]]:
    path = tmp_path / "timeline.json"
    write_trace(path, measured, predicted)
    loaded: dict[str, Any] = json.loads(path.read_text())
    entries: list[dict[str, Any]] = loaded["traceEvents"]
    return entries


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
    assert unit_seconds(MEASURED, PREDICTED) == pytest.approx(0.036 / 3)
    assert unit_seconds((), PREDICTED) == 1.0


def test_a_trace_of_the_prediction_alone(tmp_path: Path) -> None:
    entries = trace(tmp_path, (), PREDICTED)
    assert {entry["pid"] for entry in entries} == {1}
    assert max(entry["ts"] + entry["dur"] for entry in entries if entry["ph"] == "X") == pytest.approx(15e6)


def test_an_overlapped_pair_is_one_event_that_names_its_parts(tmp_path: Path) -> None:
    events = simulate(write("dualpipe_v", 2, 4), nominal_costs(2)).events
    pairs = [entry for entry in trace(tmp_path, (), events) if entry.get("cat") == "OVERLAP_F_B"]
    assert len(pairs) == sum(len(event.action.parts) > 0 for row in events for event in row) > 0
    assert all(entry["name"] == f"({';'.join(entry['args']['parts'])})OVERLAP_F_B" for entry in pairs)
