"""Messages between processes through torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.transport import Receive
from pipeline.schedule.schedule import Channel, Schedule, channel


class PeerError(ConnectionError):
    """A message did not come: the peer died or is late."""


def reason(error: BaseException) -> str:
    """The first line of what a backend says, without the place in its source that it begins with."""
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", str(error).splitlines()[0] if str(error) else type(error).__name__)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say what the ranks were doing together when a peer was lost.

    Raises:
        PeerError: in place of a backend's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"a peer was lost while {what}: {reason(error)}") from error


def channels(schedules: Iterable[Schedule]) -> tuple[Channel, ...]:
    """Every channel that the programs use, in an order that all ranks agree on."""
    return tuple(
        sorted(
            {
                channel(action, schedule.stage_to_rank)
                for schedule in schedules
                for row in schedule.rows
                for action in row
                if action.type.is_communication
            }
        )
    )


def open_channels(used: Iterable[Channel], rank: int, backend: str, timeout: float) -> dict[Channel, dist.ProcessGroup]:
    """A communicator for each channel; every rank must call this with the same channels.

    One each, because a communicator is first in, first out and NCCL ignores tags: activations and gradients between
    the same two ranks, or two directions of them, would otherwise meet the wrong receive. Each is used once here, in
    one order, so that no connection is set up in the middle of a step.

    Args:
        timeout: seconds that a message may take.
    """
    groups: dict[Channel, dist.ProcessGroup] = {}
    for used_channel in used:
        members = sorted({used_channel.source, used_channel.destination})
        group = new_group(members, backend, timeout)
        if group is not None:
            groups[used_channel] = group
            device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
            token = torch.zeros(1, device=device)
            if rank == used_channel.source:
                dist.send(token, used_channel.destination, group=group)
            else:
                dist.recv(token, used_channel.source, group=group)
    return groups


def new_group(members: Sequence[int], backend: str, timeout: float) -> dist.ProcessGroup | None:
    """A communicator of these ranks, None on the others; every rank must call this, in the same order.

    Args:
        timeout: seconds that an operation may take.
    """
    group = dist.new_group(list(members), backend=backend, timeout=timedelta(seconds=timeout))
    return group if isinstance(group, dist.ProcessGroup) else None


class DistributedTransport:
    """One rank's end of every channel it is on.

    Args:
        groups: from `open_channels`.
        device: where messages are wanted.
        backend: "nccl" moves GPU tensors; "gloo" moves CPU tensors and stages those of a GPU through the host.
        timeout: seconds to wait for a message before it counts as lost.
    """

    def __init__(
        self, groups: Mapping[Channel, dist.ProcessGroup], device: torch.device, backend: str, timeout: float
    ) -> None:
        self._groups = groups
        self._device = device
        self._staged = backend == "gloo" and device.type != "cpu"
        # NCCL's `wait` orders the stream and returns; given a time limit it would make the host wait. There the
        # communicator's own limit, which its watchdog keeps, is the only one
        self._limit = timedelta(seconds=timeout) if backend == "gloo" else None
        self._outbox = _Outbox(blocking_wait=backend == "gloo")

    def send(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        """Start the send and return; the tensor is kept until it is out."""
        payload = (tensor.cpu() if self._staged else tensor).contiguous()
        work = dist.isend(payload, channel.destination, group=self._groups[channel])
        assert work is not None, "this rank is on the channel"
        self._outbox.add(work, payload, f"{message} to rank {channel.destination}")

    def receive(self, channel: Channel, message: Hashable, spec: TensorSpec) -> Receive:
        """Post the receive into a buffer of `spec` and return."""
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if self._staged else self._device)
        work = dist.irecv(buffer, channel.source, group=self._groups[channel])
        assert work is not None, "this rank is on the channel"
        return _DistributedReceive(work, buffer, self._device, f"{message} from rank {channel.source}", self._limit)

    def finish_step(self) -> None:
        """Wait until all sends are out.

        Raises:
            PeerError: a send failed.
        """
        self._outbox.drain()


class _DistributedReceive:
    def __init__(
        self, work: dist.Work, buffer: Tensor, device: torch.device, what: str, limit: timedelta | None
    ) -> None:
        self._work, self._buffer, self._device, self._what, self._limit = work, buffer, device, what, limit

    def arrived(self) -> bool:
        return True

    def wait(self) -> Tensor:
        try:
            self._work.wait() if self._limit is None else self._work.wait(self._limit)
        except RuntimeError as error:
            raise PeerError(f"{self._what} did not arrive in time or its sender is gone: {reason(error)}") from error
        return self._buffer.to(self._device)


class _Outbox:
    """Keeps what is being sent alive until it is out, and not longer.

    gloo says that a send is done only to somebody who waits for it, so a thread waits, in the order of the sends;
    NCCL's `wait` orders the stream and doesn't make the host wait.
    """

    def __init__(self, *, blocking_wait: bool) -> None:
        self._blocking_wait = blocking_wait
        self._pending: queue.SimpleQueue[tuple[dist.Work, Tensor, str] | threading.Event] = queue.SimpleQueue()
        self._works: list[tuple[dist.Work, Tensor, str]] = []
        self._error: PeerError | None = None
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, payload: Tensor, what: str) -> None:
        if not self._blocking_wait:
            self._works = [entry for entry in self._works if not entry[0].is_completed()]
            self._works.append((work, payload, what))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_in_order, name="outbox", daemon=True)
            self._thread.start()
        self._pending.put((work, payload, what))

    def drain(self) -> None:
        if self._thread is not None:
            drained = threading.Event()
            self._pending.put(drained)
            drained.wait()
        for work, _, _ in self._works:
            work.wait()
        self._works.clear()
        if self._error is not None:
            raise self._error

    def _wait_in_order(self) -> None:
        while True:
            entry = self._pending.get()
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            try:
                entry[0].wait()
            except RuntimeError as error:
                self._error = self._error or PeerError(f"{entry[2]} was not taken: {reason(error)}")
            del entry  # or the last message would stay alive until the next
