from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pipeline.engine.clock_offset import ClockOffset, Comparison, Exchange, clock_name, compare, exchange


@dataclass
class Machines:
    """Two machines: the other's clock is ahead and drifts; a message takes some time, now and then much longer."""

    ahead: float
    drift: float
    now: float = 500.0
    source: random.Random = field(default_factory=lambda: random.Random(1))

    def delay(self) -> float:
        return 5e-5 + self.source.expovariate(1e5) + (0.02 if self.source.random() < 0.2 else 0.0)

    def read_own(self) -> float:
        return self.now

    def other(self, moment: float) -> float:
        return moment + self.ahead + self.drift * moment

    def ask(self) -> float:
        self.now += self.delay()
        said = self.other(self.now)
        self.now += self.delay()
        return said

    def compare(self) -> Comparison:
        return compare([exchange(self.ask, self.read_own) for _ in range(8)])


@pytest.mark.parametrize("ahead", [0.0, 1234.5, -77.0])
@pytest.mark.parametrize("drift", [0.0, 2e-5, -1e-4])
def test_another_clocks_times_become_the_own(ahead, drift):
    machines, offset = Machines(ahead, drift), ClockOffset()
    offset.add(machines.compare())
    moments = [machines.now + 10.0 * step for step in range(1, 60)]
    machines.now = moments[-1] + 5.0
    offset.add(machines.compare())
    # half of a round trip that nothing held up is 0.06 ms
    for moment in moments:
        assert offset.to_reference(machines.other(moment)) == pytest.approx(moment, abs=1e-4)


def test_a_drift_counts_between_the_two_comparisons_around():
    offset = ClockOffset()
    for comparison in (Comparison(100.0, 1.0), Comparison(200.0, 3.0), Comparison(300.0, 3.0)):
        offset.add(comparison)
    times = [50.0, 100.0, 150.0, 200.0, 250.0, 300.0, 400.0]
    assert [offset.to_reference(time) for time in times] == [49.0, 99.0, 148.0, 197.0, 247.0, 297.0, 397.0]


def test_a_clock_that_was_never_compared_is_the_own():
    assert ClockOffset().to_reference(12.5) == 12.5


def test_the_fastest_answer_counts():
    slow, fast = Exchange(0.0, 100.9, 1.0), Exchange(2.0, 102.05, 2.1)
    assert compare([slow, fast, slow]) == Comparison(102.05, pytest.approx(100.0))


def test_a_process_knows_its_clock():
    assert clock_name() == clock_name() != ""
