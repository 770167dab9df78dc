"""A schedule as a picture in text: one line a rank, aligned in time, warmup | steady | cooldown set apart.

1f1b: 2 ranks, 4 microbatches (warmup | steady | cooldown)
rank 0   F0|F1       B0--- F2 B1--- F3 B2---   |B3---
rank 1     |F0 B0--- F1 B1--- F2 B2--- F3 B3---|
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.schedule.actions import Action
from pipeline.schedule.costs import CostModel, nominal_costs
from pipeline.schedule.errors import Place, ScheduleError, mark_word, marked_rows
from pipeline.schedule.events import Event
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import simulate

_GAP = " ... "


def grid(
    schedule: Schedule,
    *,
    costs: CostModel | None = None,
    mark: Action | Collection[Place] | None = None,
    width: int | None = None,
) -> str:
    """Draw the compute actions where `costs` (nominal ones if None) put them; dashes show what takes longer.

    `mark`, an action or (rank, position) pairs, shows culprits as `>1B2<`. Lines longer than `width` lose their middle,
    so that warmup and cooldown stay in sight. A schedule that cannot run, or a marked send or receive, is drawn in
    program order instead.
    """
    places = _places(schedule, mark)
    title = f"{schedule.name}: {_count(schedule.pp, 'rank')}, {_count(schedule.microbatches, 'microbatch')}"
    try:
        events = simulate(schedule, costs or nominal_costs(max(1, schedule.stages // schedule.pp))).events
    except ScheduleError:
        events = None
    if events is None or not all(schedule.rows[rank][at].type.is_compute for rank, at in places):
        return f"{title} (program order)\n{marked_rows(schedule, places, width or 10**9)}"
    legend = "forward only" if schedule.forward_only else "warmup | steady | cooldown"
    return "\n".join([f"{title} ({legend})", *_timed_rows(schedule, events, places, width)])


def _places(schedule: Schedule, mark: Action | Collection[Place] | None) -> frozenset[Place]:
    if not isinstance(mark, Action):
        return frozenset(mark or ())
    rows = enumerate(schedule.rows)
    return frozenset((rank, at) for rank, row in rows for at, action in enumerate(row) if action == mark)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _timed_rows(
    schedule: Schedule, events: Sequence[Sequence[Event]], places: frozenset[Place], width: int | None
) -> list[str]:
    words = [_words(schedule, rank, places) for rank in range(schedule.pp)]
    slots = [_slots(row, _unit(events)) for row in events]
    cell = 1 + max(
        (_room(*drawn) for pair in zip(words, slots, strict=True) for drawn in zip(*pair, strict=True)), default=0
    )
    labels = [f"rank {rank:>{len(str(schedule.pp - 1))}}  " for rank in range(schedule.pp)]
    rows = [_row(words[rank], slots[rank], _cuts(schedule, rank), cell) for rank in range(schedule.pp)]
    length = max(map(len, rows))
    focus = [slots[rank][_compute_index(schedule, rank, at)][0] * cell for rank, at in sorted(places)]
    lines = [row.ljust(length) for row in rows]
    if width is not None:
        lines = _clip(lines, width - len(labels[0]), cell, focus[0] if focus else None)
    return [(label + line).rstrip() for label, line in zip(labels, lines, strict=True)]


def _words(schedule: Schedule, rank: int, places: frozenset[Place]) -> list[str]:
    """The row's compute actions; a stage's number is shown where some rank holds several."""
    several = schedule.stages > schedule.pp
    return [
        mark_word("+".join(_word(part, several) for part in action.compute), (rank, at) in places)
        for at, action in enumerate(schedule.rows[rank])
        if action.type.is_compute
    ]


def _word(action: Action, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.type.value}{action.microbatch}"


def _room(word: str, slot: tuple[int, int]) -> int:
    """How many characters of a slot a word needs. A pair's word may reach over all of its slots."""
    count = slot[1]
    return (len(word) + count) // count - 1 if "+" in word else len(word)


def _unit(events: Sequence[Sequence[Event]]) -> float:
    """The time of one slot: the shortest action that takes any."""
    return min((e.end - e.start for row in events for e in row if e.end > e.start), default=1.0)


def _slots(row: Sequence[Event], unit: float) -> list[tuple[int, int]]:
    """First slot and number of slots of each action. Rounding, or an action of no time, never makes two overlap."""
    slots: list[tuple[int, int]] = []
    free = 0
    for event in row:
        first = max(free, int(event.start / unit + 0.5))
        free = max(first + 1, int(event.end / unit + 0.5))
        slots.append((first, free - first))
    return slots


def _cuts(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Before which compute actions a phase ends."""
    phases = schedule.phases(rank)
    if not phases.steady:
        return ()
    return len(phases.warmup), len(phases.warmup) + len(phases.steady)


def _row(words: Sequence[str], slots: Sequence[tuple[int, int]], cuts: Sequence[int], cell: int) -> str:
    """A gap character before each slot, `|` where a phase begins; the word, and dashes to the end of its last slot."""
    end = slots[-1][0] + slots[-1][1] if slots else 0
    line = [" "] * (end * cell + 1)
    for word, (first, count) in zip(words, slots, strict=True):
        start = first * cell + 1
        room = cell - 1 if count == 1 else count * cell - 1
        line[start : start + room] = word.ljust(room, " " if count == 1 else "-")
    for cut in cuts:
        line[slots[cut][0] * cell if cut < len(slots) else end * cell] = "|"
    return "".join(line)


def _compute_index(schedule: Schedule, rank: int, at: int) -> int:
    return sum(action.type.is_compute for action in schedule.rows[rank][:at])


def _clip(lines: list[str], width: int, cell: int, focus: int | None) -> list[str]:
    """Cut the same slots out of every line: the middle, or all but a window around `focus`."""
    length = len(lines[0])
    if length <= width:
        return lines
    slots = max(2, (width - 2 * len(_GAP)) // cell)
    if focus is None:
        head, tail = (slots + 1) // 2 * cell, length - 1 - slots // 2 * cell
        return [line[:head] + _GAP + line[tail:] for line in lines]
    first = max(0, min(focus // cell - slots // 2, (length - 1) // cell - slots)) * cell
    last = first + slots * cell
    return [_GAP * (first > 0) + line[first:last] + _GAP * (last < length - 1) for line in lines]
