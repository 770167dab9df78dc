"""A comparison of runs as text: tables for a console, Markdown, and CSV with every digit."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from pipeline.report.columns import column_groups, total
from pipeline.report.idle_text import SHORT
from pipeline.report.ratio import CONFIDENCE
from pipeline.report.rows import Row
from pipeline.report.target_loss import SMOOTHED
from pipeline.report.words import counted
from pipeline.schedule.idle import CAUSES

_NAME = 16  # characters of a name that are never cut


def console_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Four narrow tables of the same rows."""
    for title, columns in column_groups(rows).items():
        table = Table(
            box=SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", title=title
        )
        table.title_justify, table.title_style = "left", "bold"
        table.add_column("#", justify="right")
        longest = max((len(word) for row in rows for word in row.name.split()), default=1)
        table.add_column("run", overflow="fold", min_width=min(_NAME, longest))
        for column in columns:
            widest = max((len(_tight(column.text(row))) for row in rows), default=1)
            heading = re.sub(r",? (?!%)", "\n", _short(column.heading))
            table.add_column(heading, justify="right", overflow="fold", min_width=widest)
        for row in rows:
            cells = (Text(_tight(column.text(row))) for column in columns)
            table.add_row(str(row.number), Text(row.name), *cells, style="" if row.finished else "dim")
        yield table


def _tight(text: str) -> str:
    return text.replace(" / ", "/")


def _short(heading: str) -> str:
    cause, comma, unit = heading.partition(",")
    return SHORT.get(cause, cause) + comma + unit


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the tables' numbers are, and which runs are not finished."""
    repeats = max((len(row.finished) for row in rows), default=0)
    ratios = [row.ratio for row in rows if row.ratio]
    said = ["ratio: samples/s over the baseline's"]
    if any(ratio.interval for ratio in ratios):
        paired = any(ratio.paired for ratio in ratios)
        said[0] += (
            f", geometric means of up to {counted(repeats, 'repeat')}, with its {100 * CONFIDENCE:.0f} % interval "
            f"(Student's t of the logarithms{', repeats in pairs' if paired else ''})"
        )
    targets = {row.target for row in rows if row.target}
    kinds = sorted({target.kind for target in targets})
    if targets:
        smoothing = f", the mean of the last {SMOOTHED} logged" if "training" in kinds else ""
        said.append(f"target: {' or '.join(kinds)} loss{smoothing}; seconds from the run's start")
    said.append("bubbles and idle time: measured / predicted; idle time of all ranks in a typical step")
    for row in rows:
        if row.reason:
            said.append(f"{row.number} ({row.name}) {row.reason}")
    return said


def markdown(rows: Sequence[Row], problems: Sequence[str] = ()) -> str:
    """The same tables and remarks, and what could not be read."""
    parts = ["# Comparison\n"]
    for title, columns in column_groups(rows).items():
        lines = [["#", "run", *(column.heading for column in columns)], ["---:", "---", *["---:"] * len(columns)]]
        lines += [[str(row.number), _cell(row.name), *(column.text(row) for column in columns)] for row in rows]
        parts.append(f"## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    parts.append("".join(f"- {_cell(line)}\n" for line in (*remarks(rows), *problems)))
    return "\n".join(parts)


def _cell(text: str) -> str:
    """As it stands, in Markdown."""
    escaped = "".join(f"\\{letter}" if letter in "\\`*_{}[]<>#|~" else letter for letter in text)
    return " ".join(escaped.split())


def csv_text(rows: Sequence[Row]) -> str:
    """A line a row: seconds, bytes, shares of 1; empty where nothing is known."""
    settings = list(dict.fromkeys(name for row in rows for name in row.settings))
    ranks = max((max(len(row.peak_memory), len(row.peak_activations)) for row in rows), default=0)
    records = [_record(row, settings, ranks) for row in rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def _record(row: Row, settings: Sequence[str], ranks: int) -> dict[str, object]:
    low, high = row.ratio.interval if row.ratio and row.ratio.interval else (None, None)
    first, third = row.step_quartiles or (None, None)
    return {
        "number": row.number,
        "name": row.name,
        **{name: row.settings.get(name) for name in settings},
        "status": row.status,
        "reason": row.reason,
        "finished_repeats": len(row.finished),
        "samples_per_second": row.samples_per_second,
        "is_baseline": row.is_baseline,
        "ratio": row.ratio.value if row.ratio else None,
        "ratio_low": low,
        "ratio_high": high,
        "ratio_paired": row.ratio.paired if row.ratio else None,
        "step_seconds": row.step_seconds,
        "step_seconds_first_quartile": first,
        "step_seconds_third_quartile": third,
        **_bubbles_and_idle(row),
        **{f"peak_memory_bytes_rank_{rank}": _at(row.peak_memory, rank) for rank in range(ranks)},
        **{f"peak_activation_bytes_rank_{rank}": _at(row.peak_activations, rank) for rank in range(ranks)},
        "training_loss": row.training_loss,
        "validation_loss": row.validation_loss,
        "target_loss": row.target.loss if row.target else None,
        "target_kind": row.target.kind if row.target else None,
        "steps_to_target": row.steps_to_target,
        "seconds_to_target": row.seconds_to_target,
        "directories": " ".join(str(run.directory) for run in row.runs),
    }


def _bubbles_and_idle(row: Row) -> dict[str, object]:
    values: dict[str, object] = {
        "bubble_measured": row.bubble_measured,
        "bubble_predicted": row.bubble_predicted,
        "bubble_span_measured": row.bubble_span_measured,
        "bubble_span_predicted": row.bubble_span_predicted,
    }
    for kind, idle in (("measured", row.idle_measured), ("predicted", row.idle_predicted)):
        values[f"idle_{kind}"] = total(idle)
        values |= {f"idle_{cause}_{kind}": idle.get(cause) for cause in CAUSES}
    return values


def _at(values: Sequence[float | None], rank: int) -> float | None:
    return values[rank] if rank < len(values) else None
