"""A step, measured and predicted, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.schedule.events import Event

Rows = Sequence[Sequence[Event]]
"""The compute actions of a step, one row a rank."""


def unit_seconds(measured: Rows, predicted: Rows) -> float:
    """Seconds of work measured for one unit of work predicted: what lays both on one axis. 1 where either is empty."""
    busy_measured, busy_predicted = _busy(measured), _busy(predicted)
    return busy_measured / busy_predicted if busy_measured > 0 and busy_predicted > 0 else 1.0


def beginning(rows: Rows) -> float:
    """When the first action starts."""
    return min((event.start for row in rows for event in row), default=0.0)


def from_zero(rows: Rows) -> tuple[tuple[Event, ...], ...]:
    """The same with the first action at time 0."""
    start = beginning(rows)
    return tuple(tuple(Event(e.rank, e.action, e.start - start, e.end - start) for e in row) for row in rows)


def write_trace(path: Path, measured: Rows, predicted: Rows, *, seconds: float | None = None) -> None:
    """Write a step in Chrome's trace event format.

    Two processes, measured and predicted, with a thread for each rank; an event's name is its action's word. Times are
    microseconds from the start of the step. `measured` is in seconds; a unit of `predicted` is `seconds` long, None:
    so long that it holds as much work as was measured. Its events keep their own start and end in `args`. Either may
    be empty.
    """
    scale = unit_seconds(measured, predicted) if seconds is None else seconds
    entries: list[dict[str, object]] = []
    for process, (name, rows, seconds) in enumerate((("measured", measured, 1.0), ("predicted", predicted, scale))):
        if any(rows):
            entries += _process_entries(process, name, rows, seconds)
    text = json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _busy(rows: Rows) -> float:
    return sum(event.end - event.start for row in rows for event in row)


def _process_entries(process: int, name: str, rows: Rows, seconds: float) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = [_metadata("process_name", process, name=name)]
    entries.append(_metadata("process_sort_index", process, sort_index=process))
    for rank, row in enumerate(from_zero(rows)):
        entries.append(_metadata("thread_name", process, rank, name=f"rank {rank}"))
        entries.append(_metadata("thread_sort_index", process, rank, sort_index=rank))
        for event, original in zip(row, rows[rank], strict=True):
            entries.append(
                {
                    "name": str(event.action),
                    "cat": event.action.type.value,
                    "ph": "X",
                    "ts": round(event.start * seconds * 1e6, 3),
                    "dur": round((event.end - event.start) * seconds * 1e6, 3),
                    "pid": process,
                    "tid": rank,
                    "args": _arguments(original),
                }
            )
    return entries


def _arguments(event: Event) -> dict[str, object]:
    action = event.action
    arguments: dict[str, object] = {"stage": action.stage, "type": action.type.value, "microbatch": action.microbatch}
    if action.parts:
        arguments["parts"] = [str(part) for part in action.parts]
    return {**arguments, "start": event.start, "end": event.end}


def _metadata(kind: str, process: int, thread: int = 0, **arguments: object) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}
