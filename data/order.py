"""Which samples a step takes: an endless row of epochs, each a permutation drawn from (seed, epoch)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.randomness import VALIDATION_SEED, generator

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Step to sample indices. Batches follow each other without gaps, across the ends of epochs."""

    samples: int
    batch_size: int
    seed: int
    reshuffled: bool = True

    @classmethod
    def fixed(cls, samples: int, batch_size: int) -> Order:
        """One order for all epochs and seeds, for validation: shuffled, so that a few batches represent the whole."""
        return cls(samples, batch_size, VALIDATION_SEED, reshuffled=False)

    def epochs(self, step: int) -> Indices:
        """Epoch (0 first) of each of the step's samples, (batch,)."""
        if step < 0:
            raise ValueError(f"steps count up from 0, got {step}: use 0 or more")
        row = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        return row // self.samples if self.reshuffled else np.zeros_like(row)

    def indices(self, step: int) -> Indices:
        """Index in range(samples) of each of the step's samples, (batch,)."""
        epochs = self.epochs(step)
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size) % self.samples
        indices = np.empty_like(epochs)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = _permutation(self.samples, self.seed, int(epoch))[positions[rows]]
        return indices


# A cache of pure values: a permutation of millions of samples is drawn once an epoch, not once a step.
@lru_cache(maxsize=4)
def _permutation(samples: int, seed: int, epoch: int) -> NDArray[Any]:
    return generator(seed, "epoch", epoch).permutation(samples)
