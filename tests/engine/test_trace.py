from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pipeline.engine.trace import CudaClock, HostClock, Trace, clock_for
from pipeline.schedule.actions import Action, ActionType


@dataclass(frozen=True)
class FakeMark:
    time: float

    def seconds(self) -> float:
        return self.time


@dataclass
class FakeClock:
    steps: int = 0
    times: list[float] = field(default_factory=lambda: [1.0, 2.5, 4.0, 8.0])

    def start_step(self) -> None:
        self.steps += 1

    def mark(self) -> FakeMark:
        return FakeMark(self.times.pop(0))


def test_spans_become_events():
    clock = FakeClock()
    trace = Trace(3, clock)
    for kind in (ActionType.F, ActionType.B):
        start = trace.mark()
        trace.add(Action(0, kind, 5), start)
    assert [(event.rank, str(event.action), event.start, event.end) for event in trace.events()] == [
        (3, "0F5", 1.0, 2.5),
        (3, "0B5", 4.0, 8.0),
    ]
    assert clock.steps == 1


def test_the_hosts_clock_runs_forward():
    clock = HostClock()
    clock.start_step()
    marks = [clock.mark().seconds() for _ in range(3)]
    assert marks == sorted(marks)


def test_a_devices_clock():
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    if torch.cuda.is_available():
        assert isinstance(clock_for(torch.device("cuda")), CudaClock)
