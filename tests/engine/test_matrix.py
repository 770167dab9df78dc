"""Schedule x model x precision x checkpointing x microbatches of equal size or not: what one process computes.

In float64 loss, gradients and statistics are the single process's to 1e-10. In lower precision each gradient is within
2^-7 of the float64 gradient of the same weights, and about as far from it as a plain loop over the microbatches.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from models.model import Model
from pipeline.engine.stage import Stage
from pipeline.schedule.library import SCHEDULES, options_of
from pipeline.training.plan import microbatch_sizes
from pipeline.training.precision import autocast, master_dtype, parameter_dtype
from pipeline.training.settings import ActivationCheckpointSettings, PrecisionSettings
from tests.engine.harness import (
    Outcome,
    assert_equal_outcomes,
    buffers_of,
    build_ranks,
    microbatches_of,
    outcome,
    placement,
    plan_for,
    settings_for,
    step,
)
from tests.engine.samples import chain, small_gpt, text, vectors

MICROBATCHES, STAGES = 4, 4
EVEN, UNEVEN = 8, 10
"""Samples a batch: four microbatches of two, or of 3, 3, 2 and 2."""


# Models of five layers or six, so that four stages are of unequal length


class Residual(nn.Module):
    """BatchNorm, and a convolution of what is positive, beside what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(self.norm(x).tanh_())


class Hidden(nn.Module):
    """LayerNorm and a linear map beside what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Frozen(nn.Linear):
    """Passes gradients on and gets none; its second weight is never used."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.unused = nn.Parameter(torch.empty(3))
        self.requires_grad_(False)
        self.unused.requires_grad_(True)


class Down(nn.Module):
    """Halves an image, and gives it as it was to a layer that goes up again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.avg_pool2d(self.convolution(x), 2).tanh(), x


class Up(nn.Module):
    """Doubles an image and joins what was given. A tuple goes on to the next layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], given: Tensor) -> tuple[Tensor, Tensor]:
        x = x if isinstance(x, Tensor) else x[0]
        wide = nn.functional.interpolate(x, scale_factor=2.0)
        return self.convolution(torch.cat([wide, given], 1)).tanh(), given


class Classify(nn.Module):
    """The mean over the image, and a linear map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        x = given if isinstance(given, Tensor) else given[0]
        return self.linear(x.mean((2, 3)))


def moderate(name: str, tensor: Tensor, generator: Generator) -> None:
    """Weights that keep a layer's output about as large as its input, and that bfloat16 can hold."""
    if tensor.dim() >= 2:
        tensor.normal_(generator=generator).mul_(0.5 * tensor[0].numel() ** -0.5)
        tensor.copy_(tensor.bfloat16())
    else:
        tensor.fill_(float(name.endswith(("weight", "running_var"))))


def pictures(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, 4, 8, 8, generator=torch.Generator().manual_seed(5)), vectors(batch_size)[1]


def gpt() -> Model:
    return replace(small_gpt(layers=2), initialize=moderate)


def residual() -> Model:
    stem = partial(nn.Conv2d, 4, 6, 3, padding=1)
    return _moderate([stem, *[partial(Residual, 6)] * 3, partial(Classify, 6)])


def perceptron() -> Model:
    first, hidden, last = partial(nn.Linear, 8, 16), partial(Hidden, 16), partial(nn.Linear, 16, 8)
    return _moderate([first, hidden, partial(Frozen, 16), hidden, hidden, last])


def unet() -> Model:
    builds = [partial(Down, 4), partial(Down, 4), partial(Up, 4), partial(Up, 4), partial(Classify, 4)]
    skips = {0: ("fine",), 1: ("coarse",)}, {3: ("fine",), 2: ("coarse",)}
    return _moderate(builds, gives=skips[0], takes=skips[1])


def _moderate(builds: Sequence[Callable[[], nn.Module]], **more: Any) -> Model:
    return replace(chain(builds, **more), initialize=moderate)


def learnable(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The targets show in the inputs, which bfloat16 can hold: gradients of many samples then add up, and what is left
    of rounding is no remainder of a difference."""
    inputs, targets = batch[0], (batch[1] > 0).long()
    if not inputs.is_floating_point():
        return inputs, torch.ones_like(targets)
    shown = 2 * nn.functional.one_hot(targets, inputs.shape[1])
    return (inputs / 2 + shown.reshape(shown.shape + (1,) * (inputs.dim() - 2))).bfloat16().float(), targets


MODELS: dict[str, tuple[Callable[[], Model], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "gpt": (gpt, lambda size: learnable(text(size, 3))),
    "residual": (residual, lambda size: learnable(pictures(size))),
    "perceptron": (perceptron, lambda size: learnable(vectors(size, 8))),
    "unet": (unet, lambda size: learnable(pictures(size))),
}
PRECISIONS = {
    "fp64": PrecisionSettings("fp64", "float64"),
    "bf16": PrecisionSettings("bf16", autocast="bfloat16"),
    "bf16_true": PrecisionSettings("bf16_true", "bfloat16", masters="float32"),
}
CHECKPOINTS = {
    "never": ActivationCheckpointSettings("never"),
    "except_last": ActivationCheckpointSettings("except_last"),
    "always": ActivationCheckpointSettings("always"),
    "selective": ActivationCheckpointSettings("selective"),
    "every 2nd": ActivationCheckpointSettings("selective", every=2),
}


# One process


@functools.cache
def alone(model: str, precision: str, batch_size: int, weights_of: str) -> Outcome:
    """The whole model in a loop over the microbatches, in `precision`, with the weights as `weights_of` rounds them."""
    made, (inputs, targets) = MODELS[model][0](), MODELS[model][1](batch_size)
    chosen = PRECISIONS[precision]
    stage, rounded = (_whole(made, parameter_dtype(PRECISIONS[name])) for name in (precision, weights_of))
    parameters = dict(stage.named_parameters())
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            parameters[name].copy_(parameter)
    weight, total, sums = made.loss.weight(targets), torch.zeros((), dtype=torch.float64), {}
    context = autocast(chosen, "cpu")
    sizes = list(microbatch_sizes(batch_size, MICROBATCHES))
    for piece, answer in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        with context():
            value, named = stage.placement.loaded(piece), {}
            for layer, module in zip(made.layers, stage.modules, strict=True):
                output = module(value, *(named[name] for name in layer.takes))
                value, *given = output if layer.gives else (output,)
                named.update(zip(layer.gives, given, strict=True))
            loss = made.loss(value, answer) / weight
        loss.backward()
        total = total + loss.detach()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to(master_dtype(chosen) or parameter.dtype)
                sums[name] = sums[name] + gradient if name in sums else gradient
        for parameter in parameters.values():
            parameter.grad = None
    return Outcome(total, sums, buffers_of([stage]))


def _whole(model: Model, dtype: torch.dtype) -> Stage:
    stage = Stage(0, model.layers, model, placement(dtype), last=True)
    for alias, owner in model.tied.items():
        stage.tie(alias, dict(stage.named_parameters())[owner])
    return stage


# The pipeline


def piped(schedule: str, model: str, precision: str, checkpoint: str, batch_size: int) -> Outcome:
    chosen, stages_a_rank = PRECISIONS[precision], _stages_a_rank(schedule)
    settings = settings_for(
        schedule, STAGES // stages_a_rank, MICROBATCHES, batch_size, checkpoint=CHECKPOINTS[checkpoint]
    )
    settings.precision = replace(chosen)
    made, (inputs, targets) = MODELS[model][0](), MODELS[model][1](batch_size)
    plan = plan_for(settings, made, inputs, parameter_dtype(chosen))
    ranks = build_ranks(
        plan, made, dtype=parameter_dtype(chosen), autocast=autocast(chosen, "cpu"), masters=master_dtype(chosen)
    )
    return outcome(plan, ranks, step(ranks, microbatches_of(plan, made, inputs, targets)))


def _stages_a_rank(schedule: str) -> int:
    return 2 if schedule in ("zbv", "v_half", "v_min", "dualpipe_v") or "stages_per_rank" in options_of(schedule) else 1


def errors(found: Outcome, exact: Outcome) -> dict[str, float]:
    """How far each gradient is from the exact one, beside that one's norm."""
    return {
        name: float((found.gradients[name].double() - gradient).norm() / gradient.norm())
        for name, gradient in exact.gradients.items()
    }


# The matrix


def covering(*axes: Sequence[Hashable]) -> list[tuple[Any, ...]]:
    """Cases in which every three entries of three axes occur together, as few as can be: those with most news first."""
    places = list(itertools.combinations(range(len(axes)), 3))
    everything = sorted(itertools.product(*axes), key=lambda case: zlib.crc32(repr(case).encode()))
    seen: set[tuple[Any, ...]] = set()
    chosen = []
    for news in range(len(places), 0, -1):
        for case in everything:
            triples = {(place, tuple(case[axis] for axis in place)) for place in places}
            if len(triples - seen) >= news:
                seen |= triples
                chosen.append(case)
    return chosen


CASES = covering(tuple(SCHEDULES), tuple(MODELS), tuple(PRECISIONS), tuple(CHECKPOINTS), (EVEN, UNEVEN))


@pytest.mark.parametrize(("schedule", "model", "precision", "checkpoint", "batch_size"), CASES)
def test_a_pipeline_computes_what_one_process_does(schedule, model, precision, checkpoint, batch_size):
    found = piped(schedule, model, precision, checkpoint, batch_size)
    exact = alone(model, "fp64", batch_size, precision)
    if precision == "fp64":
        assert_equal_outcomes(found, exact)
        return
    loop, ours = (errors(each, exact) for each in (alone(model, precision, batch_size, precision), found))
    assert set(ours) == set(loop)
    worst = max(ours, key=lambda name: ours[name])
    assert ours[worst] <= 2**-7, f"{worst} is off by {ours[worst]:.4f} of its norm"
    for name, error in ours.items():
        assert error <= 1.5 * loop[name], f"{name} is {error / loop[name]:.2f} x as far off as the loop's"
