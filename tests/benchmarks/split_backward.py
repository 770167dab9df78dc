"""What splitting a backward costs: I + W against B, ours and torch's, on one core.

    python -m tests.benchmarks.split_backward [--quick] [--json FILE]

B is the whole backward of the same forward, as autograd runs it; torch's I and W are the graph walks of
torch.distributed.pipelining. All three run in turn in every round, on copies of one model, in seconds of processor
time, and add to gradients that exist. A row has the medians of the rounds' ratios: to B, and of our forward to the
plain one.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import process_time

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torchvision.models.resnet import BasicBlock, Bottleneck

from models.gpt import Block
from models.resnet import STEM_WIDTH, build_block
from pipeline.engine.casts import casts_kept_for_a_step
from pipeline.engine.split_modules import split_weight_gradients
from pipeline.engine.weight_gradient import Deferral, WeightGradients
from pipeline.training.allocator import keep_freed_memory
from tests.benchmarks.table import Row, parser, publish

WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """A model and one microbatch for it."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rounds: int
    quick: int


def mlp(width: int, layers: int) -> nn.Module:
    """Linear maps with ReLU between."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def convnet(channels: int, layers: int) -> nn.Module:
    """3x3 convolutions with bias and ReLU between."""
    return nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()))
    )


def gpt_blocks(width: int, heads: int, layers: int) -> nn.Module:
    """The blocks of a GPT without embedding and head."""
    return nn.Sequential(*(Block(width, heads, dropout=0.0) for _ in range(layers)))


def resnet_blocks(block: type[BasicBlock] | type[Bottleneck], planes: int, layers: int) -> nn.Module:
    """One block that changes the shape, and those of the same shape after it."""
    width = planes * block.expansion
    return nn.Sequential(
        build_block(block, STEM_WIDTH, planes, 2), *(build_block(block, width, planes, 1) for _ in range(layers - 1))
    )


CASES = (
    Case("mlp tiny", partial(mlp, 64, 4), (32, 64), 300, 100),
    Case("mlp mid", partial(mlp, 512, 4), (256, 512), 40, 12),
    Case("mlp wide", partial(mlp, 2048, 2), (256, 2048), 12, 3),
    Case("convnet", partial(convnet, 64, 4), (8, 64, 16, 16), 30, 8),
    Case("gpt tiny", partial(gpt_blocks, 64, 4, 2), (4, 32, 64), 100, 30),
    Case("gpt", partial(gpt_blocks, 384, 6, 2), (4, 64, 384), 20, 6),
    Case("resnet-18 blocks", partial(resnet_blocks, BasicBlock, 128, 2), (8, STEM_WIDTH, 16, 16), 20, 6),
    Case("resnet-50 blocks", partial(resnet_blocks, Bottleneck, 128, 2), (8, STEM_WIDTH, 16, 16), 20, 6),
)


@dataclass(frozen=True)
class Precision:
    """The parameters' dtype, and whether autocast to bfloat16 is on."""

    dtype: torch.dtype
    autocast: bool

    def context(self) -> AbstractContextManager[object]:
        """Where forwards run."""
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext()


PRECISIONS = (
    Precision(torch.float32, autocast=False),
    Precision(torch.bfloat16, autocast=False),
    Precision(torch.float32, autocast=True),
)


class Whole:
    """F and B as autograd runs them."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        self.module = module
        self.precision = precision

    def forward(self, inputs: Tensor) -> Tensor:
        with self.precision.context():
            output: Tensor = self.module(inputs)
            return output

    def backward(self, inputs: Tensor, output: Tensor, gradient: Tensor) -> None:
        output.backward(gradient)

    def sample(self, inputs: Tensor, gradient: Tensor) -> tuple[float, float]:
        """Seconds of the forward, and of all the backward."""
        inputs = inputs.detach().requires_grad_()
        start = process_time()
        output = self.forward(inputs)
        middle = process_time()
        self.backward(inputs, output, gradient.to(output.dtype))
        return middle - start, process_time() - middle


class Ours(Whole):
    """F, I and W of the engine."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__(module, precision)
        self.deferral = Deferral()
        split_weight_gradients(module, self.deferral)

    def forward(self, inputs: Tensor) -> Tensor:
        self.weights = self.deferral.store = WeightGradients()
        output = super().forward(inputs)
        self.deferral.store = None
        return output

    def backward(self, inputs: Tensor, output: Tensor, gradient: Tensor) -> None:
        output.backward(gradient)
        self.weights.apply()


class Torch(Whole):
    """F, I and W of torch.distributed.pipelining."""

    def backward(self, inputs: Tensor, output: Tensor, gradient: Tensor) -> None:
        _, groups = stage_backward_input([output], [gradient], [inputs], self.module.parameters())
        stage_backward_weight(self.module.parameters(), groups)


def measure(case: Case, precision: Precision, rounds: int) -> Row:
    """The medians over `rounds` rounds, after some that warm up and make the gradients exist."""
    torch.manual_seed(0)
    module = case.build().to(precision.dtype)
    ways = [kind(copy.deepcopy(module), precision) for kind in (Whole, Ours, Torch)]
    inputs = torch.randn(case.shape, dtype=precision.dtype)
    gradient = torch.randn_like(module(inputs)).detach()
    samples: list[list[tuple[float, float]]] = []
    with casts_kept_for_a_step():
        for index in range(WARM_UP + rounds):
            found = {place: ways[place].sample(inputs, gradient) for place in _rotated(len(ways), index)}
            samples.append([found[place] for place in range(len(ways))])
    whole, ours, torchs = zip(*samples[WARM_UP:], strict=True)
    return {
        "model": case.name,
        "dtype": str(precision.dtype).removeprefix("torch."),
        "autocast": precision.autocast,
        "full_ms": 1e3 * statistics.median(backward for _, backward in whole),
        "split_over_full": _ratio(ours, whole, 1),
        "torch_split_over_full": _ratio(torchs, whole, 1),
        "forward_over_plain": _ratio(ours, whole, 0),
    }


def _rotated(count: int, start: int) -> list[int]:
    return [(start + offset) % count for offset in range(count)]


def _ratio(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], part: int) -> float:
    return statistics.median(a[part] / b[part] for a, b in zip(one, other, strict=True))


def main(arguments: Sequence[str] | None = None, cases: Sequence[Case] = CASES) -> list[Row]:
    """Measure, print, and write to the file asked for."""
    options = parser(__doc__, quick="few rounds, under a minute").parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    rows = [
        measure(case, precision, case.quick if options.quick else case.rounds)
        for case in cases
        for precision in PRECISIONS
    ]
    publish(rows, options.json)
    return rows


if __name__ == "__main__":
    main()
