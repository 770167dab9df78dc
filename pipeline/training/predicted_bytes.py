"""The peak activation bytes of a run before it starts: the plan's program, and its stages on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipeline.engine.footprint import measure_footprint
from pipeline.engine.model import Model
from pipeline.engine.nest import Nest
from pipeline.engine.segments import Recomputed
from pipeline.engine.stage import Placement
from pipeline.schedule.memory import Footprint, peak_activation_bytes
from pipeline.training.checkpointing import recomputed_part
from pipeline.training.placement import place
from pipeline.training.plan import Plan, first, microbatch_sizes, samples, split
from pipeline.training.settings import Settings

_log = logging.getLogger(__name__)


def with_predicted_bytes(
    plan: Plan, settings: Settings, model: Model, inputs: Nest, targets: Nest, device: torch.device
) -> Plan:
    """`plan` with the peak activation bytes of each rank; without where they can't be told, as of compiled stages.

    Args:
        inputs, targets: one whole batch; its numbers don't matter.
        device: its type decides which kernels save what.
    """
    if settings.compile:  # compiled layers save what their compiler chooses
        return plan
    sizes = plan.microbatch_sizes
    batch = split(inputs, sizes), split(targets, sizes)
    footprints = footprints_of(model, plan.counts, place(settings, device), *batch, plan.recomputed)
    if footprints is None:
        return plan
    firsts = range(0, plan.dp * plan.schedule.pp, plan.schedule.pp)
    replicas = [footprints[plan.microbatches_of(first)] for first in firsts]
    peaks = [peak for own in replicas for peak in peak_activation_bytes(plan.program, own)]
    return replace(plan, peak_activation_bytes=tuple(map(int, peaks)))


def footprint_for_a_limit(
    settings: Settings, model: Model, inputs: Nest, targets: Nest, device: torch.device, counts: Sequence[int]
) -> Footprint | None:
    """`predict_footprint` where checkpointing has a limit in bytes to keep; else None."""
    if settings.activation_checkpoint.memory_limit is None:
        return None
    return predict_footprint(settings, model, inputs, targets, device, counts)


def predict_footprint(
    settings: Settings, model: Model, inputs: Nest, targets: Nest, device: torch.device, counts: Sequence[int]
) -> Footprint | None:
    """What the largest microbatch takes at each stage; None, after a warning, where fake tensors can't tell.

    Args:
        inputs, targets: one whole batch; its numbers don't matter.
        counts: how many consecutive layers each stage holds.
    """
    size = microbatch_sizes(settings.batch_size, settings.dp * settings.microbatches)[0]
    part = recomputed_part(settings.activation_checkpoint)
    one, its_targets = first((inputs, targets), size)
    found = footprints_of(model, counts, place(settings, device), [one], [its_targets], part)
    return found[0] if found else None


def footprints_of(
    model: Model,
    counts: Sequence[int],
    placement: Placement,
    inputs: Sequence[Nest],
    targets: Sequence[Nest],
    recomputed: Recomputed,
) -> list[Footprint] | None:
    """One for each microbatch; those of one size share one. None, after a warning, where fake tensors don't do."""
    found: dict[int, Footprint] = {}
    try:
        for part, answer in zip(inputs, targets, strict=True):
            if samples(part) not in found:
                found[samples(part)] = measure_footprint(model, counts, placement, part, answer, recomputed)
    except RuntimeError as error:  # an operation whose result depends on numbers, as item() does
        _log.warning("activation bytes are not predicted, the model can't run on fake tensors: %s", _first_line(error))
        return None
    return [found[samples(part)] for part in inputs]


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
