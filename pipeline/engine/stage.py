"""One stage: its layers, and the passes through them that a schedule's actions ask for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engine import batch_norm
from pipeline.engine.boundary import Autocast
from pipeline.engine.compilation import Compiler
from pipeline.engine.materialize import MakeLayer, materialize, named_tensors
from pipeline.engine.model import Layer, Model
from pipeline.engine.named_values import alive, carried, opened, passed_on, taken
from pipeline.engine.nest import Nest
from pipeline.engine.seeding import mixed_seed, name_seed, seed_layer
from pipeline.engine.segments import Recomputed, whole
from pipeline.engine.split_modules import add_at_once, split_weight_gradients
from pipeline.engine.weight_gradient import AddedAtOnce, Deferral, WeightGradients


@dataclass(frozen=True)
class Placement:
    """How a run computes: the device, the parameters' dtype, autocast, the seed of everything random, and with what.

    Without a compiler layers run as PyTorch's operators, one by one. With `defers_batch_norm` BatchNorm's running
    averages move once a step (`pipeline.engine.batch_norm`); with `syncs_batch_norm` its statistics are those of all
    replicas, if there are several (`pipeline.engine.synced_batch_norm`). `masters` is the dtype of the parameters'
    exact copies and of the gradients, None where there are no copies (`pipeline.training.masters`).
    """

    device: torch.device
    dtype: torch.dtype
    autocast: Autocast
    seed: int
    compiler: Compiler | None = None
    defers_batch_norm: bool = False
    syncs_batch_norm: bool = False
    masters: torch.dtype | None = None

    def loaded(self, inputs: Tensor) -> Tensor:
        """A tensor of a batch where and as the first stage computes; a view where nothing is to be converted."""
        return inputs.to(self.device, self.dtype if inputs.is_floating_point() else None)


class Stage:
    """A contiguous run of a model's layers, with memory and starting values on one device.

    Holds parameters and buffers only: what a microbatch leaves between its actions belongs to the step that asks.
    `recomputed` is the part of it that an R computes again.

    Raises:
        ValueError: compiled layers shall keep the outputs of their costly operations.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        model: Model,
        placement: Placement,
        *,
        last: bool,
        recomputed: Recomputed | None = None,
        make_layer: MakeLayer = materialize,
    ) -> None:
        if placement.compiler is not None and recomputed is not None and recomputed.keeps_costly:
            raise ValueError(
                "a compiled layer's operations are fused, so the outputs of its costly ones can't be kept: use "
                "compile=false, or recompute whole layers"
            )
        self.index = index
        self.first = index == 0
        self.placement = placement
        self.loss = self._call(model.loss) if last else None
        self.layers = tuple(layers)
        self._alive = _alive_in(self.layers, model)
        self.modules = tuple(
            make_layer(model, layer, device=placement.device, dtype=placement.dtype, seed=placement.seed)
            for layer in layers
        )
        if placement.defers_batch_norm:
            for module in self.modules:
                batch_norm.defer(module)
        self.whole = whole(len(self.layers))
        self.segments = (recomputed or Recomputed()).segments(len(self.layers))
        self._calls = tuple(self._call(module) for module in self.modules)
        self._deferral: Deferral | None = None
        self._at_once: AddedAtOnce | None = None
        self._seeds = tuple(name_seed(placement.seed, layer.name) for layer in layers) if model.stochastic else ()

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, or what runs in its place."""
        compiler = self.placement.compiler
        return function if compiler is None else compiler.compiled(function)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under their whole-model names."""
        for layer, module in zip(self.layers, self.modules, strict=True):
            yield from module.named_parameters(layer.prefix.rstrip("."))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers under their whole-model names."""
        for layer, module in zip(self.layers, self.modules, strict=True):
            yield from named_tensors(module, layer.prefix)

    def state_dict(self) -> dict[str, Tensor]:
        """This stage's part of the whole model's state dict: the union over stages loads with `strict=True`."""
        state: dict[str, Tensor] = {}
        for layer, module in zip(self.layers, self.modules, strict=True):
            module.state_dict(destination=state, prefix=layer.prefix)
        return state

    def tie(self, alias: str, owner: nn.Parameter) -> None:
        """Make the parameter called `alias` the very parameter `owner`, which this rank holds too."""
        for layer, module in zip(self.layers, self.modules, strict=True):
            path, _, key = alias.removeprefix(layer.prefix).rpartition(".")
            if alias.startswith(layer.prefix) and any(name == alias for name, _ in named_tensors(module, layer.prefix)):
                setattr(module.get_submodule(path), key, owner)

    def split_backward(self) -> None:
        """Prepare for backwards in two parts: I, then W. Without `deferring` a backward stays whole."""
        if self._deferral is None and self.placement.compiler is not None:
            self._deferral = self.placement.compiler.split_backward()
        elif self._deferral is None:
            self._deferral = Deferral()
            for module in self.modules:
                split_weight_gradients(module, self._deferral)

    def whole_backward(self) -> None:
        """Prepare for backwards in one part."""
        if self._deferral is None and self._at_once is None and self.placement.compiler is None:
            self._at_once = AddedAtOnce()
            for module in self.modules:
                add_at_once(module, self._at_once)

    @contextmanager
    def deferring(self, weights: WeightGradients | None) -> Iterator[None]:
        """While open, forwards prepare to leave the weights' gradients in `weights`, and compiled backwards do so."""
        if self._deferral is None or weights is None:
            yield
            return
        self._deferral.store = weights
        try:
            yield
        finally:
            self._deferral.store = None

    @contextmanager
    def in_backward(self, weights: WeightGradients | None) -> Iterator[None]:
        """While open, the engine's own backward runs."""
        if self._at_once is None:
            with self.deferring(weights):
                yield
            return
        self._at_once.taken = True
        try:
            yield
        finally:
            self._at_once.taken = False

    def reading(self, read: Callable[[Nest, Nest], Tensor]) -> Stage:
        """The same layers with `read` in the place of the loss, where there is one."""
        if self.loss is None:
            return self
        stage = copy.copy(self)
        stage.loss = read
        return stage

    def train(self, mode: bool) -> None:
        """Switch every layer between training and evaluation."""
        for module in self.modules:
            module.train(mode)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, every layer is in evaluation mode; afterwards each part of it is as it was."""
        before = [(part, part.training) for module in self.modules for part in module.modules()]
        self.train(False)
        try:
            yield
        finally:
            for part, training in before:
                part.training = training

    def trains(self, layers: slice) -> bool:
        """Whether any parameter of these layers has a gradient."""
        return any(parameter.requires_grad for module in self.modules[layers] for parameter in module.parameters())

    def forward(
        self,
        inputs: Nest,
        targets: Nest,
        *,
        weight: float,
        step: int,
        microbatch: int,
        layers: slice = slice(None),
    ) -> Any:
        """The stage's output, a nest, or on the last stage the microbatch's share of the loss.

        Args:
            inputs: the microbatch as the stage before sent it, or the model's input.
            targets: the microbatch's targets; used by the last stage alone.
            weight: the number of samples (tokens) in the whole batch, which the summed loss is divided by here and
                nowhere else.
            step, microbatch: with the seed and the layer's name they decide every random number.
            layers: run these alone, from what the one before them gave to the output of their last.
        """
        positions = range(len(self.modules))[layers]
        with self.placement.autocast():
            value, named = opened(inputs, self._alive[positions.start])
            for position in positions:
                if self._seeds and _trains(self.modules[position]):  # an evaluation leaves the generators alone
                    seed_layer(mixed_seed(self._seeds[position], step, microbatch), self.placement.device)
                output = self._calls[position](value, *taken(self.layers[position], named))
                value, named = passed_on(self.layers[position], output, named, self._alive[position + 1])
            if self.loss is None or positions.stop != len(self.modules):
                return carried(value, named)
            assert targets is not None, "the last stage's rank loads the targets"
            return self.loss(value, targets) / weight

    @contextmanager
    def watched(self, look: Callable[[int, object], None]) -> Iterator[None]:
        """While open, `look` is told what each layer gives, by its position; the loss has the one after the last."""
        calls, loss = self._calls, self.loss
        self._calls = tuple(partial(_call_and_look, look, index, call) for index, call in enumerate(calls))
        if loss is not None:
            self.loss = partial(_call_and_look, look, len(calls), loss)
        try:
            yield
        finally:
            self._calls, self.loss = calls, loss

    def recomputing(self) -> AbstractContextManager[None]:
        """While open, normalizations compute as in training but leave their statistics: they moved in F."""
        return batch_norm.statistics_kept(self.modules)

    def begin_step(self) -> None:
        """Forget what an abandoned training step left."""
        batch_norm.begin(self.modules)

    def commit_step(self) -> None:
        """Move what moves once a training step, when all of it is done."""
        batch_norm.commit(self.modules)


def _call_and_look(look: Callable[[int, object], None], position: int, call: Callable[..., Any], *inputs: Any) -> Any:
    output = call(*inputs)
    look(position, output)
    return output


def _trains(module: nn.Module) -> bool:
    return module.training or any(part.training for part in module.modules())


def _alive_in(layers: Sequence[Layer], model: Model) -> tuple[tuple[str, ...], ...]:
    """The names alive before each of these consecutive layers of the model and after the last; none of no layers."""
    if not layers:
        return ((),)
    start = [layer.name for layer in model.layers].index(layers[0].name)
    return alive(model.layers)[start : start + len(layers) + 1]
