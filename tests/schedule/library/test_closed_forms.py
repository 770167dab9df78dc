"""Makespan, bubbles and peaks as formulas of ranks p, microbatches m and stages a rank v. Times are of one stage."""

from __future__ import annotations

import pytest

from pipeline.schedule.library import (
    dualpipe_v,
    eager_1f1b,
    interleaved_zb,
    looped_bfs,
    v_half,
    v_min,
    write,
    zb_h1,
    zb_h2,
    zbv,
)
from pipeline.schedule.simulate import Costs, simulate
from tests.schedule.library.tables import schedule_of

RANKS = range(1, 9)
EQUAL = (1.0, 1.0, 1.0)


def costs(forward: float, for_input: float, for_weight: float, transfer: float = 0.0) -> Costs:
    return Costs(forward, for_input + for_weight, for_input, for_weight, transfer=transfer)


@pytest.mark.parametrize("latency", [0.0, 0.1, 1.5])
@pytest.mark.parametrize("p", RANKS)
def test_eager_1f1b(p: int, latency: float) -> None:
    for m in range(1, 18):
        run = simulate(eager_1f1b(p, m), Costs(1.0, 2.0, transfer=latency))
        assert run.makespan == pytest.approx((m + p - 1) * 3 + 2 * (p - 1) * latency)
        assert run.peak_in_flight == tuple(min(m, 2 * (p - r) - 1) for r in range(p))


def test_eager_1f1b_hides_no_more_than_half_a_step() -> None:
    run = simulate(eager_1f1b(4, 12), Costs(1.0, 2.0, transfer=1.6))
    assert run.makespan > (12 + 4 - 1) * 3 + 2 * 3 * 1.6 + 0.1


@pytest.mark.parametrize(("latency", "least"), [(0.0, 0), (0.1, 1)])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", RANKS)
def test_looped_bfs(p: int, v: int, latency: float, least: int) -> None:
    # With a latency one more microbatch than ranks hides the hop from the last rank to the first.
    for m in range(p + least, 18):
        run = simulate(looped_bfs(p, m, v), Costs(1.0, 2.0, transfer=latency))
        assert run.makespan == pytest.approx((m * v + p - 1) * 3 + 2 * (p - 1) * latency)
        assert run.peak_in_flight == (m * v,) * p


@pytest.mark.parametrize("times", [EQUAL, (2.0, 3.0, 1.5), (1.0, 1.0, 0.0), (3.0, 2.0, 2.0)])
@pytest.mark.parametrize("p", RANKS)
def test_zb_h1(p: int, times: tuple[float, float, float]) -> None:
    forward, for_input, for_weight = times
    for m in range(p, 18):
        run = simulate(zb_h1(p, m), costs(*times))
        makespan = m * sum(times) + (p - 1) * (forward + for_input - for_weight)
        assert run.makespan == pytest.approx(makespan)
        assert run.makespan_bubble == pytest.approx(1 - m * sum(times) / makespan)
        assert run.peak_in_flight == (p,) * p
        assert run.peak_in_flight_released_at_input == tuple(p - r for r in range(p))


@pytest.mark.parametrize("p", RANKS)
def test_zero_bubble_on_a_line_with_latency(p: int) -> None:
    for m in range(2 * p, 26, 3):
        first = simulate(zb_h1(p, m), costs(*EQUAL, transfer=0.1))
        assert first.makespan == pytest.approx(3 * m + p - 1 + 4 * (p - 1) * 0.1)
        second = simulate(zb_h2(p, m), costs(*EQUAL, transfer=0.1))
        assert second.makespan == pytest.approx(3 * m + p - 1 + (p - 1) * 0.1)
        assert second.span_bubble == pytest.approx(1 - 3 * m / (3 * m + 2 * (p - 1) * 0.1))


@pytest.mark.parametrize("p", RANKS)
def test_zb_h2(p: int) -> None:
    for m in range(2 * p - 1, 26):
        run = simulate(zb_h2(p, m), costs(*EQUAL))
        assert run.makespan == pytest.approx(3 * m + p - 1)
        assert run.span_bubble == pytest.approx(0)
        assert run.peak_in_flight == (2 * p - 1,) * p
        assert run.peak_in_flight_released_at_input == tuple(2 * (p - r) - 1 for r in range(p))


@pytest.mark.parametrize("times", [EQUAL, (2.0, 3.0, 1.5)])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", RANKS)
def test_interleaved_zb(p: int, v: int, times: tuple[float, float, float]) -> None:
    forward, for_input, for_weight = times
    for m in (p, 2 * p, 3 * p):
        run = simulate(interleaved_zb(p, m, v), costs(*times))
        makespan = m * v * sum(times) + (p - 1) * (forward + for_input - for_weight)
        assert run.makespan == pytest.approx(makespan)
        assert run.peak_in_flight == (v * p,) * p


@pytest.mark.parametrize("p", RANKS)
def test_interleaved_zb_of_one_stage_is_zb_h1(p: int) -> None:
    for m in range(1, 18):
        assert interleaved_zb(p, m, 1).rows == zb_h1(p, m).rows


@pytest.mark.parametrize("p", RANKS)
def test_zbv(p: int) -> None:
    for m in range(2 * p - 1, 26):
        run = simulate(zbv(p, m), costs(*EQUAL))
        assert run.makespan == pytest.approx(6 * m + p - 1)
        assert run.span_bubble == pytest.approx(0)
        assert run.peak_in_flight == (2 * p,) * p


# Computed by another implementation of the paper's building blocks; the idle time doesn't depend on m.
@pytest.mark.parametrize(
    ("p", "half", "least"),
    [(1, 0, 0), (2, 1, 3), (3, 5, 5), (4, 5, 11), (5, 11, 15), (6, 11, 17), (8, 17, 27), (12, 29, 41)],
)
def test_idle_time_and_peak_of_building_blocks(p: int, half: int, least: int) -> None:
    for m in (2 * p, 2 * p + 1, 5 * p):
        run = simulate(v_half(p, m), costs(*EQUAL))
        assert run.makespan - 6 * m == pytest.approx(half)
        assert max(run.peak_in_flight) == 2 * ((p + 2) // 2)
        run = simulate(v_min(p, m), costs(*EQUAL))
        assert run.makespan - 6 * m == pytest.approx(least)
        assert max(run.peak_in_flight) == 2 * ((p + 4) // 3)


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v(p: int) -> None:
    for m in range(2 * p, 26):
        run = simulate(dualpipe_v(p, m), costs(*EQUAL))
        pair, backward, for_weight = 3, 2, 1
        assert run.makespan == pytest.approx(6 * m + (p - 1) * (pair + backward - 3 * for_weight))
        assert run.peak_in_flight == (2 * p + 1,) * p


def test_dualpipe_v_gains_from_a_real_overlap() -> None:
    # DeepSeek's picture, 4 ranks and 10 microbatches: 66 units, of which each rank idles 6.
    times = costs(*EQUAL)
    assert simulate(dualpipe_v(4, 10), times).makespan == pytest.approx(66)
    assert simulate(dualpipe_v(4, 10), Costs(overlap=2.0)).makespan < 66


@pytest.mark.parametrize(
    ("name", "released_at_input"),
    [
        ("zb_h1", (4, 3, 2, 1)),
        ("zb_h2", (7, 5, 3, 1)),
        ("interleaved_zb", (8, 7, 6, 5)),
        ("zbv", (8, 8, 8, 8)),
        ("v_half", (6, 6, 6, 6)),
        ("v_min", (4, 4, 4, 4)),
        ("dualpipe_v", (9, 9, 9, 9)),
    ],
)
def test_peak_released_at_the_input_gradient(name: str, released_at_input: tuple[int, ...]) -> None:
    assert simulate(write(name, 4, 8), costs(*EQUAL)).peak_in_flight_released_at_input == released_at_input


CASES = [(2, 4), (4, 8), (4, 12), (8, 16)]


# Per cent, of an independent simulator, F=I=W=1 a stage; rounded to four digits first, then to one decimal.
@pytest.mark.parametrize(
    ("name", "latency", "spans"),
    [
        ("GPipe", 0.1, (21.1, 28.6, 21.1, 31.8)),
        ("1F1B", 0.1, (22.1, 30.6, 23.7, 34.2)),
        ("Eager1F1B", 0.1, (21.1, 28.6, 21.1, 31.8)),
        ("1F1B+early-recompute", 0.1, (16.7, 23.1, 16.7, 25.9)),
        ("ZB-H1", 0.0, (7.7, 11.1, 7.7, 12.7)),
        ("ZB-H1", 0.1, (10.4, 14.9, 10.4, 17.0)),
        ("ZB-H2", 0.0, (0.0, 0.0, 0.0, 0.0)),
        ("ZB-H2", 0.1, (1.6, 2.4, 1.6, 2.8)),
        ("Interleaved1F1B", 0.1, (13.0, 17.8, 12.6, 20.0)),
        ("LoopedBFS", 0.1, (11.8, 16.7, 11.8, 18.9)),
        ("InterleavedZeroBubble", 0.0, (4.0, 5.9, 4.0, 6.8)),
        ("InterleavedZeroBubble", 0.1, (6.2, 8.8, 6.0, 9.9)),
        ("ZBV", 0.0, (0.0, 0.0, 0.0, 0.0)),
        ("ZBV", 0.1, (1.6, 3.2, 2.2, 4.0)),
        ("V-Half", 0.0, (4.0, 9.4, 6.5, 15.0)),
        ("V-Half", 0.1, (7.0, 13.0, 9.1, 18.5)),
        ("V-Min", 0.0, (11.1, 18.6, 13.2, 21.9)),
        ("V-Min", 0.1, (14.3, 23.8, 18.7, 28.1)),
        ("DualPipeV", 0.0, (7.7, 11.1, 7.7, 12.7)),
        ("DualPipeV", 0.1, (9.1, 13.7, 10.2, 16.1)),
    ],
)
def test_span_bubbles(name: str, latency: float, spans: tuple[float, ...]) -> None:
    base = name.partition("+")[0]
    stages_per_rank = 1 if base in ("GPipe", "1F1B", "Eager1F1B", "ZB-H1", "ZB-H2") else 2
    for (p, m), span in zip(CASES, spans, strict=True):
        run = simulate(schedule_of(name, p, stages_per_rank, m), costs(*EQUAL, transfer=latency))
        assert 100 * run.span_bubble == pytest.approx(span, abs=0.055)
