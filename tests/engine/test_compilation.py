"""Compiled layers give what uncompiled ones give, in every schedule. Here up to the last step, inductor's code."""

from __future__ import annotations

import functools
import itertools
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from models.resnet import resnet
from pipeline.engine import compilation
from pipeline.engine.activations import ActivationMeter
from pipeline.engine.compilation import CompilationError, Compiler
from pipeline.engine.executor import ActionError
from pipeline.engine.segments import Recomputed
from pipeline.engine.stage import Stage
from pipeline.engine.weight_gradient import WeightGradients
from pipeline.schedule import library
from tests.engine.harness import Outcome, assert_close, assert_equal_outcomes, pipelined, placement, settings_for
from tests.engine.samples import chain, images, linears, small_gpt, text, vectors

MODES = ("never", "except_last", "always")
SPLIT = ("zb_h1", "zb_h2", "interleaved_zb", "zbv", "v_half", "v_min", "dualpipe_v", "zb_auto")


@functools.cache
def compiler(splits: bool) -> Compiler:
    """One for all tests of a kind: layers of small models are compiled once."""
    return Compiler("aot_eager")


@functools.cache
def eager(model, sample, microbatches: int, **options) -> Outcome:
    inputs, targets = sample()
    return pipelined(settings_for("gpipe", 1, microbatches, len(inputs)), model(**options), inputs, targets)


def gpt_with_dropout():
    return small_gpt(dropout=0.2)


def ten_texts() -> tuple[Tensor, Tensor]:
    return text(10)


@pytest.mark.parametrize(("schedule", "mode"), itertools.product(library.SCHEDULES, MODES))
def test_every_schedule_gives_the_uncompiled_gradients_dropout_included(schedule, mode):
    """Ten samples in four microbatches: two sizes."""
    settings = settings_for(schedule, 2, 4, 10, checkpoint=mode)
    found = pipelined(settings, gpt_with_dropout(), *ten_texts(), compiler=compiler(schedule in SPLIT))
    assert_equal_outcomes(found, eager(gpt_with_dropout, ten_texts, 4), 1e-9)


@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", "always"), ("zbv", "never"), ("zb_h1", "except_last")])
def test_batchnorm_and_convolutions(schedule, mode):
    model, sample = partial(resnet, depth=18, classes=10), partial(images, 8)
    found = pipelined(
        settings_for(schedule, 2, 4, 8, checkpoint=mode), model(), *sample(), compiler=compiler(schedule in SPLIT)
    )
    assert_equal_outcomes(found, pipelined(settings_for("gpipe", 1, 4, 8), model(), *sample()), 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_autocast(schedule):
    settings, autocast = settings_for(schedule, 2, 4, 8), partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    found, expected = (
        pipelined(settings, small_gpt(), *text(8), torch.float32, autocast=autocast, compiler=chosen)
        for chosen in (Compiler("aot_eager"), None)
    )
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert found.gradients[name].dtype == torch.float32
        assert_close(name, found.gradients[name], gradient, 3e-2)


# Split backward


def stage_of(model, chosen: Compiler, *, split: bool = False, first: int = 0) -> Stage:
    stage = Stage(first, model.layers[first:], model, placement(compiler=chosen), last=False)
    if split:
        stage.split_backward()
    stage.train(True)
    return stage


def forward(stage: Stage, inputs: Tensor) -> Tensor:
    return stage.forward(inputs, None, weight=1.0, step=0, microbatch=0)


def test_i_gives_the_inputs_gradient_and_w_the_weights():
    model, chosen = small_gpt(layers=1), Compiler("aot_eager")
    stage = stage_of(model, chosen, split=True, first=1)
    inputs, weights = torch.ones(2, 8, 16, dtype=torch.float64, requires_grad=True), WeightGradients()
    with stage.deferring(weights):
        output = forward(stage, inputs)
        output.sum().backward()
    parameters = [parameter for _, parameter in stage.named_parameters()]
    assert inputs.grad is not None
    assert all(parameter.grad is None for parameter in parameters)
    weights.apply()
    assert all(parameter.grad is not None for parameter in parameters)
    assert all(parameter.grad.stride() == parameter.stride() for parameter in parameters)


def test_a_backward_that_nobody_splits_gives_all_gradients():
    chosen = Compiler("aot_eager")
    stage = stage_of(linears(2), chosen, split=True)
    for times in (1, 2):
        forward(stage, torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        assert torch.equal(stage.modules[1].bias.grad, torch.full((4,), 3.0 * times, dtype=torch.float64))


def test_w_frees_what_it_held():
    stage = stage_of(linears(3), Compiler("aot_eager"), split=True)
    meter = ActivationMeter([tensor for _, tensor in stage.named_tensors()])
    weights = WeightGradients(meter.hold)
    with stage.deferring(weights):
        forward(stage, torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    assert meter.bytes > 0
    weights.apply()
    assert meter.bytes == 0


def test_what_compiled_layers_save_is_counted():
    stage = stage_of(linears(3), Compiler("aot_eager"))
    meter = ActivationMeter([tensor for _, tensor in stage.named_tensors()])
    with meter.watch():
        output = forward(stage, torch.ones(3, 4, dtype=torch.float64))
    assert meter.peak_bytes == 3 * (3 * 4 * 8), "the inputs of three layers"
    del output
    assert meter.bytes == 0


def test_frozen_parameters_get_none():
    stage = stage_of(linears(2), Compiler("aot_eager"), split=True)
    stage.modules[0].requires_grad_(False)
    weights = WeightGradients()
    with stage.deferring(weights):
        forward(stage, torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    weights.apply()
    assert [parameter.grad is not None for _, parameter in stage.named_parameters()] == [False, False, True, True]


def test_the_outputs_of_costly_operations_cant_be_kept():
    model, costly = linears(2), Recomputed(keeps_costly=True)
    with pytest.raises(ValueError, match=r"costly ones can't be kept: use compile=false, or recompute whole layers"):
        Stage(0, model.layers, model, placement(compiler=Compiler("aot_eager")), last=False, recomputed=costly)


# What is compiled how often


def compilations(run) -> int:
    before = counters["stats"]["unique_graphs"]
    run()
    return counters["stats"]["unique_graphs"] - before


def test_layers_of_a_kind_share_their_code():
    stage = stage_of(small_gpt(layers=6), Compiler("aot_eager"))
    assert compilations(lambda: forward(stage, text(2)[0])) == 3, "embedding, block, head"
    assert compilations(lambda: forward(stage, text(2)[0])) == 0
    assert compilations(lambda: forward(stage, text(3)[0])) == 3, "another size of microbatch"
    stage.train(False)
    assert compilations(lambda: forward(stage, text(2)[0])) == 2, "the head doesn't ask whether it is trained"
    stage.train(True)
    assert compilations(lambda: forward(stage, text(3)[0])) == 0


def test_stages_share_their_code_too():
    chosen = Compiler("aot_eager")
    model = linears(4)
    both = [
        Stage(0, model.layers[part], model, placement(compiler=chosen), last=False) for part in (slice(2), slice(2, 4))
    ]
    inputs = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    assert [compilations(partial(forward, stage, inputs)) for stage in both] == [1, 0]


class Counts(nn.Module):
    """Depends on a number that every call changes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_too_many_versions_are_an_error_and_not_run_uncompiled(monkeypatch):
    monkeypatch.setattr(compilation, "COMPILATIONS", 3)
    stage = stage_of(chain([Counts]), Compiler("aot_eager"))
    for _ in range(3):
        forward(stage, torch.ones(2))
    with pytest.raises(CompilationError, match=r"Counts was compiled 3 times.*use compile=false") as caught:
        forward(stage, torch.ones(2))
    assert "\n" not in str(caught.value)


def test_the_error_names_the_action(monkeypatch):
    monkeypatch.setattr(compilation, "COMPILATIONS", 2)
    model = chain([partial(nn.Linear, 4, 4), Counts])
    with pytest.raises(ActionError, match=r"rank 1 failed in 1F2 .*Counts was compiled 2 times"):
        pipelined(settings_for("1f1b", 2, 4, 8), model, *vectors(8), compiler=Compiler("aot_eager"))


class Prints(nn.Module):
    """Can't be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_layer_of_several_graphs(schedule):
    model = chain([Prints] * 3)
    settings = settings_for(schedule, 2, 4, 8)
    found = pipelined(settings, model, *vectors(8), compiler=Compiler("aot_eager"))
    assert_equal_outcomes(found, pipelined(settings, model, *vectors(8)), 1e-12)
