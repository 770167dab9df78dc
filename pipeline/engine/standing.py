"""Where every rank stands: a board in shared memory that says it also of a rank that is stopped or killed.

Each rank moves a marker of its own; whoever asks why a job doesn't go on reads them all.
"""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory


class Activity(enum.IntEnum):
    """What a rank is doing: running one of the two programs, or something between them."""

    STARTING = 0
    CONNECTING = 1
    LOADING = 2
    TRAINING = 3
    REDUCING = 4
    SUMMING_TIED = 5
    TAKING_NORM = 6
    UPDATING = 7
    LOGGING = 8
    EVALUATING = 9
    REPORTING = 10
    SAVING = 11
    DONE = 12

    @property
    def runs_program(self) -> bool:
        """Whether a rank is at a position of its row."""
        return self in (Activity.TRAINING, Activity.EVALUATING)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rank stands.

    `step` counts from 0 (of validation: the batch). `lap` counts the programs begun, of training and validation
    together, so that (lap, position) says who is further. `position` is the one in the program's row, its length once
    only the sends' end is awaited, and BEYOND when the program is over. `waiting`: for other ranks. `seconds`: since it
    got there. `steps_done`: finished training steps.
    """

    activity: Activity
    step: int
    lap: int
    position: int
    waiting: bool
    seconds: float
    steps_done: int


BEYOND = 2**31 - 1

# activity, step, lap, position, waiting, since (seconds of the monotonic clock), steps done
_RECORD = struct.Struct("=Biii?di")
_SIZE = 32
_TRIES = 100


class Marker:
    """One rank's marker on a board. Moving it is two dozen bytes written: cheap enough for every action."""

    def __init__(self, buffer: memoryview, rank: int) -> None:
        self._buffer = buffer
        self._offset = rank * _SIZE
        self._activity = Activity.STARTING
        self._step = 0
        self._lap = 0
        self._position = BEYOND
        self._steps_done = 0
        self._waits = False
        self.move(BEYOND)

    def begin(self, activity: Activity, step: int) -> None:
        """The program of `activity` begins."""
        self._activity, self._step = activity, step
        self._lap += 1
        self.move(0)

    def move(self, position: int, waiting: bool = False) -> None:
        """To an action of the program, where the rank may have to wait for a message."""
        self._position = position
        _RECORD.pack_into(
            self._buffer,
            self._offset,
            self._activity,
            self._step,
            self._lap,
            position,
            waiting,
            time.monotonic(),
            self._steps_done,
        )

    def enter(self, activity: Activity, step: int | None = None) -> None:
        """Something outside the programs; `step` if it belongs to another one than before."""
        self._activity = activity
        if step is not None:
            self._step = step
        self.move(BEYOND)

    def resume(self, steps: int) -> None:
        """So many training steps were done before this run."""
        self._steps_done = steps
        self.move(self._position)

    def finish_step(self) -> None:
        """One more training step is done."""
        self._steps_done += 1
        self.move(self._position)

    @contextmanager
    def waiting(self, activity: Activity | None = None) -> Iterator[None]:
        """The rank waits for others inside. An exception leaves it marked so: that is where it stood.

        `activity`: what it waits in, if that is another than before.
        """
        before, outside, self._waits = self._activity, self._waits, True
        self._activity = before if activity is None else activity
        self.move(self._position, waiting=True)
        yield
        self._activity, self._waits = before, outside
        self.move(self._position, waiting=outside)


class Board:
    """The markers of all ranks.

    Args:
        buffer: zeros, or another process's board.
    """

    def __init__(self, buffer: memoryview, ranks: int) -> None:
        self._buffer = buffer
        self._ranks = ranks

    @classmethod
    def in_memory(cls, ranks: int) -> Board:
        """For ranks of this process alone."""
        return cls(memoryview(bytearray(_SIZE * ranks)), ranks)

    def marker(self, rank: int) -> Marker:
        """A rank's marker, set to the start; only one writer each."""
        return Marker(self._buffer, rank)

    def standing(self, rank: int) -> Standing:
        """Where a rank stands now."""
        record = self._record(rank)
        activity, step, lap, position, waiting, since, steps_done = _RECORD.unpack(record)
        seconds = time.monotonic() - since if since else 0.0
        return Standing(Activity(activity), step, lap, position, waiting, seconds, steps_done)

    def standings(self) -> tuple[Standing, ...]:
        """Where all ranks stand now, by rank."""
        return tuple(self.standing(rank) for rank in range(self._ranks))

    def steps_done(self) -> int:
        """The training steps that every rank has finished."""
        return min(standing.steps_done for standing in self.standings())

    def _record(self, rank: int) -> bytes:
        """A marker may be moved while it is read: read until two readings agree."""
        place = slice(rank * _SIZE, rank * _SIZE + _RECORD.size)
        record = bytes(self._buffer[place])
        for _ in range(_TRIES):
            before, record = record, bytes(self._buffer[place])
            if before == record:
                break
        return record


class SharedBoard(Board):
    """A board that processes of one machine share by its name. Gone when its maker closes it or dies."""

    def __init__(self, ranks: int, name: str | None = None) -> None:
        # multiprocessing's resource tracker, which a launcher and its ranks share, unlinks what a killed one left
        self._memory = SharedMemory(name, create=name is None, size=_SIZE * ranks)
        buffer = self._memory.buf
        assert buffer is not None, "it was opened just now"
        super().__init__(buffer, ranks)
        if name is None:
            for rank in range(ranks):
                self.marker(rank)  # from now on they are starting

    @property
    def name(self) -> str:
        """What another process opens it by: `SharedBoard(ranks, name)`."""
        return self._memory.name

    def close(self) -> None:
        """Remove it. Its markers must not be moved any more."""
        self._memory.close()
        self._memory.unlink()
