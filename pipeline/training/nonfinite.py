"""Where a step stopped being finite: found by running it once more, with every layer watched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.engine.executor import Microbatches, run
from pipeline.engine.stage import Stage
from pipeline.schedule.actions import ActionType
from pipeline.training.rank import Rank
from pipeline.training.ranks import Ranks

_MOST_IN_A_ROW = 100
"""Skipped steps after which a run ends all the same: the next ones would be no better."""


@dataclass
class Skips:
    """Steps that left weights and optimizer as they were."""

    total: int = 0
    in_a_row: int = 0

    def update(self, *, skipped: bool) -> None:
        """Take in one step."""
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0

    def must_stop(self, on_nonfinite: str) -> str | None:
        """What to add to the error with which a run ends instead of skipping one more step; None: it goes on."""
        if on_nonfinite == "stop":
            return ", or leave such steps out with on_nonfinite=skip"
        return f" ({_MOST_IN_A_ROW} steps in a row were skipped)" if self.in_a_row + 1 >= _MOST_IN_A_ROW else None


@dataclass(frozen=True, order=True)
class Finding:
    """Something that is not finite. The least is the earliest: forwards before backwards, in the order of layers.

    `position` is the layer's place in the model in a forward, and counts down in a backward.
    """

    backward: bool
    position: int
    microbatch: int
    text: str


def find(ranks: Ranks, batch: Microbatches) -> str | None:
    """What of a step is first not finite, on whichever rank; None where nothing is.

    Runs the step again on weights that have not moved: gradients are dropped before, and those it leaves are of no use.
    Every process must call it.

    Args:
        ranks: whose step it was.
        batch: of the step in question.
    """
    with ExitStack() as stack:
        ranks.clear_gradients()
        watched = [
            stack.enter_context(_watched(rank, part.first))
            for rank, part in zip(ranks, ranks.parts(batch), strict=True)
        ]
        run([rank.trainer for rank in ranks], ranks.parts(batch))
    for rank, findings in zip(ranks, watched, strict=True):
        findings.extend(_in_parameters(rank))
    found = [
        finding for finding in ranks.group.gather([min(findings, default=None) for findings in watched]) if finding
    ]
    return min(found).text if found else None


def describe(loss: float, norm: float, step: int, first: str | None) -> str:
    """One line: what of `step` (from 0) is not finite, and where that began (`find`)."""
    what = f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    where = f"first {first}" if first else "though every layer's output and gradient is finite"
    return f"{what} at step {step + 1}, {where}"


@contextmanager
def _watched(rank: Rank, first: int) -> Iterator[list[Finding]]:
    """While open, the layers' outputs, the losses, and the gradients of both are looked at.

    Gradients stay this replica's own, for one that is not finite makes those of all replicas so. `first` is the number
    of its first microbatch.
    """
    findings: list[Finding] = []
    with ExitStack() as stack:
        stack.enter_context(rank.own_gradients())
        for stage in rank.stages.values():
            stack.enter_context(stage.watched(partial(_look, findings, rank, first, stage)))
        yield findings


def _look(findings: list[Finding], rank: Rank, first: int, stage: Stage, index: int, output: object) -> None:
    microbatch, position = first + _microbatch(rank, stage), rank.plan.layers_of(stage.index).start + index
    what = "the loss" if index == len(stage.layers) else f"the output of layer {stage.layers[index].name}"
    what = f"{what} ({_place(rank, stage)}, microbatch {microbatch})"

    def look_back(gradient: Tensor) -> None:
        if not _finite(gradient):
            findings.append(Finding(True, _backward_position(rank, position), microbatch, f"the gradient of {what}"))

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            if not _finite(tensor):
                findings.append(Finding(False, position, microbatch, what))
            if tensor.requires_grad:
                tensor.register_hook(look_back)


def _in_parameters(rank: Rank) -> Iterator[Finding]:
    """Gradients that are not finite, summed over the microbatches as they are."""
    for stage in rank.stages.values():
        start = rank.plan.layers_of(stage.index).start
        for index, (layer, module) in enumerate(zip(stage.layers, stage.modules, strict=True)):
            for name, parameter in module.named_parameters(layer.prefix.rstrip(".")):
                if parameter.grad is not None and not _finite(parameter.grad):
                    # a layer's weights get theirs after its output has got its own
                    after = _backward_position(rank, start + index) + 1
                    text = f"the gradient of {name} (layer {layer.name}, {_place(rank, stage)})"
                    yield Finding(True, after, 0, text)


def _backward_position(rank: Rank, position: int) -> int:
    """Even numbers for outputs, so that the weights' have a place between."""
    return 2 * (len(rank.plan.layers) - position)


def _place(rank: Rank, stage: Stage) -> str:
    return f"stage {stage.index}, rank {rank.rank}"


def _microbatch(rank: Rank, stage: Stage) -> int:
    """The one whose forward is at hand."""
    program = rank.trainer.schedule
    action = program.rows[rank.rank % program.pp][rank.trainer.position]
    forwards = (ActionType.F, ActionType.R)
    parts = (part for part in action.compute if part.type in forwards and part.stage == stage.index)
    return next(parts).microbatch


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
