"""A pipelined step in this process, and the plain loop that it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.boundary import Autocast, specs_of
from pipeline.engine.compilation import Compiler
from pipeline.engine.executor import Microbatches, StepResult, run
from pipeline.engine.model import Model
from pipeline.engine.nest import Microbatched, mapped
from pipeline.engine.stage import Placement, Stage
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule.library import forward_only, options_of
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.validate import validate
from pipeline.training.gradients import sum_tied_gradients
from pipeline.training.group import LocalGroup
from pipeline.training.plan import Plan, make_plan, microbatch_sizes, samples, split
from pipeline.training.rank import Rank
from pipeline.training.settings import ActivationCheckpointSettings, OptimizerSettings, ScheduleSettings, Settings

CPU = torch.device("cpu")


@dataclass
class Outcome:
    """What a step leaves: the loss, every gradient and every buffer by whole-model name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def settings_for(
    schedule: str,
    pp: int,
    microbatches: int,
    batch_size: int,
    *,
    checkpoint: str | ActivationCheckpointSettings = "never",
    **more: object,
) -> Settings:
    """Settings of a small run; interleaved schedules get two stages a rank."""
    stages_per_rank = 2 if "stages_per_rank" in options_of(schedule) else 1
    settings = Settings(
        pp=pp,
        microbatches=microbatches,
        batch_size=batch_size,
        schedule=ScheduleSettings(schedule, stages_per_rank),
        activation_checkpoint=ActivationCheckpointSettings(checkpoint) if isinstance(checkpoint, str) else checkpoint,
        **more,  # type: ignore[arg-type]
    )
    settings.check()
    return settings


def placement(
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    autocast: Autocast = nullcontext,
    compiler: Compiler | None = None,
) -> Placement:
    """The CPU, without autocast or compiler unless one is given."""
    return Placement(CPU, dtype, autocast, seed, compiler)


def plan_for(settings: Settings, model: Model, inputs: Tensor, dtype: torch.dtype = torch.float64) -> Plan:
    """A plan with the boundaries of `dtype`."""
    settings.precision.parameters = str(dtype).removeprefix("torch.")
    return make_plan(settings, model, specs_of(inputs), CPU)


def plan_with(
    schedule: Schedule, model: Model, inputs: Tensor, *, checkpoint: str = "never", dtype: torch.dtype = torch.float64
) -> Plan:
    """A plan for any schedule, written by hand or not; layers are cut uniformly."""
    validate(schedule)
    written = settings_for("gpipe", schedule.stages, schedule.microbatches, samples(inputs))
    program = lower(schedule, activation_checkpoint=checkpoint)
    evaluation = lower(forward_only(schedule.stage_to_rank, schedule.microbatches))
    for lowered in (program, evaluation):
        validate(lowered)
    plan = plan_for(written, model, inputs, dtype)
    return replace(plan, schedule=schedule, program=program, evaluation=evaluation)


def microbatches_of(plan: Plan, model: Model, inputs: Tensor, targets: Tensor, step: int = 0) -> Microbatches:
    """One batch cut as the plan says."""
    sizes, kinds = plan.microbatch_sizes, plan.microbatch_kinds
    pieces = split(inputs, sizes), split(targets, sizes)
    return Microbatches(step, sizes, *pieces, weight=sum(map(model.loss.weight, pieces[1])), kinds=kinds)


def build_ranks(
    plan: Plan,
    model: Model,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    autocast: Autocast = nullcontext,
    optimizer: OptimizerSettings | None = None,
    compiler: Compiler | None = None,
    masters: torch.dtype | None = None,
    transport: InProcessTransport | None = None,
) -> list[Rank]:
    """All ranks of a plan on one in-process transport."""
    shared = transport or InProcessTransport()
    where = replace(placement(dtype, seed, autocast, compiler), masters=masters)
    return [
        Rank(rank, plan, model, where, shared, optimizer or OptimizerSettings()) for rank in range(plan.schedule.pp)
    ]


def pipelined(
    settings: Settings,
    model: Model,
    inputs: Tensor,
    targets: Tensor,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Outcome:
    """One training step of all ranks in this process; `more` is for `build_ranks`."""
    plan = plan_for(settings, model, inputs, dtype)
    ranks = build_ranks(plan, model, dtype=dtype, **more)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    return outcome(plan, ranks, results)


def step(ranks: Sequence[Rank], batch: Microbatches) -> list[StepResult]:
    """Forward and backward of all ranks."""
    return run([rank.trainer for rank in ranks], [batch] * len(ranks))


def outcome(plan: Plan, ranks: Sequence[Rank], results: Sequence[StepResult]) -> Outcome:
    """Gradients (tied ones summed) and buffers of all ranks under their whole-model names."""
    sum_tied_gradients(
        {rank.rank: rank.parameters for rank in ranks}, plan.tied, plan.tied_ranks(), LocalGroup(len(ranks))
    )
    losses = [result.loss for result in results if result.loss is not None]
    assert len(losses) == 1, "exactly one rank holds the loss"
    gradients = {name: p.grad for rank in ranks for name, p in rank.parameters.items() if p.grad is not None}
    return Outcome(losses[0], gradients, buffers_of([stage for rank in ranks for stage in rank.stages.values()]))


def buffers_of(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Every buffer by whole-model name."""
    return {
        name: tensor
        for stage in stages
        for name, tensor in stage.named_tensors()
        if not isinstance(tensor, torch.nn.Parameter)
    }


def plain_loop(
    model: Model, inputs: Tensor, targets: Tensor, microbatches: int = 1, dtype: torch.dtype = torch.float64
) -> Outcome:
    """The whole model on one device, without schedule, executor or transport: a loop over microbatches."""
    stage = Stage(0, model.layers, model, placement(dtype), last=True)
    parameters = dict(stage.named_parameters())
    for alias, owner in model.tied.items():
        stage.tie(alias, parameters[owner])
    parameters = dict(stage.named_parameters())
    sizes = microbatch_sizes(samples(inputs), len(inputs) if isinstance(inputs, Microbatched) else microbatches)
    answers = split(targets, sizes)
    weight, total = sum(map(model.loss.weight, answers)), torch.zeros((), dtype=dtype)
    for piece, answer in zip(split(inputs, sizes), answers, strict=True):
        value, named = mapped(stage.placement.loaded, piece), {}
        for layer, module in zip(model.layers, stage.modules, strict=True):
            output = module(value, *(named[name] for name in layer.takes))
            value, *given = output if layer.gives else (output,)
            named.update(zip(layer.gives, given, strict=True))
        loss = model.loss(value, answer) / weight
        loss.backward()
        total = total + loss.detach()
    return Outcome(total, {name: p.grad for name, p in parameters.items() if p.grad is not None}, buffers_of([stage]))


def assert_equal_outcomes(found: Outcome, expected: Outcome, tolerance: float = 1e-10) -> None:
    """Loss, every gradient and every buffer agree; errors are relative to each tensor's largest entry."""
    assert set(found.gradients) == set(expected.gradients)
    assert set(found.buffers) == set(expected.buffers)
    assert_close("loss", found.loss, expected.loss, tolerance)
    for kind, ours, theirs in (
        ("gradient", found.gradients, expected.gradients),
        ("buffer", found.buffers, expected.buffers),
    ):
        for name, tensor in theirs.items():
            assert_close(f"{kind} of {name}", ours[name], tensor, tolerance)


def assert_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """The largest difference is at most `tolerance` of the largest expected entry."""
    error = (found.double() - expected.double()).abs().max()
    scale = expected.double().abs().max().clamp_min(1e-30)
    assert error <= tolerance * scale, f"{what} is off by {(error / scale).item():.2e} of its largest entry"
