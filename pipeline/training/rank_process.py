"""The child's side of a local launch: what a rank's process sets up, runs and reports. The parent's is launch.py."""

from __future__ import annotations

import enum
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from pipeline.training.failures import Cause, RunFailure
from pipeline.training.rank_logging import SHOWN_BY_LAUNCHER, log_as_rank

Send = Callable[[object], None]
Target = Callable[[Any, Send], None]

_log = logging.getLogger(__name__)
# What gloo, NCCL and the store say when the other side is gone or late.
_LOST_PEER_PHRASES = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was closed",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "timed out",
    "timeout",
    "failed to recv",
    "connectfullmesh failed",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
)


class Kind(bytes, enum.Enum):
    """First byte of what a rank writes into its pipe."""

    MESSAGE = b"M"
    FAILURE = b"F"
    DONE = b"D"


@dataclass(frozen=True)
class Assignment:
    """What a rank must know to start: `work` is the pickled (target, payload), `environment` the parent's."""

    rank: int
    ranks: int
    port: int
    environment: Mapping[str, str]
    log_file: Path | None
    work: bytes


@dataclass(frozen=True)
class Report:
    """A rank's account of its exception: `reason` one line or few, `details` the traceback.

    `failure` is the exception itself if it says all by itself.
    """

    reason: str
    details: str
    cause: Cause
    failure: RunFailure | None


def run(assignment: Assignment, pipe: connection.Connection) -> None:
    """Entry of the child process: runs the target, reports how it ended."""
    _live_and_die_with_parent()
    try:
        _set_environment(assignment)
        log_as_rank(assignment.rank, assignment.log_file)
        _limit_threads(assignment.ranks)
        target, payload = pickle.loads(assignment.work)
        target(payload, _sender(pipe))
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _fail(error, pipe)
    pipe.send_bytes(Kind.DONE.value)


def lost_peer(error: BaseException | None) -> bool:
    """Whether an exception, or one it was raised from, only says that another rank is gone or late."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, (ConnectionError, TimeoutError)):
            return True
        if isinstance(error, RuntimeError) and any(phrase in text for phrase in _LOST_PEER_PHRASES):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _live_and_die_with_parent() -> None:
    # A group of its own, so that the parent's ending takes along what the rank itself has started.
    os.setpgid(0, 0)
    # Ctrl-C is the parent's to answer; and a terminal set to `tostop` must not stop a rank that prints.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()
    threading.Thread(target=_watch_parent, name="watch-parent", daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    assert parent is not None
    # PR_SET_PDEATHSIG would watch the fork server instead. Calls that block release the GIL: this thread gets to run.
    connection.wait([parent.sentinel])
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _set_environment(assignment: Assignment) -> None:
    os.environ.clear()  # it is the fork server's, from when that started
    os.environ.update(assignment.environment)
    os.environ.update(
        RANK=str(assignment.rank),
        LOCAL_RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.ranks),
        LOCAL_WORLD_SIZE=str(assignment.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(assignment.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )


def _limit_threads(ranks: int) -> None:
    import torch  # not at the top: the watchdog must stand before the longest import

    torch.set_num_threads(threads_per_rank(ranks))


def threads_per_rank(ranks: int) -> int:
    """CPU threads for each of `ranks` processes of this machine: OMP_NUM_THREADS, or the cores shared."""
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, int(chosen) if chosen.isdigit() else len(os.sched_getaffinity(0)) // ranks)


def _sender(pipe: connection.Connection) -> Send:
    lock = threading.Lock()

    def send(message: object) -> None:
        # Plain pickle: multiprocessing's own would share a tensor's memory, which dies with the rank.
        try:
            data = pickle.dumps(message)
        except Exception as error:
            raise ValueError(
                f"a message ({type(message).__name__}) cannot be pickled ({error}): send a dataclass of plain values"
            ) from error
        with lock:
            pipe.send_bytes(Kind.MESSAGE.value + data)

    return send


def account(error: BaseException) -> Report:
    """What there is to say of an exception, without the frame that caught it."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    details = "".join(traceback.format_exception(type(error), error, frames))
    # our own errors speak for themselves: the path of their class says nothing to a user
    reason = "".join(traceback.format_exception_only(error)).strip().removeprefix(f"{type(error).__module__}.")
    cause = Cause.LOST_PEER if lost_peer(error) else Cause.RAISED
    return Report(reason, details, cause, error if isinstance(error, RunFailure) else None)


def _fail(error: BaseException, pipe: connection.Connection) -> None:
    report = account(error)
    pipe.send_bytes(Kind.FAILURE.value + pickle.dumps(report))
    _log.error("failed\n%s", report.details, extra={SHOWN_BY_LAUNCHER: True})
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: unwinding could wait for a thread or for a peer.
    os._exit(1)
