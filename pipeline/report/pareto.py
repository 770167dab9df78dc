"""Several plans compared: one table, and one figure of makespan against peak memory with the Pareto front marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.lines import Line2D
from rich.box import SIMPLE
from rich.table import Table

from pipeline.report.comparison import Comparison, Entry, Plan, compare
from pipeline.report.looks import STYLE, make_figure, save
from pipeline.report.place_labels import Box, place_labels
from pipeline.report.words import ByteUnit, counted, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 8.0, 5.4
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.8, 0.25, 0.95, 1.0  # margins, in inches
_SIZE = 9.0  # of the labels, in points
_Place = tuple[float, float]
_FRONT, _BEATEN = "#0b3a63", "#8c8c8c"


def comparison_table(rows: Sequence[Plan]) -> Table:
    """What several plan.json say, a line a schedule, in order of makespan; ValueError for none.

    A comparison is of one equal model. Plans of another (another pp, number of microbatches, or costs) come last and
    say in what they differ.
    """
    comparison = compare(rows)
    table = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    reasons = list(dict.fromkeys(entry.differs for entry in comparison.entries if entry.differs))
    table.caption, table.caption_justify, table.caption_style = _caption(comparison, reasons), "left", ""
    known = [entry.peak_bytes for entry in comparison.entries if entry.peak_bytes is not None]
    size = ByteUnit.of(max(known)) if known else None
    table.add_column("schedule", overflow="fold")
    headings = ["stages\na rank", "makespan", "bubble:\nmakespan", "\nspan", "peak\nto W", "peak\nto I"]
    for heading in [*headings, *([f"peak\n{size.name}"] if size else [])]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("Pareto\nfront")
    for entry in comparison.entries:
        front = f"({reasons.index(entry.differs) + 1})" if entry.differs else "yes" if entry.on_front else ""
        table.add_row(*_cells(entry, size, front), style="dim" if entry.differs else "")
    return table


def draw_pareto(path: Path | Iterable[Path], rows: Sequence[Plan]) -> None:
    """Draw makespan against peak memory as PNG or SVG (several paths: one picture in several forms).

    A point a schedule; where several coincide they share it. Memory is bytes where every plan knows them, else
    microbatches of a rank's share. Plans that cannot be compared are left out, and named below. ValueError for none.
    """
    comparison = compare(rows)
    with matplotlib.rc_context(STYLE):
        figure = make_figure(_WIDTH, _HEIGHT)
        wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / _HEIGHT, wide / _WIDTH, high / _HEIGHT))
        _draw_points(axes, comparison, (72 * wide, 72 * high))
        at, pp, microbatches = _LEFT / _WIDTH, comparison.pp, comparison.microbatches
        title = f"Makespan against peak memory: pp={pp}, {counted(microbatches, 'microbatch')}"
        figure.text(at, 1 - 0.3 / _HEIGHT, title, fontsize=12, fontweight="bold", va="center")
        figure.text(at, 1 - 0.6 / _HEIGHT, _model(comparison), fontsize=9, va="center")
        left_out = [f"{entry.label} ({entry.differs})" for entry in comparison.entries if entry.differs]
        if left_out:
            figure.text(at, 0.12 / _HEIGHT, f"not comparable: {_few(left_out)}", fontsize=8, va="center")
        for each in [path] if isinstance(path, Path) else path:
            save(figure, each)


def _cells(entry: Entry, size: ByteUnit | None, front: str) -> list[str]:
    in_bytes = "" if size is None or entry.peak_bytes is None else number(entry.peak_bytes / size.bytes)
    return [
        entry.label,
        entry.stages_per_rank,
        number(entry.makespan),
        percent(entry.bubble_makespan),
        percent(entry.bubble_span),
        number(entry.peak),
        number(entry.peak_released_at_input),
        *([in_bytes] if size else []),
        front,
    ]


def _caption(comparison: Comparison, reasons: Sequence[str]) -> str:
    memory = "bytes" if comparison.in_bytes else "peak to W"
    lines = [
        f"One model at pp={comparison.pp} and {counted(comparison.microbatches, 'microbatch')}. Costs and bytes are a "
        f"rank's share, in {comparison.unit}: {_costs(comparison)}. Peaks in microbatches are divided by the stages a "
        "rank holds, released after B or W (to W), or B or I (to I). On the Pareto front: no other takes less time or "
        f"memory ({memory}) without more of the other.",
        *(f"({at}) not comparable: {reason}" for at, reason in enumerate(reasons, 1)),
    ]
    return "\n".join(lines)


def _model(comparison: Comparison) -> str:
    return f"one model; a rank's share of a microbatch takes {_costs(comparison)} ({comparison.unit})"


def _costs(comparison: Comparison) -> str:
    def said(times: Any) -> str:
        return f"{number(min(times))}..{number(max(times))}" if isinstance(times, list) else number(times)

    return ", ".join(f"{name} {said(times)}" for name, times in comparison.costs.items() if name != "R")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _draw_points(axes: Axes, comparison: Comparison, points: _Place) -> None:
    """`points`: the size of the axes."""
    size = ByteUnit.of(max(map(comparison.memory, comparison.comparable))) if comparison.in_bytes else None
    scale = size.bytes if size else 1.0
    places = _places(comparison, scale)
    xs, ys = _limits([x for x, _ in places]), _limits([y for _, y in places])
    front = sorted(place for place, entries in places.items() if entries[0].on_front)
    stairs = _staircase(front, xs[1], ys[1])
    axes.plot(*zip(*stairs, strict=True), color=_FRONT, linewidth=1.2, alpha=0.5, zorder=1)
    for (x, y), entries in places.items():
        best = entries[0].on_front
        face, edge = (_FRONT, _FRONT) if best else ("white", _BEATEN)
        axes.plot(x, y, marker="o", markersize=7 if best else 6, color=face, markeredgecolor=edge, markeredgewidth=1.4)
    axes.set_xlim(*xs)
    axes.set_ylim(*ys)
    _label_points(axes, places, stairs, (xs, ys), points)
    held = f"peak memory of a rank, in {size.name}" if size else "peak memory of a rank, in microbatches of its share"
    axes.set_xlabel(held, fontsize=9.5)
    axes.set_ylabel(f"makespan, in {comparison.unit}", fontsize=9.5)
    axes.tick_params(labelsize=8.5, color="#888888")
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    _legend(axes, with_beaten=len(front) < len(places))


def _legend(axes: Axes, *, with_beaten: bool) -> None:
    marks: dict[str, Any] = {"marker": "o", "markeredgewidth": 1.4}
    handles = [Line2D([], [], color=_FRONT, linewidth=1.2, markersize=7, label="on the Pareto front", **marks)]
    if with_beaten:
        beaten = Line2D([], [], color="white", markeredgecolor=_BEATEN, markersize=6, label="not on it", **marks)
        handles.append(beaten)
    corner: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.14), "borderaxespad": 0}
    axes.legend(handles=handles, frameon=False, fontsize=8.5, ncols=2, handlelength=2.2, **corner)


def _places(comparison: Comparison, scale: float) -> dict[_Place, list[Entry]]:
    """The entries by where they are: memory and makespan, equal but for rounding."""
    places: dict[_Place, list[Entry]] = {}
    for entry in comparison.comparable:
        place = float(f"{comparison.memory(entry) / scale:.9g}"), float(f"{entry.makespan:.9g}")
        places.setdefault(place, []).append(entry)
    return places


def _limits(values: Sequence[float]) -> _Place:
    """Room around the points for their labels."""
    low, high = min(values), max(values)
    room = 0.16 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _staircase(front: Sequence[_Place], right: float, top: float) -> list[_Place]:
    """What is on it or above it is no better than the front: down each front point's column, on along its line."""
    corners = [(front[0][0], top)]
    for x, y in front:
        corners += [(x, corners[-1][1]), (x, y)]
    return [*corners, (right, corners[-1][1])]


def _label_points(
    axes: Axes,
    places: dict[_Place, list[Entry]],
    stairs: Sequence[_Place],
    limits: tuple[_Place, _Place],
    points: _Place,
) -> None:
    """Names beside their points, on nothing else; a thin line leads from the point to a name that is far from it."""

    def to_points(place: _Place) -> _Place:
        x, y = ((v - low) / (high - low) * p for v, (low, high), p in zip(place, limits, points, strict=True))
        return x, y

    names = ["\n".join(entry.label for entry in entries) for entries in places.values()]
    lines = [Box.around(to_points(one), to_points(other), 1.5) for one, other in pairwise(stairs)]
    boxes = place_labels([to_points(place) for place in places], names, _SIZE, Box(0, 0, *points), lines)
    for (place, entries), name, box in zip(places.items(), names, boxes, strict=True):
        x, y = to_points(place)
        text = box.left - x, (box.bottom + box.top) / 2 - y
        far = box.distance(x, y) > 14
        line = {"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.7, "shrinkA": 1, "shrinkB": 4}
        axes.annotate(
            name,
            place,
            xytext=text,
            textcoords="offset points",
            fontsize=_SIZE,
            va="center",
            color="#111111" if entries[0].on_front else "#555555",
            fontweight="bold" if entries[0].on_front else "normal",
            arrowprops=line if far else None,
        )
