"""The gradients of a rank summed over the replicas of its pipeline, stage by stage, while the schedule goes on.

A stage's gradients are complete where its REDUCE_GRAD stands. They move into a few flat buckets, whose sums begin at
once and are waited for when the step is over. Then gradients are views of the buckets: there is no second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from pipeline.engine.weight_gradient import gradient_dtype
from pipeline.schedule.actions import ActionType
from pipeline.schedule.schedule import Row

Sum = Callable[[], Tensor]
"""Waits for a sum that was begun."""

Add = Callable[[Hashable, Tensor], Sum]
"""Begins to add a tensor, which is given away, to those that the other replicas give under the same key."""


@dataclass(frozen=True)
class Replicas:
    """A rank and its like in the other replicas of the pipeline, which do the same in the same order.

    Args:
        number, count: which of how many this is.
        add: sums over them.
    """

    number: int
    count: int
    add: Add

    def gather(self, key: Hashable, row: Tensor) -> Sum:
        """Begin to exchange a row of numbers for those of all replicas, (count, numbers)."""
        rows = row.new_zeros(self.count, row.numel())
        rows[self.number] = row
        wait = self.add(key, rows.view(-1))
        return lambda: wait().view(self.count, -1)


_BUCKET_BYTES = 32 << 20


class Reducer:
    """Sums one rank's gradients. The same rank of every replica has one like it and uses it in the same order.

    A gradient that only some replicas have counts as zero on the others; one that none has stays None. A parameter that
    several stages of the rank share is summed with the last of them.

    Args:
        row: the rank's lowered program.
        parameters: those of each stage.
        add: sums over the replicas.
        bucket_bytes: what is summed at once, at most, unless one parameter takes more.
    """

    def __init__(
        self,
        row: Row,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        add: Add,
        *,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._add = add
        self._order = [action.stage for action in row if action.type is ActionType.REDUCE_GRAD]
        self._last = {parameter: stage for stage in self._order for parameter in parameters[stage]}
        self._bucket_bytes = bucket_bytes
        self._trained: list[nn.Parameter] = []
        self._buckets: dict[int, list[_Bucket]] = {}
        self._begun: list[tuple[_Bucket, Sum]] = []
        self.begin_step()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All whose gradients are summed."""
        return [p for buckets in self._buckets.values() for bucket in buckets for p in bucket.parameters]

    def begin_step(self) -> None:
        """Forget what an abandoned step began, and sum what is trained now."""
        self._begun.clear()
        trained = [parameter for parameter in self._last if parameter.requires_grad]
        if list(map(id, trained)) != list(map(id, self._trained)):
            self._trained = trained
            self._buckets = {stage: list(self._buckets_of(stage)) for stage in self._order}

    def start(self, stage: int) -> None:
        """Begin to sum a stage's gradients; they are gone until `finish`."""
        for bucket in self._buckets.get(stage, ()):
            self._begun.append((bucket, self._add(bucket.key, bucket.filled())))

    def finish(self) -> None:
        """Wait for all sums: `.grad` holds them, on every replica the same numbers."""
        flats = [(bucket, wait()) for bucket, wait in self._begun]
        self._begun.clear()
        if flats:
            # all in one message to the host, which waits for a GPU here
            counts = torch.cat([bucket.counts(flat).float() for bucket, flat in flats]).tolist()
            present = iter(count > 0 for count in counts)
            for bucket, flat in flats:
                bucket.give_back(flat, present)

    def _buckets_of(self, stage: int) -> Iterator[_Bucket]:
        own = [parameter for parameter in self._trained if self._last[parameter] == stage]
        for number, pieces in enumerate(_cut(own, self._bucket_bytes)):
            yield _Bucket((stage, number), pieces)


class _Bucket:
    """Parameters whose gradients have one type, and behind them how many replicas have a gradient of each."""

    def __init__(self, key: Hashable, parameters: Sequence[nn.Parameter]) -> None:
        self.key = key
        self.parameters = tuple(parameters)
        ends = list(accumulate(parameter.numel() for parameter in parameters))
        self._places = [slice(end - p.numel(), end) for end, p in zip(ends, parameters, strict=True)]
        self._size = ends[-1]

    def filled(self) -> Tensor:
        """The gradients, taken away from the parameters."""
        flat = self.parameters[0].new_zeros(self._size + len(self.parameters), dtype=gradient_dtype(self.parameters[0]))
        for index, (parameter, place) in enumerate(zip(self.parameters, self._places, strict=True)):
            if parameter.grad is not None:
                flat[place].view(parameter.shape).copy_(parameter.grad)
                flat[self._size + index] = 1
                parameter.grad = None
        return flat

    def counts(self, flat: Tensor) -> Tensor:
        """How many replicas have a gradient of each parameter."""
        return flat[self._size :]

    def give_back(self, flat: Tensor, present: Iterator[bool]) -> None:
        """Let the parameters have what `flat` holds of theirs."""
        for parameter, place, came in zip(self.parameters, self._places, present, strict=False):
            if came:
                parameter.grad = flat[place].view(parameter.shape)


def _cut(parameters: Sequence[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Pieces with gradients of one type, in order, of at most so many bytes or of one parameter."""
    piece: list[nn.Parameter] = []
    size = 0
    for parameter in sorted(parameters, key=lambda p: str(gradient_dtype(p))):
        bytes_ = parameter.numel() * gradient_dtype(parameter).itemsize
        if piece and (gradient_dtype(parameter) != gradient_dtype(piece[0]) or size + bytes_ > most):
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += bytes_
    if piece:
        yield piece
