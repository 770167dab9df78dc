"""Costs and bytes of the real model's stages: times as this machine takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.engine.model import Model
from pipeline.engine.profile import StageProfile, profile_stages
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
    """Time the model, cut into `stages` as the settings say, on one (the larger) microbatch, alone on one device.

    Seconds and bytes, an entry a stage; no bytes where fake tensors can't tell them. Messages keep the latency and
    bandwidth that the settings state.

    Raises:
        ValueError: the model can't be cut so.
    """
    counts = cut(settings, layer_sizes(model), stages)
    size = microbatch_sizes(settings.batch_size, settings.microbatches)[0]
    placement = place(settings, devices.of(0))
    inputs, targets = data.train.inputs(0)[:size], data.train.targets(0)[:size]
    with _threads_of_a_rank(settings.pp):
        part = recomputed_part(settings.activation_checkpoint)
        profiles = profile_stages(model, counts, placement, inputs, targets, recomputed=part)
    footprints = footprints_of(model, counts, placement, [inputs], [targets], part)
    return to_costs(profiles, settings), footprints[0] if footprints else None


@contextmanager
def _threads_of_a_rank(ranks: int) -> Iterator[None]:
    """As many CPU threads as a rank gets where all of them share this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_costs(profiles: tuple[StageProfile, ...], settings: Settings) -> Costs:
    """The simulator's terms for what was measured. A message's size is that of the output."""
    return Costs(
        forward=tuple(stage.forward for stage in profiles),
        backward=tuple(stage.backward for stage in profiles),
        backward_input=tuple(stage.backward_input for stage in profiles),
        backward_weight=tuple(stage.backward_weight for stage in profiles),
        recompute=tuple(stage.recompute for stage in profiles),
        transfer=settings.costs.transfer,
        bandwidth=settings.costs.bandwidth,
        boundary_bytes=tuple(float(stage.output_bytes) for stage in profiles),
    )
