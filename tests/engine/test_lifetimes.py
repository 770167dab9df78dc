"""When a microbatch's tensors go: an output with its message, all else with the microbatch's last action of a stage."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from pipeline.engine.executor import run
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule.actions import ActionType
from pipeline.training.rank import Rank
from pipeline.training.settings import OptimizerSettings
from tests.engine.harness import microbatches_of, placement, plan_for, settings_for
from tests.engine.samples import chain, vectors

LINEAR = partial(nn.Linear, 4, 4)
LAST = {ActionType.B, ActionType.W}


def _note(remember, gradient):
    remember("gradient", gradient)


class CopyingTransport(InProcessTransport):
    """As between processes: a message is another memory at the other end."""

    def send(self, channel, message, tensor):
        super().send(channel, message, tensor.clone())


class Spy:
    """Weak references to the memory of what one executor's microbatches make, and what lives after each action."""

    def __init__(self, executor):
        self.made = defaultdict(dict)
        self.alive = {}
        for stage in executor.stages.values():
            stage.forward = partial(self._forward, stage, stage.forward)
        executor._handlers = {kind: partial(self._after, handler) for kind, handler in executor._handlers.items()}

    def _forward(self, stage, forward, inputs, targets, **names):
        made = self.made[stage.index, names["microbatch"]]
        given = [tensor for _, tensor in stage.named_tensors()] + ([] if targets is None else [targets])
        kept_anyway = {tensor.untyped_storage()._cdata for tensor in given}

        def remember(what, tensor):
            if tensor.untyped_storage()._cdata not in kept_anyway:
                made.setdefault(what, []).append(weakref.ref(tensor.untyped_storage()))
            return tensor

        remember("input", inputs)
        with torch.autograd.graph.saved_tensors_hooks(partial(remember, "saved"), lambda tensor: tensor):
            output = forward(inputs, targets, **names)
        remember("output", output)
        if output.requires_grad:
            output.register_hook(partial(_note, remember))
        return output

    def _after(self, handler, state, action):
        handler(state, action)
        made = self.made[action.stage, action.microbatch]
        self.alive[action] = {what for what, memories in made.items() if any(memory() for memory in memories)}


@contextmanager
def counted_by_references_alone() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spied(schedule, checkpoint="never", builds=(LINEAR,) * 4, evaluate=False):
    """What was alive after each action of two ranks. The batch is converted, so an input of the first is a copy."""
    model, (inputs, targets) = chain(builds), vectors(8)
    plan = plan_for(settings_for(schedule, 2, 4, 8, checkpoint=checkpoint), model, inputs)
    transport = CopyingTransport()
    ranks = [Rank(rank, plan, model, placement(), transport, OptimizerSettings()) for rank in range(2)]
    executors = [rank.evaluator if evaluate else rank.trainer for rank in ranks]
    spies = [Spy(executor) for executor in executors]
    with counted_by_references_alone():
        run(executors, [microbatches_of(plan, model, inputs, targets)] * 2)
    assert all({"input", "output"} <= set(made) for spy in spies for made in spy.made.values()), "the spy sees nothing"
    return {action: alive for spy in spies for action, alive in spy.alive.items()}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_nothing_of_a_microbatch_outlives_its_last_action(schedule, checkpoint):
    alive = spied(schedule, checkpoint)
    last = {action: what for action, what in alive.items() if action.type in LAST}
    assert len(last) == 8
    # the loss, a number that was asked for, is the last stage's output
    assert all(what <= ({"output"} if action.stage == 1 else set()) for action, what in last.items())


def test_until_its_last_action_it_is_there():
    alive = spied("zb_h1")
    for action, what in alive.items():
        if action.type is ActionType.F:
            assert {"input", "saved"} <= what
        if action.type is ActionType.I:
            assert {"input"} <= what, "W needs it"
            assert action.stage == 1 or "gradient" in what


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_sent_output_is_gone(schedule, checkpoint):
    sends = [what for action, what in spied(schedule, checkpoint).items() if action.type is ActionType.SEND_F]
    assert len(sends) == 4
    assert not any("output" in what for what in sends)


def test_a_sent_output_that_autograd_saved_stays_until_the_backward():
    alive = spied("gpipe", builds=(LINEAR, nn.Tanh, LINEAR, LINEAR))
    sends = [what for action, what in alive.items() if action.type is ActionType.SEND_F]
    assert all("output" in what for what in sends)
    assert not any(what for action, what in alive.items() if action.type is ActionType.B and action.stage == 0)


def test_a_recomputed_microbatch_keeps_its_input_alone():
    alive = spied("gpipe", "always")
    assert all(what == {"input"} for action, what in alive.items() if action.type is ActionType.SEND_F)


def test_an_evaluation_keeps_nothing():
    alive = spied("1f1b", evaluate=True)
    after = {action: what for action, what in alive.items() if action.type in {ActionType.F, ActionType.SEND_F}}
    assert all("input" not in what and "saved" not in what for what in after.values())
    assert not any(what for action, what in after.items() if action.type is ActionType.SEND_F)
