"""Forward passes alone, of any number of samples, through the pipeline, with a bounded number of them under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pipeline.engine.executor import Microbatches, run
from pipeline.engine.nest import Nest
from pipeline.training.plan import microbatch_sizes, split
from pipeline.training.ranks import Ranks

Read = Callable[[Nest, Nest], Tensor]
"""Makes of a microbatch's outputs and targets, where the last stage is, what is wanted of them, in floating point."""


class Inference:
    """The model in evaluation mode, its weights and statistics untouched.

    The samples go through the plan's evaluation program again and again: as many microbatches as that has are under
    way, whatever the number of samples.

    Args:
        ranks: of this process; the others make the same calls with theirs.
        largest: samples in a microbatch, at most.
        read: what becomes of each microbatch's outputs.
    """

    def __init__(self, ranks: Ranks, largest: int, read: Read) -> None:
        self._ranks = ranks
        self._largest = largest
        self._executors = [rank.reader(read) for rank in ranks]
        self._passes = 0

    def run(self, samples: int, inputs: Nest, targets: Nest) -> Iterator[Tensor]:
        """What `read` makes of each microbatch, in the samples' order; nothing where the last stage is elsewhere.

        Every process must take all of it.

        Args:
            samples: how many there are.
            inputs, targets: of all of them, the samples first; None where no local rank takes them.

        Raises:
            ActionError: an action of the program failed.
        """
        if targets is None and self._ranks.holds_last:
            targets = torch.zeros(samples, 0)
        runs = chunks(samples, self._largest, self._ranks.plan.evaluation.microbatches)
        parts = [_cut(given, [sum(sizes) for sizes in runs]) for given in (inputs, targets)]
        for sizes, *given in zip(runs, *parts, strict=True):
            yield from self._run(sizes, *given)

    def _run(self, sizes: tuple[int, ...], inputs: Nest, targets: Nest) -> list[Tensor]:
        """One run of the program; where there are too few microbatches, the last one goes again, for nothing."""
        again = self._ranks.plan.evaluation.microbatches - len(sizes)
        pieces = [_cut(given, sizes) for given in (inputs, targets)]
        inputs_cut, targets_cut = (each + each[-1:] * again for each in pieces)
        batch = Microbatches(self._passes, sizes + sizes[-1:] * again, inputs_cut, targets_cut, weight=1.0)
        self._passes += 1
        results = run(self._executors, [batch] * len(self._executors))
        (losses,) = [result.losses for result in results if result.losses] or [{}]
        return [losses[microbatch] for microbatch in range(len(sizes))] if losses else []


def chunks(samples: int, largest: int, microbatches: int) -> list[tuple[int, ...]]:
    """The microbatches' sizes in each run of a program of `microbatches`; none is above `largest`."""
    runs = -(-samples // (largest * microbatches))
    return [microbatch_sizes(part, min(part, microbatches)) for part in microbatch_sizes(samples, runs)]


def under_way(microbatches: int, pp: int) -> int:
    """How many microbatches of a batch cut into so many a pipeline of `pp` ranks takes at a time.

    About twice as many as ranks: enough that the next ones are there when the first ones leave.
    """
    return -(-microbatches // -(-microbatches // (2 * pp)))


def _cut(batch: Nest, sizes: Sequence[int]) -> tuple[Nest, ...]:
    """Parts of these sizes; of nothing as many nothings."""
    return (None,) * len(sizes) if batch is None else split(batch, sizes)
