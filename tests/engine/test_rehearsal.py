"""A rehearsal compiles everything and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from models.resnet import resnet
from pipeline.engine.compilation import Compiler
from tests.engine.harness import (
    assert_equal_outcomes,
    build_ranks,
    microbatches_of,
    outcome,
    pipelined,
    plan_for,
    settings_for,
    step,
)
from tests.engine.samples import images, small_gpt, text
from tests.training.harness import prepare, relative_error, settings_to_train, text_data, train


def test_statistics_generators_and_gradients_are_as_before():
    model, (inputs, targets) = resnet(depth=18, classes=10), images(8)
    settings = settings_for("1f1b", 2, 4, 8, checkpoint="except_last")
    plan = plan_for(settings, model, inputs)
    ranks = build_ranks(plan, model)
    before = [{name: tensor.clone() for name, tensor in rank.state_dict().items()} for rank in ranks]
    drawn = torch.get_rng_state()
    for rank in ranks:
        rank.rehearse(microbatches_of(plan, model, inputs, targets), evaluates=True)
    for rank, state in zip(ranks, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in rank.state_dict().items())
        assert all(parameter.grad is None for parameter in rank.parameters.values())
    assert torch.equal(torch.get_rng_state(), drawn)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    assert_equal_outcomes(outcome(plan, ranks, results), pipelined(settings, model, inputs, targets), 0.0)


@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", "except_last"), ("zbv", "never")])
def test_after_it_nothing_is_left_to_compile(schedule, mode):
    """Neither forward nor backward, of both sizes that ten samples in four microbatches have."""
    model, (inputs, targets) = small_gpt(dropout=0.1), text(10)
    plan = plan_for(settings_for(schedule, 2, 4, 10, checkpoint=mode), model, inputs)
    ranks = build_ranks(plan, model, compiler=Compiler("aot_eager"))
    batch = microbatches_of(plan, model, inputs, targets)
    counters.clear()
    for rank in ranks:
        rank.rehearse(batch, evaluates=False)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    step(ranks, batch)
    for rank in ranks:
        rank.clear_gradients()
    step(ranks, batch)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("validate_every", [0, 2])
def test_a_trainer_compiles_before_its_first_step(validate_every):
    """With evaluations, if there will be any; and then never again."""
    settings = settings_to_train("zb_h1", 2, 4, 10, steps=2, compile=True, validate_every=validate_every)
    run = prepare(settings, small_gpt(), text_data(10), compiler=Compiler("aot_eager"))
    counters.clear()
    run.trainer._compile()
    graphs = counters["stats"]["unique_graphs"]
    run.trainer.train()
    assert counters["stats"]["unique_graphs"] == graphs
    plain = train(
        settings_to_train("zb_h1", 2, 4, 10, steps=2, validate_every=validate_every), small_gpt(), text_data(10)
    )
    assert relative_error(run.losses, plain.losses) < 1e-5
    assert len(run.validations) == len(plain.validations) == (validate_every > 0)
