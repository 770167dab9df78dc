"""How long a compiled stage takes beside an uncompiled one, backwards whole and split.

    python -m tests.benchmarks.compile [--quick] [--json FILE]

One stage of transformer blocks (or of a ResNet), one microbatch, one process; passes of both in turn, medians of their
times. Prints a table: the compiled milliseconds of the forward and the backward (B, or I and W), their ratios to the
uncompiled ones, and the seconds of compiling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from models.gpt import gpt
from models.model import Model
from models.resnet import resnet
from pipeline.engine.boundary import Autocast
from pipeline.engine.compilation import Compiler
from pipeline.engine.stage import Placement, Stage
from pipeline.engine.weight_gradient import WeightGradients
from tests.benchmarks.table import Row, parser, publish

BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A stage of a model's inner layers, its input's shape, and the precision."""

    name: str
    model: Callable[[], Model]
    shape: tuple[int, ...]
    precision: str = "fp32"

    @property
    def autocast(self) -> Autocast:
        return cast(Autocast, BF16) if self.precision == "bf16" else nullcontext


def _gpt(width: int, layers: int, dropout: float = 0.0) -> Callable[[], Model]:
    return partial(gpt, layers=layers, width=width, heads=4, context=128, vocabulary=256, dropout=dropout)


QUICK = (
    Case("gpt", _gpt(128, 2), (4, 128, 128)),
    Case("gpt, dropout", _gpt(128, 2, 0.1), (4, 128, 128)),
    Case("gpt", _gpt(128, 2), (4, 128, 128), "bf16"),
)
FULL = (
    *QUICK,
    Case("wide gpt", _gpt(512, 2), (2, 128, 512)),
    Case("wide gpt", _gpt(512, 2), (2, 128, 512), "bf16"),
    Case("resnet50", partial(resnet, depth=50, classes=10), (4, 64, 16, 16)),
)


class Timed:
    """One stage, compiled or not, and the times of its passes."""

    def __init__(self, case: Case, compiler: Compiler | None, split: bool) -> None:
        model = case.model()
        placement = Placement(torch.device("cpu"), torch.float32, case.autocast, 0, compiler)
        self._stage = Stage(1, model.layers[1:-1], model, placement, last=False)
        self._stage.train(True)
        self._split = split
        if split:
            self._stage.split_backward()
        self._inputs = torch.randn(case.shape, generator=torch.Generator().manual_seed(0))
        self._passes: list[tuple[float, float, float]] = []
        began = time.perf_counter()
        self._run()
        self.first_seconds = time.perf_counter() - began
        self._run()

    def measure(self) -> None:
        """One more pass."""
        self._passes.append(self._run())

    def medians(self) -> tuple[float, float, float]:
        """Seconds of F, of B or I, of W."""
        forward, backward, weights = (statistics.median(seconds) for seconds in zip(*self._passes, strict=True))
        return forward, backward, weights

    def gradients(self) -> list[Tensor]:
        """Of all parameters, of one pass."""
        parameters = [parameter for _, parameter in self._stage.named_parameters()]
        for parameter in parameters:
            parameter.grad = None
        self._run()
        return [cast(Tensor, parameter.grad) for parameter in parameters]

    def _run(self) -> tuple[float, float, float]:
        weights, inputs = WeightGradients() if self._split else None, self._inputs.detach().requires_grad_()
        marks = [time.perf_counter()]
        with self._stage.deferring(weights):
            output = self._stage.forward(inputs, None, weight=1.0, step=0, microbatch=0)
            marks.append(time.perf_counter())
            torch.autograd.backward(output, torch.ones_like(output))
        marks.append(time.perf_counter())
        if weights is not None:
            weights.apply()
        marks.append(time.perf_counter())
        return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]


def compare(case: Case, split: bool, rounds: int) -> Row:
    """Both kinds of one stage.

    Raises:
        ValueError: their gradients differ.
    """
    plain, compiled = Timed(case, None, split), Timed(case, Compiler(), split)
    _check(case, plain.gradients(), compiled.gradients())
    for _ in range(rounds):
        plain.measure()
        compiled.measure()
    ours, theirs = compiled.medians(), plain.medians()
    return {
        "stage": case.name,
        "precision": case.precision,
        "backward": "I + W" if split else "B",
        "F ms": 1e3 * ours[0],
        "backward ms": 1e3 * sum(ours[1:]),
        "F ratio": ours[0] / theirs[0],
        "backward ratio": sum(ours[1:]) / sum(theirs[1:]),
        "ratio": sum(ours) / sum(theirs),
        "compile s": compiled.first_seconds,
    }


def _check(case: Case, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    tolerance = 5e-2 if case.precision == "bf16" else 1e-4
    for ours, theirs in zip(found, expected, strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        if error > tolerance:
            raise ValueError(f"{case.name} in {case.precision}: a compiled gradient is off by {error:.1e}")


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure all cases and print the table."""
    options: argparse.Namespace = parser(__doc__, "small stages alone, fewer rounds").parse_args(arguments)
    torch.set_num_threads(1)
    cases, rounds = (QUICK, 15) if options.quick else (FULL, 31)
    rows = [compare(case, split, rounds) for case in cases for split in (False, True)]
    publish(rows, options.json)
    return rows


if __name__ == "__main__":
    main()
