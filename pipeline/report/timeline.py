"""The measured timeline over the predicted one, or either alone, as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.report.idle_text import IdleTable, draw_idle, idle_height
from pipeline.report.lanes import Room, draw_lanes, label_points, moving
from pipeline.report.looks import IDLE, LOOKS, MESSAGES, STYLE, Look, make_figure, save
from pipeline.report.trace import Rows, beginning, from_zero, unit_seconds
from pipeline.schedule.events import bubbles
from pipeline.schedule.memory import Transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LANE, _LANE_OF_MUCH = 0.36, 0.46  # inches a rank, when there is room; of much: with pairs or messages
_NARROWEST, _WIDEST, _TALLEST = 12.0, 24.0, 14.0
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _BETWEEN, _MARGIN_BOTTOM = 0.75, 0.2, 0.8, 0.8, 0.8
_LEGEND = 0.3  # inches that the legend takes at the bottom
_BEYOND = 1.003  # the axis ends a bit after the last action


def draw(
    path: Path | Iterable[Path],
    measured: Rows,
    predicted: Rows,
    *,
    title: str = "",
    transfers: Sequence[Transfer] = (),
    unit: str = "nominal units",
    remark: str = "",
    idle: IdleTable | None = None,
) -> None:
    """Draw a step as PNG or SVG: the measured lanes (seconds) over the predicted ones (`unit`), at one scale.

    A prediction in "seconds" is drawn as it is: equal bars mean an exact one. In another unit, a unit is as long as
    the measured work that it stands for, so that a longer panel is a larger bubble. `remark` says what the prediction
    is made from; `idle` is written below. Several paths hold one picture in several forms. `transfers` are the
    prediction's messages; those that take no time are not drawn. Raises ValueError where both are empty, or for a path
    that ends neither in .png nor in .svg.
    """
    scale = 1.0 if unit == "seconds" else unit_seconds(measured, predicted)
    both = (
        _Panel("measured", measured, 1.0, "seconds"),
        _Panel("predicted", predicted, scale, unit, transfers, remark),
    )
    panels = [panel for panel in both if panel]
    if not panels:
        raise ValueError("there is no event to draw: give the events of a step, measured or predicted")
    with matplotlib.rc_context(STYLE):
        figure, lane = _make_figure(panels, 0.0 if idle is None else idle_height(idle))
        longest = max(panel.makespan * panel.seconds for panel in panels)
        for panel, axes in zip(panels, _lay_out(figure, panels, lane), strict=True):
            _draw_panel(axes, panel, longest, lane)
        _head(figure, title, panels)
        _legend(figure, panels)
        if idle is not None:
            draw_idle(figure, idle, _MARGIN_LEFT, _LEGEND + idle_height(idle))
        for each in [path] if isinstance(path, Path) else path:
            save(figure, each)


class _Panel:
    """One of the two timelines: its times moved to start at 0, and how many seconds its unit of time is."""

    def __init__(
        self, name: str, rows: Rows, seconds: float, unit: str, transfers: Sequence[Transfer] = (), remark: str = ""
    ) -> None:
        self.name = name
        self.rows = from_zero(rows)
        self.seconds = seconds
        self.unit = unit
        self.remark = f" ({remark})" if remark else ""
        start = beginning(rows)
        self.transfers = [Transfer(moved.message, *(time - start for time in moved[1:])) for moved in moving(transfers)]
        self.makespan = max((event.end for row in self.rows for event in row), default=0.0)
        self.bubbles = bubbles(self.rows, len(self.rows))

    def __bool__(self) -> bool:
        return any(self.rows)

    @property
    def title(self) -> str:
        if self.unit == "seconds":
            return f"{self.name.capitalize()}: one step, {_seconds_text(self.makespan)}{self.remark}"
        return f"Predicted: {self.makespan:g} {self.unit}{self.remark}"

    @property
    def bar(self) -> float:
        """Seconds that an action takes."""
        return self.seconds * median(event.end - event.start for row in self.rows for event in row)

    @property
    def looks(self) -> Iterator[Look]:
        """Of what it holds."""
        kinds = {part.type for row in self.rows for event in row for part in event.action.compute}
        yield from (look for kind, look in LOOKS.items() if kind in kinds)
        kinds_moved = {moved.message.kind for moved in self.transfers}
        yield from (look for kind, look in MESSAGES.items() if kind in kinds_moved)

    @property
    def lane(self) -> float:
        """Inches that a lane would like to have."""
        pairs = any(event.action.parts for row in self.rows for event in row)
        return _LANE_OF_MUCH if pairs or self.transfers else _LANE


def _make_figure(panels: Sequence[_Panel], below: float) -> tuple[Figure, float]:
    """A figure as wide as labels in most bars take, within bounds, with room below; the height of a lane, in inches."""
    longest = max(panel.makespan * panel.seconds for panel in panels)
    lane = min(max(panel.lane for panel in panels), (_TALLEST - 3.0) / sum(len(panel.rows) for panel in panels))
    wanted = max(label_points(panel.rows) * longest / panel.bar if panel.bar > 0 else 0.0 for panel in panels) / 72
    width = min(_WIDEST, max(_NARROWEST, wanted * _BEYOND + _MARGIN_LEFT + _MARGIN_RIGHT))
    lanes = sum(len(panel.rows) for panel in panels) * lane
    return make_figure(width, lanes + _MARGIN_TOP + _MARGIN_BOTTOM + _BETWEEN * (len(panels) - 1) + below), lane


def _lay_out(figure: Figure, panels: Sequence[_Panel], lane: float) -> list[Axes]:
    """One axes a panel, all lanes of one height, placed in inches from the top."""
    width, height = figure.get_size_inches()
    top = height - _MARGIN_TOP
    result = []
    for panel in panels:
        tall = len(panel.rows) * lane
        wide = (width - _MARGIN_LEFT - _MARGIN_RIGHT) / width
        result.append(figure.add_axes((_MARGIN_LEFT / width, (top - tall) / height, wide, tall / height)))
        top -= tall + _BETWEEN
    return result


def _draw_panel(axes: Axes, panel: _Panel, longest_seconds: float, lane: float) -> None:
    longest = longest_seconds / panel.seconds * _BEYOND
    width = axes.get_position().width * axes.get_figure().get_size_inches()[0]  # type: ignore[union-attr]
    draw_lanes(axes, panel.rows, panel.makespan, panel.transfers, Room(72 * lane, 72 * width / longest))
    axes.set_xlim(0, longest)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color="#888888")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize=10, pad=5)
    axes.set_xlabel(panel.unit, fontsize=8.5, labelpad=2)


def _head(figure: Figure, title: str, panels: Sequence[_Panel]) -> None:
    """The title, and the bubbles: of one panel both kinds, of two the one that both show."""
    width, height = figure.get_size_inches()
    at = 1 - 0.3 / height
    if len(panels) == 1:
        makespan, span = panels[0].bubbles
        said = f"bubble: makespan {100 * makespan:.1f} %, span {100 * span:.1f} %"
    else:
        said = "makespan bubble: " + ", ".join(f"{panel.name} {100 * panel.bubbles[0]:.1f} %" for panel in panels)
    figure.text(_MARGIN_LEFT / width, at, title, fontsize=12, fontweight="bold", va="center")
    figure.text(1 - _MARGIN_RIGHT / width, at, said, fontsize=10, ha="right", va="center")


def _legend(figure: Figure, panels: Sequence[_Panel]) -> None:
    """What the picture holds, and nothing else."""
    looks = [look for panel in panels for look in panel.looks]
    ordered = [look for look in (*LOOKS.values(), IDLE, *MESSAGES.values()) if look in looks or look is IDLE]
    handles = [Patch(facecolor=look.face, edgecolor="#666666", linewidth=0.4, label=look.label) for look in ordered]
    width, height = figure.get_size_inches()
    style: dict[str, Any] = {"frameon": False, "borderpad": 0, "borderaxespad": 0, "handlelength": 1.8}
    corner = (_MARGIN_LEFT / width, 0.05 / height)
    legend = figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=corner, ncols=len(handles), fontsize=8.5, **style
    )
    for patch, look in zip(legend.get_patches(), ordered, strict=True):
        if look in MESSAGES.values():  # as thin as in the lanes
            patch.set_height(patch.get_height() * 0.35)  # type: ignore[attr-defined]
            patch.set_y(2)  # type: ignore[attr-defined]


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
