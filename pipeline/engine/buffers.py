"""Memory that messages are received into: taken, let go and taken again, so that a step allocates nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.engine.boundary import TensorSpec

_ALIGNMENT = 4096


class Slot(NamedTuple):
    """Where a buffer lies: an offset in bytes into a block."""

    block: Block
    offset: int


@dataclass(frozen=True)
class Block:
    """Memory for one or several buffers; `name` is how another process finds it, if it can."""

    memory: mmap
    name: int = -1


def private_block(size: int) -> Block:
    """Memory of this process alone."""
    return Block(mmap(-1, size))


class BufferPool:
    """Buffers of one size, as many as are in use at once.

    A buffer is free again when nothing refers to its memory any more, neither the engine nor autograd nor a model that
    kept its input: so no one's tensor is ever overwritten. CPython frees a tensor at once when its last reference goes.

    Args:
        size: bytes of the largest message that is known of. Should a larger one come, larger buffers take their place.
        count: buffers to make at the start; more are made should more be in use.
        make: gives the memory, private or shared.
    """

    def __init__(self, size: int, count: int, make: Callable[[int], Block] = private_block) -> None:
        self.size = _aligned(size)
        self._make = make
        self._free: list[Slot] = []
        self._taken: dict[int, weakref.ref[memoryview]] = {}
        self.made = 0
        self.peak = 0
        """The most buffers that were in use at a time."""
        if count:
            self._grow(count)

    def take(self, spec: TensorSpec) -> tuple[Tensor, Slot]:
        """A tensor on a free buffer, with what was last written there, and where it lies."""
        if spec.nbytes > self.size:
            self.size, self._free = _aligned(max(spec.nbytes, 2 * self.size)), []
        if not self._free:
            self._grow(1)
        slot = self._free.pop()
        # frombuffer keeps the view alive as long as its storage lives
        view = memoryview(slot.block.memory)[slot.offset : slot.offset + spec.nbytes]
        key, size = id(view), self.size
        self._taken[key] = weakref.ref(view, lambda _: self._let_go(key, slot, size))
        self.peak = max(self.peak, len(self._taken))
        return tensor_on(view, spec), slot

    def _let_go(self, key: int, slot: Slot, size: int) -> None:
        del self._taken[key]
        if size == self.size:  # else larger ones have taken its place
            self._free.append(slot)

    def _grow(self, count: int) -> None:
        block = self._make(count * self.size)
        self._free += [Slot(block, index * self.size) for index in reversed(range(count))]
        self.made += count


def _aligned(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


def tensor_on(memory: memoryview, spec: TensorSpec) -> Tensor:
    """A tensor that lies in `memory`; one without elements lies nowhere."""
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(memory, dtype=spec.dtype).view(spec.shape)
