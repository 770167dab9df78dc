"""What signals do inside a block: raise where they would end the process, or nothing while ranks are being ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def _handlers(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Signal handlers for the block; only the main thread may set any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in old.items():
            # None: set by C code; it can't be put back from here.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def sigterm_raises() -> contextlib.AbstractContextManager[None]:
    """SIGTERM raises SystemExit(143) inside the block, so that it is ended like a Ctrl-C."""
    return _handlers(_raise_exit, signal.SIGTERM)


def deaf() -> None:
    """For the end of a rank whose launcher signals the others once one is gone: it kills who takes too long."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """For the ending of the ranks, which a second Ctrl-C must not leave half done."""
    return _handlers(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)
