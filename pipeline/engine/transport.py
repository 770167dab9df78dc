"""How a tensor gets to the next rank."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from pipeline.engine.boundary import TensorSpec
from pipeline.schedule.schedule import Channel


class PeerError(ConnectionError):
    """A message did not come: the peer died or is late."""


def reason(error: BaseException) -> str:
    """The first line of what a backend says, without the place in its source that it begins with."""
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", str(error).splitlines()[0] if str(error) else type(error).__name__)


class Receive(Protocol):
    """A receive that was posted."""

    def arrived(self) -> bool:
        """Whether `wait` returns without the peer doing anything more. A transport that can block may say True."""

    def wait(self) -> Tensor:
        """The message."""


class Transport(Protocol):
    """Moves messages between ranks. A channel is a FIFO: its n-th receive takes its n-th send."""

    def send(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        """Hand over `tensor`; returns at once. The caller must not write to it any more."""

    def receive(self, channel: Channel, message: Hashable, spec: TensorSpec) -> Receive:
        """Post a receive; returns at once."""

    def progress(self) -> None:
        """Move what can be moved without waiting; called between actions."""

    def finish_step(self) -> bool:
        """Whether every message sent so far is out of this rank's hands. A transport that can block waits until so."""


class InProcessTransport:
    """All ranks in one process: a queue a channel, a message is the tensor itself.

    Channels are first in, first out as a communicator is, so that a program whose receives are in another order than
    its sends fails here as it would between processes.
    """

    def __init__(self) -> None:
        self._sent: dict[Channel, deque[tuple[Hashable, Tensor]]] = {}
        self._posted: dict[Channel, deque[_LocalReceive]] = {}

    def send(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        """Match the channel's oldest open receive, or wait for one."""
        self._sent.setdefault(channel, deque()).append((message, tensor))
        self._match(channel)

    def receive(self, channel: Channel, message: Hashable, spec: TensorSpec) -> Receive:
        """Match the channel's oldest waiting send, or wait for one."""
        receive = _LocalReceive(message, spec)
        self._posted.setdefault(channel, deque()).append(receive)
        self._match(channel)
        return receive

    def progress(self) -> None:
        """Nothing waits for more than its match."""

    def finish_step(self) -> bool:
        """Nothing is under way: a message is handed over at once."""
        return True

    def _match(self, channel: Channel) -> None:
        sent, posted = self._sent.get(channel), self._posted.get(channel)
        while sent and posted:
            (message, tensor), receive = sent.popleft(), posted.popleft()
            receive.take(channel, message, tensor)


class _LocalReceive:
    def __init__(self, message: Hashable, spec: TensorSpec) -> None:
        self._message = message
        self._spec = spec
        self._tensor: Tensor | None = None

    def take(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        if message != self._message:
            raise RuntimeError(f"{channel}: {message} was sent where {self._message} is received: out of order")
        if TensorSpec.of(tensor) != self._spec:
            raise RuntimeError(f"{channel}: {message} is {TensorSpec.of(tensor)}, {self._spec} was expected")
        self._tensor = tensor

    def arrived(self) -> bool:
        return self._tensor is not None

    def wait(self) -> Tensor:
        assert self._tensor is not None, "the in-process driver waits for arrived()"
        tensor, self._tensor = self._tensor, None
        return tensor
