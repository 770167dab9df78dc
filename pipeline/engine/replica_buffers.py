"""Buffers that forwards move, equal on all replicas when a step is over.

BatchNorm's running averages are merged exactly: those that move with each microbatch come out as if the replicas'
microbatches had come one after the other, the first replica's first; deferred ones move by the statistics of the whole
batch. Of any other buffer that a step has changed, the first replica's counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from pipeline.engine import batch_norm
from pipeline.engine.reduction import Replicas
from pipeline.engine.synced_batch_norm import Synced

_BYTES = torch.uint8


class ReplicaBuffers:
    """Of one rank. The same rank of every replica has one like it and uses it in the same order.

    Args:
        modules: the rank's.
        replicas: this one and the others.
    """

    def __init__(self, modules: Iterable[nn.Module], replicas: Replicas) -> None:
        modules = list(modules)
        self._replicas = replicas
        alike = {id(module) for root in modules for module in root.modules() if isinstance(module, Synced)}
        self._norms = [norm for norm in batch_norm.averages(modules) if id(norm.module) not in alike]
        handled = alike | {id(norm.module) for norm in self._norms}
        unique = {id(module): module for root in modules for module in root.modules() if id(module) not in handled}
        self._others = [
            (module, name)
            for module in unique.values()
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        self._before: list[tuple[Tensor, int]] = []

    def begin_step(self) -> None:
        """Remember what there is before a step."""
        for norm in self._norms:
            norm.begin()
        self._before = [(tensor, tensor._version) for tensor in self._other_buffers()]

    def settle(self) -> Iterator[None]:
        """Make all equal. Goes on when every replica has come to the same `yield`."""
        own = [norm.moved() for norm in self._norms]
        changed = [
            tensor is not before or tensor._version != version
            for tensor, (before, version) in zip(self._other_buffers(), self._before, strict=True)
        ]
        if changed:
            own.append(torch.tensor(changed, dtype=torch.float64, device=self._other_buffers()[0].device))
        if not own:
            return
        wait = self._replicas.gather("moved", torch.cat(own))
        yield
        sizes = [part.numel() for part in own]
        columns = wait().split(sizes, dim=1)
        for norm, rows in zip(self._norms, columns, strict=False):
            norm.merge(rows)
        if changed:
            yield from self._from_the_first([count > 0 for count in columns[-1].sum(0).tolist()])

    def _from_the_first(self, changed: Sequence[bool]) -> Iterator[None]:
        buffers = [buffer for buffer, moved in zip(self._other_buffers(), changed, strict=True) if moved]
        if not buffers:
            return
        # as bytes: a sum with nothing but zeros is what the first has, to the last bit and of any type
        own = torch.cat([buffer.detach().contiguous().view(-1).view(_BYTES) for buffer in buffers])
        wait = self._replicas.add("buffers", own if self._replicas.number == 0 else torch.zeros_like(own))
        yield
        ends = list(accumulate(buffer.nbytes for buffer in buffers))
        found = wait()
        with torch.no_grad():
            for buffer, end in zip(buffers, ends, strict=True):
                content = found[end - buffer.nbytes : end].clone()  # aligned for its type
                buffer.copy_(content.view(buffer.dtype).view(buffer.shape))

    def _other_buffers(self) -> list[Tensor]:
        found = [module._buffers[name] for module, name in self._others]
        return [tensor for tensor in found if tensor is not None]
