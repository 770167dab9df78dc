"""BatchNorm's running statistics where a batch comes in microbatches, some of them computed twice.

Every microbatch is normalized by its own statistics. Its running averages move as PyTorch moves them, microbatch after
microbatch; or, deferred, once a step, to the mean and unbiased variance of all values that the step's microbatches had.
Those are combined from each microbatch's count, mean and sum of squared deviations (Chan, Golub and LeVeque, 1979),
which doesn't cancel where the mean is large beside the deviation, as E[x^2] - E[x]^2 does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


class Moments(NamedTuple):
    """Of some values a channel: how many, their mean, and their squared deviations from it, summed."""

    number: Tensor | Any
    mean: Tensor
    squares: Tensor


def combined(one: Moments, other: Moments) -> Moments:
    """Of both together, without cancellation."""
    total = one.number + other.number
    share = other.number / total.clamp(min=1)
    apart = other.mean - one.mean
    squares = one.squares + other.squares + apart.square() * (one.number * share)
    return Moments(total, one.mean + apart * share, squares)


class _Deferred(_BatchNorm):
    """What a BatchNorm of any dimension becomes: see `defer`. Its sums are buffers that no checkpoint holds."""

    collects: bool
    batch_count: Tensor
    batch_mean: Tensor
    batch_squares: Tensor
    """Squared deviations from the mean, summed."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        if self.training and self.collects:
            self._collect(input.detach())
        return output

    @torch.no_grad()
    def _collect(self, input: Tensor) -> None:
        count = input.numel() // input.shape[1]
        if count == 0:
            return
        if input.dtype.itemsize < 4:
            input = input.float()
        dimensions = [dimension for dimension in range(input.dim()) if dimension != 1]
        first = input[:1]
        for dimension in range(2, input.dim()):
            first = first.narrow(dimension, 0, 1)
        # a mean in float32 is off by more than a small deviation: that of what is left by a value of the channel isn't
        variance, mean = torch.var_mean(input - first, dimensions, correction=0)
        self.take_in(count, first.double().flatten() + mean.double(), variance.double() * count)

    @torch.no_grad()
    def take_in(self, count: Tensor | int, mean: Tensor, squares: Tensor) -> None:
        """Combine what there is with the sums of `count` more values, in float64."""
        sums = self.batch_count, self.batch_mean, self.batch_squares
        for sum_, found in zip(sums, combined(Moments(*sums), Moments(count, mean, squares)), strict=True):
            sum_.copy_(found)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by the class that it was made of: its own has no name in any file."""
        return _blank, (type(self).__bases__[1],), self.__dict__

    def begin(self) -> None:
        """Forget what an abandoned step collected."""
        for sum_ in (self.batch_count, self.batch_mean, self.batch_squares):
            sum_.zero_()

    @torch.no_grad()
    def commit(self) -> None:
        """Move the running averages once, if anything came; nobody waits for a GPU to find that out."""
        mean, variance, steps = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None, "else it isn't deferred"
        assert variance is not None
        assert steps is not None
        came = self.batch_count > 0
        steps += came
        share = came.double() * (1 / steps.clamp(min=1).double() if self.momentum is None else self.momentum)
        unbiased = self.batch_squares / (self.batch_count - 1).clamp(min=1)
        mean.copy_(mean.double() * (1 - share) + self.batch_mean * share)
        variance.copy_(variance.double() * (1 - share) + unbiased * share)
        self.begin()


@functools.cache
def _deferred(kind: Any) -> type[_Deferred]:
    return type(f"Deferred{kind.__name__}", (_Deferred, kind), {})


def _blank(kind: Any) -> _Deferred:
    made = _deferred(kind)
    return made.__new__(made)


def defer(root: nn.Module) -> None:
    """Make every BatchNorm in `root` that has running averages move them in `commit` alone.

    A module becomes an instance of a subclass of its class, so that hooks, names and `isinstance` stay as they were.
    """
    for norm in _norms([root]):
        assert norm.running_mean is not None
        sums: dict[str, Any] = {"dtype": torch.float64, "device": norm.running_mean.device}
        kind: Any = type(norm)
        norm.__class__ = _deferred(kind)
        assert isinstance(norm, _Deferred)
        norm.track_running_stats = False  # its forward moves nothing, and evaluation still uses what there is
        norm.collects = True
        norm.register_buffer("batch_count", torch.zeros((), **sums), persistent=False)
        for name in ("batch_mean", "batch_squares"):
            norm.register_buffer(name, torch.zeros(norm.num_features, **sums), persistent=False)


def begin(modules: Iterable[nn.Module]) -> None:
    """A training step begins: nothing has been collected."""
    for norm in _deferred_norms(modules):
        norm.begin()


def commit(modules: Iterable[nn.Module]) -> None:
    """A training step is complete: running averages that wait for that move."""
    for norm in _deferred_norms(modules):
        norm.commit()


class DeferredAverages:
    """What a deferred BatchNorm of one replica has collected in a step, to be combined with the other replicas'."""

    def __init__(self, module: _Deferred) -> None:
        self.module = module

    def begin(self) -> None:
        """Nothing is there: `begin` of the module has seen to it."""

    def moved(self) -> Tensor:
        """One row, float64."""
        norm = self.module
        return torch.cat([norm.batch_count.view(1), norm.batch_mean, norm.batch_squares])

    def merge(self, rows: Tensor) -> None:
        """Let the module have collected what all replicas have, `rows` in their order."""
        self.module.begin()
        for row in rows:
            mean, squares = row[1:].chunk(2)
            self.module.take_in(row[0], mean, squares)


class MovingAverages:
    """A BatchNorm of one replica whose running averages move with every microbatch.

    A step of k microbatches takes an average a to d a + b, with d = (1 - momentum)^k (for a cumulative average of n
    values: n / (n + k)). What is known is the outcome, so b is, and the replicas' steps can follow one another.
    """

    def __init__(self, module: _BatchNorm) -> None:
        self.module = module
        self.begin()

    def begin(self) -> None:
        """Remember the averages before a step."""
        self._before = self.moved()

    @torch.no_grad()
    def moved(self) -> Tensor:
        """The number of microbatches so far and the averages: one row, float64."""
        return torch.cat([part.double().view(-1) for part in self._parts()])

    @torch.no_grad()
    def merge(self, rows: Tensor) -> None:
        """Set the averages to those after the steps of all replicas, `rows` in their order, one after the other."""
        before, averages = self._before[0], self._before[1:]
        steps, merged = before, averages
        for row in rows:
            came = row[0] - before
            added = row[1:] - self._decay(before, came) * averages
            if self.module.momentum is None:
                added = added * ((before + came) / (steps + came).clamp(min=1))
            merged = torch.where(came > 0, self._decay(steps, came) * merged + added, merged)
            steps = steps + came
        tracked, mean, variance = self._parts()
        tracked.copy_(steps)
        for part, found in zip((mean, variance), merged.chunk(2), strict=True):
            part.copy_(found)

    def _decay(self, steps: Tensor, came: Tensor) -> Tensor:
        if self.module.momentum is None:
            return steps / (steps + came).clamp(min=1)
        return torch.pow(1 - self.module.momentum, came)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        norm = self.module
        assert norm.num_batches_tracked is not None, "it tracks its averages"
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return norm.num_batches_tracked, norm.running_mean, norm.running_var


def averages(modules: Iterable[nn.Module]) -> list[DeferredAverages | MovingAverages]:
    """Of every BatchNorm that has running averages."""
    modules = list(modules)
    deferred = [DeferredAverages(norm) for norm in dict.fromkeys(_deferred_norms(modules))]
    return [*deferred, *(MovingAverages(norm) for norm in dict.fromkeys(_norms(modules)))]


@contextmanager
def statistics_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While open, BatchNorm and InstanceNorm normalize as in training but leave their statistics."""
    modules = list(modules)
    hidden = [(norm, name, norm._buffers[name]) for norm in _instance_norms(modules) for name in _AVERAGES]
    tracking, collecting = list(_norms(modules)), [norm for norm in _deferred_norms(modules) if norm.collects]
    for norm in tracking:
        norm.track_running_stats = False
    for deferred in collecting:
        deferred.collects = False
    for instance_norm, name, _ in hidden:  # it moves whatever averages it has
        instance_norm._buffers[name] = None
    try:
        yield
    finally:
        for instance_norm, name, average in hidden:
            instance_norm._buffers[name] = average
        for norm in tracking:
            norm.track_running_stats = True
        for deferred in collecting:
            deferred.collects = True


def _norms(modules: Iterable[nn.Module]) -> Iterator[_BatchNorm]:
    for root in modules:
        for module in root.modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                yield module


_AVERAGES = ("running_mean", "running_var")


def _instance_norms(modules: Iterable[nn.Module]) -> Iterator[_InstanceNorm]:
    for root in modules:
        for module in root.modules():
            if isinstance(module, _InstanceNorm):
                yield module


def _deferred_norms(modules: Iterable[nn.Module]) -> Iterator[_Deferred]:
    for root in modules:
        for module in root.modules():
            if isinstance(module, _Deferred):
                yield module
