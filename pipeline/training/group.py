"""What ranks do together besides passing activations and gradients: gathering, and summing gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engine.clock_offset import Comparison, compare, exchange
from pipeline.engine.distributed import naming, new_group, token
from pipeline.engine.reduction import Sum
from pipeline.engine.standing import Activity, Board, Marker
from pipeline.training import rendezvous

T = TypeVar("T")
Clock = Callable[[], float]

_PATIENCE = timedelta(days=1)
_EXCHANGES = 8
"""How often a clock is asked the time, of which the fastest answer counts."""


class Group(Protocol):
    """All ranks of a run. Every process must make the same calls in the same order."""

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks in this process, ascending."""

    @property
    def size(self) -> int:
        """Ranks in all."""

    def gather_floats(self, values: Sequence[float]) -> list[float]:
        """One float64 from each local rank in, those of all ranks out, in rank order, on every process."""

    def gather(self, values: Sequence[T]) -> list[T]:
        """Any picklable from each local rank in, those of all ranks out, in rank order, on every process."""

    def meet(self) -> None:
        """Return when every process has called it, however late."""

    def compare_clocks(self, ranks: Sequence[int], read: Clock) -> Comparison | None:
        """How far the clock of this process (`read`, in seconds) is ahead of rank 0's; None unless it is in `ranks`."""

    def sum_gradients(self, key: tuple[int, ...], gradients: Mapping[int, Tensor]) -> None:
        """Replace each local gradient (by rank) with the sum over the ranks in `key`, in place."""

    def add(self, rank: int, key: Hashable, tensor: Tensor) -> Sum:
        """Begin to add `tensor` of a local rank to those of its like in the other replicas; wait by calling the result.

        The ranks that are each other's like must do it in the same order. The sum may lie where `tensor` does, and is
        the same to the last bit in all replicas.
        """


class LocalGroup:
    """All ranks in this process: of `dp` replicas of a pipeline with `pp` ranks, one replica after the other."""

    def __init__(self, pp: int, dp: int = 1) -> None:
        self._pp, self._size = pp, pp * dp
        self._given: dict[tuple[int, Hashable], dict[int, Tensor]] = defaultdict(dict)

    @property
    def local(self) -> tuple[int, ...]:
        """Every rank."""
        return tuple(range(self._size))

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self._size

    def gather_floats(self, values: Sequence[float]) -> list[float]:
        """The values: they are all here."""
        return list(values)

    def gather(self, values: Sequence[T]) -> list[T]:
        """The values: they are all here."""
        return list(values)

    def meet(self) -> None:
        """Everybody is here."""

    def compare_clocks(self, ranks: Sequence[int], read: Clock) -> Comparison | None:
        """Nothing: there is one clock."""
        return None

    def sum_gradients(self, key: tuple[int, ...], gradients: Mapping[int, Tensor]) -> None:
        """Sum in rank order and copy to all."""
        total = gradients[key[0]].clone()
        for rank in key[1:]:
            total += gradients[rank]
        for gradient in gradients.values():
            gradient.copy_(total)

    def add(self, rank: int, key: Hashable, tensor: Tensor) -> Sum:
        """The first who waits sums in rank order: by then every replica has given its part."""
        place = rank % self._pp, key
        self._given[place][rank] = tensor
        return partial(self._summed, place, tensor)

    def _summed(self, place: tuple[int, Hashable], tensor: Tensor) -> Tensor:
        given = self._given.pop(place, {})
        if given:
            self.sum_gradients(tuple(sorted(given)), given)
        return tensor


class DistributedGroup:
    """One rank a process. Small things go over gloo; gradients over `backend`, where the tensors are.

    Args:
        rank, size: of all replicas of the pipeline, one after the other.
        dp: replicas.
        tied: the sets of ranks that `sum_gradients` will be called for, the same on every rank.
        backend: "nccl" or "gloo"; gloo stages GPU tensors through the host.
        timeout: seconds a collective may take.
        marker: shows that this rank waits for others while a collective goes on.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        tied: Sequence[tuple[int, ...]],
        backend: str,
        timeout: float,
        marker: Marker | None = None,
        dp: int = 1,
    ) -> None:
        self._rank, self._size, self._backend = rank, size, backend
        self._meetings = 0
        self._marker = marker or Board.in_memory(1).marker(0)
        self._control = new_group(range(size), "gloo", timeout)
        self._tied = {key: new_group(key, backend, timeout) for key in sorted(set(tied))}
        pp = size // dp
        alike = [new_group(range(first, size, pp), backend, timeout) for first in range(pp if dp > 1 else 0)]
        self._replicas = next((group for group in alike if group is not None), None)
        if self._replicas is not None:  # used once, so that no connection is set up in the middle of a step
            dist.all_reduce(token(backend), group=self._replicas)

    @property
    def local(self) -> tuple[int, ...]:
        """This rank."""
        return (self._rank,)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self._size

    def gather_floats(self, values: Sequence[float]) -> list[float]:
        """An all-gather of one float64."""
        (value,) = values
        gathered = [torch.empty((), dtype=torch.float64) for _ in range(self._size)]
        with naming(f"rank {self._rank} gathered a number from all ranks"), self._marker.waiting():
            dist.all_gather(gathered, torch.tensor(value, dtype=torch.float64), group=self._control)
        return [entry.item() for entry in gathered]

    def gather(self, values: Sequence[T]) -> list[T]:
        """An all-gather of a pickled object."""
        (value,) = values
        gathered: list[T] = [value] * self._size
        with naming(f"rank {self._rank} gathered what all ranks report"), self._marker.waiting():
            dist.all_gather_object(gathered, value, group=self._control)
        return gathered

    def meet(self) -> None:
        """Through the job's store, for a collective fails after `timeout`; a peer's death ends the job all the same."""
        self._meetings += 1
        store = rendezvous.shared_store()
        store.set(f"meeting {self._meetings}, rank {self._rank}", "here")
        with self._marker.waiting():
            store.wait([f"meeting {self._meetings}, rank {rank}" for rank in range(self._size)], _PATIENCE)

    def compare_clocks(self, ranks: Sequence[int], read: Clock) -> Comparison | None:
        """Rank 0 asks one rank after the other and tells all what came of it."""
        found = torch.zeros(len(ranks), 2, dtype=torch.float64)
        with naming(f"rank {self._rank} compared its clock with rank 0's"):
            for index, rank in enumerate(ranks):
                if self._rank == 0:
                    comparison = compare([exchange(partial(self._ask, rank), read) for _ in range(_EXCHANGES)])
                    found[index] = torch.tensor(comparison, dtype=torch.float64)
                elif self._rank == rank:
                    self._answer(read)
            dist.broadcast(found, 0, group=self._control)
        return Comparison(*found[ranks.index(self._rank)].tolist()) if self._rank in ranks else None

    def _ask(self, rank: int) -> float:
        said = torch.zeros((), dtype=torch.float64)
        dist.send(said, rank, group=self._control)
        dist.recv(said, rank, group=self._control)
        return said.item()

    def _answer(self, read: Clock) -> None:
        said = torch.zeros((), dtype=torch.float64)
        for _ in range(_EXCHANGES):
            dist.recv(said, 0, group=self._control)
            dist.send(said.fill_(read()), 0, group=self._control)

    def sum_gradients(self, key: tuple[int, ...], gradients: Mapping[int, Tensor]) -> None:
        """An all-reduce among the ranks that hold a copy."""
        with naming(f"rank {self._rank} summed tied gradients with ranks {list(key)}"), self._marker.waiting():
            self._sum(key, gradients)

    def _sum(self, key: tuple[int, ...], gradients: Mapping[int, Tensor]) -> None:
        for gradient in gradients.values():
            if self._stages(gradient):
                staged = gradient.cpu()
                dist.all_reduce(staged, group=self._tied[key])
                gradient.copy_(staged)
            else:
                dist.all_reduce(gradient, group=self._tied[key])

    def add(self, rank: int, key: Hashable, tensor: Tensor) -> Sum:
        """An all-reduce that goes on beside the schedule."""
        there = tensor.cpu() if self._stages(tensor) else tensor
        what = f"rank {rank} summed over the replicas"
        with naming(what):
            work = dist.all_reduce(there, group=self._replicas, async_op=True)
        return partial(self._waited, work, there, tensor.device, what)

    def _waited(self, work: dist.Work, there: Tensor, device: torch.device, what: str) -> Tensor:
        with naming(what), self._marker.waiting(Activity.REDUCING):
            work.wait()
        return there.to(device)

    def _stages(self, tensor: Tensor) -> bool:
        """Whether the backend takes it from the host alone."""
        return self._backend == "gloo" and tensor.device.type != "cpu"
