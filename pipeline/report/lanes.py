"""The lanes of one timeline: a bar an action, an overlapped pair as two half bars, messages as thin marks below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from pipeline.report.labels import Labels, text_width
from pipeline.report.looks import IDLE, LOOKS, MESSAGES
from pipeline.report.trace import Rows
from pipeline.schedule.actions import Action
from pipeline.schedule.events import Event
from pipeline.schedule.memory import Transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR_HEIGHT = 0.82  # of the lane
_BAR_HEIGHT_OVER_MESSAGES, _MESSAGE_HEIGHT = 0.72, 0.085
_LARGEST, _SMALLEST, _STAGE_SIZE = 8.5, 4.5, 5.2  # of a label, in points
_PADDING = 1.2  # beside a label, in points
_DENSE = 500  # bars of a color and a lane, beyond which an SVG holds them as an image

_Box = list[tuple[float, float]]


@dataclass(frozen=True)
class Room:
    """How much place the lanes have."""

    lane_points: float
    """Height of a lane."""
    unit_points: float
    """Width of a unit of time."""


def draw_lanes(axes: Axes, rows: Rows, makespan: float, transfers: Sequence[Transfer], room: Room) -> None:
    """Draw every rank's lane around its number on the y axis, rank 0 on top; time is x, from 0."""
    top, height = _band(bool(transfers))
    for rank, row in enumerate(rows):
        _draw_boxes(axes, [_box(0.0, makespan, rank + top, height)], IDLE.face)
        bars = [bar for event in row for bar in _bars(event, rank + top, height)]
        edge = _edge_width(len(bars), makespan * room.unit_points)
        for kind, look in LOOKS.items():
            boxes = [_box(bar.start, bar.end, bar.top, bar.height) for bar in bars if bar.action.type is kind]
            _draw_boxes(axes, boxes, look.face, edge)
    _draw_messages(axes, rows, transfers, top + height)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    ranks = range(0, len(rows), max(1, round(10 / room.lane_points)))
    centers = [rank + top + height / 2 for rank in ranks]
    axes.set_yticks(centers, [f"rank {rank}" for rank in ranks], fontsize=min(9, room.lane_points))
    _label_bars(axes, rows, room, top, height)


def label_points(rows: Rows) -> float:
    """How wide a bar must be to hold the longest of the microbatches' numbers."""
    return text_width(_widest_number(rows), _SMALLEST + 0.5) + _PADDING


def moving(transfers: Sequence[Transfer]) -> list[Transfer]:
    """The messages that take time."""
    return [moved for moved in transfers if moved.arrived > max(moved.sent, moved.posted)]


@dataclass(frozen=True, slots=True)
class _Bar:
    action: Action
    start: float
    end: float
    top: float
    height: float
    is_half: bool


def _band(with_messages: bool) -> tuple[float, float]:
    """Where in a lane the bars are, from the rank's number downwards: top and height."""
    if with_messages:
        return -0.48, _BAR_HEIGHT_OVER_MESSAGES
    return -_BAR_HEIGHT / 2, _BAR_HEIGHT


def _bars(event: Event, top: float, height: float) -> Iterator[_Bar]:
    """One bar, or those of a pair's two parts, one over the other."""
    parts = event.action.compute
    each = height / len(parts)
    for at, part in enumerate(parts):
        yield _Bar(part, event.start, event.end, top + at * each, each, len(parts) > 1)


def _box(start: float, end: float, top: float, height: float) -> _Box:
    return [(start, top), (end, top), (end, top + height), (start, top + height)]


def _draw_boxes(axes: Axes, boxes: Sequence[_Box], color: str, edge: float = 0.0) -> None:
    """All of one color as one path: a patch each would take minutes for what a large schedule holds."""
    if boxes:
        corners = [corner for box in boxes for corner in (*box, box[0])]
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
        style: dict[str, Any] = {"facecolor": color, "edgecolor": "white", "linewidth": edge}
        axes.add_artist(PathPatch(Path(corners, codes), rasterized=len(boxes) > _DENSE, **style))


def _edge_width(bars: int, width: float) -> float:
    """Points of the white line between bars, thinner where a dense row would drown in it."""
    return min(0.7, 0.06 * width / max(1, bars))


def _draw_messages(axes: Axes, rows: Rows, transfers: Sequence[Transfer], below: float) -> None:
    """Activations, and gradients under them, below the lane of the rank that sends, from start to arrival."""
    holder = {part.stage: rank for rank, row in enumerate(rows) for event in row for part in event.action.compute}
    for at, (kind, look) in enumerate(MESSAGES.items()):
        top = below + 0.03 + at * (_MESSAGE_HEIGHT + 0.02)
        boxes = [
            _box(
                max(moved.sent, moved.posted), moved.arrived, holder[moved.message.source_stage] + top, _MESSAGE_HEIGHT
            )
            for moved in transfers
            if moved.message.kind == kind
        ]
        _draw_boxes(axes, boxes, look.face)


def _label_bars(axes: Axes, rows: Rows, room: Room, top: float, height: float) -> None:
    """The microbatch in each bar that could hold the widest of them, and the stage where a rank holds several."""
    number = _widest_number(rows)
    lengths = sorted(event.end - event.start for row in rows for event in row)
    if lengths[-1] * room.unit_points < text_width(number, _SMALLEST) + _PADDING:
        return
    by_width = (lengths[len(lengths) // 4] * room.unit_points - _PADDING) / text_width(number, 1)
    several = any(len({part.stage for event in row for part in event.action.compute}) > 1 for row in rows)
    stage = f"s{max(part.stage for row in rows for event in row for part in event.action.compute)}" if several else ""
    labels = Labels()
    for rank, row in enumerate(rows):
        for bar in (bar for event in row for bar in _bars(event, rank + top, height)):
            size = bar.height * room.lane_points * (0.75 if bar.is_half else 0.6)
            size = min(_LARGEST, size, max(_SMALLEST, by_width))
            if size >= _SMALLEST:
                _label_bar(labels, bar, room, size, number, stage)
    labels.draw(axes)


def _label_bar(labels: Labels, bar: _Bar, room: Room, size: float, widest: str, widest_stage: str) -> None:
    """The stage goes under the number, in a low bar beside it, and where there is no room for it nowhere."""
    width = (bar.end - bar.start) * room.unit_points - _PADDING
    if text_width(widest, size) > width:
        return
    number, stage, color = str(bar.action.microbatch), f"s{bar.action.stage}", LOOKS[bar.action.type].text
    x, y = (bar.start + bar.end) / 2, bar.top + bar.height / 2
    stage_size = min(_STAGE_SIZE, size)
    stage_width = text_width(widest_stage, stage_size)
    is_tall = bar.height * room.lane_points >= size + stage_size + 2
    if widest_stage and is_tall and stage_width <= width:
        labels.add(x, y - 0.17 * bar.height, number, size, color)
        labels.add(x, y + 0.27 * bar.height, stage, stage_size, color)
    elif widest_stage and not is_tall and text_width(widest, size) + stage_width + 2 * _PADDING <= width:
        labels.add(x - (stage_width / 2 + _PADDING) / room.unit_points, y, number, size, color)
        labels.add(x + (text_width(number, size) / 2 + _PADDING) / room.unit_points, y, stage, stage_size, color)
    else:
        labels.add(x, y, number, size, color)


def _widest_number(rows: Rows) -> str:
    return str(max((part.microbatch for row in rows for event in row for part in event.action.compute), default=0))
