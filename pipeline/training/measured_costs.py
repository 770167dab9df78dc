"""Costs and bytes of the real model's stages: the times that this machine takes for their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.engine.model import Model
from pipeline.engine.profile import LayerProfile, profile_layers
from pipeline.engine.segments import Recomputed
from pipeline.schedule.costs import Costs
from pipeline.schedule.memory import Footprint
from pipeline.training.checkpointing import recomputed_part
from pipeline.training.devices import Devices
from pipeline.training.placement import place
from pipeline.training.plan import cut, layer_sizes, microbatch_sizes
from pipeline.training.predicted_bytes import footprints_of
from pipeline.training.rank_process import threads_per_rank
from pipeline.training.settings import Settings
from pipeline.training.trainer import Data


def measure(
    settings: Settings, model: Model, data: Data, devices: Devices, stages: int
) -> tuple[Costs, Footprint | None]:
    """Time the model's layers, cut into `stages` as the settings say, on one (the larger) microbatch and one device.

    Seconds and bytes, an entry a stage; no bytes where fake tensors can't tell them. Messages keep the latency and
    bandwidth that the settings state.

    Raises:
        ValueError: the model can't be cut so.
    """
    counts = cut(settings, layer_sizes(model), stages)
    size = microbatch_sizes(settings.batch_size, settings.microbatches)[0]
    placement = place(settings, devices.of(0))
    inputs, targets = data.train.inputs(0)[:size], data.train.targets(0)[:size]
    part = recomputed_part(settings.activation_checkpoint)
    with _threads_of_a_rank(settings.pp):
        profiles = profile_layers(model, placement, inputs, targets, keeps_costly=part.keeps_costly)
    footprints = footprints_of(model, counts, placement, [inputs], [targets], part)
    return to_costs(profiles, counts, part, settings), footprints[0] if footprints else None


@contextmanager
def _threads_of_a_rank(ranks: int) -> Iterator[None]:
    """As many CPU threads as a rank gets where all of them share this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_costs(profiles: Sequence[LayerProfile], counts: Sequence[int], part: Recomputed, settings: Settings) -> Costs:
    """The simulator's terms for what was measured: a stage takes what its layers take together.

    A message's size is that of the output of the stage's last layer.

    Args:
        profiles: an entry a layer.
        counts: how many consecutive layers each stage holds.
        part: of a stage that an R computes again.
    """
    held, start = [], 0
    for count in counts:
        held.append(profiles[start : start + count])
        start += count
    repeated = [
        [layer for segment in part.segments(len(stage)) if segment.recomputed for layer in stage[segment.layers]]
        for stage in held
    ]
    return Costs(
        forward=tuple(sum(layer.forward for layer in stage) for stage in held),
        backward=tuple(sum(layer.backward for layer in stage) for stage in held),
        backward_input=tuple(sum(layer.backward_input for layer in stage) for stage in held),
        backward_weight=tuple(sum(layer.backward_weight for layer in stage) for stage in held),
        recompute=tuple(sum(layer.recompute for layer in stage) for stage in repeated),
        transfer=settings.costs.transfer,
        bandwidth=settings.costs.bandwidth,
        boundary_bytes=tuple(float(stage[-1].output_bytes) for stage in held),
    )
