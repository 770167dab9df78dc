"""One microbatch's way through one stage, from its forward to the end of its backward.

A pass is a chain of segments (`pipeline.engine.segments`), each with a graph of its own:

    F   kept segments build their graph, recomputed ones compute without one and keep their input
    R   recomputed segments build theirs
    B   from the last segment to the first: the gradient of one's input is that of the output before it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pipeline.engine.activations import ActivationMeter
from pipeline.engine.casts import graph_kept
from pipeline.engine.costly import CostlyOutputs
from pipeline.engine.nest import Nest, flat, mapped
from pipeline.engine.segments import Segment
from pipeline.engine.stage import Stage
from pipeline.engine.weight_gradient import WeightGradients

Gradients = Sequence[Tensor | None]
"""One entry a tensor of a nest; None: no gradient comes to it, or it is wanted by nobody."""

Run = Callable[..., Any]
"""`Stage.forward` of one microbatch, to be called with the input and the `layers` that take it. Gives a nest."""


class Pass:
    """What one microbatch leaves in one stage between its actions.

    Args:
        inputs: what the stage receives, leaves.
        recomputed: whether an R comes between forward and backward.
        weights: gathers what the backward leaves for W; None: nothing.
        meter: counts what is held, if somebody asks.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Nest,
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

    def forward(self, run: Run) -> Nest:
        """The stage's output, without a graph."""
        value = self.inputs
        for segment in self._segments:
            section = _section_of(segment)(self, segment.layers, value)
            self._sections.append(section)
            last = segment is self._segments[-1]
            # the output's graph has a place of its own
            value = mapped(Tensor.detach if last else section.leaf, section.forward(run))
        return value

    def recompute(self, run: Run) -> None:
        """Build the graphs that the forward didn't keep."""
        with self.stage.recomputing():
            for section in self._sections:
                section.recompute(run)

    def trained(self) -> tuple[bool, ...]:
        """Of each tensor of the output whether the backward can start there: known once the graphs are built."""
        return tuple(root is not None for root in self._sections[-1].roots)

    def surely_trained(self) -> tuple[bool, ...]:
        """The same, but False where a section before the last may have been taken for one that trains a tensor."""
        known = all(section.knows_what_trains for section in self._sections[:-1])
        return tuple(each and known for each in self.trained())

    def backward(self, gradients: Gradients) -> Gradients:
        """The gradients of the stage's input, from those of its output; the pass holds nothing more but for W."""
        passed = gradients
        while self._sections:
            passed = self._sections.pop().backward(passed)
        return passed


class _Section:
    """One segment of a pass, which keeps its graph from F on."""

    knows_what_trains = True
    """Whether the next section's leaves are those tensors alone that train something."""

    def __init__(self, owner: Pass, layers: slice, inputs: Nest) -> None:
        self.inputs = inputs
        self._owner = owner
        self._layers = layers
        self.roots: tuple[GradientEdge | None, ...] = ()
        """Where the backward starts: the outputs' places in the graph, without their data. None: nothing to train."""
        self._held = [owner.meter.hold(tensor) for tensor in flat(inputs)] if owner.meter is not None else None

    def forward(self, run: Run) -> Nest:
        return self._build(run)

    def recompute(self, run: Run) -> None:
        """There is nothing to be done again."""

    def leaf(self, output: Tensor) -> Tensor:
        """A tensor of the output as the input of what comes after, whose backward goes on here if there's any use."""
        return output.detach().requires_grad_(self._passes_gradient(output))

    def _passes_gradient(self, output: Tensor) -> bool:
        return output.requires_grad

    def backward(self, gradients: Gradients) -> Gradients:
        """The gradients of the inputs, from those of the outputs."""
        pairs = [
            pair for pair in zip(self.roots, gradients, strict=True) if pair[0] is not None and pair[1] is not None
        ]
        if pairs:
            roots, given = zip(*pairs, strict=True)
            with self._owner.stage.in_backward(self._owner.weights):
                torch.autograd.backward(roots, given)
        return [tensor.grad for tensor in flat(self.inputs)]

    def _build(self, run: Run) -> Nest:
        owner = self._owner
        watch = nullcontext() if owner.meter is None else owner.meter.watch()
        with watch, graph_kept(True), owner.stage.deferring(owner.weights):
            output: Nest = run(self.inputs, layers=self._layers)
        self.roots = tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in flat(output))
        return output


class _Recomputed(_Section):
    """Keeps its input alone from F to R."""

    knows_what_trains = False

    def forward(self, run: Run) -> Nest:
        with graph_kept(False):
            output: Nest = run(self.inputs, layers=self._layers)
        return output

    def recompute(self, run: Run) -> None:
        self._build(run)

    def _passes_gradient(self, output: Tensor) -> bool:
        trains = any(tensor.requires_grad for tensor in flat(self.inputs)) or self._owner.stage.trains(self._layers)
        return trains and (output.is_floating_point() or output.is_complex())


class _RecomputedAroundCostly(_Section):
    """Keeps its input, and the outputs of costly operations, from F to R."""

    def __init__(self, owner: Pass, layers: slice, inputs: Nest) -> None:
        super().__init__(owner, layers, inputs)
        self._costly = CostlyOutputs(owner.meter.hold if owner.meter is not None else None)

    def forward(self, run: Run) -> Nest:
        """As R will do it, with a graph that comes to nothing: which operations run depends on whether there is one."""
        owner = self._owner
        unused = None if owner.weights is None else WeightGradients()
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(_forget, _forget))
            stack.enter_context(graph_kept(True))
            stack.enter_context(owner.stage.deferring(unused))
            stack.enter_context(self._costly.keeping())
            output: Nest = run(self.inputs, layers=self._layers)
        return output

    def recompute(self, run: Run) -> None:
        with self._costly.handing_back():
            self._build(run)


def _section_of(segment: Segment) -> type[_Section]:
    if not segment.recomputed:
        return _Section
    return _RecomputedAroundCostly if segment.keeps_costly else _Recomputed


def _forget(saved: Any) -> Any:
    """For a graph whose backward never runs."""
