"""What each rank does and holds, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from pipeline.report.idle_text import SHORT
from pipeline.report.words import ByteUnit, number
from pipeline.schedule.idle import CAUSES, Idle
from pipeline.schedule.simulate import Simulation

_RANKS_AT_MOST, _SHOWN_AT_EACH_END = 32, 8


def rank_table(simulation: Simulation, peak_bytes: Sequence[float] | None, *, wide: bool = True) -> Table:
    """A line a rank: its stages, busy and idle time, the idle time by cause, and its peaks: in flight and in bytes.

    Of many ranks the first and the last are shown; the last line sums the times and takes the highest of the peaks.
    Headings are cut short unless `wide`, so that 80 columns hold the table.
    """
    table = Table(box=SIMPLE, padding=(0, 1 if wide else 0), header_style="bold", show_footer=True, show_edge=False)
    size = ByteUnit.of(max(peak_bytes, default=0.0)) if peak_bytes is not None else None
    for heading, total in zip(_headings(size, wide), _totals(simulation, peak_bytes, size), strict=True):
        table.add_column(heading, total, justify="left" if heading == "stages" else "right", no_wrap=True)
    ranks = simulation.schedule.pp
    skipped = range(_SHOWN_AT_EACH_END, ranks - _SHOWN_AT_EACH_END) if ranks > _RANKS_AT_MOST else range(0)
    for rank in (rank for rank in range(ranks) if rank not in skipped):
        table.add_row(*_row(simulation, rank, peak_bytes, size))
        if skipped and rank == skipped[0] - 1:
            table.add_row("...", f"({len(skipped)} ranks)")
    return table


def _headings(size: ByteUnit | None, wide: bool) -> list[str]:
    causes = [cause if wide else SHORT.get(cause, cause) for cause in CAUSES]
    peaks = ["peak\nto W", "peak\nto I", *([f"peak\n{size.name}"] if size else [])]
    return ["rank", "stages", "busy", "idle:", *causes, *peaks]


def _row(simulation: Simulation, rank: int, peak_bytes: Sequence[float] | None, size: ByteUnit | None) -> list[str]:
    events, idle = simulation.events[rank], simulation.idle[rank]
    return [
        str(rank),
        _stages(simulation.schedule.stages_of(rank)),
        number(sum(event.end - event.start for event in events)),
        *_idle(idle),
        str(simulation.peak_in_flight[rank]),
        str(simulation.peak_in_flight_released_at_input[rank]),
        *([] if peak_bytes is None or size is None else [number(peak_bytes[rank] / size.bytes)]),
    ]


def _totals(simulation: Simulation, peak_bytes: Sequence[float] | None, size: ByteUnit | None) -> list[str]:
    busy = sum(event.end - event.start for row in simulation.events for event in row)
    whole = Idle(*(sum(getattr(idle, cause) for idle in simulation.idle) for cause in CAUSES))
    return [
        "all",
        "",
        number(busy),
        *_idle(whole),
        str(max(simulation.peak_in_flight)),
        str(max(simulation.peak_in_flight_released_at_input)),
        *([] if peak_bytes is None or size is None else [number(max(peak_bytes) / size.bytes)]),
    ]


def _idle(idle: Idle) -> list[str]:
    return [number(idle.total), *(number(getattr(idle, cause)) for cause in CAUSES)]


def _stages(stages: Sequence[int]) -> str:
    """All of a few, else the first two."""
    return ",".join(map(str, stages)) if len(stages) <= 3 else f"{stages[0]},{stages[1]}.."
