"""What joins two processes of one host: a pipe each way for every channel, and memory that both can open.

Memory and pipes have no names: the peer opens them under /proc, so that nothing is left behind however a job ends. A
pipe wakes its reader in one step, and ends when the process at its other end does.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from mmap import mmap
from typing import Protocol
from zlib import crc32

from torch import Tensor

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.buffers import Block, Slot, tensor_on
from pipeline.schedule.schedule import Channel

_POST = struct.Struct("<iQQ")  # the block's name, the buffer's offset in it, the bytes expected
_RING = struct.Struct("<IQ")  # the message's mark, its bytes


class Store(Protocol):
    """What processes leave each other word in, such as torch's TCPStore."""

    def set(self, key: str, value: str, /) -> None:
        """Leave word."""

    def get(self, key: str, /) -> bytes:
        """Read it, waiting until it is there."""


class Posted(Protocol):
    """A receive whose buffer the sender may write to."""

    def ring(self, mark: int, size: int) -> None:
        """The sender has written `size` bytes, or found that what it sends isn't as large as the buffer."""


def host() -> str:
    """The same for processes that can open each other's memory, and for no others; "" where none can."""
    if sys.platform != "linux":
        return ""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def open_links(
    used: Iterable[Channel], rank: int, store: Store
) -> tuple[dict[Channel, Incoming], dict[Channel, Outgoing]]:
    """This rank's ends of its channels; every rank must call this with the same channels, each used once a store.

    Raises:
        OSError: a pipe of this rank's, or one to it, can't be opened.
    """
    incoming = {channel: Incoming() for channel in used if channel.destination == rank}
    for channel, receiver in incoming.items():
        store.set(f"address of {channel}", receiver.address)
    outgoing, errors = {}, []
    for channel in (channel for channel in used if channel.source == rank):
        try:
            outgoing[channel] = Outgoing(store.get(f"address of {channel}").decode())
        except OSError as error:
            errors.append(str(error))
        store.set(f"opened {channel}", errors[-1] if errors else "")
    for channel, receiver in incoming.items():
        errors += filter(None, [store.get(f"opened {channel}").decode()])
        receiver.connected()
    if errors:
        close_links(incoming, outgoing)
        raise OSError(errors[0])
    return incoming, outgoing


def close_links(incoming: Mapping[Channel, Incoming], outgoing: Mapping[Channel, Outgoing]) -> None:
    """End all pipes: the other ranks find this one gone."""
    for receiver in incoming.values():
        receiver.close()
    for sender in outgoing.values():
        sender.close()


class Incoming:
    """The receiver's end of a channel."""

    def __init__(self) -> None:
        self.rings, self._ring_end = os.pipe()
        self._posts_end, self._posts = os.pipe()
        os.set_blocking(self.rings, False)
        self._posted: deque[Posted] = deque()

    @property
    def address(self) -> str:
        """Where the sender finds its end."""
        return f"{os.getpid()} {self._ring_end} {self._posts_end}"

    def connected(self) -> None:
        """Let go of the sender's ends, so that this end notices when the sender is gone."""
        os.close(self._ring_end)
        os.close(self._posts_end)

    def post(self, receive: Posted, slot: Slot, size: int) -> None:
        """Offer the sender a buffer for its next message, of `size` bytes.

        Raises:
            BrokenPipeError: the sender is gone.
        """
        self._posted.append(receive)
        os.write(self._posts, _POST.pack(slot.block.name, slot.offset, size))

    def close(self) -> None:
        """End the pipes: the sender will find the receiver gone."""
        os.close(self.rings)
        os.close(self._posts)

    def read(self) -> bool:
        """Take in the rings that came; False if there were none.

        Raises:
            BrokenPipeError: the sender is gone.
        """
        try:
            data = os.read(self.rings, 64 * _RING.size)
        except BlockingIOError:
            return False
        if not data:
            raise BrokenPipeError
        for found, size in _RING.iter_unpack(data):
            self._posted.popleft().ring(found, size)
        return True


class Outgoing:
    """The sender's end of a channel: `address` is what the receiver's end says."""

    def __init__(self, address: str) -> None:
        self._pid, ring, posts = address.split()
        self._ring = os.open(f"/proc/{self._pid}/fd/{ring}", os.O_WRONLY)
        self.posts = os.open(f"/proc/{self._pid}/fd/{posts}", os.O_RDONLY | os.O_NONBLOCK)
        self._unused: deque[tuple[int, int, int]] = deque()
        self._blocks: dict[int, mmap] = {}
        self._targets: dict[tuple[int, int, TensorSpec], Tensor] = {}
        self.waiting: deque[tuple[Hashable, Tensor]] = deque()

    def flush(self) -> None:
        """Send what waits, as far as buffers are posted.

        Raises:
            BrokenPipeError: the receiver is gone.
        """
        while self.waiting and (self._unused or self._read()):
            message, tensor = self.waiting.popleft()
            name, offset, expected = self._unused.popleft()
            spec = TensorSpec.of(tensor)
            if spec.nbytes == expected:  # else the receiver will say what is wrong
                self._target(name, offset, spec).copy_(tensor)
            os.write(self._ring, _RING.pack(mark(message, spec), spec.nbytes))

    def _read(self) -> bool:
        try:
            data = os.read(self.posts, 64 * _POST.size)
        except BlockingIOError:
            return False
        if not data:
            raise BrokenPipeError
        self._unused.extend(_POST.iter_unpack(data))
        return True

    def _target(self, name: int, offset: int, spec: TensorSpec) -> Tensor:
        key = name, offset, spec
        if key not in self._targets:
            memory = memoryview(self._block(name))[offset : offset + spec.nbytes]
            self._targets[key] = tensor_on(memory, spec)
        return self._targets[key]

    def _block(self, name: int) -> mmap:
        if name not in self._blocks:
            descriptor = os.open(f"/proc/{self._pid}/fd/{name}", os.O_RDWR)
            self._blocks[name] = mmap(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        return self._blocks[name]

    def close(self) -> None:
        """End the pipes: the receiver will find the sender gone."""
        os.close(self._ring)
        os.close(self.posts)


def shared_block(size: int) -> Block:
    """Memory that another process opens by the number of its descriptor."""
    descriptor = os.memfd_create("boundary buffers")
    os.ftruncate(descriptor, size)
    return Block(mmap(descriptor, size), descriptor)


@cache
def mark(message: Hashable, spec: TensorSpec) -> int:
    """A number that the two ends of a channel agree on for this message of this shape and dtype."""
    return crc32(f"{message}: {spec}".encode())
