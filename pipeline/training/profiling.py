"""What a model's layers take under a run's settings: measured here, or read from what task=profile wrote."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pipeline.engine.boundary import specs_of
from pipeline.engine.materialize import give_memory
from pipeline.engine.model import Layer, Model
from pipeline.engine.nest import Nest, flat
from pipeline.engine.profile import profile_layers
from pipeline.engine.segments import Recomputed
from pipeline.partition import LayerCosts
from pipeline.schedule.costs import Costs, place_costs
from pipeline.training.checkpointing import recomputed_part
from pipeline.training.placement import place
from pipeline.training.plan import first, layer_boundaries, layer_sizes, microbatch_sizes
from pipeline.training.precision import master_dtype, parameter_dtype
from pipeline.training.predicted_bytes import footprints_of
from pipeline.training.profile_file import Conditions, ModelProfile
from pipeline.training.rank_process import threads_per_rank
from pipeline.training.schedule_choice import stated_times
from pipeline.training.settings import Settings


def take_profile(settings: Settings, model: Model, inputs: Nest, targets: Nest, device: torch.device) -> ModelProfile:
    """The profile that the settings name, or one made here and now.

    Args:
        inputs, targets: one whole batch.

    Raises:
        ValueError: the file can't be read, or is of another model, microbatch or precision.
    """
    if settings.profile is None:
        return measure_profile(settings, model, inputs, targets, device)
    path = Path(settings.profile)
    profile = ModelProfile.read(path)
    profile.check(path, _conditions(settings, model, inputs, device), [layer.name for layer in model.layers])
    # the optimizer and the dtype of messages may be others
    sizes = (
        [parameter_bytes(layer, settings) for layer in model.layers],
        _message_bytes(settings, model, inputs, device),
    )
    layers = [
        replace(layer, parameter_bytes=held, boundary_bytes=sent)
        for layer, held, sent in zip(profile.layers, *sizes, strict=True)
    ]
    return replace(profile, layers=tuple(layers))


def measure_profile(
    settings: Settings, model: Model, inputs: Nest, targets: Nest, device: torch.device
) -> ModelProfile:
    """Time every layer, one after the other, on one (the larger) microbatch and one device.

    Args:
        inputs, targets: one whole batch.

    Raises:
        ValueError: a layer can't be run alone, for it overwrites its input.
    """
    sizes = predict_layer_bytes(settings, model, inputs, targets, device)
    size = microbatch_sizes(settings.batch_size, settings.dp * settings.microbatches)[0]
    placement, part = place(settings, device), recomputed_part(settings.activation_checkpoint)
    with _threads_of_a_rank(settings.ranks):
        timed = profile_layers(model, placement, *first((inputs, targets), size), keeps_costly=part.keeps_costly)
    layers = [
        replace(
            held,
            forward=times.forward,
            backward=times.backward,
            backward_input=times.backward_input,
            backward_weight=times.backward_weight,
            recompute=times.recompute,
            output_bytes=times.output_bytes,
        )
        for held, times in zip(sizes, timed, strict=True)
    ]
    return ModelProfile(_conditions(settings, model, inputs, device), tuple(layers))


def predict_layer_bytes(
    settings: Settings, model: Model, inputs: Nest, targets: Nest, device: torch.device
) -> tuple[LayerCosts, ...]:
    """Every layer's bytes, and no times: found on tensors without memory.

    Those of activations stay None, after a warning, where such tensors can't tell them, and for compiled layers.

    Args:
        inputs, targets: one whole batch; its numbers don't matter.

    Raises:
        ValueError: no cut can be before a layer, for it overwrites its input.
    """
    size = microbatch_sizes(settings.batch_size, settings.dp * settings.microbatches)[0]
    part = Recomputed(keeps_costly=recomputed_part(settings.activation_checkpoint).keeps_costly)
    tied = _tied_layers(model)
    layers = [
        LayerCosts(layer.name, 0, 0, 0, None, sent, parameter_bytes(layer, settings), tied.get(layer.name, ()))
        for layer, sent in zip(model.layers, _message_bytes(settings, model, inputs, device), strict=True)
    ]
    if settings.compile:  # compiled layers save what their compiler chooses
        return tuple(layers)
    alone = [1] * len(layers)
    one, its_targets = first((inputs, targets), size)
    found = footprints_of(model, alone, place(settings, device), [one], [its_targets], part)
    if found is None:
        return tuple(layers)
    stages = [found[0].stage(index) for index in range(len(layers))]
    again = [found[0].recomputed_stage(index) for index in range(len(layers))]
    return tuple(
        replace(
            layer,
            activation_bytes=stage.activation,
            checkpoint_bytes=stage.checkpoint,
            rebuilt_bytes=rebuilt.activation + rebuilt.during_recompute,
            kept_output_bytes=stage.kept_output,
            output_bytes=stage.boundary,
        )
        for layer, stage, rebuilt in zip(layers, stages, again, strict=True)
    )


def _message_bytes(settings: Settings, model: Model, inputs: Nest, device: torch.device) -> list[int]:
    """What a cut after each layer sends down for one microbatch; of the last layer, what the loss takes."""
    carried = layer_boundaries(settings, model, specs_of(inputs), device)
    return [sum(spec.nbytes for spec in boundary.message("activation")) for boundary in carried]


def parameter_bytes(layer: Layer, settings: Settings) -> int:
    """What a layer's parameters take: themselves; trained, a gradient and the optimizer's state; rounded, a copy."""
    with torch.device("meta"):
        module = layer.build()
    give_memory(module, torch.device("meta"), parameter_dtype(settings.precision))
    optimizer, exact = settings.optimizer, master_dtype(settings.precision)
    states = 2 if optimizer.name == "adamw" else 1 if optimizer.momentum else 0

    def per_element(parameter: nn.Parameter) -> int:
        size = parameter.dtype.itemsize
        if not parameter.requires_grad:
            return size
        return size * (2 + states) if exact is None or exact.itemsize <= size else size + exact.itemsize * (2 + states)

    return sum(parameter.numel() * per_element(parameter) for parameter in module.parameters())


def to_costs(layers: Sequence[LayerCosts], counts: Sequence[int], part: Recomputed, settings: Settings) -> Costs:
    """The simulator's terms for what was measured: a stage takes what its layers take together.

    A message's size is that of what the last layer before it hands on; its latency and bandwidth are the stated ones.

    Args:
        layers: of the whole model.
        counts: how many consecutive layers each stage holds.
        part: of a stage that an R computes again.

    Raises:
        ValueError: a stated number can't be, or there are others than one a stage.
    """
    held, start = [], 0
    for count in counts:
        held.append(layers[start : start + count])
        start += count
    repeated = [
        [layer for segment in part.segments(len(stage)) if segment.recomputed for layer in stage[segment.layers]]
        for stage in held
    ]
    costs = Costs(
        forward=tuple(sum(layer.forward for layer in stage) for stage in held),
        backward=tuple(sum(layer.full_backward for layer in stage) for stage in held),
        backward_input=tuple(sum(layer.backward_input for layer in stage) for stage in held),
        backward_weight=tuple(sum(layer.backward_weight for layer in stage) for stage in held),
        recompute=tuple(sum(layer.again for layer in stage) for stage in repeated),
        transfer=stated_times("costs.transfer", settings.costs.transfer) or 0.0,
        bandwidth=settings.costs.bandwidth,
        boundary_bytes=tuple(
            float(layers[sum(counts[: stage + 1]) - 1].boundary_bytes) for stage in range(len(counts))
        ),
    )
    return place_costs(costs, range(len(held)))


def _conditions(settings: Settings, model: Model, inputs: Nest, device: torch.device) -> Conditions:
    size = microbatch_sizes(settings.batch_size, settings.dp * settings.microbatches)[0]
    precision = settings.precision
    return Conditions(
        model=model.name,
        inputs=tuple(number for tensor in flat(inputs) for number in (size, *tensor.shape[1:])),
        parameters=tuple(sum(layer.parameters.values()) for layer in layer_sizes(model)),
        precision=precision.parameters + (f", autocast {precision.autocast}" if precision.autocast else ""),
        keeps_costly=settings.activation_checkpoint.keeps_costly,
        compiled=settings.compile,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        threads=threads_per_rank(settings.ranks),
        torch=torch.__version__,
    )


def _tied_layers(model: Model) -> dict[str, tuple[str, ...]]:
    """By name of a layer: the others that share a parameter with it."""
    home = {name: layer.name for layer in layer_sizes(model) for name in layer.parameters}
    groups: dict[str, set[str]] = {}
    for alias, owner in model.tied.items():
        groups.setdefault(owner, {home[owner]}).add(home[alias])
    others: dict[str, set[str]] = {}
    for group in groups.values():
        for name in group:
            others.setdefault(name, set()).update(group - {name})
    return {name: tuple(sorted(found)) for name, found in others.items() if found}


@contextmanager
def _threads_of_a_rank(ranks: int) -> Iterator[None]:
    """As many CPU threads as a rank gets where all of them share this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)
