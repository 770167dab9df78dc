"""Everything that is decided and checked in the launching process: whatever is wrong is said before a rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.engine.boundary import TensorSpec, specs_of
from pipeline.engine.flops import forward_flops
from pipeline.engine.model import Model
from pipeline.training import rendezvous
from pipeline.training.checkpoint import Checkpoint, find_checkpoint
from pipeline.training.cutting import decide_cut
from pipeline.training.devices import choose_devices, warn_of_slow_choices
from pipeline.training.evaluation import Evaluate
from pipeline.training.generation import Generate
from pipeline.training.inference import chunks, under_way
from pipeline.training.job import Builders, Job, check_launch
from pipeline.training.plan import Plan, draft_plan, for_batch, for_inference
from pipeline.training.predicted_bytes import footprint_for_a_limit, with_predicted_bytes
from pipeline.training.saving import check_continues, check_fits
from pipeline.training.settings import Settings
from pipeline.training.trainer import Codec, Data


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
    model, data, job = _prepare(settings, builders, validation_batches)
    inputs, targets, device = data.train.inputs(0), data.train.targets(0), job.devices.of(0)
    plan = for_batch(job.plan, settings, model, specs_of(inputs), device)
    _check_targets(plan, model, data)
    plan = with_predicted_bytes(plan, settings, model, inputs, targets, device)
    return replace(job, plan=replace(plan, flops=forward_flops(model, inputs)))


def prepare_evaluation(settings: Settings, builders: Builders, validation_batches: int) -> Job:
    """As `prepare` does, to evaluate every held-out sample; of data without end, `validation_batches` batches.

    Raises:
        ValueError, OSError: as `prepare` does.
    """
    model, data, job = _prepare(settings, builders, validation_batches)
    samples, batch = data.validation.samples, settings.batch_size
    if samples is None:
        samples = validation_batches * batch
    largest, microbatches = -(-batch // settings.microbatches), under_way(settings.microbatches, settings.pp)
    sizes = {
        size
        for held in (min(samples, batch), samples % batch)
        if held
        for part in chunks(held, largest, microbatches)
        for size in part
    }
    inputs = specs_of(data.validation.inputs(0))
    plan = for_inference(job.plan, settings, model, inputs, job.devices.of(0), microbatches=microbatches, sizes=sizes)
    _check_targets(plan, model, data)
    return replace(job, plan=plan, work=Evaluate(data.kind, samples, batch, largest))


def prepare_generation(settings: Settings, builders: Builders) -> tuple[Job, Codec]:
    """As `prepare` does, to go on with a text; and what its tokens stand for.

    Raises:
        ValueError: the data isn't text or nobody knows what its tokens stand for, or the prompt is empty; or as
            `prepare` does.
        OSError: as `prepare` does.
    """
    model, data, job = _prepare(settings, builders, 0)
    if data.kind != "text" or data.codec is None:
        kind = "tokens of an unknown vocabulary" if data.kind == "text" else data.kind
        raise ValueError(f"task=generate goes on with a text, and this data is {kind}: use model=gpt data=python_text")
    prompt = tuple(data.codec.encode(settings.prompt))
    if not prompt:
        raise ValueError('prompt is empty: give what the text begins with, such as prompt="def "')
    inputs = specs_of(data.train.inputs(0))
    assert isinstance(inputs, TensorSpec), "text is one tensor of tokens"
    plan = for_inference(job.plan, settings, model, inputs, job.devices.of(0), microbatches=1, sizes={1})
    _check_targets(plan, model, data)
    work = Generate(
        prompt, settings.max_new_tokens, inputs.shape[1], settings.temperature, settings.top_k, settings.seed
    )
    return replace(job, plan=plan, work=work), data.codec


def _prepare(settings: Settings, builders: Builders, validation_batches: int) -> tuple[Model, Data, Job]:
    """The model, the data, and a job to train with them, whose plan is for batches of any shape."""
    if settings.task != "train" and settings.dp > 1:
        raise ValueError(f"task={settings.task} takes one pipeline, and dp={settings.dp} makes several: use dp=1")
    check_launch(settings)
    build_model, build_data = builders
    model, data, devices = build_model(), build_data(), choose_devices(settings)
    resumed = resume(settings, model)
    device, inputs, targets = devices.of(0), data.train.inputs(0), data.train.targets(0)
    cut, costs = decide_cut(settings, model, inputs, targets, device)
    footprint = footprint_for_a_limit(settings, model, inputs, targets, device, cut.counts)
    plan = draft_plan(settings, model, costs, footprint, cut=cut)
    if rendezvous.rank() == 0:
        warn_of_slow_choices(settings, devices)
    tokens = data.kind == "text"
    job = Job(settings, plan, devices, build_model, build_data, validation_batches, tokens=tokens, resumed=resumed)
    return model, data, job


def _check_targets(plan: Plan, model: Model, data: Data) -> None:
    """Where targets are classes, of which a custom loss need know nothing."""
    if getattr(model.loss, "classifies", False):
        plan.check_targets(data.classes)


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
