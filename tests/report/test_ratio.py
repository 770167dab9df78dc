"""Ratios and their intervals against tables and worked cases."""

from __future__ import annotations

import math
import random

import pytest

from pipeline.report.ratio import geometric_mean, ratio, student_distribution, student_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float):
    assert student_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-4)
    assert student_distribution(expected, freedom) == pytest.approx(0.975, abs=1e-5)
    assert student_distribution(0.0, freedom) == 0.5


def test_a_paired_interval_is_that_of_the_quotients():
    """Both slow down alike; their log quotients are 0.1 and 0.2."""
    found = ratio([math.exp(1.1), math.exp(5.2)], [math.exp(1.0), math.exp(5.0)], paired=True)
    assert found.value == pytest.approx(math.exp(0.15))
    reach = 12.7062 * 0.05  # t of one degree of freedom, times the standard error of 0.1 and 0.2
    assert found.interval == pytest.approx((math.exp(0.15 - reach), math.exp(0.15 + reach)), rel=1e-4)


def test_an_unpaired_interval_is_welchs():
    """Variances 1 and 4 of three each: standard error sqrt(5/3), (5/3)^2 / (1/18 + 16/18) = 2.94 degrees, so 2."""
    ours, theirs = [math.exp(value) for value in (1, 2, 3)], [math.exp(value) for value in (-2, 0, 2)]
    found = ratio(ours, theirs, paired=False)
    reach = 4.3027 * math.sqrt(5 / 3)
    assert found.interval == pytest.approx((math.exp(2 - reach), math.exp(2 + reach)), rel=1e-3)


def test_one_repeat_has_no_interval():
    assert ratio([2.0], [1.0], paired=True).interval is None
    assert ratio([2.0, 2.0], [1.0], paired=False).interval is None
    assert ratio([2.0, 2.0], [1.0, 1.0], paired=False).interval == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("paired", [True, False])
def test_nineteen_of_twenty_intervals_hold_the_truth(paired: bool):
    numbers, held, trials = random.Random(1), 0, 1000
    for _ in range(trials):
        drift = [numbers.gauss(0, 0.2 if paired else 0.0) for _ in range(3)]
        ours, theirs = ([math.exp(mean + d + numbers.gauss(0, 0.05)) for d in drift] for mean in (0.1, 0.0))
        interval = ratio(ours, theirs, paired=paired).interval
        assert interval is not None
        held += interval[0] <= math.exp(0.1) <= interval[1]
    # rounding the degrees of freedom down makes Welch's wider than need be, never narrower
    assert 0.93 * trials < held < (0.97 if paired else 0.99) * trials


@pytest.mark.parametrize(
    ("ours", "theirs", "paired"), [([], [1.0], False), ([1.0], [], False), ([1.0], [1.0, 2.0], True)]
)
def test_what_cannot_be_compared_is_refused(ours: list[float], theirs: list[float], paired: bool):
    with pytest.raises(ValueError, match="give one or more of each"):
        ratio(ours, theirs, paired=paired)


def test_a_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
