"""A rank's step on zeros, alone: it compiles all that the real step calls, and leaves no trace.

A compilation takes seconds to minutes. In a real step the other ranks would wait for it, and might take the rank for
one that hangs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline.engine.boundary import TensorSpec
from pipeline.engine.executor import Executor, Microbatches, run
from pipeline.engine.nest import Nest, mapped
from pipeline.engine.stage import Stage
from pipeline.engine.transport import InProcessTransport, Receive
from pipeline.schedule.schedule import Channel


class Silence(InProcessTransport):
    """No peers: what is sent is lost, what is received is zero."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def send(self, channel: Channel, message: Hashable, tensor: Tensor) -> None:
        """Nobody is there."""

    def receive(self, channel: Channel, message: Hashable, spec: TensorSpec) -> Receive:
        """A message of zeros."""
        return _Arrived(torch.zeros(spec.shape, dtype=spec.dtype, device=self._device))


class _Arrived:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def arrived(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._tensor


def rehearse(executor: Executor, batch: Microbatches) -> None:
    """Run a step of an executor whose transport is a `Silence`, with zeros in the place of the batch.

    Parameters, statistics, gradients (there must be none yet) and random number generators are as before.
    """
    with _untouched(executor.stages.values()):
        run([executor], [replace(batch, inputs=_zeros(batch.inputs), targets=_zeros(batch.targets))])


def _zeros(batch: tuple[Nest, ...] | None) -> tuple[Nest, ...] | None:
    """Of the same layout too: code is compiled for it."""
    zeros: tuple[Nest, ...] | None = mapped(_zeros_like, batch)
    return zeros


def _zeros_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty_strided(tensor.size(), tensor.stride()).zero_()


@contextmanager
def _untouched(stages: Iterable[Stage]) -> Iterator[None]:
    tensors = [tensor for stage in stages for _, tensor in stage.named_tensors()]
    buffers = [(tensor, tensor.clone()) for tensor in tensors if not isinstance(tensor, nn.Parameter)]
    gpus = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=gpus):
        yield
    for tensor in tensors:
        tensor.grad = None
    for buffer, before in buffers:
        buffer.copy_(before)
