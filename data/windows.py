"""Windows of a long row of tokens: inputs, and targets one token further on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.dataset import ALL
from data.order import Indices, Order
from data.randomness import generator

Tokens = NDArray[Any]


@dataclass(frozen=True)
class Text:
    """Tokens that are read on first use: a rank that asks for no batch holds none. `name` is for messages."""

    name: str
    length: int
    read: Callable[[], Tokens]

    @cached_property
    def tokens(self) -> Tokens:
        """All tokens, (length,), any integer type."""
        return self.read()


@dataclass(frozen=True)
class Windows:
    """Samples of `context` tokens that do not overlap within an epoch; each epoch starts its cuts elsewhere.

    `vocabulary` is checked on every batch where the tokens' type alone does not bound them.
    """

    text: Text
    context: int
    order: Order
    vocabulary: int | None = None

    @classmethod
    def shuffled(
        cls, text: Text, context: int, batch_size: int, seed: int, *, vocabulary: int | None = None
    ) -> Windows:
        """For training: a new permutation each epoch. A text shorter than context + 1 is a ValueError."""
        return cls(text, context, Order(_count(text, context), batch_size, seed), vocabulary)

    @classmethod
    def fixed(cls, text: Text, context: int, batch_size: int, *, vocabulary: int | None = None) -> Windows:
        """For validation: one order. A text shorter than context + 1 is a ValueError."""
        return cls(text, context, Order.fixed(_count(text, context), batch_size), vocabulary)

    def inputs(self, step: int, samples: slice = ALL) -> Tensor:
        """Tokens of the step's samples, int64 (batch, context)."""
        return self._gather(self._starts(step)[samples])

    def targets(self, step: int) -> Tensor:
        """The next token at each position, int64 (batch, context)."""
        return self._gather(self._starts(step) + 1)

    @property
    def samples(self) -> int:
        """Windows in an epoch."""
        return self.order.samples

    def _starts(self, step: int) -> Indices:
        # What the windows leave over at the end is the room in which an epoch's cuts can shift.
        room = min(self.text.length - 1 - self.order.samples * self.context, self.context - 1)
        epochs, shifts = self.order.epochs(step), np.zeros(self.order.batch_size, dtype=np.int64)
        for epoch in np.unique(epochs) if self.order.reshuffled else ():
            shifts[epochs == epoch] = generator(self.order.seed, "shift", int(epoch)).integers(room + 1)
        return self.order.indices(step) * self.context + shifts

    def _gather(self, starts: Indices) -> Tensor:
        tokens = self.text.tokens
        windows = np.stack([tokens[start : start + self.context] for start in starts]).astype(np.int64)
        if self.vocabulary is not None and windows.max() >= self.vocabulary:
            raise ValueError(
                f"{self.text.name} holds token {windows.max()}, outside a vocabulary of {self.vocabulary}: "
                f"use vocabulary={windows.max() + 1} or more"
            )
        return torch.from_numpy(windows)


def _count(text: Text, context: int) -> int:
    """Windows in an epoch, leaving room for the shift where the text is long enough."""
    if text.length < context + 1:
        longest = f" or context={text.length - 1}" if text.length > 1 else ""
        raise ValueError(
            f"{text.name} has {text.length} tokens, fewer than context + 1 ({context + 1}): use a longer text{longest}"
        )
    return max(1, (text.length - context) // context)
