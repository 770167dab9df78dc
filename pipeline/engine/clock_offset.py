"""How far another machine's clock is ahead, by asking it the time."""

from __future__ import annotations

import platform
from bisect import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Exchange(NamedTuple):
    """One question and its answer: when it was asked and answered by the own clock, and the time that was said."""

    asked: float
    said: float
    answered: float


class Comparison(NamedTuple):
    """At `moment`, by a rank's own clock, that clock was `ahead` seconds ahead of rank 0's."""

    moment: float
    ahead: float


def compare(exchanges: Sequence[Exchange]) -> Comparison:
    """What the fastest of several exchanges says: the answer was given halfway, give or take half the round trip.

    Source: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989).
    """
    best = min(exchanges, key=lambda exchange: exchange.answered - exchange.asked)
    return Comparison(best.said, best.said - (best.asked + best.answered) / 2)


class ClockOffset:
    """Turns one rank's times into rank 0's: between two comparisons a clock drifts evenly."""

    def __init__(self) -> None:
        self._comparisons: list[Comparison] = []

    def add(self, comparison: Comparison) -> None:
        """Comparisons come in the order of their moments."""
        self._comparisons.append(comparison)

    def to_reference(self, seconds: float) -> float:
        """`seconds` of the own clock by rank 0's. Before the first and after the last comparison that one holds."""
        if not self._comparisons:
            return seconds
        after = bisect(self._comparisons, seconds, key=lambda comparison: comparison.moment)
        if after == 0 or after == len(self._comparisons):
            return seconds - self._comparisons[min(after, len(self._comparisons) - 1)].ahead
        first, second = self._comparisons[after - 1], self._comparisons[after]
        share = (seconds - first.moment) / (second.moment - first.moment)
        return seconds - first.ahead - share * (second.ahead - first.ahead)


def exchange(ask: Callable[[], float], read: Callable[[], float]) -> Exchange:
    """Ask once; `ask` returns what the other clock says."""
    asked = read()
    said = ask()
    return Exchange(asked, said, read())


def clock_name() -> str:
    """Equal for two processes that read one monotonic clock: on Linux, a kernel's boot and its time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return platform.node()
