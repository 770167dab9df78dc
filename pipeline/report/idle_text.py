"""Each rank's idle time by cause, measured beside predicted, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.schedule.idle import CAUSES, Idle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT = {"communication": "comm.", "imbalance": "imbal.", "dependency": "depend."}
"""Causes as narrow columns call them."""

_RANKS_AT_MOST, _SHOWN_AT_EACH_END = 16, 4
_LINE, _FIRST, _COLUMN = 0.19, 0.75, 1.25  # inches: the height of a row, the widths of the columns
_ABOVE, _BELOW = 0.3, 0.12


@dataclass(frozen=True)
class IdleTable:
    """Headings and rows of text, a row a rank: "measured / predicted" of all idle time and of each cause."""

    unit: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def idle_table(measured: Sequence[Idle], predicted: Sequence[Idle]) -> IdleTable | None:
    """The table of a step's idle seconds. Either may be empty, its numbers are then dashes; None where both are.

    Of many ranks the first and the last are shown; the last row sums over all.
    """
    ranks = max(len(measured), len(predicted))
    if not ranks:
        return None
    largest = max(idle.total for idle in (*measured, *predicted))
    unit, scale = ("ms", 1e3) if largest < 1 else ("s", 1.0)
    rows = [_row(str(rank), measured[rank : rank + 1], predicted[rank : rank + 1], scale) for rank in range(ranks)]
    if ranks > _RANKS_AT_MOST:
        between = ("...", *[""] * (1 + len(CAUSES)))
        rows = [*rows[:_SHOWN_AT_EACH_END], between, *rows[-_SHOWN_AT_EACH_END:]]
    if ranks > 1:
        rows.append(_row("all", measured, predicted, scale))
    return IdleTable(unit, ("rank", "idle", *CAUSES), tuple(rows))


def _row(name: str, measured: Sequence[Idle], predicted: Sequence[Idle], scale: float) -> tuple[str, ...]:
    cells = [f"{_sum(measured, part, scale)} / {_sum(predicted, part, scale)}" for part in ("total", *CAUSES)]
    return name, *cells


def _sum(idles: Sequence[Idle], part: str, scale: float) -> str:
    if not idles:
        return "-"
    value = scale * sum(getattr(idle, part) for idle in idles)
    return f"{value:,.0f}" if value >= 99.95 else f"{abs(value):.1f}"


def idle_height(table: IdleTable) -> float:
    """Inches that `draw_idle` takes."""
    return _ABOVE + _LINE * (1 + len(table.rows)) + _BELOW


def draw_idle(figure: Figure, table: IdleTable, left: float, top: float) -> None:
    """Write the table into a picture, its upper left corner so many inches from the lower left one."""
    width, height = figure.get_size_inches()
    title = f"Idle time in {table.unit}, measured / predicted"
    figure.text(left / width, (top - 0.08) / height, title, fontsize=10, va="top")
    for number, row in enumerate((table.headings, *table.rows)):
        y = (top - _ABOVE - _LINE * (number + 0.5)) / height
        for column, text in enumerate(row):
            x = (left + (_FIRST - 0.35 if column == 0 else _FIRST + _COLUMN * column - 0.35)) / width
            color = "#666666" if number == 0 else "#222222"
            figure.text(x, y, text, fontsize=8.5, color=color, ha="right", va="center")
