"""Everything that is decided and checked in the launching process: whatever is wrong is said before a rank starts."""

from __future__ import annotations

from pathlib import Path

from pipeline.engine.boundary import specs_of
from pipeline.engine.model import Model
from pipeline.training import rendezvous
from pipeline.training.checkpoint import Checkpoint, find_checkpoint
from pipeline.training.checkpointing import recomputed_part
from pipeline.training.devices import choose_devices, warn_of_slow_choices
from pipeline.training.job import Builders, Job, check_launch
from pipeline.training.plan import cut, layer_sizes, make_plan
from pipeline.training.predicted_bytes import footprint_for_a_limit, with_predicted_bytes
from pipeline.training.profiling import take_profile, to_costs
from pipeline.training.saving import check_continues, check_fits
from pipeline.training.schedule_choice import write_schedule
from pipeline.training.settings import Settings


def prepare(settings: Settings, builders: Builders, validation_batches: int) -> Job:
    """Build model and data once, here, and decide the plan with them.

    Args:
        settings: checked.
        builders: make the model and the data; picklable.
        validation_batches: held-out batches that a validation averages over.

    Raises:
        ValueError: the launch, the devices, the model, the data or the plan can't be.
        OSError: the data can't be read.
    """
    check_launch(settings)
    build_model, build_data = builders
    model, data, devices = build_model(), build_data(), choose_devices(settings)
    resumed = resume(settings, model)
    device, stages = devices.of(0), write_schedule(settings).stages
    inputs, targets = data.train.inputs(0), data.train.targets(0)
    counts, costs = cut(settings, layer_sizes(model), stages), None
    if settings.profiled:
        profile = take_profile(settings, model, inputs, targets, device)
        costs = to_costs(profile.layers, counts, recomputed_part(settings.activation_checkpoint), settings)
    footprint = footprint_for_a_limit(settings, model, inputs, targets, device, counts)
    plan = make_plan(settings, model, specs_of(inputs), device, costs, footprint)
    plan.check_targets(data.classes)
    plan = with_predicted_bytes(plan, settings, model, inputs, targets, device)
    if rendezvous.rank() == 0:
        warn_of_slow_choices(settings, devices)
    tokens = data.kind == "text"
    return Job(settings, plan, devices, build_model, build_data, validation_batches, tokens=tokens, resumed=resumed)


def resume(settings: Settings, model: Model) -> Checkpoint | None:
    """The checkpoint that the run goes on from, opened and checked; None: it starts anew.

    Raises:
        ValueError: there is none at `resume`, or it doesn't fit the run.
    """
    if settings.resume is None:
        return None
    checkpoint = find_checkpoint(Path(settings.resume))
    check_fits(checkpoint, model)
    if settings.task == "train":
        check_continues(checkpoint, settings)
    return checkpoint
