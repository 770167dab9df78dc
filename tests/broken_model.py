"""Models that break a run in its second step, by names that a rank's process can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.gpt import gpt
from models.model import Model
from pipeline.engine.executor import Executor
from pipeline.training import gradients, rendezvous

FAILING_FORWARD = 6
"""With 4 microbatches: microbatch 1 of the second step."""


def fail() -> None:
    raise ArithmeticError("the tests' own failure")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Breaks(nn.Module):
    """A layer that works a few times, then does something else first."""

    def __init__(self, layer: nn.Module, otherwise: Callable[[], None]) -> None:
        super().__init__()
        self.inner = layer
        self.otherwise = otherwise
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        if self.calls == FAILING_FORWARD:
            self.otherwise()
        output: Tensor = self.inner(value)
        return output


def breaking_gpt(otherwise: Callable[[], None], pids: str | None = None) -> Model:
    """A GPT of two blocks; in the second step the second one calls `otherwise`. Leaves a file a rank in `pids`."""
    if pids is not None:
        (Path(pids) / str(os.getpid())).touch()
    model = gpt(layers=2, width=32, heads=2, context=16, vocabulary=256, dropout=0.0, tie_embeddings=False)
    layers = list(model.layers)
    broken = layers[2]
    layers[2] = replace(broken, build=lambda: Breaks(broken.build(), otherwise))

    def initialize(name: str, tensor: Tensor, draw: object) -> None:
        model.initialize(name.replace("inner.", ""), tensor, draw)  # type: ignore[arg-type]

    return replace(model, layers=tuple(layers), initialize=initialize)


failing_gpt = partial(breaking_gpt, fail)


def gpt_beside_a_rank_that_stops_in(name: str, pids: str | None = None) -> Model:
    """A sound GPT with tied weights; but rank 1 is stopped when it calls `pipeline.training.gradients.name`."""
    if pids is not None:
        (Path(pids) / str(os.getpid())).touch()
    if rendezvous.rank() == 1:
        original = getattr(gradients, name)

        def stopping(*arguments: Any) -> Any:
            stop()
            return original(*arguments)

        setattr(gradients, name, stopping)
    return gpt(layers=2, width=32, heads=2, context=16, vocabulary=256, dropout=0.0)


class Doubling:
    """A transport that sends twice as much as the peer expects, once."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.sends = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def send(self, channel: Any, message: Any, tensor: Tensor) -> None:
        self.sends += 1
        self.transport.send(channel, message, torch.cat([tensor, tensor]) if self.sends == FAILING_FORWARD else tensor)


def gpt_beside_a_doubling_transport(pids: str | None = None) -> Model:
    """A sound GPT; but rank 0 sends microbatch 1 of the second step twice over."""
    if rendezvous.rank() == 0:
        original = Executor.__init__

        def init(self: Executor, rank: int, *arguments: Any) -> None:
            schedule, stages, boundaries, transport, *more = arguments
            original(self, rank, schedule, stages, boundaries, Doubling(transport), *more)

        Executor.__init__ = init  # type: ignore[method-assign]
    return breaking_gpt(int, pids)
