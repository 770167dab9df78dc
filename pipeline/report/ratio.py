"""How much faster: the ratio of two sets of repeated runs, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A ratio of geometric means, and the interval that covers the true one; None where there are too few repeats."""

    value: float
    interval: tuple[float, float] | None = None
    paired: bool = False


def ratio(ours: Sequence[float], theirs: Sequence[float], *, paired: bool) -> Ratio:
    """Ours over theirs, positive numbers both.

    The interval is Student's t of the logarithms: rates are positive, what disturbs them multiplies, and the quotient
    of geometric means is the same whichever is the baseline (Fleming and Wallace, CACM 29(3), 1986; t intervals of few
    repeats: Georges, Buytaert and Eeckhout, OOPSLA 2007).

    Args:
        paired: the n-th of one ran beside the n-th of the other. What slowed both down then cancels: the interval is
            that of their n log quotients, n - 1 degrees of freedom. Else Welch's, variances may differ (Biometrika 34,
            1947), with Satterthwaite's degrees of freedom rounded down.

    Raises:
        ValueError: one of them is empty, or paired ones are of different lengths.
    """
    if not ours or not theirs or (paired and len(ours) != len(theirs)):
        raise ValueError(f"no ratio of {len(ours)} to {len(theirs)} runs: give one or more of each, in pairs as many")
    left, right = [math.log(value) for value in ours], [math.log(value) for value in theirs]
    middle = fmean(left) - fmean(right)
    if min(len(left), len(right)) < 2:
        return Ratio(math.exp(middle), paired=paired)
    error, freedom = _paired_error(left, right) if paired else _welch_error(left, right)
    reach = student_quantile(0.5 + CONFIDENCE / 2, freedom) * error
    return Ratio(math.exp(middle), (math.exp(middle - reach), math.exp(middle + reach)), paired)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, one or more."""
    return math.exp(fmean(map(math.log, values)))


def _paired_error(left: Sequence[float], right: Sequence[float]) -> tuple[float, int]:
    """The standard error of the mean difference, and its degrees of freedom."""
    differences = [a - b for a, b in zip(left, right, strict=True)]
    return math.sqrt(variance(differences) / len(differences)), len(differences) - 1


def _welch_error(left: Sequence[float], right: Sequence[float]) -> tuple[float, int]:
    shares = [(variance(values) / len(values), len(values) - 1) for values in (left, right)]
    total = sum(share for share, _ in shares)
    spread = sum(share**2 / freedom for share, freedom in shares)
    fewest = min(freedom for _, freedom in shares)
    return math.sqrt(total), max(fewest, math.floor(total**2 / spread)) if spread > 0 else fewest


def student_quantile(probability: float, freedom: int) -> float:
    """Below which a variable of Student's distribution stays with a probability of 0.5 to 1, by bisection."""
    low, high = 0.0, 1.0
    while student_distribution(high, freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_distribution(middle, freedom) < probability else (low, middle)
    return high


def student_distribution(t: float, freedom: int) -> float:
    """The probability to stay below t >= 0: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd, total = freedom % 2, 0.0
    term = math.cos(angle) ** odd
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + within / 2
