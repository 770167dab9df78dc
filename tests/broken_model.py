"""A model that fails in training, by names that a rank's process can import."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from models.gpt import gpt
from models.model import Model

FAILING_FORWARD = 6
"""With 4 microbatches: microbatch 1 of the second step."""


class Fails(nn.Module):
    """A layer that works a few times, then raises."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        if self.calls == FAILING_FORWARD:
            raise ArithmeticError("the tests' own failure")
        output: Tensor = self.inner(value)
        return output


def failing_gpt() -> Model:
    """A GPT of two blocks; the second one fails in the second step."""
    model = gpt(layers=2, width=32, heads=2, context=16, vocabulary=256, dropout=0.0, tie_embeddings=False)
    layers = list(model.layers)
    broken = layers[2]
    layers[2] = replace(broken, build=lambda: Fails(broken.build()))

    def initialize(name: str, tensor: Tensor, draw: object) -> None:
        model.initialize(name.replace("inner.", ""), tensor, draw)  # type: ignore[arg-type]

    return replace(model, layers=tuple(layers), initialize=initialize)
