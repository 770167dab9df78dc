"""A whole training run in this process, with what it reports and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.model import Model
from pipeline.engine.boundary import TensorSpec
from pipeline.engine.compilation import Compiler
from pipeline.engine.transport import InProcessTransport
from pipeline.training.checkpoint import Checkpoint
from pipeline.training.group import LocalGroup
from pipeline.training.messages import Finished, StepMetrics, ValidationMetrics
from pipeline.training.plan import make_plan
from pipeline.training.precision import autocast, master_dtype, parameter_dtype
from pipeline.training.rank import Rank
from pipeline.training.saving import Saving
from pipeline.training.settings import OptimizerSettings, PrecisionSettings, Settings
from pipeline.training.trainer import Trainer
from tests.engine.harness import CPU, placement, settings_for
from tests.engine.samples import images, text, vectors

FP32 = PrecisionSettings("fp32", "float32", None)
FP64 = PrecisionSettings("fp64", "float64", None)
BF16_TRUE = PrecisionSettings("bf16_true", "bfloat16", masters="float32")
FP16 = PrecisionSettings("fp16", "float32", "float16", 65536.0)


@dataclass(frozen=True)
class Numbers:
    """A split whose batch is a pure function of the step."""

    make: Callable[[int], tuple[Tensor, Tensor]]

    def inputs(self, step: int, samples: slice = slice(None)) -> Tensor:
        return self.make(step)[0][samples]

    def targets(self, step: int) -> Tensor:
        return self.make(step)[1]


@dataclass(frozen=True)
class SmallData:
    """Training and held-out batches of `tests.engine.samples`."""

    train: Numbers
    validation: Numbers
    kind: str = "text"
    units_per_sample: int = 8


def text_data(batch_size: int) -> SmallData:
    return SmallData(Numbers(lambda step: text(batch_size, 100 + step)), Numbers(lambda step: text(batch_size, step)))


def vector_data(batch_size: int) -> SmallData:
    numbers = Numbers(lambda step: vectors(batch_size))
    return SmallData(numbers, numbers, "vectors", 1)


def image_data(batch_size: int) -> SmallData:
    numbers = Numbers(lambda step: images(batch_size))
    return SmallData(numbers, numbers, "images", 1)


@dataclass
class Run:
    """A trainer and what it reported."""

    trainer: Trainer
    messages: list[Any] = field(default_factory=list)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if type(message) is kind]

    @property
    def losses(self) -> list[float]:
        return [message.loss for message in self.of(StepMetrics)]

    @property
    def validations(self) -> list[float]:
        return [message.loss for message in self.of(ValidationMetrics)]

    @property
    def finished(self) -> Finished:
        (message,) = self.of(Finished)
        return message

    @property
    def ranks(self) -> Sequence[Rank]:
        return self.trainer.ranks.ranks

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for rank in self.ranks for name, tensor in rank.state_dict().items()}


def settings_to_train(schedule: str, pp: int, microbatches: int, batch_size: int, steps: int, **more: Any) -> Settings:
    """Every step logged, no validation, AdamW and clipping unless said otherwise."""
    options = {"precision": FP32, "log_every": 1, "validate_every": 0, "gradient_clip": 0.3}
    options["optimizer"] = OptimizerSettings(learning_rate=3e-3, warmup_steps=3, weight_decay=0.1)
    settings = settings_for(schedule, pp, microbatches, batch_size, **{**options, **more, "steps": steps})
    return settings


def prepare(
    settings: Settings,
    model: Model,
    data: Any,
    *,
    validation_batches: int = 2,
    compiler: Compiler | None = None,
    saved: Saving | None = None,
    resumed: Checkpoint | None = None,
) -> Run:
    """All ranks of a run in this process, not yet trained."""
    plan = make_plan(settings, model, TensorSpec.of(data.train.inputs(0)), CPU)
    context = autocast(settings.precision, "cpu")
    where = placement(parameter_dtype(settings.precision), settings.seed, context, compiler)
    deferred = settings.batch_norm == "deferred"
    where = replace(where, masters=master_dtype(settings.precision), defers_batch_norm=deferred)
    transport, messages = InProcessTransport(), []
    group = LocalGroup(settings.pp, settings.dp)
    ranks = [
        Rank(rank, plan, model, where, transport, settings.optimizer, add=partial(group.add, rank))
        for rank in group.local
    ]
    trainer = Trainer(
        settings,
        plan,
        ranks,
        model.loss,
        data,
        group,
        validation_batches=validation_batches,
        shared_memory=True,
        report=messages.append,
        saved=saved,
        resumed=resumed,
    )
    return Run(trainer, messages)


def train(settings: Settings, model: Model, data: Any, **options: Any) -> Run:
    """A run to its end."""
    run = prepare(settings, model, data, **options)
    run.trainer.train()
    return run


def relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected, strict=True))


def equal_states(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
