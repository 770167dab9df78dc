"""The parent's side of a local launch: start the ranks, listen to them, and end all of them when one fails.

parent ---- fork server (imports torch once) ---- rank 0, rank 1, ...
   |  <----------- a pipe from each rank: messages, then done or a report ----'
   |  ------------ TCPStore on a port the kernel picked: how the ranks find each other
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

# torch.distributed has this name too, but mypy finds no type by that way.
from torch._C._distributed_c10d import TCPStore

from pipeline.training import rank_process
from pipeline.training.failures import Cause, RankFailure, RunFailure
from pipeline.training.inheritance import inheritable_start_method, inherited
from pipeline.training.rank_process import Assignment, Kind, Report, Target
from pipeline.training.signals import sigterm_raises, undisturbed

_log = logging.getLogger(__name__)
_starting = threading.Lock()
_TERMINATE_SECONDS = 1.0  # between asking a rank to end and killing it
_KILL_SECONDS = 5.0
_EXIT_SECONDS = 10.0  # for a rank to leave after its work is done


@dataclass(frozen=True)
class _Member:
    rank: int
    process: ForkServerProcess
    listener: threading.Thread

    def signal(self, number: int) -> None:
        pid = self.process.pid
        assert pid is not None
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # all gone, or the rank hasn't made its group yet
            if self.listener.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


_Events = queue.SimpleQueue[tuple[int, bytes | int]]  # (rank, what it wrote, or its exit code)


def launch(
    target: Target,
    payload: object,
    ranks: int,
    *,
    on_message: Callable[[Any], None],
    on_start: Callable[[tuple[int, ...]], None] | None = None,
    on_failure: Callable[[], None] | None = None,
    log_file: Path | None = None,
) -> None:
    """Run `target(payload, send)` in `ranks` local processes that can `rendezvous.join`; return when all ended well.

    `send(object)` delivers to `on_message` here, in order for each rank. `on_start` gets the process ids by rank,
    `on_failure` is called once, at the first sign of a failure, while the other ranks are still there. Ranks log into
    `log_file`. Target and payload are pickled: functions and classes by the name they are imported by.
    Raises RankFailure when a rank raises, exits or is killed, after ending the others, a RunFailure as the rank raised
    it; ValueError for bad arguments.
    On KeyboardInterrupt, SIGTERM (SystemExit 143) or any other way out no rank is left.
    """
    if ranks < 1:
        raise ValueError(f"ranks ({ranks}) must be at least 1: use 1 or more")
    work = _pickled(target, payload)
    with sigterm_raises():
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = _Job(on_message, on_failure)
        try:
            job.start([_assignment(rank, ranks, store.port, log_file, work) for rank in range(ranks)])
            if on_start is not None:
                on_start(job.pids)
            job.supervise()
        finally:
            with undisturbed():
                job.end()
        job.conclude()


class _Job:
    """The ranks of one launch and what is known of them."""

    def __init__(self, on_message: Callable[[Any], None], on_failure: Callable[[], None] | None) -> None:
        self._on_message = on_message
        self._on_failure = on_failure
        self._events: _Events = queue.SimpleQueue()
        self._members: list[_Member] = []
        self._running: set[int] = set()
        self._done: set[int] = set()
        self._failures: list[tuple[Cause, RunFailure]] = []
        self._failed_ranks: set[int] = set()
        self._deadline: float | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(member.process.pid or 0 for member in self._members)

    def start(self, assignments: Sequence[Assignment]) -> None:
        context = multiprocessing.get_context("forkserver")
        with _starting, inheritable_start_method():
            _start_fork_server(context)
            for assignment in assignments:
                self._members.append(_start_rank(context, assignment, self._events))
                self._running.add(assignment.rank)

    def supervise(self) -> None:
        """Deliver messages until every rank has ended, or one has failed and the time for a likelier cause is over."""
        while self._running:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self._handle(*self._events.get(timeout=left))

    def conclude(self) -> None:
        """Deliver what the ranks had still sent, then raise the root cause, if any."""
        failed = list(self._failures)
        while not self._events.empty():
            rank, event = self._events.get()
            if isinstance(event, bytes) and event[:1] == Kind.MESSAGE.value:
                self._handle(rank, event)
        if failed:
            _, cause = min(failed, key=lambda failure: failure[0])  # the first of the likeliest
            raise cause

    def end(self) -> None:
        """End every rank that is left, and what it has started: ask, wait, kill. Bounded in time."""
        if not self._running and not self._failures:
            return
        if not self._failures and len(self._done) == len(self._members):
            _log.warning("ranks %s were done but didn't exit: ended", sorted(self._running))
        for number, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for member in self._members:
                member.signal(number)
            deadline = time.monotonic() + seconds
            for member in self._members:
                member.listener.join(max(0.0, deadline - time.monotonic()))

    def _handle(self, rank: int, event: bytes | int) -> None:
        if isinstance(event, int):
            self._ended(rank, event)
        elif event[:1] == Kind.MESSAGE.value:
            self._on_message(_unpickled(rank, event))
        elif event[:1] == Kind.DONE.value:
            self._done.add(rank)
            if len(self._done) == len(self._members):
                self._wait_at_most(_EXIT_SECONDS)
        else:
            report: Report = pickle.loads(event[1:])
            self._failed(rank, report.cause, report.failure or _raised(rank, report))

    def _ended(self, rank: int, code: int) -> None:
        self._running.discard(rank)
        if rank not in self._failed_ranks and (code != 0 or rank not in self._done):
            self._failed(rank, Cause.DIED, RankFailure(rank, _describe_exit(code), cause=Cause.DIED))

    def _failed(self, rank: int, cause: Cause, failure: RunFailure) -> None:
        if self._on_failure is not None and not self._failures:
            self._on_failure()
        self._failures.append((cause, failure))
        self._failed_ranks.add(rank)
        self._wait_at_most(cause.patience)

    def _wait_at_most(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)


def _raised(rank: int, report: Report) -> RankFailure:
    return RankFailure(rank, f"raised {report.reason}", report.details, report.cause)


def _pickled(target: Target, payload: object) -> bytes:
    try:
        return pickle.dumps((target, payload))
    except Exception as error:
        raise ValueError(
            f"the ranks' work cannot be pickled ({error}): use functions and classes defined at the top of a module"
        ) from error


def _unpickled(rank: int, event: bytes) -> object:
    try:
        return pickle.loads(event[1:])
    except Exception as error:
        raise RankFailure(rank, f"sent a message that cannot be read here: {type(error).__name__}: {error}") from error


def _assignment(rank: int, ranks: int, port: int, log_file: Path | None, work: bytes) -> Assignment:
    environment = dict(os.environ)
    if sys.platform == "linux":
        # All ranks are here, and gloo fails where the host's own name doesn't resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Assignment(rank, ranks, port, environment, log_file and log_file.resolve(), work)


def _start_rank(context: ForkServerContext, assignment: Assignment, events: _Events) -> _Member:
    reader, writer = context.Pipe(duplex=False)
    name = f"rank {assignment.rank}"
    process = context.Process(target=rank_process.run, args=(assignment, writer), name=name, daemon=False)
    process.start()
    # The exit code comes through a pipe that must be read once, by `_listen`; multiprocessing would poll it whenever
    # any process is started, and wait for the ranks at exit.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    writer.close()  # the rank's copy is the only one now: its end is the pipe's end
    arguments = (assignment.rank, process, reader, events)
    listener = threading.Thread(target=_listen, args=arguments, name=f"listen to {name}", daemon=True)
    listener.start()
    return _Member(assignment.rank, process, listener)


def _listen(rank: int, process: ForkServerProcess, reader: connection.Connection, events: _Events) -> None:
    """Empty a rank's pipe as it fills, so that the rank never waits for `on_message`; the exit code comes last."""
    # The pipe alone isn't enough: a process the rank has started may hold it open.
    while reader in connection.wait([reader, process.sentinel]):
        try:
            events.put((rank, reader.recv_bytes()))
        except (EOFError, OSError):
            break
    process.join()
    reader.close()
    code = process.exitcode
    assert code is not None
    events.put((rank, code))


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code} before its work was done"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (perhaps by the kernel, for lack of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _start_fork_server(context: ForkServerContext) -> None:
    """Start the server that ranks are forked from, unless this process has one; later launches find torch imported."""
    from multiprocessing import forkserver

    context.set_forkserver_preload(_modules_to_preload())
    resource_tracker.ensure_running()  # first, for it unblocks SIGINT
    with inherited(PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        # Blocked in the server and its children: a Ctrl-C while they import would print tracebacks.
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _modules_to_preload() -> list[str]:
    """torch, and what the main module took its names from, for every rank imports the main module again."""
    names = {"torch.distributed", rank_process.__name__}
    for value in vars(sys.modules["__main__"]).values():
        origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(origin, str) and origin in sys.modules and origin not in ("__main__", "__mp_main__"):
            names.add(origin)
    return sorted(names)
