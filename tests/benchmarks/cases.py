"""What the engines are compared on: models with a batch each, and torch's class for each schedule of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from models.gpt import gpt
from models.model import Layer, Model
from pipeline import partition
from pipeline.engine.boundary import TensorSpec
from pipeline.engine.profile import profile_layers
from pipeline.schedule.library import options_of
from pipeline.training.plan import Plan, make_plan, microbatch_sizes
from pipeline.training.schedule_choice import write_schedule
from pipeline.training.settings import PartitionSettings, ScheduleSettings, Settings
from tests.engine.harness import placement

CPU = torch.device("cpu")
VOCABULARY = 256
CLASSES = 10

TORCH_CLASSES: Mapping[str, type] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}
"""Our name -> the class of torch.distributed.pipelining that runs the same family, with as many stages a rank.

zbv needs a torch newer than 2.11, where a stage greets its neighbor on the same rank and gloo can't send to itself."""


@dataclass(frozen=True)
class Case:
    """A model and the batch that one step takes. Picklable; both are built where they are used."""

    name: str
    build: Callable[[], Model]
    batch_size: int
    microbatches: int
    sample: tuple[int, ...]
    """The input's shape without the batch: (tokens,) or (3, height, width)."""

    def halved(self) -> Case:
        """Half the batch in half the microbatches."""
        return replace(self, batch_size=self.batch_size // 2, microbatches=self.microbatches // 2)

    @property
    def inputs(self) -> TensorSpec:
        """A whole batch of the model's input."""
        return TensorSpec((self.batch_size, *self.sample), torch.int64 if len(self.sample) == 1 else torch.float32)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets of the step, always the same."""
        source = torch.Generator().manual_seed(0)
        if len(self.sample) == 1:
            tokens = torch.randint(VOCABULARY, (self.batch_size, self.sample[0] + 1), generator=source)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        images = torch.randn(self.batch_size, *self.sample, generator=source)
        return images, torch.randint(CLASSES, (self.batch_size,), generator=source)


def gpt_case(
    name: str, layers: int, width: int, heads: int, context: int, batch_size: int, microbatches: int = 8
) -> Case:
    # not tied: what tied weights take comes after the step that is compared
    build = partial(
        gpt, layers=layers, width=width, heads=heads, context=context, vocabulary=VOCABULARY, tie_embeddings=False
    )
    return Case(name, build, batch_size, microbatches, (context,))


def _build_resnet(depth: int) -> Model:
    from models.resnet import resnet  # not at the top: torchvision takes seconds to import

    return resnet(depth=depth, classes=CLASSES)


def _resnet(depth: int, size: int, batch_size: int, microbatches: int = 8) -> Case:
    return Case(f"resnet{depth}", partial(_build_resnet, depth), batch_size, microbatches, (3, size, size))


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        gpt_case("tiny", layers=4, width=32, heads=2, context=16, batch_size=8),
        gpt_case("small", layers=4, width=128, heads=4, context=128, batch_size=32),
        gpt_case("wide", layers=4, width=768, heads=12, context=128, batch_size=8),
        _resnet(50, size=32, batch_size=32),
        _resnet(152, size=32, batch_size=16),
    )
}


class Scale(nn.Module):
    """A multiplication: the least that a stage can do and still have something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as it came in."""
        return x * self.weight


@dataclass(frozen=True)
class Sum:
    """The sum of the outputs as a loss."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """0-dim."""
        return outputs.sum()

    def weight(self, targets: Tensor) -> int:
        """The number of samples."""
        return len(targets)


def _ones(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.detach().fill_(1)


def _build_empty() -> Model:
    layers = tuple(Layer(f"scale.{index}", Scale, f"scale.{index}.") for index in range(4))
    return Model("empty", layers, Sum(), _ones)


EMPTY = Case("empty", _build_empty, batch_size=8, microbatches=8, sample=(1, 1, 1))
"""Four layers that do next to nothing, on one number a microbatch."""


def layer_seconds(case: Case, repeats: int = 3) -> list[float]:
    """Forward and backward of each layer alone on one microbatch, measured here."""
    model, (inputs, targets) = case.build(), case.batch()
    size = microbatch_sizes(case.batch_size, case.microbatches)[0]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    profiles = profile_layers(model, placement(torch.float32), inputs[:size], targets[:size], repeats=repeats)
    torch.set_num_threads(before)
    return [layer.forward + layer.backward for layer in profiles]


def settings_of(case: Case, schedule: str, seconds: Sequence[float], pp: int = 2, **more: Any) -> Settings:
    """Those of a real run, with the cut whose slowest stage is fastest; two stages a rank where there is a choice.

    Args:
        seconds: each layer's.
        more: settings that aren't the defaults.
    """
    chosen = ScheduleSettings(schedule, 2 if "stages_per_rank" in options_of(schedule) else 1)
    settings = Settings(pp=pp, microbatches=case.microbatches, batch_size=case.batch_size, schedule=chosen, **more)
    stages = write_schedule(settings).stages
    settings.partition = PartitionSettings("manual", list(partition.bottleneck(seconds, stages)))
    settings.check()
    return settings


def plan_of(case: Case, settings: Settings, device: torch.device = CPU) -> Plan:
    """The plan of a real run."""
    return make_plan(settings, case.build(), case.inputs, device)
