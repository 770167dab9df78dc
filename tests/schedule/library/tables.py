"""The tables beside this file, and the schedules that their names mean."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from pipeline.schedule.library import options_of, write
from pipeline.schedule.recomputation import place_recomputation
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Costs

NAMES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Eager1F1B": "eager_1f1b",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "ZB-H1": "zb_h1",
    "ZB-H2": "zb_h2",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBV": "zbv",
    "V-Half": "v_half",
    "V-Min": "v_min",
    "DualPipeV": "dualpipe_v",
}


def schedule_of(name: str, pp: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """The schedule of a table's row. `+early-recompute` puts an R before each backward.

    `+recompute` changes nothing: it recomputes inside the backward, and the row's I column holds the time of both.
    """
    base, _, variant = name.partition("+")
    options = {"stages_per_rank": stages_per_rank} if "stages_per_rank" in options_of(NAMES[base]) else {}
    schedule = write(NAMES[base], pp, microbatches, **options)
    assert schedule.stages == pp * stages_per_rank
    return place_recomputation(schedule, lambda *_: True) if variant == "early-recompute" else schedule


def table(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / name).open() as file:
        return list(csv.DictReader(file))


def row_schedule(row: dict[str, str]) -> Schedule:
    pp, stages_per_rank, microbatches = (int(row[key]) for key in ("ranks", "stages_per_rank", "microbatches"))
    return schedule_of(row["schedule"], pp, stages_per_rank, microbatches)


def row_costs(row: dict[str, str]) -> Costs:
    """F, I and W are the times of one stage."""
    forward, for_input, for_weight, transfer = (float(row[key]) for key in ("F", "I", "W", "transfer"))
    return Costs(forward, for_input + for_weight, for_input, for_weight, transfer=transfer)


def orders() -> Iterator[tuple[str, Schedule, list[str]]]:
    """Title, our schedule, and the row of each rank as words."""
    text = (Path(__file__).parent / "orders.txt").read_text()
    for block in text.split("## ")[1:]:
        title, *lines = block.strip().splitlines()
        name, *counts = title.partition("  [")[0].split()
        pp, stages_per_rank, microbatches = (int(count.partition("=")[2]) for count in counts)
        if stages_per_rank == 1:
            lines = [" ".join(f"{rank}{word}" for word in line.split()) for rank, line in enumerate(lines)]
        yield title, schedule_of(name, pp, stages_per_rank, microbatches), lines
