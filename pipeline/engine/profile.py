"""How long a model's stages really take: the costs that simulator and planner reckon with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeline.engine.model import Model
from pipeline.engine.passes import Pass
from pipeline.engine.segments import Recomputed
from pipeline.engine.stage import Placement, Stage
from pipeline.engine.weight_gradient import WeightGradients

REPEATS = 5


@dataclass(frozen=True)
class StageProfile:
    """One stage and one microbatch. Seconds: medians of several passes."""

    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    recompute: float
    output_bytes: int


def profile_stages(
    model: Model,
    counts: Sequence[int],
    placement: Placement,
    inputs: Tensor,
    targets: Tensor,
    repeats: int = REPEATS,
    recomputed: Recomputed | None = None,
) -> tuple[StageProfile, ...]:
    """Time every stage alone, one after the other, in this process; only one has memory at a time.

    Args:
        counts: how many consecutive layers each stage holds.
        placement: device and precision of the run.
        inputs, targets: one microbatch.
        repeats: timed passes of each kind, after one that warms up.
        recomputed: the part of a stage that an R computes again.
    """
    profiles, start = [], 0
    dtype = placement.dtype if inputs.is_floating_point() else None
    value = inputs.to(placement.device, dtype, copy=True)
    for index, count in enumerate(counts):
        layers, last = model.layers[start : start + count], index == len(counts) - 1
        stage = Stage(index, layers, model, placement, last=last, recomputed=recomputed)
        stage.split_backward()
        stage.train(True)
        profile, value = _Passes(stage, value, targets.to(placement.device), model).profile(repeats)
        profiles.append(profile)
        start += count
    return tuple(profiles)


class _Passes:
    """Forwards and backwards of one stage on one microbatch."""

    def __init__(self, stage: Stage, inputs: Tensor, targets: Tensor, model: Model) -> None:
        self._stage = stage
        self._inputs = inputs
        self._targets = targets
        self._weight = float(model.loss.weight(targets))
        self._device = stage.placement.device
        self._run = partial(stage.forward, targets=targets, weight=self._weight, step=0, microbatch=0)

    def profile(self, repeats: int) -> tuple[StageProfile, Tensor]:
        """The stage's profile, and its output for the stage after it."""
        whole = [self._whole() for _ in range(repeats + 1)][1:]
        split = [self._split() for _ in range(repeats + 1)][1:]
        again = [self._again() for _ in range(repeats + 1)][1:]
        with torch.no_grad():
            output = self._forward(self._leaf(), None)
        profile = StageProfile(
            forward=statistics.median(forward for forward, _ in whole),
            backward=statistics.median(backward for _, backward in whole),
            backward_input=statistics.median(for_input for for_input, _ in split),
            backward_weight=statistics.median(for_weight for _, for_weight in split),
            recompute=statistics.median(again),
            output_bytes=output.nbytes,
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

    def _leaf(self) -> Tensor:
        for _, parameter in self._stage.named_parameters():
            parameter.grad = None
        return self._inputs.detach().requires_grad_(self._inputs.is_floating_point() and not self._stage.first)

    def _forward(self, inputs: Tensor, weights: WeightGradients | None) -> Tensor:
        with self._stage.deferring(weights):
            return self._run(inputs)

    def _backward(self, output: Tensor, weights: WeightGradients | None = None) -> None:
        if output.requires_grad:
            with self._stage.deferring(weights):
                torch.autograd.backward(output, torch.ones_like(output))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
