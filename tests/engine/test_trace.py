from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from pipeline.engine.trace import CudaClock, HostClock, NoTrace, Trace, clock_for
from pipeline.schedule.actions import Action, ActionType

F, B = Action(0, ActionType.F, 5), Action(0, ActionType.B, 5)


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

    def tie(self) -> None:
        raise AssertionError("a step ties no clock")


def test_spans_become_events():
    clock = FakeClock()
    trace = Trace(3, clock)
    for action in (F, B):
        start = trace.mark()
        trace.add(action, start)
    assert [(event.rank, str(event.action), event.start, event.end) for event in trace.events()] == [
        (3, "0F5", 1.0, 2.5),
        (3, "0B5", 4.0, 8.0),
    ]
    assert clock.steps == 1


def test_a_trace_of_nothing():
    trace = NoTrace()
    trace.add(F, trace.mark())
    assert trace.events() == ()


def test_the_hosts_clock_runs_forward():
    clock = HostClock()
    clock.start_step()
    clock.tie()
    marks = [clock.mark().seconds() for _ in range(3)]
    assert marks == sorted(marks)


def test_a_devices_clock():
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    if torch.cuda.is_available():
        assert isinstance(clock_for(torch.device("cuda")), CudaClock)


@dataclass
class Device:
    """A host and a device whose clocks differ: the device works off its queue, and the host waits if it asks to.

    `now` and `busy_until` are true seconds. The host's clock reads `now`; the device's counts milliseconds of its own,
    which are longer by `drift`, and says differences of them in single precision.
    """

    now: float = 1000.0
    busy_until: float = 0.0
    drift: float = 0.0
    delay: float = 10e-6
    waits: int = 0
    recorded: int = 0

    def read(self) -> float:
        self.now += 1e-7
        return self.now

    def record(self) -> FakeEvent:
        self.recorded += 1
        self.now += 1e-6
        self.busy_until = max(self.busy_until, self.now + self.delay)
        return FakeEvent(self, self.busy_until)

    def work(self, seconds: float) -> None:
        """Queue work; the host goes on."""
        self.busy_until = max(self.busy_until, self.now + self.delay) + seconds


@dataclass(frozen=True)
class FakeEvent:
    device: Device
    time: float

    def query(self) -> bool:
        return self.device.now >= self.time

    def synchronize(self) -> None:
        if not self.query():
            self.device.waits += 1
            self.device.now = self.time + self.device.delay

    def elapsed_time(self, end_event: FakeEvent) -> float:
        for event in (self, end_event):
            assert event.query(), "the device has not got there"
        milliseconds = 1e3 * (end_event.time - self.time) * (1 - self.device.drift)
        return torch.tensor(milliseconds, dtype=torch.float32).item()


def run_step(clock: CudaClock, device: Device, durations: tuple[float, ...]) -> tuple[Trace, list[tuple[float, float]]]:
    """A step whose actions are queued without waiting, and its true times."""
    trace, truth = Trace(0, clock), []
    for seconds in durations:
        start = trace.mark()
        begin = device.busy_until
        device.work(seconds)
        trace.add(F, start)
        truth.append((begin, device.busy_until))
    return trace, truth


def test_a_gpus_times_are_the_hosts_and_no_step_waits():
    device = Device()
    clock = CudaClock(device.record, device.read)
    tied = device.waits
    for _ in range(50):
        trace, truth = run_step(clock, device, (0.02, 0.3, 0.001))
        assert device.waits == tied, "nothing waits while actions are queued"
        events = trace.events()
        assert [(event.start, event.end) for event in events] == [pytest.approx(pair, abs=2e-5) for pair in truth]
        tied = device.waits


def test_a_long_run_loses_no_precision():
    """Twenty thousand seconds from one origin would be counted in steps of two milliseconds."""
    device = Device()
    clock = CudaClock(device.record, device.read)
    first, errors, single = FakeEvent(device, device.now), [], []
    for step in range(2000):
        trace, truth = run_step(clock, device, (10.0 + 1e-5 * step,))
        end = truth[0][1]
        errors.append(abs(trace.events()[0].end - end))
        single.append(abs(first.time + first.elapsed_time(FakeEvent(device, end)) / 1e3 - end))
    assert max(errors) < 1e-4
    assert max(single) > 5e-4


def test_steps_that_nobody_reads_leave_no_chain():
    device = Device()
    clock = CudaClock(device.record, device.read)
    for _ in range(2000):  # far beyond what recursion could settle at once
        run_step(clock, device, (0.01,))
        device.now = device.busy_until + 1.0
    trace, truth = run_step(clock, device, (0.01,))
    assert trace.events()[0].start == pytest.approx(truth[0][0], abs=2e-4)


def test_tying_again_takes_out_a_drift():
    device = Device(drift=1e-4)
    clock = CudaClock(device.record, device.read)
    run_step(clock, device, (100.0,))
    late, truth = run_step(clock, device, (0.01,))
    assert abs(late.events()[0].start - truth[0][0]) > 9e-3
    clock.tie()
    tied, truth = run_step(clock, device, (0.01,))
    assert tied.events()[0].start == pytest.approx(truth[0][0], abs=2e-5)


def test_the_closest_of_several_readings_ties_the_clocks():
    """One attempt that the host slept through must not shift the run."""
    device = Device()
    naps = iter([0.5, 0.5, 0.5, 0.0] + [0.5] * 8)

    def read() -> float:
        device.now += next(naps)
        return device.now

    clock = CudaClock(device.record, read)
    trace, truth = run_step(clock, device, (0.01,))
    assert trace.events()[0].start == pytest.approx(truth[0][0], abs=3e-5)
