"""What of a stage a recomputed pass computes again: its segments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of a stage that share their fate in a pass."""

    layers: slice
    recomputed: bool
    """Whether they keep their input alone and build their graph in R; else it is built in F and kept."""
    keeps_costly: bool = False
    """Whether, recomputed, they keep the outputs of costly operations too."""


CHEAP_TIME = 0.4
"""About which part of a forward's time is not in matrix products, convolutions and attention: 0.24 (ResNet-18) to 0.5
(the default GPT) on a CPU."""

COSTLY_BYTES = 0.5
"""About which part of the activations is their outputs: 0.47 (ResNet-18) to 0.62 (the default GPT)."""


@dataclass(frozen=True)
class Recomputed:
    """The part of a stage that R computes again; by default all of it.

    Args:
        every: the stage's first layer and every so many-th after it; the others keep their activations.
        keeps_costly: of those layers only what is cheap: the outputs of matrix products, convolutions and attention are
            kept.

    Raises:
        ValueError: `every` below 1.
    """

    every: int = 1
    keeps_costly: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}: use 1 (every layer) or more")

    def segments(self, layers: int) -> tuple[Segment, ...]:
        """How a recomputed pass cuts a stage of so many layers.

        The first layer is recomputed, for its input, the stage's, is held in any case.
        """
        if layers == 0:
            return whole(0)
        if self.every == 1:
            return (Segment(slice(0, layers), True, self.keeps_costly),)
        runs = (list(run) for _, run in groupby(range(layers), self._run))
        return tuple(Segment(slice(run[0], run[-1] + 1), *self._fate(run[0])) for run in runs)

    def share(self, layers: int | None = None) -> float:
        """About which part of a forward's time an R takes, for layers that take equally long.

        Args:
            layers: of the stage; None: many.
        """
        return self._layered(layers) * (CHEAP_TIME if self.keeps_costly else 1.0)

    def kept(self, layers: int | None = None) -> float:
        """About which part of its activations a recomputed pass keeps from F to R, as `share` reckons."""
        return 1 - self._layered(layers) * (1 - COSTLY_BYTES if self.keeps_costly else 1.0)

    def _layered(self, layers: int | None) -> float:
        """The part of the layers that is recomputed."""
        return 1 / self.every if layers is None else len(range(0, layers, self.every)) / max(layers, 1)

    def _run(self, layer: int) -> tuple[int, bool]:
        return layer // self.every, layer % self.every == 0

    def _fate(self, layer: int) -> tuple[bool, bool]:
        recomputed = layer % self.every == 0
        return recomputed, recomputed and self.keeps_costly


def whole(layers: int) -> tuple[Segment, ...]:
    """A pass that is not recomputed: one segment, which keeps everything."""
    return (Segment(slice(0, layers), False),)
