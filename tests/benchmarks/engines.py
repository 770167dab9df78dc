"""The engines that are compared, each as one rank's step of the same model on the same microbatches.

A step is forward and backward of every microbatch; gradients are added to what is there and the loss is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from models.model import Model
from pipeline.engine.executor import Microbatches, run
from pipeline.engine.materialize import materialize
from pipeline.engine.stage import Placement
from pipeline.engine.transport import Transport
from pipeline.training.plan import Plan, split
from pipeline.training.rank import Rank
from pipeline.training.settings import OptimizerSettings
from tests.benchmarks.cases import CPU, TORCH_CLASSES, Case
from tests.engine.harness import placement

FP32_ON_CPU = placement(torch.float32)
Parameters = Mapping[str, nn.Parameter]


class Engine(Protocol):
    """One rank of a pipeline, or a whole model."""

    parameters: Parameters
    """By whole-model name."""
    loss: Tensor | None
    """The last step's, where the loss is computed here."""

    def step(self) -> None:
        """Forward and backward of every microbatch."""


class Ours:
    """What a training run does between two optimizer steps."""

    def __init__(self, case: Case, plan: Plan, rank: int, transport: Transport, where: Placement = FP32_ON_CPU) -> None:
        model, (inputs, targets) = case.build(), case.batch()
        held = Rank(rank, plan, model, where, transport, OptimizerSettings())
        self.executor = held.trainer
        self.measure_activations = held.measure_activations
        self.batch = Microbatches(
            step=0,
            sizes=plan.microbatch_sizes,
            inputs=split(inputs, plan.microbatch_sizes),
            targets=split(targets, plan.microbatch_sizes),
            weight=model.loss.weight(targets),
        )
        self.parameters: Parameters = held.parameters
        self.loss: Tensor | None = None

    def step(self) -> None:
        """The executor's step."""
        (result,) = run([self.executor], [self.batch])
        self.loss = result.loss


class Torch:
    """torch.distributed.pipelining: a stage built by hand from the same layers, and its schedule class."""

    def __init__(self, case: Case, plan: Plan, rank: int) -> None:
        model, (inputs, targets) = case.build(), case.batch()
        schedule, weight = plan.schedule, model.loss.weight(targets)
        held = {stage: modules(model, plan.layers_of(stage), FP32_ON_CPU) for stage in schedule.stages_of(rank)}
        stages = [
            PipelineStage(nn.Sequential(*layers.values()), stage, schedule.stages, CPU)
            for stage, layers in held.items()
        ]
        several = schedule.stages > schedule.pp
        self._schedule = TORCH_CLASSES[schedule.name](
            stages if several else stages[0],
            schedule.microbatches,
            loss_fn=lambda outputs, targets: model.loss(outputs, targets) / weight,
            scale_grads=False,  # the loss is divided by the whole batch's weight already
        )
        self._inputs = (inputs,) if 0 in held else ()
        self._targets = targets if schedule.stages - 1 in held else None
        self.parameters: Parameters = {name: p for layers in held.values() for name, p in named(model, layers)}
        self.loss: Tensor | None = None

    def step(self) -> None:
        """The schedule's step."""
        losses: list[Tensor] = []
        self._schedule.step(*self._inputs, target=self._targets, losses=losses, return_outputs=False)
        self.loss = torch.stack(losses).detach().sum() if losses else None


class Alone:
    """The whole model in one process: a loop over the microbatches."""

    def __init__(self, case: Case, where: Placement = FP32_ON_CPU) -> None:
        model, (inputs, targets) = case.build(), case.batch()
        layers = modules(model, range(len(model.layers)), where)
        self._model, self._whole, self._where = model, nn.Sequential(*layers.values()), where
        self._weight = model.loss.weight(targets)
        self._inputs, self._targets = inputs.tensor_split(case.microbatches), targets.tensor_split(case.microbatches)
        self.parameters: Parameters = dict(named(model, layers))
        self.loss: Tensor | None = None

    def step(self) -> None:
        """A forward and a backward after the other."""
        losses = []
        for inputs, targets in zip(self._inputs, self._targets, strict=True):
            inputs, targets = inputs.to(self._where.device), targets.to(self._where.device)
            with self._where.autocast():
                loss = self._model.loss(self._whole(inputs), targets) / self._weight
            loss.backward()
            losses.append(loss.detach())
        self.loss = torch.stack(losses).sum()


def modules(model: Model, layers: Iterable[int], where: Placement) -> dict[int, nn.Module]:
    """Layers by index, with the starting weights that they have in every run."""
    place = {"device": where.device, "dtype": where.dtype, "seed": where.seed}
    return {index: materialize(model, model.layers[index], **place) for index in layers}


def named(model: Model, layers: Mapping[int, nn.Module]) -> Iterable[tuple[str, nn.Parameter]]:
    """The layers' parameters under their whole-model names."""
    for index, module in layers.items():
        yield from module.named_parameters(model.layers[index].prefix.rstrip("."))


def clear(engine: Engine) -> None:
    """Drop the gradients."""
    for parameter in engine.parameters.values():
        parameter.grad = None


def error(found: Engine, expected: Engine) -> float:
    """The largest difference of a gradient, or of the loss, in terms of the largest entry that was expected."""
    pairs = [(parameter.grad, expected.parameters[name].grad) for name, parameter in found.parameters.items()]
    if found.loss is not None:
        pairs.append((found.loss, expected.loss))
    return max(_difference(ours, theirs) for ours, theirs in pairs)


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None, "every parameter gets a gradient"
    assert expected is not None, "every parameter gets a gradient"
    largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((found - expected).abs().max() / largest)
