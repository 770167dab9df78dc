"""Keeps what is being sent alive until it is out, and not longer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from pipeline.engine.transport import PeerError, reason

Sending = tuple[dist.Work, Tensor]
"""A send that was started, and what it sends."""


@dataclass(frozen=True)
class _Later:
    """A send that starts when its message is in the host's memory."""

    wait: Callable[[], None]
    start: Callable[[], Sending]
    what: str


@dataclass(frozen=True)
class _Started:
    sending: Sending
    what: str


_Entry = _Later | _Started | threading.Event


class Outbox:
    """All sends of a rank.

    gloo says that a send is done only to somebody who waits for it, so a thread waits, in the order of the sends;
    NCCL's `wait` orders the stream and doesn't make the host wait.

    Args:
        blocking_wait: whether waiting for a send blocks (gloo).
    """

    def __init__(self, *, blocking_wait: bool) -> None:
        self._blocking_wait = blocking_wait
        self._works: list[Sending] = []
        self._error: PeerError | None = None
        # two threads: a copy to the host ends by itself, a send when its peer takes it; none may hold up the other
        self._starter = _Thread("outbox starter", self._start)
        self._waiter = _Thread("outbox", self._wait)

    def add(self, sending: Sending, what: str) -> None:
        """Keep a send that was started; `what` names it and its peer."""
        if self._blocking_wait:
            self._waiter.put(_Started(sending, what))
            return
        self._works = [other for other in self._works if not other[0].is_completed()]
        self._works.append(sending)

    def add_when(self, wait: Callable[[], None], start: Callable[[], Sending], what: str) -> None:
        """Start a send once `wait` has returned, after those that were added before."""
        self._starter.put(_Later(wait, start, what))

    def drain(self) -> None:
        """Return when everything is out.

        Raises:
            PeerError: a send failed.
        """
        for thread in (self._starter, self._waiter):
            thread.drain()
        for work, _ in self._works:
            work.wait()
        self._works.clear()
        if self._error is not None:
            raise self._error

    def _start(self, entry: _Entry) -> None:
        assert isinstance(entry, _Later)
        try:
            entry.wait()
            self._waiter.put(_Started(entry.start(), entry.what))
        except RuntimeError as error:
            self._error = self._error or PeerError(f"{entry.what} was not sent: {reason(error)}")

    def _wait(self, entry: _Entry) -> None:
        assert isinstance(entry, _Started)
        try:
            entry.sending[0].wait()
        except RuntimeError as error:
            self._error = self._error or PeerError(f"{entry.what} was not taken: {reason(error)}")


class _Thread:
    """Works off its entries in order; started by the first."""

    def __init__(self, name: str, work: Callable[[_Entry], None]) -> None:
        self._name = name
        self._work = work
        self._entries: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, entry: _Entry) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._entries.put(entry)

    def drain(self) -> None:
        if self._thread is not None:
            drained = threading.Event()
            self._entries.put(drained)
            drained.wait()

    def _run(self) -> None:
        while True:
            entry = self._entries.get()
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                self._work(entry)
            del entry  # or the last message would stay alive until the next
