"""Everything decided before a process starts: the cut, the program, the messages, and what to expect of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.engine.boundary import Boundary, SpecNest, TensorSpec, boundaries
from pipeline.engine.flops import TRAINING
from pipeline.engine.model import Model
from pipeline.engine.nest import Microbatched, Nest, flat, mapped, rebuilt
from pipeline.engine.segments import Recomputed
from pipeline.engine.standing import Activity
from pipeline.schedule.costs import Costs
from pipeline.schedule.library import forward_only
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import Footprint
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Simulation, nominal_costs, simulate
from pipeline.schedule.validate import validate
from pipeline.training.checkpointing import lowered, recomputed_part
from pipeline.training.partitioning import Cut, simple_cut
from pipeline.training.precision import autocast, crossing_dtype, parameter_dtype
from pipeline.training.schedule_choice import stated_footprint, write_schedule
from pipeline.training.settings import Settings
from pipeline.training.ties import check_ties


@dataclass(frozen=True)
class LayerSize:
    """One layer's name and the sizes of its parameters by whole-model name."""

    name: str
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """What every rank must agree on. Picklable; a pure function of settings, model and the input's shape."""

    schedule: Schedule
    """As written: compute actions alone."""
    program: Schedule
    """Lowered: what the executors run."""
    evaluation: Schedule
    """The lowered forward-only program for validation."""
    layers: tuple[LayerSize, ...]
    counts: tuple[int, ...]
    """How many consecutive layers each stage holds."""
    tied: Mapping[str, str]
    boundaries: Mapping[Hashable, tuple[Boundary, ...]]
    """By microbatch size (or kind): what each stage receives, and last what the loss receives."""
    microbatch_sizes: tuple[int, ...]
    """Of a whole batch, those of the first replica first."""
    recomputed: Recomputed
    """The part of a stage that an R computes again."""
    predicted: Simulation
    """The program under nominal costs: F=1 and B=2 a stage (divided by the stages a rank holds), R the recomputed part
    of F, no transfer."""
    partition: str = ""
    """How the layers were cut, and why so."""
    microbatch_kinds: tuple[Hashable, ...] | None = None
    """Of each microbatch what it has in common with others of its shape. None: its size."""
    peak_activation_bytes: tuple[int, ...] | None = None
    """Of each rank of all replicas, as predicted (`predicted_bytes.with_predicted_bytes`)."""
    dp: int = 1
    """Replicas of the pipeline, each with the schedule's ranks."""
    flops: tuple[int, ...] | None = None
    """Of each layer's forward, for a whole batch (`pipeline.engine.flops`)."""

    @property
    def flops_per_step(self) -> int | None:
        """The model's for a training step: what a recomputation repeats counts once."""
        return None if self.flops is None else TRAINING * sum(self.flops)

    def stage_flops(self, stage: int) -> float | None:
        """A stage's part of the model's; None where there are none, or they can't be told."""
        total = sum(self.flops or ())
        return sum((self.flops or ())[index] for index in self.layers_of(stage)) / total if total else None

    @property
    def programs(self) -> dict[Activity, Schedule]:
        """What the executors run, by what a rank does meanwhile."""
        return {Activity.TRAINING: self.program, Activity.EVALUATING: self.evaluation}

    def microbatches_of(self, rank: int) -> slice:
        """Which of the whole batch's microbatches go through the replica of a rank."""
        first = rank // self.schedule.pp * self.schedule.microbatches
        return slice(first, first + self.schedule.microbatches)

    @property
    def parameters(self) -> int:
        """Of the whole model, a tied one once."""
        return sum(size for layer in self.layers for name, size in layer.parameters.items() if name not in self.tied)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank of whichever replica holds."""
        return self.schedule.stages_of(rank % self.schedule.pp)

    def layers_of(self, stage: int) -> range:
        """The indices of a stage's layers."""
        start = sum(self.counts[:stage])
        return range(start, start + self.counts[stage])

    def stage_parameters(self, stage: int) -> int:
        """The parameters a stage holds, tied copies included."""
        return sum(sum(self.layers[index].parameters.values()) for index in self.layers_of(stage))

    def rank_parameters(self, rank: int) -> int:
        """The parameters a rank holds: tied ones on one rank are one."""
        held = [name for stage in self.stages_of(rank) for name in self._names(stage)]
        sizes = {name: size for layer in self.layers for name, size in layer.parameters.items()}
        return sum({self.tied.get(name, name): sizes[name] for name in held}.values())

    def rank_of(self, parameter: str) -> int:
        """The first replica's rank that holds a parameter."""
        for stage, rank in enumerate(self.schedule.stage_to_rank):
            if parameter in self._names(stage):
                return rank
        raise KeyError(parameter)

    def tied_ranks(self) -> dict[str, tuple[int, ...]]:
        """For each tied owner held by more than one rank of a replica: those ranks in all replicas, ascending."""
        holders: dict[str, set[int]] = {}
        for alias, owner in self.tied.items():
            holders.setdefault(owner, {self.rank_of(owner)}).add(self.rank_of(alias))
        first = range(0, self.dp * self.schedule.pp, self.schedule.pp)
        return {
            owner: tuple(start + rank for start in first for rank in sorted(ranks))
            for owner, ranks in holders.items()
            if len(ranks) > 1
        }

    def check_targets(self, classes: int) -> None:
        """Refuse a model whose last layer tells fewer classes (tokens) apart than the data's targets name.

        Raises:
            ValueError: both numbers and the cure.
        """
        outputs = self.boundaries[self.microbatch_sizes[0]][-1].nest
        if isinstance(outputs, TensorSpec) and outputs.shape[-1] < classes:
            raise ValueError(
                f"the model tells {outputs.shape[-1]} classes apart and the data has {classes}: "
                f"use model.vocabulary={classes} (gpt), model.classes={classes} (images), or as wide a last layer"
            )

    def _names(self, stage: int) -> list[str]:
        return [name for index in self.layers_of(stage) for name in self.layers[index].parameters]


def make_plan(
    settings: Settings,
    model: Model,
    inputs: SpecNest,
    device: torch.device,
    costs: Costs | None = None,
    footprint: Footprint | None = None,
    cut: Cut | None = None,
) -> Plan:
    """Decide and check everything that needs no process.

    Args:
        settings, model, costs, footprint, cut: see `draft_plan`.
        inputs, device: see `for_batch`.

    Raises:
        ValueError: the schedule, the cut or the batch can't be, with the values and the cure.
    """
    return for_batch(draft_plan(settings, model, costs, footprint, cut=cut), settings, model, inputs, device)


def draft_plan(
    settings: Settings,
    model: Model,
    costs: Costs | None = None,
    footprint: Footprint | None = None,
    schedule: Schedule | None = None,
    cut: Cut | None = None,
) -> Plan:
    """A plan for batches of any shape: it says nothing of messages and microbatches' sizes.

    Args:
        settings: checked already (`Settings.check`).
        model: nothing of it is given memory.
        costs: measured ones, for a schedule that is searched for its costs; None: the stated ones.
        footprint: bytes of a microbatch at each stage, for checkpointing with a limit in bytes; None: the stated ones.
        schedule: None: the one that the settings name.
        cut: who holds which layers; None: as the settings say, where they ask for no costs.

    Raises:
        ValueError: the schedule or the cut can't be, with the values and the cure.
    """
    schedule = schedule or write_schedule(settings, costs)
    validate(schedule)
    check_ties(model)
    layers = layer_sizes(model)
    chosen = cut or simple_cut(settings, parameter_counts(layers), schedule.stages)
    counts = chosen.counts
    program = lowered(schedule, settings, footprint or stated_footprint(settings, schedule.stage_to_rank))
    evaluation = lower(forward_only(schedule.stage_to_rank, settings.microbatches), prefetch=settings.prefetch)
    for complete in (program, evaluation):
        validate(complete)
    part = recomputed_part(settings.activation_checkpoint)
    return Plan(
        schedule=schedule,
        program=program,
        evaluation=evaluation,
        layers=layers,
        counts=counts,
        tied=dict(model.tied),
        boundaries={},
        microbatch_sizes=(),
        recomputed=part,
        dp=settings.dp,
        partition=chosen.why,
        predicted=simulate(program, nominal_costs(schedule.stages // schedule.pp, tuple(map(part.share, counts)))),
    )


def for_batch(plan: Plan, settings: Settings, model: Model, inputs: SpecNest, device: torch.device) -> Plan:
    """The plan with what batches of this shape need.

    Args:
        settings, model: the plan's.
        inputs: one whole batch of the model's input: a tensor's spec, or a nest of such, or these for each microbatch
            (`Microbatched`). Of a batch of fewer samples than microbatches the last ones are empty.
        device: its type decides autocast's rules.

    Raises:
        ValueError: a layer refuses such a batch, or a replica would have none of its samples.
    """
    count = settings.dp * settings.microbatches
    kinds: tuple[Hashable, ...] | None = None
    shapes: dict[Hashable, tuple[SpecNest, int]]
    if isinstance(inputs, Microbatched):
        check_count(inputs, count)
        sizes, kinds = tuple(map(samples, inputs)), tuple(map(repr, inputs))
        shapes = dict(zip(kinds, zip(inputs, sizes, strict=True), strict=True))
    else:
        sizes = microbatch_sizes(samples(inputs), count)
        shapes = {size: (inputs, size) for size in sizes}
    _check_replicas(sizes, settings)
    found = {
        kind: _boundaries(settings, model, plan.counts, piece, size, device)
        for kind, (piece, size) in shapes.items()
        if size
    }
    return replace(plan, boundaries=found, microbatch_sizes=sizes, microbatch_kinds=kinds)


def _check_replicas(sizes: Sequence[int], settings: Settings) -> None:
    firsts = range(0, len(sizes), settings.microbatches)
    if not all(any(sizes[first : first + settings.microbatches]) for first in firsts):
        least = (settings.dp - 1) * settings.microbatches + 1
        raise ValueError(f"a batch of {sum(sizes)} samples is too small: use {least} or more, one at least a replica")


def check_count(batch: Microbatched, microbatches: int) -> None:
    """Refuse a batch that is cut into another number of microbatches than the run has.

    Raises:
        ValueError: both numbers.
    """
    if len(batch) != microbatches:
        raise ValueError(
            f"the batch is cut into {len(batch)} microbatches, and the run has {microbatches}: use "
            f"microbatches={len(batch)}, or cut it into {microbatches}"
        )


def for_inference(
    plan: Plan,
    settings: Settings,
    model: Model,
    inputs: SpecNest,
    device: torch.device,
    *,
    microbatches: int,
    sizes: Collection[int],
) -> Plan:
    """`plan` for forward passes alone.

    Args:
        microbatches: under way at a time.
        sizes: the samples that one of them may have.
        inputs, device: as `make_plan` takes them.
    """
    program = lower(forward_only(plan.schedule.stage_to_rank, microbatches), prefetch=settings.prefetch)
    validate(program)
    cut_there: dict[Hashable, tuple[Boundary, ...]] = {
        size: _boundaries(settings, model, plan.counts, inputs, size, device, training=False) for size in sorted(sizes)
    }
    return replace(plan, program=program, evaluation=program, boundaries=cut_there, microbatch_sizes=tuple(sizes))


def microbatch_sizes(batch_size: int, microbatches: int) -> tuple[int, ...]:
    """Samples in each microbatch, as `torch.tensor_split` makes them: sizes differ by at most one, larger first."""
    return tuple(len(piece) for piece in torch.empty(batch_size).tensor_split(microbatches))


def layer_sizes(model: Model) -> tuple[LayerSize, ...]:
    """The parameters of every layer, found without giving any of them memory."""
    sizes = []
    for layer in model.layers:
        with torch.device("meta"):
            module = layer.build()
        named = module.named_parameters(layer.prefix.rstrip("."))
        sizes.append(LayerSize(layer.name, {name: parameter.numel() for name, parameter in named}))
    return tuple(sizes)


def parameter_counts(layers: Sequence[LayerSize]) -> dict[str, int]:
    """How many parameters each layer has, by its name."""
    return {layer.name: sum(layer.parameters.values()) for layer in layers}


def layer_boundaries(settings: Settings, model: Model, inputs: SpecNest, device: torch.device) -> tuple[Boundary, ...]:
    """What a cut after each layer would carry for the largest microbatch of such a batch.

    Raises:
        ValueError: a layer refuses its input, or none can be cut off before it, for it overwrites that.
    """
    size = microbatch_sizes(samples(inputs), settings.dp * settings.microbatches)[0]
    return _boundaries(settings, model, [1] * len(model.layers), inputs, size, device)[1:]


def _boundaries(
    settings: Settings,
    model: Model,
    counts: Sequence[int],
    inputs: SpecNest,
    size: int,
    device: torch.device,
    *,
    training: bool = True,
) -> tuple[Boundary, ...]:
    part = recomputed_part(settings.activation_checkpoint)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return boundaries(
        model.layers,
        counts,
        mapped(lambda spec: TensorSpec((size, *spec.shape[1:]), spec.dtype), inputs),
        dtype=parameter_dtype(settings.precision),
        device=device,
        autocast=autocast(settings.precision, device.type),
        kept=[start + one.layers.start for start, n in zip(starts, counts, strict=True) for one in part.segments(n)],
        crossing=crossing_dtype(settings.precision),
        training=training,
    )


def split(batch: Nest, sizes: Sequence[int]) -> tuple[Nest, ...]:
    """The batch cut into microbatches of these sizes, every tensor of it along its first dimension; or as it is cut."""
    if isinstance(batch, Microbatched):
        check_count(batch, len(sizes))
        return batch
    parts = [torch.split(tensor, list(sizes)) for tensor in flat(batch)]
    return tuple(rebuilt(batch, part) for part in zip(*parts, strict=True))


def first(batches: tuple[Nest, ...], size: int) -> tuple[Nest, ...]:
    """The first `size` samples of each batch."""
    parts: tuple[Nest, ...] = mapped(lambda tensor: tensor[:size], batches)
    return parts


def samples(batch: Nest | SpecNest) -> int:
    """How many samples a batch holds: the first dimension of each of its tensors.

    Raises:
        ValueError: they don't agree, or a tensor has none.
    """
    if isinstance(batch, Microbatched):
        return sum(map(samples, batch))
    shapes = [tuple(tensor.shape) for tensor in flat(batch)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"a batch of tensors of shapes {', '.join(map(str, shapes)) or 'none'}: let the first dimension of each be "
            "the samples"
        )
    return int(sizes.pop()[0])
