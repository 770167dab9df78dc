"""The cut of a run, with what its layers cost where the settings ask for that."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pipeline.engine.model import Model
from pipeline.engine.nest import Nest
from pipeline.partition.problem import Counts
from pipeline.schedule.costs import Costs
from pipeline.training.checkpointing import recomputed_part
from pipeline.training.partitioning import SEARCHED, Cut, check_search, searched_cut, simple_cut
from pipeline.training.plan import layer_sizes, parameter_counts
from pipeline.training.profiling import predict_layer_bytes, take_profile, to_costs
from pipeline.training.schedule_choice import write_schedule
from pipeline.training.settings import Settings


class Decided(NamedTuple):
    """A cut, and its stages' costs."""

    cut: Cut
    costs: Costs | None
    """In seconds, from a profile; None: the stated ones."""


def decide_cut(settings: Settings, model: Model, inputs: Nest, targets: Nest, device: torch.device) -> Decided:
    """Cut the model as the settings say; its layers are profiled, or their profile read, where they need that.

    Args:
        inputs, targets: one whole batch.
        device: where layers are timed.

    Raises:
        ValueError: the cut or the profile can't be.
    """
    cut, profile = None, None
    if settings.partition.name in SEARCHED:
        check_search(settings, len(model.layers))  # before layers are timed, which takes a while
    else:
        cut = simple_cut(settings, parameter_counts(layer_sizes(model)), write_schedule(settings).stages)
    if settings.profiled:
        profile = take_profile(settings, model, inputs, targets, device)

    def costs_of(counts: Counts) -> Costs | None:
        part = recomputed_part(settings.activation_checkpoint)
        return None if profile is None else to_costs(profile.layers, counts, part, settings)

    if cut is None:
        layers = profile.layers if profile else predict_layer_bytes(settings, model, inputs, targets, device)
        cut = searched_cut(settings, layers, costs_of)
    return Decided(cut, costs_of(cut.counts))
