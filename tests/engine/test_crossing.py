"""Several tensors from stage to stage: which messages there are, and the plain loop's gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from pipeline.engine.boundary import Boundary, TensorSpec
from pipeline.engine.executor import ActionError, run
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule.library import SCHEDULES
from pipeline.training.settings import ActivationCheckpointSettings
from tests.engine.harness import (
    assert_equal_outcomes,
    build_ranks,
    microbatches_of,
    outcome,
    pipelined,
    plain_loop,
    plan_for,
    settings_for,
    step,
)
from tests.engine.samples import chain, nested, nests, vectors
from tests.engine.test_edges import LINEAR, Frozen


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_the_plain_loops(schedule, checkpoint):
    """Dicts, tuples and lists of numbers, integers and booleans; of inputs, targets and outputs too."""
    pp = 4 if schedule in ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", "zb_auto") else 2
    settings = settings_for(schedule, pp, 4, 7, checkpoint=checkpoint)
    found, expected = pipelined(settings, nested(), *nests(7)), plain_loop(nested(), *nests(7), 4)
    assert_equal_outcomes(found, expected)


def test_an_evaluation_gives_the_plain_loops_loss():
    model, batch = nested(), nests(7)
    plan = plan_for(settings_for("1f1b", 4, 4, 7), model, batch[0])
    ranks = build_ranks(plan, model)
    for rank in ranks:
        rank.rehearse(microbatches_of(plan, model, *batch), evaluates=True)
    results = run([rank.evaluator for rank in ranks], [microbatches_of(plan, model, *batch)] * 4)
    torch.testing.assert_close(results[-1].loss, plain_loop(model, *batch, 4).loss, rtol=1e-12, atol=0)


class Counting(InProcessTransport):
    """Counts messages by kind and the stage they come from."""

    def __init__(self):
        super().__init__()
        self.sent = Counter()

    def send(self, channel, message, tensor):
        self.sent[message.kind, message.source_stage] += 1
        super().send(channel, message, tensor)


def transfers(model, batch, microbatches=2):
    """Of one step under 1F1B: those of each stage's activations and gradients, a microbatch."""
    plan = plan_for(settings_for("1f1b", 4, microbatches, len(batch[1])), model, batch[0])
    transport = Counting()
    ranks = build_ranks(plan, model, transport=transport)
    results = step(ranks, microbatches_of(plan, model, *batch))
    assert_equal_outcomes(outcome(plan, ranks, results), plain_loop(model, *batch, microbatches))
    sent = {
        kind: [transport.sent[kind, stage] // microbatches for stage in range(4)] for kind in ("activation", "gradient")
    }
    assert sum(transport.sent.values()) == microbatches * sum(map(sum, sent.values()))
    return sent


def test_numbers_alone_have_gradients_that_go_back():
    """The fork gives five tensors: three of numbers, of which one comes twice, a mask and integers."""
    model, batch = nested(), nests(6)
    plan = plan_for(settings_for("1f1b", 4, 2, 6), model, batch[0])
    made, looked_up = TensorSpec((3, 2, 2), torch.float64), TensorSpec((3, 4), torch.float64)
    boundary = plan.boundaries[3][1]
    assert boundary.tensors == (
        made,
        looked_up,
        looked_up,
        TensorSpec((3, 4), torch.bool),
        TensorSpec((3,), torch.int64),
    )
    assert boundary.gradients == (made, looked_up, looked_up)
    assert boundary.message("activation") == boundary.tensors
    assert boundary.message("gradient") == boundary.gradients


def test_what_nothing_before_trains_on_is_not_sent_back():
    """The first two stages are frozen, the third trains: one gradient crosses, from the last stage."""
    assert transfers(chain([Frozen, Frozen, LINEAR, LINEAR]), vectors(6)) == {
        "activation": [1, 1, 1, 0],
        "gradient": [0, 0, 0, 1],
    }


class Stops(nn.Module):
    def forward(self, x):
        return x.detach() * 2


def test_a_layer_that_stops_the_gradient_ends_its_messages():
    """The layers before it have no gradient, as in one process, where an optimizer passes over them."""
    assert transfers(chain([LINEAR, LINEAR, Stops, LINEAR]), vectors(6))["gradient"] == [0, 0, 0, 0]


class First(nn.Module):
    def forward(self, given):
        return given[0]


class Half(nn.Module):
    """Gives its input and makes something that nothing uses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x, self.linear(x)


def test_what_nothing_after_uses_is_not_sent_back():
    sent = transfers(chain([LINEAR, Half, First, LINEAR]), vectors(6))
    assert sent == {"activation": [1, 2, 1, 0], "gradient": [0, 1, 1, 1]}


def test_two_stages_of_a_frozen_model_have_nothing_to_send_back():
    sent = transfers(chain([Frozen, Frozen, Frozen, LINEAR]), vectors(6))
    assert sent == {"activation": [1, 1, 1, 0], "gradient": [0, 0, 0, 0]}


def test_layers_unfrozen_after_the_plan_are_refused():
    """Their gradients would be zero without a word."""
    model, batch = chain([Frozen, LINEAR]), vectors(4)
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, batch[0])
    ranks = build_ranks(plan, model)
    ranks[0].stages[0].modules[0].requires_grad_(True)
    with pytest.raises(ActionError, match="stage 0 trains now and was frozen when the run was planned: unfreeze"):
        step(ranks, microbatches_of(plan, model, *batch))


class Changing(nn.Module):
    """Gives another number of tensors in evaluation."""

    def forward(self, x):
        return (x, x) if self.training else (x,)


def test_what_was_not_planned_is_refused():
    model, batch = chain([Changing, First]), vectors(4)
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, batch[0])
    ranks = build_ranks(plan, model)
    expected = r"stage 0 made float64\[2, 4\] for its neighbor, which expects float64\[2, 4\], float64\[2, 4\]"
    with pytest.raises(ActionError, match=expected):
        run([rank.evaluator for rank in ranks], [microbatches_of(plan, model, *batch)] * 2)


def test_a_boundary_sorts_what_crosses():
    number, count = torch.zeros(2), torch.zeros(3, dtype=torch.int64)
    specs = {"count": TensorSpec.of(count), "rest": [TensorSpec.of(number), None]}
    boundary = Boundary(specs, trained=(False, True), differentiable=(False, True))
    assert boundary.gradients == (TensorSpec((2,), torch.float32),)
    its_gradient = torch.ones(2)
    (nothing, given) = boundary.spread([its_gradient])
    assert nothing is None
    assert given is its_gradient
    assert boundary.returned([None, "of the number"], [count, number]) == ("of the number",)
    (zeros,) = boundary.returned([None, None], [count, number])
    assert torch.equal(zeros, torch.zeros(2))
    arrived = count.clone(), number
    leaves = boundary.leaves(arrived)
    assert leaves == {"count": arrived[0], "rest": [arrived[1], None]}
    assert [tensor.requires_grad for tensor in arrived] == [False, True]


class Aside(nn.Module):
    """Gives what came beside what it trains on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh(), x


class Joined(Aside):
    """Takes both."""

    def forward(self, given):
        return self.linear(given[0]) + given[1]


class Further(Aside):
    """Trains on one of them and passes the other on."""

    def forward(self, given):
        return self.linear(given[0]).tanh(), given[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_trains_nothing_goes_past_recomputed_layers(schedule):
    """The recomputed first layer gives the batch itself on; the second, in the same stage, is kept."""
    model, every_2nd = chain([Aside, Further, Further, Joined]), ActivationCheckpointSettings("selective", every=2)
    settings = settings_for(schedule, 2, 4, 7, checkpoint=every_2nd)
    assert_equal_outcomes(pipelined(settings, model, *vectors(7)), plain_loop(model, *vectors(7)))
