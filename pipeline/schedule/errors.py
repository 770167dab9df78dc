"""The error of a broken schedule: what is wrong, then the rows with the culprits marked."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.schedule.schedule import Schedule

Place = tuple[int, int]
"""A rank and a position in its row."""

_ROWS_SHOWN = 8


class ScheduleError(ValueError):
    """A schedule that cannot run, or not as it says. The first line says why, the others show where."""


def schedule_error(problem: str, schedule: Schedule, marks: Iterable[Place] = ()) -> ScheduleError:
    """The error to raise for `problem`, with the rows below it."""
    return ScheduleError(f"{schedule.name}: {problem}\n{marked_rows(schedule, frozenset(marks))}")


def marked_rows(schedule: Schedule, marks: frozenset[Place], width: int = 118, first_rank: int = 0) -> str:
    """The rows in program order, one line a rank, each clipped around its first mark, shown as `>1B2<`.

    Of many ranks only the marked ones are shown. `first_rank` is what the first row's rank is called.
    """
    marked = {rank for rank, _ in marks}
    shown = [rank for rank in range(schedule.pp) if schedule.pp <= _ROWS_SHOWN or rank in marked]
    digits = len(str(first_rank + schedule.pp - 1))
    lines = [
        f"rank {first_rank + rank:>{digits}}  {_row_text(schedule, rank, marks, width - digits - 7)}" for rank in shown
    ]
    if len(shown) < schedule.pp:
        lines.append(f"({schedule.pp - len(shown)} more ranks)")
    return "\n".join(lines)


def mark_word(word: str, marked: bool) -> str:
    """How a culprit looks."""
    return f">{word}<" if marked else word


def _row_text(schedule: Schedule, rank: int, marks: frozenset[Place], width: int) -> str:
    row = schedule.rows[rank]
    words = [mark_word(str(action), (rank, i) in marks) for i, action in enumerate(row)]
    focus = next((i for i in range(len(row)) if (rank, i) in marks), 0)
    first, last, room = focus, focus + 1, width - len("... ...")
    # Grow the window to both sides of the culprit for as long as the next word fits.
    used = len(words[focus]) if words else 0
    grown = True
    while grown:
        grown = False
        if first > 0 and used + len(words[first - 1]) < room:
            first, used, grown = first - 1, used + len(words[first - 1]) + 1, True
        if last < len(words) and used + len(words[last]) < room:
            last, used, grown = last + 1, used + len(words[last]) + 1, True
    return " ".join(["..."] * (first > 0) + words[first:last] + ["..."] * (last < len(words)))
