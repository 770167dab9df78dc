"""The columns of a comparison of runs: what each is called, what it says of a row, and what it is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.ratio import CONFIDENCE
from pipeline.report.rows import Row
from pipeline.report.words import ByteUnit, number
from pipeline.schedule.idle import CAUSES

UNKNOWN = "-"


@dataclass(frozen=True)
class Column:
    """One column. `value` is None where nothing is known, and such rows come last, however they are sorted."""

    heading: str
    text: Callable[[Row], str]
    value: Callable[[Row], float | None]


def column_groups(rows: Sequence[Row]) -> dict[str, tuple[Column, ...]]:
    """The columns by table. All rows are in one unit: that of the largest."""
    return {
        "Speed": _speed(rows),
        "Memory and bubbles": (*_memory(rows), *_bubbles()),
        "Loss": _losses(),
        "Idle time": _idle(rows),
    }


def _speed(rows: Sequence[Row]) -> tuple[Column, ...]:
    unit, scale = _time_unit(row.step_seconds for row in rows)
    return (
        _column("samples/s", lambda row: row.samples_per_second, number),
        Column("ratio", _ratio_text, lambda row: 1.0 if row.is_baseline else row.ratio.value if row.ratio else None),
        Column(
            f"interval, {100 * CONFIDENCE:.0f} %",
            lambda row: _range(row.ratio.interval if row.ratio else None, lambda value: f"{value:.3f}"),
            lambda row: row.ratio.interval[0] if row.ratio and row.ratio.interval else None,
        ),
        _column(f"step, {unit}", lambda row: row.step_seconds, lambda value: number(value * scale)),
        Column(
            f"quartiles, {unit}",
            lambda row: _range(row.step_quartiles, lambda value: number(value * scale)),
            lambda row: row.step_quartiles[1] - row.step_quartiles[0] if row.step_quartiles else None,
        ),
    )


def _memory(rows: Sequence[Row]) -> tuple[Column, ...]:
    columns = []
    for heading, peaks in (("peak memory", _memory_of), ("peak activations", _activations_of)):
        known = [peak for row in rows if (peak := most(peaks(row))) is not None]
        size = ByteUnit.of(max(known, default=1.0))
        columns.append(_bytes_column(f"{heading}, {size.name}", peaks, size))
    return tuple(columns)


def _bytes_column(heading: str, peaks: Callable[[Row], Sequence[float | None]], size: ByteUnit) -> Column:
    return _column(heading, lambda row: most(peaks(row)), lambda value: number(value / size.bytes))


def _memory_of(row: Row) -> Sequence[float | None]:
    return row.peak_memory


def _activations_of(row: Row) -> Sequence[float | None]:
    return row.peak_activations


def _losses() -> tuple[Column, ...]:
    return (
        _column("training loss", lambda row: row.training_loss, "{:.4f}".format),
        _column("validation loss", lambda row: row.validation_loss, "{:.4f}".format),
        _column("target loss", lambda row: row.target.loss if row.target else None, "{:.4f}".format),
        _column("steps to target", lambda row: row.steps_to_target, number),
        _column("seconds to target", lambda row: row.seconds_to_target, number),
    )


def _bubbles() -> tuple[Column, ...]:
    return (
        _pair("makespan bubble, %", lambda row: (row.bubble_measured, row.bubble_predicted), _percent),
        _pair("span bubble, %", lambda row: (row.bubble_span_measured, row.bubble_span_predicted), _percent),
    )


def _idle(rows: Sequence[Row]) -> tuple[Column, ...]:
    unit, scale = _time_unit(total(row.idle_measured) for row in rows)

    def said(value: float) -> str:
        return f"{value * scale:,.{1 if value * scale < 99.95 else 0}f}"

    def of(cause: str) -> Column:
        def values(row: Row) -> tuple[float | None, float | None]:
            return row.idle_measured.get(cause), row.idle_predicted.get(cause)

        return _pair(f"{cause}, {unit}", values, said)

    everything = _pair(f"idle, {unit}", lambda row: (total(row.idle_measured), total(row.idle_predicted)), said)
    return (everything, *map(of, CAUSES))


def most(values: Sequence[float | None]) -> float | None:
    """The largest that is known."""
    return max((value for value in values if value is not None), default=None)


def total(idle: Mapping[str, float]) -> float | None:
    """All idle seconds; None where none are known."""
    return sum(idle.values()) if idle else None


def _time_unit(seconds: Iterable[float | None]) -> tuple[str, float]:
    known = [value for value in seconds if value is not None]
    return ("ms", 1e3) if max(known, default=0.0) < 1 else ("s", 1.0)


def _column(heading: str, value: Callable[[Row], float | None], said: Callable[[float], str]) -> Column:
    def text(row: Row) -> str:
        known = value(row)
        return UNKNOWN if known is None else said(known)

    return Column(heading, text, value)


def _pair(
    heading: str, values: Callable[[Row], tuple[float | None, float | None]], said: Callable[[float], str]
) -> Column:
    """Measured and predicted."""

    def text(row: Row) -> str:
        both = values(row)
        if both == (None, None):
            return UNKNOWN
        return " / ".join(UNKNOWN if value is None else said(value) for value in both)

    return Column(heading, text, lambda row: values(row)[0])


def _range(ends: tuple[float, float] | None, said: Callable[[float], str]) -> str:
    return UNKNOWN if ends is None else f"{said(ends[0])} .. {said(ends[1])}"


def _ratio_text(row: Row) -> str:
    if row.is_baseline:
        return "baseline"
    return f"{row.ratio.value:.3f}" if row.ratio else UNKNOWN


def _percent(share: float) -> str:
    return f"{100 * share + 0.0:.1f}"
