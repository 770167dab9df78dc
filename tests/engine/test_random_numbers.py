"""Starting weights and what layers draw are those of (step, microbatch, layer), whatever the pipeline."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.engine.compilation import Compiler
from pipeline.schedule.library import SCHEDULES
from pipeline.training.settings import ActivationCheckpointSettings
from tests.engine.harness import Outcome, assert_equal_outcomes, build_ranks, pipelined, plan_for, settings_for
from tests.engine.samples import chain, vectors

CHECKPOINTS = {
    "never": ActivationCheckpointSettings("never"),
    "always": ActivationCheckpointSettings("always"),
    "costly kept": ActivationCheckpointSettings("selective"),
    "every 2nd": ActivationCheckpointSettings("selective", every=2),
}


class Nested(nn.Module):
    """Dropout in a module in a module, twice."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate))
        self.body = nn.ModuleDict({"first": inner, "second": nn.Sequential(nn.GELU(), nn.AlphaDropout(rate))})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body["second"](self.body["first"](x))


class Functional(nn.Module):
    """Dropout without a module, and noise that no module draws."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.linear = rate, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        noise = self.rate * torch.randn_like(x) if self.training else 0.0
        return functional.dropout(self.linear(x).tanh() + noise, self.rate, training=self.training)


class Attends(nn.Module):
    """Dropout within attention."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.linear = rate, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).reshape(-1, 1, 4, 6).split(2, -1)
        rate = self.rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        return x + mixed.reshape(x.shape)


def noisy(rate: float = 0.3):
    builds = [functools.partial(kind, rate) for kind in (Nested, Functional, Attends, Nested, Functional)]
    return chain([*builds, functools.partial(nn.Linear, 8, 8)], stochastic=True)


@functools.cache
def alone(rate: float = 0.3, step: int = 0) -> Outcome:
    return pipelined(settings_for("1f1b", 1, 4, 8), noisy(rate), *vectors(8, 8))


def test_the_run_is_one_in_which_it_matters():
    assert not torch.isclose(alone().loss, alone(0.0).loss)


PIPELINES = [
    *[(schedule, 2) for schedule in SCHEDULES],
    *[("1f1b", 3), ("zb_h1", 3), ("interleaved_1f1b", 3), ("zbv", 3), ("gpipe", 6)],
]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(("schedule", "pp"), PIPELINES)
def test_dropout_does_not_depend_on_the_pipeline(schedule, pp, checkpoint):
    """Nor on the schedule, stages a rank or recomputation: the loss bit for bit."""
    microbatches = 4 if (schedule, pp) != ("dualpipe_v", 3) else 6
    settings = settings_for(schedule, pp, microbatches, 8, checkpoint=CHECKPOINTS[checkpoint])
    found = pipelined(settings, noisy(), *vectors(8, 8))
    assert torch.equal(found.loss, alone().loss)
    assert_equal_outcomes(found, alone(), 1e-12)


@pytest.mark.parametrize(("schedule", "checkpoint"), itertools.product(["1f1b", "zb_h1"], ["never", "always"]))
def test_compiled_layers_draw_the_same(schedule, checkpoint):
    settings = settings_for(schedule, 2, 4, 8, checkpoint=CHECKPOINTS[checkpoint])
    found = pipelined(settings, noisy(), *vectors(8, 8), compiler=Compiler("aot_eager"))
    assert_equal_outcomes(found, alone(), 1e-9)


def test_starting_weights_do_not_depend_on_the_pipeline():
    states = []
    for schedule, pp in PIPELINES:
        plan = plan_for(settings_for(schedule, pp, 6, 8), noisy(), vectors(8, 8)[0])
        ranks = build_ranks(plan, noisy())
        states.append({name: tensor for rank in ranks for name, tensor in rank.state_dict().items()})
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())


def test_no_two_microbatches_or_layers_draw_alike():
    drawn = []

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:  # else it is a rehearsal on fake ones
                drawn.append(float(torch.rand(())))
            return x

    linear = functools.partial(nn.Linear, 8, 8)
    pipelined(settings_for("1f1b", 2, 4, 8), chain([Draws, linear, Draws, linear], stochastic=True), *vectors(8, 8))
    assert len(drawn) == len(set(drawn)) == 2 * 4
