"""What ran when: the measured counterpart of the simulator's events, in the same form."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pipeline.schedule.actions import Action
from pipeline.schedule.simulate import Event

_TIES = 5
"""Attempts at reading both clocks at once, of which the closest counts."""


class Mark(Protocol):
    """A moment on a device; its time in seconds is known once the device got there."""

    def seconds(self) -> float:
        """Seconds on the host's monotonic clock, the same clock for every process of a machine."""


class Clock(Protocol):
    """Marks moments without making the host wait for the device."""

    def start_step(self) -> None:
        """A step begins."""

    def mark(self) -> Mark:
        """This moment in the order of the device's work."""

    def tie(self) -> None:
        """Set by the host's clock; waits for the device, so between steps only."""


class HostClock:
    """For a CPU, where work is done when the call returns."""

    def start_step(self) -> None:
        """Every step is on the one clock."""

    def mark(self) -> Mark:
        """Now."""
        return _HostMark(time.perf_counter())

    def tie(self) -> None:
        """It is the host's clock."""


class TimedEvent(Protocol):
    """What this file uses of `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device got there."""

    def synchronize(self) -> None:
        """Return when the device got there."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from here to there, in single precision; the device must have got to both."""


class CudaClock:
    """For a GPU: events in the stream, read after the step.

    The device is waited for only when its clock is tied to the host's. From there every step has an event of its own
    as origin, whose time is that of the last step's origin and what passed in between, summed in double precision:
    `elapsed_time` is in single precision and would lose microseconds over hours.

    Args:
        record: records a new event in the device's current stream.
        read: the host's clock, in seconds.
    """

    def __init__(self, record: Callable[[], TimedEvent], read: Callable[[], float] = time.perf_counter) -> None:
        self._record = record
        self._read = read
        self._origin = self._tied()

    def start_step(self) -> None:
        """Record the step's origin. The last step's is settled by now, or the chain would grow."""
        self._origin.settle()
        self._origin = _Origin(self._record(), self._origin)

    def mark(self) -> Mark:
        """An event in the current stream."""
        return _CudaMark(self._origin, self._record())

    def tie(self) -> None:
        """Take a new origin next to a reading of the host's clock: the two drift apart over a long run."""
        self._origin = self._tied()

    def _tied(self) -> _Origin:
        """On an idle device an event is reached between the readings around it: the closest two say when."""
        self._record().synchronize()
        ties = []
        for _ in range(_TIES):
            before = self._read()
            event = self._record()
            event.synchronize()
            after = self._read()
            ties.append((after - before, (before + after) / 2, event))
        _, seconds, event = min(ties, key=lambda tie: tie[0])
        return _Origin(event, None, seconds)


class _Origin:
    """The event that a step's times are counted from, and when that was on the host's clock."""

    __slots__ = ("_before", "_seconds", "event")

    def __init__(self, event: TimedEvent, before: _Origin | None, seconds: float = 0.0) -> None:
        self.event = event
        self._before = before
        self._seconds = seconds

    def settle(self) -> None:
        """Find the time now if that takes no waiting."""
        if self._before is not None and self.event.query():
            self.seconds()

    def seconds(self) -> float:
        """When it was; the device must have got there."""
        if self._before is not None:
            self._seconds = self._before.seconds() + float(self._before.event.elapsed_time(self.event)) / 1e3
            self._before = None
        return self._seconds


class _HostMark:
    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


class _CudaMark:
    __slots__ = ("_event", "_origin")

    def __init__(self, origin: _Origin, event: TimedEvent) -> None:
        self._origin, self._event = origin, event

    def seconds(self) -> float:
        self._event.synchronize()  # the stream's later events imply the origin
        return self._origin.seconds() + float(self._origin.event.elapsed_time(self._event)) / 1e3


class Trace:
    """The spans of one rank's compute actions in one step."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self._rank = rank
        self._spans: list[tuple[Action, Mark, Mark]] = []
        self._clock = clock
        clock.start_step()

    def mark(self) -> Mark:
        """This moment."""
        return self._clock.mark()

    def add(self, action: Action, start: Mark) -> None:
        """`action` ran from `start` to now."""
        self._spans.append((action, start, self._clock.mark()))

    def events(self) -> tuple[Event, ...]:
        """The spans with times in seconds. Waits for the device's last one, so not within a step."""
        return tuple(Event(self._rank, action, start.seconds(), end.seconds()) for action, start, end in self._spans)


class NoTrace(Trace):
    """A step of which nothing is noted."""

    def __init__(self) -> None:
        super().__init__(0, HostClock())

    def mark(self) -> Mark:
        """No time at all."""
        return _NO_MARK

    def add(self, action: Action, start: Mark) -> None:
        """Forget it."""


_NO_MARK = _HostMark(0.0)


def clock_for(device: torch.device) -> Clock:
    """The clock that times work on `device`. Waits for a GPU once, to tie its clock to the host's."""
    return CudaClock(lambda: _recorded(device)) if device.type == "cuda" else HostClock()


def _recorded(device: torch.device) -> TimedEvent:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
