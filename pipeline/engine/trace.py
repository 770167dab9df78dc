"""What ran when: the measured counterpart of the simulator's events, in the same form."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from pipeline.schedule.actions import Action
from pipeline.schedule.simulate import Event


class Mark(Protocol):
    """A moment on a device; its time in seconds is known once the device got there."""

    def seconds(self) -> float:
        """Seconds on the host's monotonic clock, the same clock for every process of a machine."""


class Clock(Protocol):
    """Marks moments without making the host wait for the device."""

    def start_step(self) -> None:
        """Tie the device's time to the host's."""

    def mark(self) -> Mark:
        """This moment in the order of the device's work."""


class HostClock:
    """For a CPU, where work is done when the call returns."""

    def start_step(self) -> None:
        """The host's clock needs no tie to itself."""

    def mark(self) -> Mark:
        """Now."""
        return _HostMark(time.perf_counter())


class CudaClock:
    """For a GPU: events in the stream, read after the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin_seconds = 0.0

    def start_step(self) -> None:
        """Record an event on an idle device next to a reading of the host's clock."""
        torch.cuda.synchronize(self._device)
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(self._device))
        self._origin_seconds = time.perf_counter()

    def mark(self) -> Mark:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(self._origin, self._origin_seconds, event)


class _HostMark:
    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


class _CudaMark:
    __slots__ = ("_event", "_origin", "_origin_seconds")

    def __init__(self, origin: torch.cuda.Event, origin_seconds: float, event: torch.cuda.Event) -> None:
        self._origin, self._origin_seconds, self._event = origin, origin_seconds, event

    def seconds(self) -> float:
        self._event.synchronize()
        return self._origin_seconds + float(self._origin.elapsed_time(self._event)) / 1e3


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
        """The spans with times in seconds; waits for the device's last one."""
        return tuple(Event(self._rank, action, start.seconds(), end.seconds()) for action, start, end in self._spans)


def clock_for(device: torch.device) -> Clock:
    """The clock that times work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
