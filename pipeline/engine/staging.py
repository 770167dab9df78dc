"""Between a GPU and the pinned host memory that gloo sends from and receives into, without making the host wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.schedule.schedule import Channel


class HostStaging:
    """Copies on a stream of each channel's own, beside the compute and beside each other.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Channel, torch.cuda.Stream] = {}

    def to_host(self, channel: Channel, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start a copy to the host behind what was enqueued so far; the copy, and what waits until it is there."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = self._stream(channel)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
            there = torch.cuda.Event()
            there.record(stream)
        tensor.record_stream(stream)  # or its memory could be given away before it is copied
        return copy, there.synchronize

    def to_device(self, channel: Channel, tensor: Tensor) -> Tensor:
        """Start a copy to the GPU; what is enqueued from now on finds it there."""
        stream, compute = self._stream(channel), torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            copy.copy_(tensor, non_blocking=True)
        compute.wait_stream(stream)
        copy.record_stream(compute)
        return copy

    def _stream(self, channel: Channel) -> torch.cuda.Stream:
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self._device)
        return self._streams[channel]
