"""Messages between processes through torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.buffers import BufferPool
from pipeline.engine.outbox import Outbox, Sending
from pipeline.engine.staging import HostStaging
from pipeline.engine.transport import PeerError, Receive, reason
from pipeline.schedule.schedule import Channel, Schedule, channel


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


def channels(schedules: Iterable[Schedule], replicas: int = 1) -> tuple[Channel, ...]:
    """Every channel that the programs use in each replica of the pipeline, in an order that all ranks agree on."""
    return tuple(
        sorted(
            {
                channel(action, tuple(replica * schedule.pp + rank for rank in schedule.stage_to_rank))
                for replica in range(replicas)
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
            if rank == used_channel.source:
                dist.send(token(backend), used_channel.destination, group=group)
            else:
                dist.recv(token(backend), used_channel.source, group=group)
    return groups


def token(backend: str) -> Tensor:
    """Something to send where the backend takes it from, so that a communicator connects."""
    return torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu")


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
        pool: what messages to a CPU are received into. A GPU's allocator is such a pool of its own, and knows until
            when a stream uses what is let go.
    """

    def __init__(
        self,
        groups: Mapping[Channel, dist.ProcessGroup],
        device: torch.device,
        backend: str,
        timeout: float,
        pool: BufferPool,
    ) -> None:
        self._groups = groups
        self._device = device
        self._pool = pool
        self._staging = HostStaging(device) if backend == "gloo" and device.type != "cpu" else None
        # NCCL's `wait` orders the stream and returns; given a time limit it would make the host wait. There the
        # communicator's own limit, which its watchdog keeps, is the only one
        self._limit = timedelta(seconds=timeout) if backend == "gloo" else None
        self._outbox = Outbox(blocking_wait=backend == "gloo")

    def send(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        """Start the send and return; the tensor is kept until it is out."""
        what = f"{message} to rank {channel.destination}"
        if self._staging is None:
            self._outbox.add(self._started(channel, tensor.contiguous()), what)
        else:
            payload, there = self._staging.to_host(channel, tensor)
            self._outbox.add_when(there, lambda: self._started(channel, payload), what)

    def receive(self, channel: Channel, message: Hashable, spec: TensorSpec) -> Receive:
        """Post the receive into a buffer of `spec` and return."""
        buffer = self._buffer(spec)
        work = dist.irecv(buffer, channel.source, group=self._groups[channel])
        assert work is not None, "this rank is on the channel"
        place = None if self._staging is None else partial(self._staging.to_device, channel)
        return _DistributedReceive(work, buffer, place, f"{message} from rank {channel.source}", self._limit)

    def progress(self) -> None:
        """The backend's threads see to it."""

    def finish_step(self) -> bool:
        """Wait until all sends are out.

        Raises:
            PeerError: a send failed.
        """
        self._outbox.drain()
        return True

    def _started(self, channel: Channel, payload: Tensor) -> Sending:
        work = dist.isend(payload, channel.destination, group=self._groups[channel])
        assert work is not None, "this rank is on the channel"
        return work, payload

    def _buffer(self, spec: TensorSpec) -> Tensor:
        if self._staging is not None:
            return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=True)
        if self._device.type == "cpu":
            return self._pool.take(spec)[0]
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)


class _DistributedReceive:
    def __init__(
        self,
        work: dist.Work,
        buffer: Tensor,
        place: Callable[[Tensor], Tensor] | None,
        what: str,
        limit: timedelta | None,
    ) -> None:
        self._work, self._place, self._what, self._limit = work, place, what, limit
        self._buffer: Tensor | None = buffer

    def arrived(self) -> bool:
        return True

    def wait(self) -> Tensor:
        try:
            self._work.wait() if self._limit is None else self._work.wait(self._limit)
        except RuntimeError as error:
            raise PeerError(f"{self._what} did not arrive in time or its sender is gone: {reason(error)}") from error
        assert self._buffer is not None, "taken once"
        buffer, self._buffer = self._buffer, None
        return buffer if self._place is None else self._place(buffer)
