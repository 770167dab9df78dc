"""Values that go past other layers and stages by name, against the plain loop."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from pipeline.engine.compilation import Compiler
from pipeline.engine.named_values import alive
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
from tests.engine.samples import chain, pixels, sentences, translator, unet, vectors

MODELS = {"unet": (unet, pixels), "translator": (translator, sentences)}
ONE_STAGE_A_RANK = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", "zb_auto")


def case(name, samples=7):
    build, batch = MODELS[name]
    return build(), *batch(samples)


def compare(name, schedule, checkpoint="never", **more):
    """Four stages, with seven samples in four microbatches."""
    pp = 4 if schedule in ONE_STAGE_A_RANK else 2
    model, inputs, targets = case(name)
    settings = settings_for(schedule, pp, 4, 7, checkpoint=checkpoint)
    assert_equal_outcomes(pipelined(settings, model, inputs, targets, **more), plain_loop(model, inputs, targets, 4))


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_plain_loops(name, schedule, checkpoint):
    compare(name, schedule, checkpoint)


@pytest.mark.parametrize("part", [{"every": 2}, {"keep": "costly"}, {"every": 2, "keep": "costly"}])
@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_stage_that_are_recomputed(name, schedule, part):
    compare(name, schedule, ActivationCheckpointSettings("selective", **part))


def test_compiled_layers():
    compare("translator", "zb_h1", compiler=Compiler("aot_eager"))


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", MODELS)
def test_any_cut(name, pp):
    model, inputs, targets = case(name, 4)
    found = pipelined(settings_for("1f1b", pp, 2, 4), model, inputs, targets)
    assert_equal_outcomes(found, plain_loop(model, inputs, targets, 2))


def test_what_crosses_is_what_is_still_taken():
    """The mask and the memory go down to the last stage, the mask without a gradient; of those not alive nothing."""
    model, inputs, _ = case("translator", 4)
    plan = plan_for(settings_for("1f1b", 9, 2, 4), model, inputs)
    words = {boundary: {name: len(names) for name in names} for boundary, names in enumerate(alive(model.layers))}
    assert words[1].keys() == words[3].keys() == {"padding", "target"}
    assert words[4].keys() == words[7].keys() == {"padding", "memory"}
    assert not words[0]
    assert not words[8]
    assert [len(boundary.tensors) for boundary in plan.boundaries[2]] == [2, 3, 3, 3, 3, 3, 3, 3, 1, 1]
    assert [len(boundary.gradients) for boundary in plan.boundaries[2]] == [0, 1, 1, 1, 2, 2, 2, 2, 1, 1]
    assert set(plan.boundaries[2][5].nest.named) == {"padding", "memory"}


class Gives(nn.Linear):
    """Its product, and that again by name."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, *taken):
        x = super().forward(x)
        return x, x


class Takes(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, *taken):
        return super().forward(sum(taken, x))


class Ignores(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, taken):
        return super().forward(x)


LINEAR = partial(nn.Linear, 4, 4)
WAYS = {
    "the output itself, by name too": ([Gives, LINEAR, LINEAR, Takes], {3: ("x",)}, {0: ("x",)}),
    "taken by all, and twice": ([Gives, Takes, Takes, Takes], {1: ("x",), 2: ("x", "x"), 3: ("x",)}, {0: ("x",)}),
    "taken by nobody": ([Gives, LINEAR, Gives, LINEAR], {}, {0: ("x",), 2: ("y",)}),
    "taken and left unused": ([Gives, LINEAR, Ignores, LINEAR], {2: ("x",)}, {0: ("x",)}),
    "one ends where the next begins": ([Gives, Gives, Takes, LINEAR], {1: ("x",), 2: ("y",)}, {0: ("x",), 1: ("y",)}),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "zb_h1"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_giving_and_taking(way, schedule, checkpoint):
    builds, takes, gives = WAYS[way]
    model, batch = chain(builds, takes=takes, gives=gives), vectors(6)
    settings = settings_for(schedule, 2 if schedule == "zbv" else 4, 2, 6, checkpoint=checkpoint)
    assert_equal_outcomes(pipelined(settings, model, *batch), plain_loop(model, *batch, 2))


def test_a_value_is_let_go_after_its_last_taker():
    """Within a stage too: nothing but the next layer's input is alive when the layers after it run."""
    layers = chain([Gives, Takes, LINEAR], takes={1: ("x",)}, gives={0: ("x",)}).layers
    assert alive(layers) == ((), ("x",), (), ())


@pytest.mark.parametrize(
    ("takes", "gives", "words"),
    [
        ({2: ("memory",)}, {}, r"layer 2 takes 'memory', which no layer gives: let one before it give it \(gives="),
        (
            {1: ("x",)},
            {2: ("x",)},
            "layer 1 takes 'x', and layer 2, which gives it, is not before it: change",
        ),
        ({1: ("x",)}, {1: ("x",)}, "layer 1 takes 'x', and layer 1, which gives it, is not before it"),
        ({}, {0: ("x",), 2: ("x",)}, "layers 0 and 2 both give 'x': give each value a name of its own"),
        ({}, {0: ("x", "x")}, "layers 0 and 0 both give 'x'"),
        ({}, {3: ("x",)}, r"layer 3 gives x and returns a tensor: let it return \(value, x\)"),
        ({1: ("x",)}, {0: ("x",)}, r"layer 1 refuses its input float64\[2, 4\], float64\[2, 4\]: .*positional arg"),
        ({3: "skip"}, {0: ("skip",)}, r"layer 3 takes 'skip': use a tuple of names, as in takes=\('skip',\)"),
        ({}, {0: [1]}, r"layer 0 gives \[1\]: use a tuple of names"),
        ({}, {0: ("x", "y")}, r"layer 0 gives x, y and returns a tuple of 2: let it return \(value, x, y\)"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(takes, gives, words):
    first = Gives if 0 in gives else LINEAR
    model, (inputs, _) = chain([first, LINEAR, LINEAR, LINEAR], takes=takes, gives=gives), vectors(4)
    with pytest.raises(ValueError, match=words):
        plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)


def test_a_rehearsal_and_an_evaluation_take_the_same_way():
    model, inputs, targets = case("translator", 4)
    plan = plan_for(settings_for("zb_h1", 4, 2, 4), model, inputs)
    ranks, batch = build_ranks(plan, model), microbatches_of(plan, model, inputs, targets)
    for rank in ranks:
        rank.rehearse(batch, evaluates=True)
    expected = plain_loop(model, inputs, targets, 2)
    assert_equal_outcomes(outcome(plan, ranks, step(ranks, batch)), expected)
