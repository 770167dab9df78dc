"""One pipeline rank of a run: its stages, its parameters, and the executors that run its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.engine.activations import ActivationMeter
from pipeline.engine.executor import Executor, Microbatches, nothing_to_reduce
from pipeline.engine.materialize import MakeLayer, materialize
from pipeline.engine.model import Model
from pipeline.engine.nest import Nest
from pipeline.engine.reduction import Add
from pipeline.engine.rehearsal import Silence, rehearse
from pipeline.engine.stage import Placement, Stage
from pipeline.engine.standing import Board, Marker
from pipeline.engine.transport import Transport
from pipeline.training.masters import Masters
from pipeline.training.optimizer import build_optimizer, set_learning_rate
from pipeline.training.plan import Plan
from pipeline.training.replicated import Replicated
from pipeline.training.settings import OptimizerSettings


class Rank:
    """What one rank holds. Built with memory for its own layers alone. Its marker says where it stands.

    Without settings of an optimizer it has none: somebody else moves the parameters.

    Args:
        rank: of all replicas' ranks.
        add: sums over the replicas, if there are several (`Group.add` of this rank).
    """

    def __init__(
        self,
        rank: int,
        plan: Plan,
        model: Model,
        placement: Placement,
        transport: Transport,
        optimizer: OptimizerSettings | None,
        marker: Marker | None = None,
        make_layer: MakeLayer = materialize,
        add: Add | None = None,
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.placement = placement
        self.stages = {stage: _stage(stage, plan, model, placement, make_layer) for stage in plan.stages_of(rank)}
        _tie(self.stages, plan.tied)
        self._transport = transport
        self.marker = marker or Board.in_memory(1).marker(0)
        self.parameters = {name: p for stage in self.stages.values() for name, p in stage.named_parameters()}
        self._unique = list({id(parameter): parameter for parameter in self.parameters.values()}.values())
        self._kept: list[Tensor] = []
        self.masters = Masters(self._unique, placement.masters)
        self.replicated = None if add is None or plan.dp == 1 else Replicated(rank, plan, self.stages, add)
        reduce = None if self.replicated is None else self.replicated.reducer.start
        self.trainer = Executor(rank, plan.program, self.stages, plan.boundaries, transport, self.marker, reduce)
        self.evaluator = self._forward_alone(self.stages)
        moved = [self.masters.of(parameter) for parameter in self._unique]
        self.optimizer = None if optimizer is None else build_optimizer(optimizer, moved)

    def reader(self, read: Callable[[Nest, Nest], Tensor]) -> Executor:
        """Runs the evaluation's program, with `read(outputs, targets)` in the place of the loss."""
        return self._forward_alone({index: stage.reading(read) for index, stage in self.stages.items()})

    def _forward_alone(self, stages: Mapping[int, Stage]) -> Executor:
        plan = self.plan
        executor = Executor(self.rank, plan.evaluation, stages, plan.boundaries, self._transport, self.marker)
        executor.clock = None  # what a validation's actions take is nobody's question
        return executor

    @property
    def holds_first(self) -> bool:
        """Whether the model's input goes in here."""
        return 0 in self.stages

    @property
    def holds_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.plan.schedule.stages - 1 in self.stages

    def expect(self, plan: Plan) -> None:
        """Take batches of another shape from now on: `plan` differs from the rank's own in nothing else."""
        self.plan = plan
        for executor in (self.trainer, self.evaluator):
            executor.boundaries = plan.boundaries

    def rehearse(self, batch: Microbatches, *, evaluates: bool) -> None:
        """Run a step (and an evaluation) on zeros, alone, so that all code is compiled before others wait for it."""
        for program in (self.plan.program, self.plan.evaluation)[: 1 + evaluates]:
            silence = Silence(self.placement.device)
            rehearse(Executor(self.rank, program, self.stages, self.plan.boundaries, silence), batch)

    def counted_parameters(self, tied_ranks: Mapping[str, tuple[int, ...]]) -> list[nn.Parameter]:
        """The parameters that this rank counts in the model's norm: a tied one is counted where its owner is.

        Those of all replicas have the same gradients, which the first counts.
        """
        if self.rank >= self.plan.schedule.pp:
            return []
        elsewhere = {alias for alias, owner in self.plan.tied.items() if owner in tied_ranks}
        return list(dict.fromkeys(p for name, p in self.parameters.items() if name not in elsewhere))

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """While open, gradients aren't summed over the replicas."""
        reduce, self.trainer.reduce = self.trainer.reduce, nothing_to_reduce
        try:
            yield
        finally:
            self.trainer.reduce = reduce

    def step(self, learning_rate: float) -> None:
        """Let the optimizer move the parameters."""
        if self.optimizer is not None:
            set_learning_rate(self.optimizer, learning_rate)
            self.masters.take_gradients()
            self.optimizer.step()
            self.masters.round()

    def clear_gradients(self) -> None:
        """Drop every gradient."""
        for parameter in self._unique:
            parameter.grad = None
        self.masters.drop_gradients()

    def keep_buffers(self) -> None:
        """Remember BatchNorm's statistics and the like, which forwards move."""
        if self._kept:  # for every layer of every step: one kernel for many small tensors, into memory that is there
            torch._foreach_copy_(self._kept, self._buffers())
        else:
            self._kept = [buffer.clone() for buffer in self._buffers()]

    def restore_buffers(self) -> None:
        """Put back what was kept."""
        if self._kept:
            torch._foreach_copy_(self._buffers(), self._kept)

    def _buffers(self) -> list[Tensor]:
        return [
            b for stage in self.stages.values() for _, b in stage.named_tensors() if not isinstance(b, nn.Parameter)
        ]

    def tie_clock(self) -> None:
        """Set the clock that times this rank's actions by the host's; waits for a GPU."""
        if self.trainer.clock is not None:
            self.trainer.clock.tie()

    def measure_activations(self, measure: bool) -> int | None:
        """Start measuring what is held for microbatches, or stop and give the peak in bytes."""
        if measure:
            tensors = [tensor for stage in self.stages.values() for _, tensor in stage.named_tensors()]
            self.trainer.meter = ActivationMeter(tensors)
            return None
        meter, self.trainer.meter = self.trainer.meter, None
        return None if meter is None else meter.peak_bytes

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the whole model's state dict; of rounded parameters the exact ones."""
        state = {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}
        return state | {name: tensor.detach() for name, tensor in self.trained.items()}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves, by whole-model name: the parameters, or their exact copies (`masters`)."""
        return {name: self.masters.of(parameter) for name, parameter in self.parameters.items()}


def _stage(index: int, plan: Plan, model: Model, placement: Placement, make_layer: MakeLayer) -> Stage:
    layers = [model.layers[layer] for layer in plan.layers_of(index)]
    last = index == plan.schedule.stages - 1
    return Stage(index, layers, model, placement, last=last, recomputed=plan.recomputed, make_layer=make_layer)


def _tie(stages: Mapping[int, Stage], tied: Mapping[str, str]) -> None:
    held: dict[str, nn.Parameter] = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    for owner in set(tied.values()):
        # the first held here stands for the others: the owner may be on another rank
        names = [name for name in (owner, *(alias for alias, of in tied.items() if of == owner)) if name in held]
        for name in names[1:]:
            for stage in stages.values():
                stage.tie(name, held[names[0]])
