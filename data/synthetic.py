"""Random batches with nothing to learn, for measuring speed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from data.dataset import ALL, Data, require_positive
from data.randomness import VALIDATION_SEED, generator


def synthetic_text(*, batch_size: int, seed: int, context: int, vocabulary: int, fixed: bool = True) -> Data:
    """Uniform random tokens, int64 (batch, context); `fixed` gives every step the same batch."""
    require_positive(batch_size=batch_size, context=context, vocabulary=vocabulary)
    shape = (batch_size, context)
    return Data(
        train=RandomTokens(shape, vocabulary, seed, "train", fixed),
        validation=RandomTokens(shape, vocabulary, VALIDATION_SEED, "validation", fixed),
        kind="text",
        units_per_sample=context,
        classes=vocabulary,
    )


def synthetic_images(*, batch_size: int, seed: int, classes: int, size: int = 224, fixed: bool = True) -> Data:
    """Normal random images, float32 (batch, 3, size, size), and classes; `fixed` gives every step the same batch."""
    require_positive(batch_size=batch_size, classes=classes, size=size)
    shape = (batch_size, 3, size, size)
    return Data.of_images(
        train=RandomImages(shape, classes, seed, "train", fixed),
        validation=RandomImages(shape, classes, VALIDATION_SEED, "validation", fixed),
        classes=classes,
    )


@dataclass(frozen=True)
class RandomTokens:
    """Targets are the inputs one token further on."""

    shape: tuple[int, int]
    vocabulary: int
    seed: int
    split: str
    fixed: bool

    def inputs(self, step: int, samples: slice = ALL) -> Tensor:
        """Tokens, int64 (batch, context)."""
        return self._tokens(step)[samples, :-1]

    def targets(self, step: int) -> Tensor:
        """The next token at each position, int64 (batch, context)."""
        return self._tokens(step)[:, 1:]

    @property
    def samples(self) -> None:
        """Without end."""
        return None

    def _tokens(self, step: int) -> Tensor:
        batch, context = self.shape
        draw = generator(self.seed, self.split, "tokens", 0 if self.fixed else step)
        return torch.from_numpy(draw.integers(self.vocabulary, size=(batch, context + 1)))


@dataclass(frozen=True)
class RandomImages:
    """Classes are drawn apart from the images."""

    shape: tuple[int, int, int, int]
    classes: int
    seed: int
    split: str
    fixed: bool

    def inputs(self, step: int, samples: slice = ALL) -> Tensor:
        """Images, float32 (batch, 3, size, size)."""
        return (self._fixed_images if self.fixed else self._images(step))[samples]

    def targets(self, step: int) -> Tensor:
        """Classes, int64 (batch,)."""
        draw = generator(self.seed, self.split, "classes", 0 if self.fixed else step)
        return torch.from_numpy(draw.integers(self.classes, size=self.shape[0]))

    @property
    def samples(self) -> None:
        """Without end."""
        return None

    @cached_property
    def _fixed_images(self) -> Tensor:
        # A large batch takes longer to draw than some models to run, and would be what is measured.
        return self._images(0)

    def _images(self, step: int) -> Tensor:
        draw = generator(self.seed, self.split, "images", step)
        return torch.from_numpy(draw.standard_normal(self.shape, dtype=np.float32))
