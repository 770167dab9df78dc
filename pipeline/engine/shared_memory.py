"""Messages between the ranks of one host: the sender writes into the receiver's buffer.

A receive posts a free buffer to the sender; a send copies into the oldest posted buffer and rings.

    receiver   take a buffer ---- post ---->  sender
               consumer waits <--- ring -----  copy into the buffer
"""

from __future__ import annotations

import select
import time
from collections.abc import Hashable, Iterable, Mapping

from torch import Tensor

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.buffers import BufferPool
from pipeline.engine.links import Incoming, Outgoing, mark, shared_block
from pipeline.engine.transport import PeerError, Receive
from pipeline.schedule.schedule import Channel

_PATIENCE = 50e-6
"""Seconds that a receiver looks again and again before it sleeps: waking up takes about as long."""


class SharedMemoryTransport:
    """One rank's ends of all its channels to ranks of the same host.

    Args:
        incoming, outgoing: from `open_links`.
        size: bytes of the largest message that this rank receives.
        count: boundary buffers that it holds at most (`pipeline.schedule.buffers.peak_buffers`).
        timeout: seconds to wait for a message before it counts as lost.
        blocking: whether a receive may wait; not so where several ranks take turns in one process.
        crowded: more ranks than processor cores: a rank that waits had better sleep at once.
    """

    def __init__(
        self,
        incoming: Mapping[Channel, Incoming],
        outgoing: Mapping[Channel, Outgoing],
        *,
        size: int,
        count: int,
        timeout: float,
        blocking: bool = True,
        crowded: bool = False,
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.pool = BufferPool(size, count, shared_block)
        self._timeout = timeout
        self.blocking = blocking
        self._patience = 0.0 if crowded else _PATIENCE
        self._backlog: dict[Channel, Outgoing] = {}

    def send(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        """Copy `tensor` to the receiver if a buffer is posted; else keep it until one is, and return."""
        link = self._outgoing[channel]
        link.waiting.append((message, tensor))
        self._flush(channel, link)

    def receive(self, channel: Channel, message: Hashable, spec: TensorSpec) -> Receive:
        """Post a buffer to the sender."""
        link = self._incoming[channel]
        buffer, slot = self.pool.take(spec)
        receive = _SharedReceive(self, channel, link, message, spec, buffer)
        try:
            link.post(receive, slot, spec.nbytes)
        except BrokenPipeError as error:
            raise _gone(f"{message} from rank {channel.source} will not arrive", "sender") from error
        return receive

    def progress(self) -> None:
        """Send what had to wait for a buffer, as far as there are buffers now."""
        for channel, link in list(self._backlog.items()):
            self._flush(channel, link)

    def finish_step(self) -> bool:
        """Whether all sends are out; waits for them if it may.

        Raises:
            PeerError: a receiver is gone or late.
        """
        self.progress()
        deadline = time.monotonic() + self._timeout
        while self._backlog and self.blocking:
            if not self._sleep([], deadline):
                channel, link = next(iter(self._backlog.items()))
                raise PeerError(f"{link.waiting[0][0]} was not taken by rank {channel.destination} in time")
            self.progress()
        return not self._backlog

    def wait(self, receive: _SharedReceive, link: Incoming) -> None:
        """Return when `receive` is there. Meanwhile what had to wait is sent.

        Raises:
            TimeoutError, BrokenPipeError: it will not come.
        """
        began = time.monotonic()
        deadline, eager = began + self._timeout, began + self._patience
        while not receive.there:
            if link.read():
                continue
            self.progress()
            if time.monotonic() > eager and not self._sleep([link.rings], deadline):
                raise TimeoutError(f"nothing in {self._timeout:g} s")

    def _flush(self, channel: Channel, link: Outgoing) -> None:
        try:
            link.flush()
        except BrokenPipeError as error:
            message = link.waiting[0][0] if link.waiting else "a message"
            raise _gone(f"{message} cannot be sent to rank {channel.destination}", "receiver") from error
        if link.waiting:
            self._backlog[channel] = link
        else:
            self._backlog.pop(channel, None)

    def _sleep(self, descriptors: Iterable[int], deadline: float) -> bool:
        """Until one of `descriptors` or a post for something that waits can be read; False after the deadline."""
        poll = select.poll()
        for descriptor in (*descriptors, *(link.posts for link in self._backlog.values())):
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1e3))


class _SharedReceive:
    def __init__(
        self,
        transport: SharedMemoryTransport,
        channel: Channel,
        link: Incoming,
        message: Hashable,
        spec: TensorSpec,
        buffer: Tensor,
    ) -> None:
        self._transport, self._channel, self._link = transport, channel, link
        self._message, self._spec = message, spec
        self._buffer: Tensor | None = buffer
        self.there = False
        self._mismatch = ""

    def ring(self, found: int, size: int) -> None:
        """The sender has written, or found that what it sends doesn't fit."""
        self.there = True
        if found != mark(self._message, self._spec):
            self._mismatch = f"{size} bytes" if size != self._spec.nbytes else "another message or dtype of that size"

    def arrived(self) -> bool:
        if not (self.there or self._transport.blocking):
            self._transport.progress()
            self._link.read()
        return self.there or self._transport.blocking

    def wait(self) -> Tensor:
        what = f"{self._message} from rank {self._channel.source}"
        try:
            self._transport.wait(self, self._link)
        except TimeoutError as error:
            raise PeerError(f"{what} did not arrive in time: {error}") from error
        except BrokenPipeError as error:
            raise _gone(f"{what} did not arrive", "sender") from error
        if self._mismatch:
            raise RuntimeError(f"{what} is {self._mismatch}, {self._spec} ({self._spec.nbytes} bytes) was expected")
        assert self._buffer is not None, "taken once"
        buffer, self._buffer = self._buffer, None
        return buffer


def _gone(what: str, who: str) -> PeerError:
    return PeerError(f"{what}: its {who} is gone")
