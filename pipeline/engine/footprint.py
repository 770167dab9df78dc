"""The bytes that a microbatch takes at each stage, found without memory: the stages run on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.engine.activations import ActivationMeter
from pipeline.engine.casts import casts_kept_for_a_step
from pipeline.engine.materialize import give_memory
from pipeline.engine.model import Layer, Model
from pipeline.engine.nest import Nest, flat, mapped, rebuilt
from pipeline.engine.passes import Pass, Run
from pipeline.engine.segments import Recomputed
from pipeline.engine.stage import Placement, Stage
from pipeline.engine.weight_gradient import WeightGradients
from pipeline.schedule.memory import Footprint


def measure_footprint(
    model: Model,
    counts: Sequence[int],
    placement: Placement,
    inputs: Nest,
    targets: Nest,
    recomputed: Recomputed | None = None,
) -> Footprint:
    """What a meter would count of one microbatch alone, an entry a stage.

    Passes through every stage, whole and split, kept and recomputed, on fake tensors: they have no memory, but shapes,
    dtypes and storages, and autograd saves of them what it saves of real ones.

    Args:
        counts: how many consecutive layers each stage holds.
        placement: device and precision of the run. Layers run an operator at a time, whatever a compiler makes of them.
        inputs, targets: one microbatch, as the batch is cut; only their shapes, strides and dtypes matter.
        recomputed: the part of each stage that an R computes again; None: all of it.
    """
    placement = replace(placement, compiler=None)
    with torch.device("meta"):
        built = {layer.name: layer.build() for layer in model.layers}

    def give_no_values(model: Model, layer: Layer, *, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
        give_memory(built[layer.name], device, dtype)
        return built[layer.name]

    kept, again, start = [], [], 0
    with FakeTensorMode() as mode, _StatisticsInFull():  # type: ignore[no-untyped-call]
        batch: tuple[Nest, Nest] = mapped(mode.from_tensor, (inputs, targets))
        value: Nest = mapped(placement.loaded, batch[0])
        for index, count in enumerate(counts):
            stage = Stage(
                index,
                model.layers[start : start + count],
                model,
                placement,
                last=index == len(counts) - 1,
                recomputed=recomputed,
                make_layer=give_no_values,
            )
            stage.split_backward()
            stage.train(True)
            microbatch = _Microbatch(stage, value, batch)
            entry, _ = microbatch.measure(recomputed=True)
            again.append(entry)
            entry, value = microbatch.measure(recomputed=False)
            kept.append(entry._replace(checkpoint=again[-1].checkpoint))
            start += count
    return _footprint(kept, _footprint(again))


def _footprint(entries: Sequence[_Entry], recomputed: Footprint | None = None) -> Footprint:
    def of(field: str) -> tuple[float, ...]:
        return tuple(float(getattr(entry, field)) for entry in entries)

    return Footprint(
        activation=of("activation"),
        weight_gradient=of("weight_gradient"),
        checkpoint=of("checkpoint"),
        boundary=of("boundary"),
        during_recompute=of("during_recompute"),
        during_input=of("during_input"),
        kept_output=of("kept_output"),
        input_for_weight=of("input_for_weight"),
        recomputed=recomputed,
    )


class _StatisticsInFull(TorchDispatchMode):
    """BatchNorm's statistics of low-precision inputs in the dtype of its weight, as they are on the CPU.

    Fake ones have the input's dtype (torch/_decomp/decompositions.py, native_batch_norm).
    """

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.native_batch_norm.default or args[1] is None:
            return result
        output, *statistics = result
        return output, *(each.to(args[1].dtype) for each in statistics)


class _Entry(NamedTuple):
    """One stage's entries of a `Footprint`."""

    activation: int
    weight_gradient: int
    checkpoint: int
    boundary: int
    during_recompute: int
    during_input: int
    kept_output: int
    input_for_weight: int


class _Microbatch:
    """One microbatch's way through one stage."""

    def __init__(self, stage: Stage, inputs: Nest, batch: tuple[Nest, Nest]) -> None:
        self._stage = stage
        self._inputs = inputs
        self._batch = batch

    def measure(self, *, recomputed: bool) -> tuple[_Entry, Nest]:
        """The stage's entry, and what the stage after it receives: leaves with memory of their own."""
        whole, peak_of_whole = self._before_a_whole_backward(recomputed)
        with self._metered(recomputed, split=True) as (meter, passed, run):
            output = passed.forward(run)
            tensors = flat(output)
            checkpoint, kept_output = meter.bytes, meter.held(tensors)
            peak_of_recompute = self._recompute(meter, passed, run)
            activation = max(meter.bytes, whole)
            meter.peak_bytes = 0
            wanted = passed.trained()
            passed.backward([torch.empty_like(t) if one else None for t, one in zip(tensors, wanted, strict=True)])
            entry = _Entry(
                activation=activation,
                weight_gradient=meter.bytes,
                checkpoint=checkpoint,
                boundary=sum(each.nbytes for each in tensors),
                during_recompute=max(peak_of_recompute - activation, peak_of_whole - activation, 0),
                during_input=max(meter.peak_bytes - activation, 0),
                kept_output=kept_output,
                input_for_weight=meter.held(flat(passed.inputs)),
            )
        received = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
        return entry, rebuilt(output, map(Tensor.requires_grad_, received, wanted))

    def _before_a_whole_backward(self, recomputed: bool) -> tuple[int, int]:
        """What is held after F, or R, where the modules are not split; and at most in R."""
        with self._metered(recomputed, split=False) as (meter, passed, run):
            passed.forward(run)
            peak = self._recompute(meter, passed, run)
            return meter.bytes, peak

    def _recompute(self, meter: ActivationMeter, passed: Pass, run: Run) -> int:
        meter.peak_bytes = 0
        passed.recompute(run)
        return meter.peak_bytes

    @contextmanager
    def _metered(self, recomputed: bool, *, split: bool) -> Iterator[tuple[ActivationMeter, Pass, Run]]:
        stage = self._stage
        meter = ActivationMeter(tensor for _, tensor in stage.named_tensors())
        targets = mapped(lambda tensor: tensor.to(stage.placement.device), self._batch[1])
        # a cumulative average asks for the number of batches so far, which a fake tensor doesn't have
        with casts_kept_for_a_step(), meter.excluding(flat(self._batch)), stage.recomputing():
            inputs = mapped(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), self._inputs)
            weights = WeightGradients(meter.hold) if split else None
            passed = Pass(stage, inputs, recomputed=recomputed, weights=weights, meter=meter)
            yield meter, passed, partial(stage.forward, targets=targets, weight=1.0, step=0, microbatch=0)
