"""What data is: two splits, each a pure function from a step number to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

ALL = slice(None)
"""The whole batch."""


class Split(Protocol):
    """The batches of one split, on the CPU, each a pure function of (seed, step): any rank may ask, in any order."""

    def inputs(self, step: int, samples: slice = ALL) -> Tensor:
        """Inputs of a step: int64 (batch, context) tokens, or float32 (batch, 3, height, width) images.

        `samples`: those of the batch that are wanted, the same whoever asks for how many.
        """
        ...

    def targets(self, step: int) -> Tensor:
        """Targets of a step, int64: (batch, context) next tokens, or (batch,) classes. Decodes no image."""
        ...

    @property
    def samples(self) -> int | None:
        """How many there are, none twice in the batches up to there; None: they are drawn without end."""
        ...


class Codec(Protocol):
    """Text as tokens, and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ...


@dataclass(frozen=True)
class Data:
    """A training and a validation split.

    The training split shuffles anew each epoch; the validation split has one fixed order, whatever the seed.
    `units_per_sample` counts the loss's terms in a sample (tokens: the context; images: 1), `classes` what a target can
    be (the vocabulary, or the number of image classes). `codec` is there where tokens are known to stand for text.
    """

    train: Split
    validation: Split
    kind: Literal["text", "images"]
    units_per_sample: int
    classes: int
    codec: Codec | None = None

    @classmethod
    def of_images(cls, train: Split, validation: Split, classes: int) -> Data:
        """Images: one term of the loss a sample."""
        return cls(train, validation, kind="images", units_per_sample=1, classes=classes)


def require_positive(**sizes: int) -> None:
    """ValueError naming the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"data needs a positive {name}, got {size}: use {name}=1 or more")
