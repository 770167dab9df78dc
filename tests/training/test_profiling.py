"""A model's layers, measured or read: their bytes, the conditions, and what the simulator is told of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from torch import nn

from models.resnet import resnet
from pipeline.engine.activations import ActivationMeter
from pipeline.engine.casts import casts_kept_for_a_step
from pipeline.engine.passes import Pass
from pipeline.engine.segments import Recomputed
from pipeline.engine.stage import Stage
from pipeline.partition import LayerCosts
from pipeline.training.placement import place
from pipeline.training.profile_file import ModelProfile
from pipeline.training.profiling import measure_profile, parameter_bytes, predict_layer_bytes, take_profile, to_costs
from pipeline.training.settings import ActivationCheckpointSettings, CostsSettings, OptimizerSettings, Settings
from tests.engine.harness import CPU
from tests.engine.samples import chain, images, small_gpt, text, vectors
from tests.engine.test_executor import LINEAR
from tests.training.harness import BF16_TRUE, FP16, FP32, FP64, settings_to_train
from tests.training.test_predicted_bytes import Scalar

LAYERS = [
    LayerCosts(str(n), 1.0 * n, 3.0 * n, 4.0 * n, None, 10 * n, 0, backward=2.0 * n, recompute=0.5 * n)
    for n in (1, 2, 3, 4, 5)
]
COSTLY = ActivationCheckpointSettings("selective")


def measured_bytes(settings, model, inputs, targets):
    """What a meter counts of each layer, alone and real: between F and B, and between F and R."""
    placement, value, found = place(settings, CPU), inputs.to(place(settings, CPU).dtype), []
    value = value if inputs.is_floating_point() else inputs
    for index, layer in enumerate(model.layers):
        last = index == len(model.layers) - 1
        part = Recomputed(keeps_costly=settings.activation_checkpoint.keeps_costly)
        stage = Stage(index, [layer], model, placement, last=last, recomputed=part)
        stage.train(True)
        run, held = partial(stage.forward, targets=targets, weight=1.0, step=0, microbatch=0), []
        for recomputed in (False, True):
            meter = ActivationMeter(tensor for _, tensor in stage.named_tensors())
            leaf = value.detach().requires_grad_(value.is_floating_point() and index > 0)
            with casts_kept_for_a_step(), meter.excluding([inputs, targets]):
                passed = Pass(stage, leaf, recomputed=recomputed, meter=meter)
                output = passed.forward(run)
                held.append(meter.bytes)
                del passed
        value = output
        found.append((*held, output.nbytes))
    return found


@pytest.mark.parametrize("precision", [FP32, FP64, FP16], ids=["fp32", "fp64", "fp16"])
@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize(
    ("build", "batch"), [(small_gpt, text), (partial(resnet, depth=18, classes=10), images)], ids=["gpt", "resnet"]
)
def test_bytes_told_without_memory_are_those_of_real_layers(build, batch, costly, precision):
    settings = settings_to_train("1f1b", 2, 1, 3, 1, precision=precision)
    settings.activation_checkpoint = COSTLY if costly else ActivationCheckpointSettings()
    model, (inputs, targets) = build(), batch(3)
    told = predict_layer_bytes(settings, model, inputs, targets, CPU)
    expected = measured_bytes(settings, model, inputs, targets)
    assert [(layer.activation_bytes, layer.checkpoint_bytes, layer.output_bytes) for layer in told] == expected


def test_a_profile_has_times_bytes_and_names():
    settings = settings_to_train("1f1b", 2, 2, 5, 1, precision=FP64)
    model, (inputs, targets) = small_gpt(), text(5)
    found = measure_profile(settings, model, inputs, targets, CPU)
    assert found.conditions.inputs == (3, 8)
    told = predict_layer_bytes(settings, model, inputs, targets, CPU)
    assert [
        replace(layer, forward=0, backward_input=0, backward_weight=0, backward=None, recompute=None)
        for layer in found.layers
    ] == list(told)
    assert all(min(layer.seconds, layer.backward, layer.recompute) > 0 for layer in found.layers)
    assert found.layers[0].tied == ("head",)
    assert found.layers[-1].tied == ("embedding",)
    assert {layer.tied for layer in found.layers[1:-1]} == {()}


def test_a_profile_is_taken_from_its_file(tmp_path):
    settings = settings_to_train("1f1b", 2, 2, 4, 1)
    model, (inputs, targets) = chain([LINEAR] * 3), vectors(4)
    measured = take_profile(settings, model, inputs, targets, CPU)
    settings.profile = str(tmp_path / "profile.json")
    measured.write(tmp_path / "profile.json")
    assert take_profile(settings, model, inputs, targets, CPU) == measured
    settings.optimizer = OptimizerSettings("sgd", momentum=0.0)
    plain = take_profile(settings, model, inputs, targets, CPU)
    assert [2 * layer.parameter_bytes for layer in plain.layers] == [layer.parameter_bytes for layer in measured.layers]
    settings.microbatches = 4
    with pytest.raises(ValueError, match=r"measured with inputs \(2, 4\) and the run has \(1, 4\): make one"):
        take_profile(settings, model, inputs, targets, CPU)


def test_messages_may_have_another_dtype(tmp_path):
    settings = settings_to_train("1f1b", 2, 2, 4, 1)
    model, (inputs, targets) = small_gpt(), text(4)
    measure_profile(settings, model, inputs, targets, CPU).write(tmp_path / "profile.json")
    settings.profile, hidden = str(tmp_path / "profile.json"), 2 * 8 * 16
    full = take_profile(settings, model, inputs, targets, CPU)
    settings.precision = replace(settings.precision, boundary="bfloat16")
    half = take_profile(settings, model, inputs, targets, CPU)
    assert [layer.boundary_bytes for layer in full.layers[:-1]] == [4 * hidden] * 7
    assert [layer.boundary_bytes for layer in half.layers[:-1]] == [2 * hidden] * 7
    assert [layer.handed_on for layer in full.layers] == [layer.handed_on for layer in half.layers]


def test_a_layer_that_overwrites_its_input_is_named():
    settings = settings_to_train("1f1b", 2, 2, 4, 1)
    model = chain([LINEAR, partial(nn.ReLU, inplace=True), LINEAR])
    with pytest.raises(ValueError, match=r"layer 1 overwrites what its stage received .*: use an operation out"):
        measure_profile(settings, model, *vectors(4), CPU)


def test_a_model_that_needs_its_numbers_has_times_alone():
    settings = settings_to_train("1f1b", 2, 2, 4, 1)
    found = measure_profile(settings, chain([LINEAR] * 2, loss=Scalar()), *vectors(4), CPU)
    assert [layer.activation_bytes for layer in found.layers] == [None, None]
    assert found.layers[0].boundary_bytes == found.layers[0].output_bytes == 2 * 4 * 4
    assert ModelProfile(found.conditions, found.layers) == found


def test_compiled_layers_have_no_bytes_of_activations():
    settings = settings_to_train("1f1b", 2, 2, 4, 1, compile=True)
    told = predict_layer_bytes(settings, chain([LINEAR] * 2), *vectors(4), CPU)
    assert [layer.activation_bytes for layer in told] == [None, None]


class HalfFrozen(nn.Sequential):
    """Four numbers to train and two that stay."""

    def __init__(self):
        super().__init__(nn.Linear(2, 1, bias=False), nn.Linear(1, 4, bias=False))
        self[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [(OptimizerSettings(), 16 + 2), (OptimizerSettings("sgd"), 12 + 2), (OptimizerSettings("sgd", momentum=0), 8 + 2)],
)
@pytest.mark.parametrize(("precision", "size"), [(FP32, 4), (FP64, 8)], ids=["fp32", "fp64"])
def test_parameters_take_what_their_training_takes(optimizer, numbers, precision, size):
    settings = Settings(optimizer=optimizer, precision=precision)
    assert parameter_bytes(chain([HalfFrozen]).layers[0], settings) == numbers * size


def test_rounded_parameters_take_an_exact_copy_too():
    """Weight 2, gradient, copy and two of AdamW's 4 each; BatchNorm is exact as it is."""
    layer = chain([lambda: nn.Sequential(HalfFrozen(), nn.BatchNorm1d(4))]).layers[0]
    assert parameter_bytes(layer, Settings(precision=BF16_TRUE)) == 4 * (2 + 16) + 2 * 2 + 8 * 16


SETTINGS = Settings(costs=CostsSettings(transfer=0.5, bandwidth=1e9))


def test_a_stage_takes_what_its_layers_take():
    costs = to_costs(LAYERS, (3, 2), Recomputed(), SETTINGS)
    assert (costs.forward, costs.backward) == ((6.0, 9.0), (12.0, 18.0))
    assert (costs.backward_input, costs.backward_weight) == ((18.0, 27.0), (24.0, 36.0))
    assert costs.recompute == (3.0, 4.5)
    assert costs.boundary_bytes == (30.0, 50.0)
    assert (costs.transfer, costs.bandwidth) == ((0.5, 0.5), 1e9)


@pytest.mark.parametrize(
    ("transfer", "words"),
    [("slow", "costs.transfer=slow is not a number"), ([1, 2, 3], "costs.transfer has 3 entries for 2 stages")],
)
def test_stated_messages_that_can_not_be(transfer, words):
    with pytest.raises(ValueError, match=words):
        to_costs(LAYERS, (3, 2), Recomputed(), Settings(costs=CostsSettings(transfer=transfer)))


@pytest.mark.parametrize(("counts", "recompute"), [((3, 2), (2.0, 2.0)), ((5,), (4.5,)), ((1, 4), (0.5, 3.0))])
def test_a_recomputation_takes_what_its_layers_take(counts, recompute):
    """Of each stage its first layer and every second one after it."""
    assert to_costs(LAYERS, counts, Recomputed(2), SETTINGS).recompute == recompute
