"""How long a model's layers really take: the costs that simulator and planner reckon with."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.engine.model import Model
from pipeline.engine.nest import Nest, flat, mapped
from pipeline.engine.passes import Pass
from pipeline.engine.segments import Recomputed
from pipeline.engine.stage import Placement, Stage
from pipeline.engine.weight_gradient import WeightGradients

REPEATS = 5


@dataclass(frozen=True)
class LayerProfile:
    """One layer and one microbatch; the model's loss belongs to the last. Seconds: medians of several passes.

    A stage takes about what its layers take together: within 9 % for the default GPT, while the later half of ResNet-18
    took up to a fifth more as a whole (one CPU thread).
    """

    name: str
    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    recompute: float
    output_bytes: int


def profile_layers(
    model: Model,
    placement: Placement,
    inputs: Nest,
    targets: Nest,
    *,
    repeats: int = REPEATS,
    keeps_costly: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LayerProfile, ...]:
    """Time every layer alone, one after the other, in this process; only one has memory at a time.

    Args:
        placement: device and precision of the run.
        inputs, targets: one microbatch.
        repeats: timed passes of each kind, after one that warms up.
        keeps_costly: a recomputation is handed the outputs of costly operations.
        clock: in seconds.
    """
    profiles = []
    part = Recomputed(keeps_costly=keeps_costly)
    value = mapped(lambda tensor: placement.loaded(tensor.clone()), inputs)
    answers = mapped(lambda tensor: tensor.to(placement.device), targets)
    for index, layer in enumerate(model.layers):
        last = index == len(model.layers) - 1
        stage = Stage(index, [layer], model, placement, last=last, recomputed=part)
        passes = _Passes(stage, value, answers, model, clock)
        profile, value = passes.profile(repeats)
        del stage, passes
        gc.collect()  # modules split for I and W are in cycles; the next layer needs their memory
        profiles.append(profile)
    return tuple(profiles)


class _Passes:
    """Forwards and backwards of one layer, as a stage of its own, on one microbatch."""

    def __init__(self, stage: Stage, inputs: Nest, targets: Nest, model: Model, clock: Callable[[], float]) -> None:
        stage.split_backward()
        stage.train(True)
        self._stage = stage
        self._inputs = inputs
        self._targets = targets
        self._weight = float(model.loss.weight(targets))
        self._device = stage.placement.device
        self._clock = clock
        self._run = partial(stage.forward, targets=targets, weight=self._weight, step=0, microbatch=0)

    def profile(self, repeats: int) -> tuple[LayerProfile, Nest]:
        """The layer's profile, and its output for the layer after it.

        The kinds of passes take turns, so that a busy spell of the machine falls on all of them.
        """
        rounds = [(*self._whole(), *self._split(), self._again()) for _ in range(repeats + 1)][1:]
        forward, backward, backward_input, backward_weight, recompute = map(
            statistics.median, zip(*rounds, strict=True)
        )
        with torch.no_grad():
            output = self._forward(self._leaf(), None)
        profile = LayerProfile(
            name=self._stage.layers[0].name,
            forward=forward,
            backward=backward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            recompute=recompute,
            output_bytes=sum(tensor.nbytes for tensor in flat(output)),
        )
        return profile, output

    def _whole(self) -> tuple[float, float]:
        inputs = self._leaf()
        began = self._now()
        output = self._forward(inputs, None)
        middle = self._now()
        self._backward(output)
        return middle - began, self._now() - middle

    def _split(self) -> tuple[float, float]:
        inputs, weights = self._leaf(), WeightGradients()
        output = self._forward(inputs, weights)
        began = self._now()
        self._backward(output, weights)
        middle = self._now()
        weights.apply()
        return middle - began, self._now() - middle

    def _again(self) -> float:
        passed = Pass(self._stage, self._leaf(), recomputed=True)
        passed.forward(self._run)
        began = self._now()
        passed.recompute(self._run)
        return self._now() - began

    def _leaf(self) -> Nest:
        for _, parameter in self._stage.named_parameters():
            parameter.grad = None
        wanted = not self._stage.first
        leaves: Nest = mapped(lambda one: one.detach().requires_grad_(wanted and one.is_floating_point()), self._inputs)
        return leaves

    def _forward(self, inputs: Nest, weights: WeightGradients | None) -> Nest:
        with self._stage.deferring(weights):
            output: Nest = self._run(inputs)
        return output

    def _backward(self, output: Nest, weights: WeightGradients | None = None) -> None:
        ends = [tensor for tensor in flat(output) if tensor.requires_grad]
        if ends:
            with self._stage.deferring(weights):
                torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()
