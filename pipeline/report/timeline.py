"""The measured timeline over the predicted one: as a picture, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.schedule.actions import ActionType
from pipeline.schedule.simulate import Event, bubbles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Sequence[Event]]
"""The compute actions of a step, one row a rank."""


@dataclass(frozen=True)
class _Look:
    face: str
    text: str
    hatch: str
    label: str


# Near Okabe and Ito's colors, which color-blind readers tell apart; lightness and hatch do the same in gray.
_LOOKS = {
    ActionType.F: _Look("#a9d3ee", "#10242f", "", "F forward"),
    ActionType.B: _Look("#1b5a87", "#ffffff", "", "B backward"),
    ActionType.I: _Look("#e08e2b", "#1f1200", "", "I backward for input"),
    ActionType.W: _Look("#fbf0b4", "#2e2800", "....", "W backward for weights"),
    ActionType.R: _Look("#c98bb0", "#2a0d1e", "////", "R recompute"),
}
_IDLE = "#ececec"
_LANE = 0.36  # inches a rank, when there is room
_LANE_HEIGHT = 0.82  # of the lane that bars fill
_WIDTH = 12.0
_TALLEST = 14.0
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _BETWEEN, _MARGIN_BOTTOM = 0.75, 0.2, 0.8, 0.8, 0.8
_LABELS_AT_MOST = 4000  # text is drawn one by one: a picture of 100,000 actions can't show them anyway


def unit_seconds(measured: Rows, predicted: Rows) -> float:
    """Seconds of work measured for one unit of work predicted: what lays both on one axis. 1 where either is empty."""
    busy_measured, busy_predicted = _busy(measured), _busy(predicted)
    return busy_measured / busy_predicted if busy_measured > 0 and busy_predicted > 0 else 1.0


def write_trace(path: Path, measured: Rows, predicted: Rows) -> None:
    """Write a step in Chrome's trace event format.

    Two processes, measured and predicted, with a thread for each rank; an event's name is its action's word. Times are
    microseconds from the start of the step. `measured` is in seconds; `predicted`, in any unit, is scaled to hold as
    much work as was measured, and its events keep their own start and end in `args`. Either may be empty.
    """
    scale = unit_seconds(measured, predicted)
    entries: list[dict[str, object]] = []
    for process, (name, rows, seconds) in enumerate((("measured", measured, 1.0), ("predicted", predicted, scale))):
        if any(rows):
            entries += _process_entries(process, name, rows, seconds)
    text = json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def draw(path: Path, measured: Rows, predicted: Rows, *, title: str = "") -> None:
    """Draw a step as a PNG: the measured lanes (seconds) over the predicted ones (nominal units), at one scale.

    A unit is as long as the measured work that it stands for, so equal bars mean an exact prediction and a longer
    panel is a larger bubble. Raises ValueError where both are empty.
    """
    scale = unit_seconds(measured, predicted)
    panels = [panel for panel in (_Panel("measured", measured, 1.0), _Panel("predicted", predicted, scale)) if panel]
    if not panels:
        raise ValueError("there is no event to draw: give the events of a step, measured or predicted")
    lane = min(_LANE, (_TALLEST - 3.0) / sum(len(panel.rows) for panel in panels))
    # A Figure of its own on Agg, and settings restored on leaving: no window, nothing of pyplot's global state.
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "hatch.linewidth": 0.6, "hatch.color": "#00000059"}):
        figure = Figure(figsize=(_WIDTH, _height(panels, lane)), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        longest = max(panel.makespan * panel.seconds for panel in panels)
        for panel, axes in zip(panels, _lay_out(figure, panels, lane), strict=True):
            _draw_panel(axes, panel, longest, lane)
        _head(figure, title, panels)
        _legend(figure, panels)
        figure.savefig(path, format="png", metadata={"Software": None})


class _Panel:
    """One of the two timelines: its rows moved to start at 0, and how many seconds its unit of time is."""

    def __init__(self, name: str, rows: Rows, seconds: float) -> None:
        self.name = name
        self.rows = _from_zero(rows)
        self.seconds = seconds
        self.makespan = max((event.end for row in self.rows for event in row), default=0.0)
        self.bubble = bubbles(self.rows, len(self.rows))[0]

    def __bool__(self) -> bool:
        return any(self.rows)

    @property
    def title(self) -> str:
        if self.name == "measured":
            return f"Measured: one step, {_seconds_text(self.makespan)}"
        return f"Predicted: {self.makespan:g} units"


def _busy(rows: Rows) -> float:
    return sum(event.end - event.start for row in rows for event in row)


def _from_zero(rows: Rows) -> tuple[tuple[Event, ...], ...]:
    start = min((event.start for row in rows for event in row), default=0.0)
    return tuple(tuple(Event(e.rank, e.action, e.start - start, e.end - start) for e in row) for row in rows)


def _process_entries(process: int, name: str, rows: Rows, seconds: float) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = [_metadata("process_name", process, name=name)]
    entries.append(_metadata("process_sort_index", process, sort_index=process))
    for rank, row in enumerate(_from_zero(rows)):
        entries.append(_metadata("thread_name", process, rank, name=f"rank {rank}"))
        entries.append(_metadata("thread_sort_index", process, rank, sort_index=rank))
        for event, original in zip(row, rows[rank], strict=True):
            action = event.action
            arguments = {"stage": action.stage, "type": action.type.value, "microbatch": action.microbatch}
            entries.append(
                {
                    "name": str(action),
                    "cat": action.type.value,
                    "ph": "X",
                    "ts": round(event.start * seconds * 1e6, 3),
                    "dur": round((event.end - event.start) * seconds * 1e6, 3),
                    "pid": process,
                    "tid": rank,
                    "args": {**arguments, "start": original.start, "end": original.end},
                }
            )
    return entries


def _metadata(kind: str, process: int, thread: int = 0, **arguments: object) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _height(panels: Sequence[_Panel], lane: float) -> float:
    lanes = sum(len(panel.rows) for panel in panels) * lane
    return lanes + _MARGIN_TOP + _MARGIN_BOTTOM + _BETWEEN * (len(panels) - 1)


def _lay_out(figure: Figure, panels: Sequence[_Panel], lane: float) -> list[Axes]:
    """One axes a panel, all lanes of one height, placed in inches from the top."""
    height = _height(panels, lane)
    top = height - _MARGIN_TOP
    result = []
    for panel in panels:
        tall = len(panel.rows) * lane
        wide = (_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT) / _WIDTH
        result.append(figure.add_axes((_MARGIN_LEFT / _WIDTH, (top - tall) / height, wide, tall / height)))
        top -= tall + _BETWEEN
    return result


def _draw_panel(axes: Axes, panel: _Panel, longest_seconds: float, lane: float) -> None:
    for rank, row in enumerate(panel.rows):
        low = rank - _LANE_HEIGHT / 2
        axes.broken_barh([(0, panel.makespan)], (low, _LANE_HEIGHT), facecolor=_IDLE)
        for kind, look in _LOOKS.items():
            bars = [(event.start, event.end - event.start) for event in row if event.action.type is kind]
            if bars:
                style: dict[str, Any] = {"facecolor": look.face, "hatch": look.hatch, "edgecolor": "white"}
                axes.broken_barh(bars, (low, _LANE_HEIGHT), linewidth=_edge_width(len(row)), **style)
    axes.set_xlim(0, longest_seconds / panel.seconds * 1.003)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    ranks = range(0, len(panel.rows), max(1, round(0.14 / lane)))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color="#888888")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize=10, pad=5)
    axes.set_xlabel("seconds" if panel.name == "measured" else "nominal units", fontsize=8.5, labelpad=2)
    _label_bars(axes, panel, longest_seconds, lane)


def _edge_width(bars: int) -> float:
    """Points of the white line between bars, thinner where a dense row would drown in it."""
    return min(0.7, 0.06 * 72 * (_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT) / bars)


def _label_bars(axes: Axes, panel: _Panel, longest_seconds: float, lane: float) -> None:
    """The microbatch in each bar that is wide enough, under it the stage where the rank holds several."""
    points_a_unit = 72 * (_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT) / 1.003 * panel.seconds / longest_seconds
    size = min(8.5, 72 * lane * _LANE_HEIGHT * 0.6)
    if size < 4 or sum(map(len, panel.rows)) > _LABELS_AT_MOST:
        return
    for rank, row in enumerate(panel.rows):
        several = len({event.action.stage for event in row}) > 1
        for event in row:
            room = (event.end - event.start) * points_a_unit - 2
            _label_bar(axes, event, rank, room, size, show_stage=several and lane >= 0.3)


def _label_bar(axes: Axes, event: Event, rank: int, room: float, size: float, *, show_stage: bool) -> None:
    look = _LOOKS[event.action.type]
    number = str(event.action.microbatch)
    stage = f"s{event.action.stage}"
    fits_stage = show_stage and _text_width(stage, 5.2) <= room
    middle = (event.start + event.end) / 2
    style: dict[str, Any] = {"color": look.text, "ha": "center", "clip_on": True}
    # A number on a hatch is unreadable: it gets a patch of the bar's own color.
    box = {"facecolor": look.face, "edgecolor": "none", "pad": 0.6} if look.hatch else None
    if _text_width(number, size) <= room:
        at = rank - 0.13 if fits_stage else rank
        axes.text(middle, at, number, fontsize=size, va="center_baseline", bbox=box, **style)
    if fits_stage:
        axes.text(middle, rank + 0.24, stage, fontsize=5.2, va="center_baseline", bbox=box, **style)


def _text_width(text: str, size: float) -> float:
    """About how many points `text` takes: DejaVu's digits and letters are 0.6 of the size wide."""
    return 0.62 * size * len(text)


def _head(figure: Figure, title: str, panels: Iterable[_Panel]) -> None:
    at = 1 - 0.3 / figure.get_size_inches()[1]
    bubbles_text = ", ".join(f"{panel.name} {100 * panel.bubble:.1f} %" for panel in panels)
    figure.text(_MARGIN_LEFT / _WIDTH, at, title, fontsize=12, fontweight="bold", va="center")
    figure.text(
        1 - _MARGIN_RIGHT / _WIDTH, at, f"makespan bubble: {bubbles_text}", fontsize=10, ha="right", va="center"
    )


def _legend(figure: Figure, panels: Iterable[_Panel]) -> None:
    """What the picture holds, and nothing else."""
    used = {event.action.type for panel in panels for row in panel.rows for event in row}
    handles = [
        Patch(facecolor=look.face, hatch=look.hatch, edgecolor="#666666", linewidth=0.4, label=look.label)
        for kind, look in _LOOKS.items()
        if kind in used
    ]
    handles.append(Patch(facecolor=_IDLE, edgecolor="#666666", linewidth=0.4, label="idle"))
    corner = (_MARGIN_LEFT / _WIDTH, 0.05 / figure.get_size_inches()[1])
    style = {"fontsize": 8.5, "frameon": False, "borderpad": 0, "borderaxespad": 0, "handlelength": 1.8}
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=corner, ncols=len(handles), **style)


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
