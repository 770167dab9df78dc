"""A batch through the pipeline: what the ranks of a process do with it, and together with those of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from torch import Tensor, nn

from pipeline.engine.executor import Microbatches, StepResult, run
from pipeline.engine.model import Loss
from pipeline.engine.nest import Microbatched, Nest, mapped
from pipeline.engine.standing import Activity
from pipeline.training import gradients
from pipeline.training.group import Group
from pipeline.training.plan import Plan, split
from pipeline.training.rank import Rank


class Ranks:
    """The ranks of this process; the other processes make the same calls with theirs, in the same order.

    Args:
        plan: the same in every process.
        ranks: those in this process, ascending.
        loss: the model's, for its weight.
        group: all ranks.
    """

    def __init__(self, plan: Plan, ranks: Sequence[Rank], loss: Loss, group: Group) -> None:
        self.plan = plan
        self.ranks = tuple(ranks)
        self.group = group
        self._loss = loss
        self._tied = _held_apart(plan, self.ranks)
        self._replicated = [rank.replicated for rank in self.ranks if rank.replicated is not None]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    @property
    def holds_first(self) -> bool:
        """Whether the model's input goes in here."""
        return any(rank.holds_first for rank in self.ranks)

    @property
    def holds_last(self) -> bool:
        """Whether the loss is computed here."""
        return any(rank.holds_last for rank in self.ranks)

    @property
    def samples(self) -> slice:
        """Of a whole batch those that go through the replicas of this process."""
        sizes, own = self.plan.microbatch_sizes, self.microbatches
        return slice(sum(sizes[: own.start]), sum(sizes[: own.stop]))

    @property
    def microbatches(self) -> slice:
        """Of a whole batch's microbatches those that go through the replicas of this process."""
        first, last = (self.plan.microbatches_of(self.ranks[at].rank) for at in (0, -1))
        return slice(first.start, last.stop)

    def expect(self, plan: Plan) -> None:
        """Take batches of another shape from now on: `plan` differs from the one at hand in nothing else."""
        self.plan = plan
        for rank in self.ranks:
            rank.expect(plan)

    def own(self, inputs: Nest) -> Nest:
        """Of a whole batch what goes through the replicas of this process."""
        if isinstance(inputs, Microbatched):
            return Microbatched(inputs[self.microbatches])
        own: Nest = mapped(lambda tensor: tensor[self.samples], inputs)
        return own

    def cut(self, step: int, inputs: Nest, targets: Nest, *, loss_scale: float = 1.0) -> Microbatches:
        """A whole batch as microbatches.

        Args:
            step: with the seed decides every random number.
            inputs: a tensor (samples, ...) or a nest of such, of the `samples` that are local; None where no local rank
                takes them.
            targets: the same of the whole batch.
            loss_scale: what the gradients are multiplied by.
        """
        sizes = self.plan.microbatch_sizes
        whole = targets if isinstance(targets, Microbatched) else (targets,)
        return Microbatches(
            step=step,
            sizes=sizes,
            inputs=None if inputs is None else self._placed(split(inputs, sizes[self.microbatches])),
            targets=None if targets is None else split(targets, sizes),
            # nothing may count in a batch, padding alone: its sum is 0, and so shall its mean be
            weight=1.0 if targets is None else sum(map(self._loss.weight, whole)) or 1.0,
            loss_scale=loss_scale,
            kinds=self.plan.microbatch_kinds,
        )

    def _placed(self, pieces: tuple[Nest, ...]) -> tuple[Nest, ...]:
        """Where they belong among those of all replicas, whose own aren't here."""
        before, after = self.microbatches.start, len(self.plan.microbatch_sizes) - self.microbatches.stop
        return (*[None] * before, *pieces, *[None] * after)

    def parts(self, batch: Microbatches) -> list[Microbatches]:
        """For each rank what goes through its replica."""
        return [batch.part(self.plan.microbatches_of(rank.rank)) for rank in self.ranks]

    def train(self, batch: Microbatches) -> list[StepResult]:
        """Forward and backward: add the gradients of the whole batch's mean loss to `.grad`, tied ones summed.

        Afterwards all replicas have the same gradients and the same buffers.

        Raises:
            ActionError: an action of the program failed.
        """
        for rank in self._replicated:
            rank.begin_step()
        before = self._set_sums_aside()
        results = run([rank.trainer for rank in self.ranks], self.parts(batch), self._settle)
        self.enter(Activity.SUMMING_TIED)
        local = {rank.rank: rank.parameters for rank in self.ranks}
        gradients.sum_tied_gradients(local, self.plan.tied, self._tied, self.group)
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return results

    def evaluate(self, batch: Microbatches) -> list[StepResult]:
        """Forward alone, in evaluation mode; weights, statistics and random numbers stay as they are.

        Raises:
            ActionError: an action of the program failed.
        """
        return run([rank.evaluator for rank in self.ranks], self.parts(batch))

    def mean_loss(self, results: Sequence[StepResult]) -> float:
        """The whole batch's loss, of which one rank of each replica has a share, in every process."""
        shares = [0.0 if result.loss is None else float(result.loss) for result in results]
        return sum(self.group.gather_floats(shares))

    def gradient_norm(self, results: Sequence[StepResult] = ()) -> float:
        """The Euclidean norm of the whole model's gradient, a tied parameter counted once; in every process.

        Args:
            results: of `train`, if the norm shall not be finite where the loss isn't.
        """
        self.enter(Activity.TAKING_NORM)
        counted: dict[int, list[Tensor]] = {}
        seen: set[nn.Parameter] = set()  # ranks of one process may share a parameter
        for rank in self.ranks:
            own = [parameter for parameter in rank.counted_parameters(self._tied) if parameter not in seen]
            counted[rank.rank] = [parameter.grad for parameter in own if parameter.grad is not None]
            seen.update(own)
        losses = {rank.rank: result.loss for rank, result in zip(self.ranks, results, strict=False)}
        return gradients.global_norm(counted, self.group, losses)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient of this process in place."""
        gradients.scale_gradients([p.grad for p in self.parameters() if p.grad is not None], factor)

    def clear_gradients(self) -> None:
        """Drop every gradient."""
        for rank in self.ranks:
            rank.clear_gradients()

    def keep_buffers(self) -> None:
        """Remember what forwards move besides gradients, to be put back should the step be skipped."""
        for rank in self.ranks:
            rank.keep_buffers()

    def restore_buffers(self) -> None:
        """Put back what was kept."""
        for rank in self.ranks:
            rank.restore_buffers()

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of this process, once."""
        return list(dict.fromkeys(parameter for rank in self.ranks for parameter in rank.parameters.values()))

    def enter(self, activity: Activity, step: int | None = None) -> None:
        """Show what this process does from now on."""
        for rank in self.ranks:
            rank.marker.enter(activity, step)

    def _settle(self) -> None:
        """Wait for the gradients' sums over the replicas, and make buffers equal on all."""
        if not self._replicated:
            return
        self.enter(Activity.REDUCING)
        for rank in self._replicated:
            rank.reducer.finish()
        # in step, for each waits at a `yield` for what the others give
        deque(zip_longest(*(rank.buffers.settle() for rank in self._replicated)), maxlen=0)

    def _set_sums_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take away what earlier steps left in parameters that are summed over ranks: that is a sum already."""
        owners = self.plan.tied
        found = {
            p for rank in self.ranks for name, p in rank.parameters.items() if owners.get(name, name) in self._tied
        }
        found.update(p for rank in self._replicated for p in rank.reducer.parameters)
        before = [(parameter, parameter.grad) for parameter in found if parameter.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        return before


def _held_apart(plan: Plan, ranks: Sequence[Rank]) -> dict[str, tuple[int, ...]]:
    """`plan.tied_ranks()` without the parameters that are one and the same for all of their ranks."""
    copies: dict[str, set[nn.Parameter]] = {}
    for rank in ranks:
        for name, parameter in rank.parameters.items():
            copies.setdefault(plan.tied.get(name, name), set()).add(parameter)
    here = {rank.rank for rank in ranks}
    return {
        owner: holders
        for owner, holders in plan.tied_ranks().items()
        if not here.issuperset(holders) or len(copies[owner]) > 1
    }
