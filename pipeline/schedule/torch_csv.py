"""torch.pipelining's CSV, in and out: one line a rank, one word a cell, with or without communication.

The words are those of torch 2.14's `_Action`, so files go to and from `_PipelineScheduleRuntime._load_csv` and
`_dump_csv` in both of its formats, compute_only and compute_comms, and to and from torchtitan.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from typing import NamedTuple

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.schedule import Row, Schedule


class Read(NamedTuple):
    """A schedule from a CSV, and a line for the user on what the CSV had besides."""

    schedule: Schedule
    notes: tuple[str, ...]


class Written(NamedTuple):
    """A schedule as CSV, and a line for the user on what CSV cannot say."""

    text: str
    notes: tuple[str, ...]


def read_csv(text: str, name: str = "csv") -> Read:
    """The schedule of a CSV; placement and microbatches follow from its rows. Empty cells (bubbles) are skipped.

    UNSHARD and RESHARD, torch's handling of sharded parameters, are left out with a note.

    Raises:
        ValueError: a cell that is no action, a stage missing or on two ranks, a rank without stages.
    """
    lines = csv.reader(io.StringIO(text.rstrip()))
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    left_out = Counter(match[1] for line in cells for cell in line if (match := _SHARDING.fullmatch(cell)))
    rows = tuple(tuple(Action.parse(cell) for cell in line if not _SHARDING.fullmatch(cell)) for line in cells)
    parts = [part for row in rows for action in row for part in action.compute]
    if not parts:
        raise ValueError("the CSV holds no action: use one line a rank, one word such as 0F0 a cell")
    microbatches = 1 + max(part.microbatch for part in parts)
    forward_only = not any(part.type.is_backward for part in parts)
    schedule = Schedule(name, rows, _placement(rows), microbatches, forward_only)
    counts = " and ".join(f"{count} {word}" for word, count in sorted(left_out.items(), reverse=True))
    note = f"{name}: left out {counts}, which shard parameters and order nothing here"
    return Read(schedule, (note,) if counts else ())


def write_csv(schedule: Schedule) -> Written:
    """The rows in torch's words.

    R, which torch's reader refuses, is left out with a note, and so is `release` each: `to_text` keeps both.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([str(a) for a in row if a.type is not ActionType.R] for row in schedule.rows)
    count = sum(action.type is ActionType.R for row in schedule.rows for action in row)
    notes = (
        [f"{schedule.name}: left out {count} R, which torch's reader refuses; the text form keeps them"]
        if count
        else []
    )
    if schedule.release == "each":
        notes.append(f"{schedule.name}: torch's CSV has no word for release=each; set it again where the file is read")
    return Written(file.getvalue(), tuple(notes))


_SHARDING = re.compile(r"[0-9]+(UNSHARD|RESHARD)")


def _placement(rows: tuple[Row, ...]) -> tuple[int, ...]:
    """The rank of each stage, as the rows show it."""
    holder: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if not row:
            raise ValueError(f"line {rank + 1} of the CSV is empty: give rank {rank} a stage or drop the line")
        for part in (part for action in row for part in action.compute):
            if holder.setdefault(part.stage, rank) != rank:
                raise ValueError(f"{part} is on rank {rank}, but stage {part.stage} is on rank {holder[part.stage]}")
    for stage in range(max(holder) + 1):
        if stage not in holder:
            raise ValueError(f"stage {stage} has no action in the CSV: number the stages 0 to {len(holder) - 1}")
    return tuple(holder[stage] for stage in range(len(holder)))
