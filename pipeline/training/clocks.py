"""One clock for all ranks: the times of other machines turned into rank 0's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.engine.clock_offset import ClockOffset, clock_name
from pipeline.training.group import Group


class SharedClock:
    """Turns this process's times into rank 0's. Every process must make the same calls.

    Processes of one machine share its monotonic clock; only those of other machines are asked the time.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        names = group.gather([clock_name()] * len(group.local))
        self._strangers = tuple(rank for rank, name in enumerate(names) if name != names[0])
        self._offset = ClockOffset()
        self.update()

    def update(self) -> None:
        """Compare the clocks, again after a while: times in between are turned as if they drifted evenly."""
        if self._strangers:
            comparison = self._group.compare_clocks(self._strangers, time.perf_counter)
            if comparison is not None:
                self._offset.add(comparison)

    def to_rank_0(self, times: Sequence[float]) -> Sequence[float]:
        """`times`, in seconds of this process's `time.perf_counter`, as rank 0's."""
        return list(map(self._offset.to_reference, times)) if self._strangers else times
