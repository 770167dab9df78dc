"""Counting what is really held for microbatches in flight: each storage once, parameters not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode


class ActivationMeter:
    """Bytes of activations that autograd and the engine hold, now and at most.

    An activation is what is there for a microbatch. Parameters are not, nor their low-precision copies, of which a step
    makes one for all microbatches; the batch is not either, until a microbatch of it is moved or converted.

    What autograd saves is seen through saved-tensor hooks, which cost time; so a meter is used for one step and then
    dropped.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._excluded = _storages(parameters)
        self._holders: dict[int, int] = {}
        self.bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def excluding(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Until this closes, count neither `tensors` nor copies that autocast makes of parameters.

        Their storages live as long, so that no other gets their address.
        """
        before = self._excluded
        self._excluded = before | _storages(tensors)
        try:
            yield
        finally:
            self._excluded = before

    def hold(self, tensor: Tensor) -> Held:
        """Count `tensor`'s storage until the returned object is dropped."""
        return Held(self, tensor)

    def held(self, tensors: Iterable[Tensor]) -> int:
        """The bytes of those of the tensors' storages that are counted now."""
        return sum(storage.nbytes() for key, storage in _storages(tensors).items() if key in self._holders)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While open, what autograd saves on this thread is counted until it is freed."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), _CopiesOfParameters(self._excluded):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | Held:
        return tensor if _storage(tensor) in self._excluded else Held(self, tensor)

    def _add(self, tensor: Tensor) -> int | None:
        key = _storage(tensor)
        if key in self._excluded:
            return None
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if holders == 0:
            self.bytes += tensor.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return key

    def _remove(self, key: int, nbytes: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.bytes -= nbytes


class Held:
    """A tensor that is counted as long as this object lives. CPython frees it with the graph that refers to it."""

    __slots__ = ("_key", "_meter", "_nbytes", "tensor")

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        self._nbytes = tensor.untyped_storage().nbytes()
        self._key = meter._add(tensor)

    def __del__(self) -> None:
        if self._key is not None:
            self._meter._remove(self._key, self._nbytes)


class _CopiesOfParameters(TorchDispatchMode):
    """Adds to `excluded` the low-precision copies of what is in there already.

    Only those that are made once a step: autocast copies a frozen parameter anew in each forward.
    """

    def __init__(self, excluded: dict[int, UntypedStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._excluded = excluded

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled stage stays compiled under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].requires_grad and _storage(args[0]) in self._excluded:
            self._excluded |= _storages([result])
        return result


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    return {_storage(tensor): tensor.untyped_storage() for tensor in tensors}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unpack(packed: Tensor | Held) -> Tensor:
    return packed.tensor if isinstance(packed, Held) else packed
