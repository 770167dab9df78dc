"""Makespan, bubbles and peaks against closed forms, published tables and an independent simulator's figures.

`figures.csv`: F, I and W are of one stage, `bubble` is the makespan bubble, peaks count microbatch x stage to the end
of B or W; `source` says whose order was simulated or which formula evaluated. A `+recompute` row recomputes inside the
backward: its I holds both times, its peak counts what is saved. `published_spans.csv` holds span bubbles.
"""

from __future__ import annotations

from decimal import Decimal

import pytest

from pipeline.schedule.simulate import simulate
from tests.schedule.library.tables import row_costs, row_schedule, table


def label(row: dict[str, str]) -> str:
    return ",".join([*list(row.values())[:8], row["source"].split()[0].strip(":")])


def assert_printed(value: float, printed: str) -> None:
    """That `value` rounds to `printed`; a value halfway between two figures may go either way."""
    unit = Decimal(1).scaleb(Decimal(printed).as_tuple().exponent)
    assert abs(value - float(printed)) <= float(unit) / 2 * (1 + 1e-6), f"{value} is not {printed}"


@pytest.mark.parametrize("row", table("figures.csv"), ids=label)
def test_figures(row: dict[str, str]) -> None:
    run = simulate(row_schedule(row), row_costs(row))
    assert run.makespan == pytest.approx(float(row["makespan"]), rel=1e-9)
    assert_printed(run.makespan_bubble, row["bubble"])
    assert ";".join(map(str, run.peak_in_flight)) == row["peak_in_flight"]


@pytest.mark.parametrize("row", table("published_spans.csv"), ids=label)
def test_published_spans(row: dict[str, str]) -> None:
    schedule, costs = row_schedule(row), row_costs(row)
    run = simulate(schedule, costs)
    if row["schedule"] != "Interleaved1F1B":
        assert_printed(run.span_bubble, row["span_bubble"])
        return
    # The published figure takes 2(vp-1)-p transfers, the order really has 2(vp-1).
    busy = sum(costs.duration(event.action) for event in run.events[0])
    span = busy / (1 - run.span_bubble)
    assert span - busy == pytest.approx(idle_of_interleaved(row, transfers=2 * (schedule.stages - 1)))
    published = idle_of_interleaved(row, transfers=2 * (schedule.stages - 1) - schedule.pp)
    assert_printed(published / (busy + published), row["span_bubble"])


def idle_of_interleaved(row: dict[str, str], transfers: int) -> float:
    step = sum(float(row[key]) for key in ("F", "I", "W"))
    return (int(row["ranks"]) - 1) * step + transfers * float(row["transfer"])
