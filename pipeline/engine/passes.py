"""One microbatch's way through one stage, from its forward to the end of its backward.

A pass is a chain of segments (`pipeline.engine.segments`), each with a graph of its own:

    F   kept segments build their graph, recomputed ones compute without one and keep their input
    R   recomputed segments build theirs
    B   from the last segment to the first: the gradient of one's input is that of the output before it
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pipeline.engine.activations import ActivationMeter
from pipeline.engine.casts import graph_kept
from pipeline.engine.costly import CostlyOutputs
from pipeline.engine.segments import Segment
from pipeline.engine.stage import Stage
from pipeline.engine.weight_gradient import WeightGradients

Run = Callable[..., Tensor]
"""`Stage.forward` of one microbatch, to be called with the input and the `layers` that take it."""


class Pass:
    """What one microbatch leaves in one stage between its actions.

    Args:
        inputs: what the stage receives, a leaf.
        recomputed: whether an R comes between forward and backward.
        weights: gathers what the backward leaves for W; None: nothing.
        meter: counts what is held, if somebody asks.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Tensor,
        *,
        recomputed: bool,
        weights: WeightGradients | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        self.stage = stage
        self.inputs = inputs
        self.weights = weights
        self.meter = meter
        self._segments = stage.segments if recomputed else stage.whole
        self._sections: list[_Section] = []

    def forward(self, run: Run) -> Tensor:
        """The stage's output, without a graph."""
        value = self.inputs
        for segment in self._segments:
            section = _section_of(segment)(self, segment.layers, value)
            self._sections.append(section)
            output = section.forward(run)
            value = output.detach()
            if segment is not self._segments[-1]:
                value.requires_grad_(section.passes_gradient(output))
            del output  # its graph has a place of its own
        return value

    def recompute(self, run: Run) -> None:
        """Build the graphs that the forward didn't keep."""
        with self.stage.recomputing():
            for section in self._sections:
                section.recompute(run)

    def backward(self, gradient: Tensor) -> Tensor | None:
        """The gradient of the stage's input, None where it has none; the pass holds nothing more but for W."""
        passed: Tensor | None = gradient
        while self._sections:
            passed = self._sections.pop().backward(passed)
        return passed


class _Section:
    """One segment of a pass, which keeps its graph from F on."""

    def __init__(self, owner: Pass, layers: slice, inputs: Tensor) -> None:
        self.inputs = inputs
        self._owner = owner
        self._layers = layers
        self._root: GradientEdge | None = None
        """Where the backward starts: the output's place in the graph, without its data. None: nothing to train here."""
        self._held = owner.meter.hold(inputs) if owner.meter is not None else None

    def forward(self, run: Run) -> Tensor:
        return self._build(run)

    def recompute(self, run: Run) -> None:
        """There is nothing to be done again."""

    def passes_gradient(self, output: Tensor) -> bool:
        """Whether the backward of what comes after should go on here."""
        return output.requires_grad

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        if self._root is None or gradient is None:
            return None
        with self._owner.stage.in_backward(self._owner.weights):
            torch.autograd.backward(self._root, gradient)
        return self.inputs.grad

    def _build(self, run: Run) -> Tensor:
        owner = self._owner
        watch = nullcontext() if owner.meter is None else owner.meter.watch()
        with watch, graph_kept(True), owner.stage.deferring(owner.weights):
            output = run(self.inputs, layers=self._layers)
        self._root = get_gradient_edge(output) if output.requires_grad else None
        return output


class _Recomputed(_Section):
    """Keeps its input alone from F to R."""

    def forward(self, run: Run) -> Tensor:
        with graph_kept(False):
            return run(self.inputs, layers=self._layers)

    def recompute(self, run: Run) -> None:
        self._build(run)

    def passes_gradient(self, output: Tensor) -> bool:
        trains = self.inputs.requires_grad or self._owner.stage.trains(self._layers)
        return trains and output.is_floating_point()


class _RecomputedAroundCostly(_Section):
    """Keeps its input, and the outputs of costly operations, from F to R."""

    def __init__(self, owner: Pass, layers: slice, inputs: Tensor) -> None:
        super().__init__(owner, layers, inputs)
        self._costly = CostlyOutputs(owner.meter.hold if owner.meter is not None else None)

    def forward(self, run: Run) -> Tensor:
        """As R will do it, with a graph that comes to nothing: which operations run depends on whether there is one."""
        owner = self._owner
        unused = None if owner.weights is None else WeightGradients()
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(_forget, _forget))
            stack.enter_context(graph_kept(True))
            stack.enter_context(owner.stage.deferring(unused))
            stack.enter_context(self._costly.keeping())
            return run(self.inputs, layers=self._layers)

    def recompute(self, run: Run) -> None:
        with self._costly.handing_back():
            self._build(run)


def _section_of(segment: Segment) -> type[_Section]:
    if not segment.recomputed:
        return _Section
    return _RecomputedAroundCostly if segment.keeps_costly else _Recomputed


def _forget(saved: Any) -> Any:
    """For a graph whose backward never runs."""
