"""A schedule as a picture in text: one line a rank, aligned in time, warmup | steady | cooldown set apart.

1f1b: 2 ranks, 4 microbatches (warmup | steady | cooldown)
rank 0   F0|F1       B0--- F2 B1--- F3 B2---   |B3---
rank 1     |F0 B0--- F1 B1--- F2 B2--- F3 B3---|
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from itertools import pairwise

from pipeline.schedule.actions import Action
from pipeline.schedule.costs import CostModel, nominal_costs
from pipeline.schedule.errors import Place, ScheduleError, mark_word, marked_rows
from pipeline.schedule.events import Event
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import simulate

_WHOLE = 3
"""So many blocks of time are all shown; of more, those where nothing but steady goes on are left out."""


def grid(
    schedule: Schedule,
    *,
    costs: CostModel | None = None,
    mark: Action | Collection[Place] | None = None,
    width: int | None = None,
    first_rank: int = 0,
) -> str:
    """Draw the compute actions where `costs` (nominal ones if None) put them; dashes show what takes longer.

    `mark`, an action or (rank, position) pairs, shows culprits as `>1B2<`. What is wider than `width` is wrapped into
    blocks of time, all ranks at the same slots; dashes at a block's start go on with what began before it. Of more
    than three blocks, those without a phase's bar or a mark are left out between the first and the last. A schedule
    that cannot run, or a marked send or receive, is drawn in program order instead. `first_rank` is what the first
    row's rank is called: those of a pipeline's replicas are numbered on.
    """
    places = _places(schedule, mark)
    title = f"{schedule.name}: {_count(schedule.pp, 'rank')}, {_count(schedule.microbatches, 'microbatch')}"
    try:
        events = simulate(schedule, costs or nominal_costs(max(1, schedule.stages // schedule.pp))).events
    except ScheduleError:
        events = None
    if events is None or not all(schedule.rows[rank][at].type.is_compute for rank, at in places):
        return (
            f"{_fill(f'{title} (program order)', width)}\n{marked_rows(schedule, places, width or 10**9, first_rank)}"
        )
    legend = "forward only" if schedule.forward_only else "warmup | steady | cooldown"
    labels = _labels(first_rank, schedule.pp)
    return "\n".join([_fill(f"{title} ({legend})", width), *_timed_rows(schedule, events, places, labels, width)])


def _places(schedule: Schedule, mark: Action | Collection[Place] | None) -> frozenset[Place]:
    if not isinstance(mark, Action):
        return frozenset(mark or ())
    rows = enumerate(schedule.rows)
    return frozenset((rank, at) for rank, row in rows for at, action in enumerate(row) if action == mark)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _fill(title: str, width: int | None) -> str:
    return title if width is None or len(title) <= width else textwrap.fill(title, max(1, width))


def _labels(first: int, count: int) -> list[str]:
    return [f"rank {rank:>{len(str(first + count - 1))}}  " for rank in range(first, first + count)]


def _timed_rows(
    schedule: Schedule,
    events: Sequence[Sequence[Event]],
    places: frozenset[Place],
    labels: Sequence[str],
    width: int | None,
) -> list[str]:
    words = [_words(schedule, rank, places) for rank in range(schedule.pp)]
    slots = [_slots(row, _unit(events)) for row in events]
    drawn = [one for row in zip(words, slots, strict=True) for one in zip(*row, strict=True)]
    narrow = 1 + max((_room(*one) for one in drawn), default=0)
    wide = 1 + max((len(word) for word, _ in drawn), default=0)
    # Where no edge spares a word that reaches over several slots, each slot has room for a whole word.
    for cell in (narrow, wide):
        rows = [_row(words[rank], slots[rank], _cuts(schedule, rank), cell) for rank in range(schedule.pp)]
        length = max(map(len, rows))
        lines = [row.ljust(length) for row in rows]
        harm = [_harm(parted) for parted in zip(*(line[::cell] for line in lines), strict=True)]
        most = len(harm) if width is None else max(1, (width - len(labels[0]) - 1) // cell)
        edges = _edges(harm, most)
        if not any(harm[edge][0] for edge in edges):
            break
    return _blocks(labels, lines, cell, edges)


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


def _edges(harm: Sequence[tuple[int, int]], most: int) -> list[int]:
    """The first slots of blocks of about equal length, `most` slots at most, and the end.

    Each is moved a little to where it does the least harm; there are more blocks than need be only where a word would
    be parted otherwise.
    """
    slots = len(harm) - 1
    least = max(1, -(-slots // most))
    edges = [0]
    for count in range(least, min(2 * least, slots + 1)):
        reach = min(max(1, most // 8), (most + slots // -count) // 2, (slots // count - 1) // 2)
        edges = [0]
        for equal in (slots * block // count for block in range(1, count)):
            near = range(equal - reach, equal + reach + 1)
            edges.append(min((harm[edge], abs(edge - equal), edge) for edge in near)[-1])
        if not any(harm[edge][0] for edge in edges):
            break
    return [*edges, slots]


def _harm(parted: Sequence[str]) -> tuple[int, int]:
    """How many words, and how many words, actions and bars, a block's edge runs through at these characters."""
    return sum(char not in " |-" for char in parted), sum(char != " " for char in parted)


def _blocks(labels: Sequence[str], lines: Sequence[str], cell: int, edges: Sequence[int]) -> list[str]:
    """The blocks of time below each other, each with its labels; a note where some are left out."""
    drawn: list[str] = []
    left_out = 0
    for first, last in pairwise(edges):
        # The character after the last slot too: it shows an action that goes on, or a phase that ends.
        parts = [line[first * cell : last * cell + 1] for line in lines]
        inner = first > 0 and last < edges[-1]
        if inner and len(edges) - 1 > _WHOLE and not any({"|", ">"} & set(part) for part in parts):
            left_out += last - first
            continue
        if drawn:
            drawn.append(f"{' ' * len(labels[0])} ... {_count(left_out, 'slot')} left out ..." if left_out else "")
        drawn += [(label + part).rstrip() for label, part in zip(labels, parts, strict=True)]
        left_out = 0
    return drawn
