"""Counting what is really held for microbatches in flight: each storage once, parameters not at all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, UntypedStorage


class ActivationMeter:
    """Bytes of activations that autograd and the engine hold, now and at most.

    What autograd saves is seen through saved-tensor hooks, which cost time; so a meter is used for one step and then
    dropped.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._excluded: dict[int, UntypedStorage] = {}
        self.exclude(parameters)
        self._holders: dict[int, int] = {}
        self._bytes = 0
        self.peak_bytes = 0

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of `tensors`, which live as long as the meter: no other gets their address."""
        self._excluded |= {_storage(tensor): tensor.untyped_storage() for tensor in tensors}

    def hold(self, tensor: Tensor) -> Held:
        """Count `tensor`'s storage until the returned object is dropped."""
        return Held(self, tensor)

    def watch(self) -> AbstractContextManager[object]:
        """While open, what autograd saves on this thread is counted until it is freed."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Held:
        return tensor if _storage(tensor) in self._excluded else Held(self, tensor)

    def _add(self, tensor: Tensor) -> int:
        key = _storage(tensor)
        if key in self._excluded:
            return key
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if holders == 0:
            self._bytes += tensor.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return key

    def _remove(self, key: int, nbytes: int) -> None:
        if key in self._excluded:
            return
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self._bytes -= nbytes


class Held:
    """A tensor that is counted as long as this object lives. CPython frees it with the graph that refers to it."""

    __slots__ = ("_key", "_meter", "_nbytes", "tensor")

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        self._nbytes = tensor.untyped_storage().nbytes()
        self._key = meter._add(tensor)

    def __del__(self) -> None:
        self._meter._remove(self._key, self._nbytes)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unpack(packed: Tensor | Held) -> Tensor:
    return packed.tensor if isinstance(packed, Held) else packed
