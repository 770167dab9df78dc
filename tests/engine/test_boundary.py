from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from models.gpt import gpt
from models.resnet import resnet
from pipeline.engine.boundary import TensorSpec, boundaries
from pipeline.engine.stage import Placement, Stage
from pipeline.training.plan import make_plan
from pipeline.training.precision import autocast
from pipeline.training.settings import PrecisionSettings
from tests.engine.harness import CPU, build_ranks, microbatches_of, settings_for, step
from tests.engine.samples import chain, images, small_gpt, text, vectors

BF16 = PrecisionSettings("bf16", "float32", "bfloat16")
FP64 = PrecisionSettings("fp64", "float64", None)


def specs(layers, inputs, counts=None, *, dtype=torch.float32, context=nullcontext, kept=()):
    counts = counts or (1,) * len(layers)
    return boundaries(layers, counts, TensorSpec.of(inputs), dtype=dtype, device=CPU, autocast=context, kept=kept)


@pytest.mark.parametrize("precision", [BF16, FP64], ids=["bf16", "fp64"])
@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_what_is_foreseen_is_what_real_stages_make(kind, precision):
    model, (inputs, _) = (small_gpt(), text(3)) if kind == "gpt" else (resnet(depth=18, classes=10), images(3, 32))
    counts = (1, 2, 1, len(model.layers) - 4)
    dtype, context = getattr(torch, precision.parameters), autocast(precision, "cpu")
    foreseen = specs(model.layers, inputs, counts, dtype=dtype, context=context)
    placement, value, start = Placement(CPU, dtype, context, 0), inputs, 0
    value = value.to(dtype) if value.is_floating_point() else value
    assert TensorSpec.of(value) == foreseen[0].nest
    for stage, count in enumerate(counts):
        layers = model.layers[start : start + count]
        made = Stage(stage, layers, model, placement, last=False)
        with torch.no_grad():
            value = made.forward(value, None, weight=1.0, step=0, microbatch=0)
        assert TensorSpec.of(value) == foreseen[stage + 1].nest
        start += count


def test_autocast_shows_in_what_is_sent():
    model, (inputs, _) = resnet(depth=18, classes=10), images(2)
    foreseen = specs(model.layers, inputs, context=autocast(BF16, "cpu"))
    assert foreseen[0].nest.dtype is torch.float32
    assert {boundary.nest.dtype for boundary in foreseen[1:]} == {torch.bfloat16}


def test_nothing_real_is_made_or_drawn():
    before = torch.get_rng_state()
    specs(small_gpt(dropout=0.1).layers, text(2)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_integer_inputs_stay_integers():
    assert specs(small_gpt().layers, text(2)[0], dtype=torch.float64)[0].nest.dtype is torch.int64


def test_batchnorm_with_one_value_a_channel_is_refused():
    layers = resnet(depth=18, classes=10).layers
    with pytest.raises(ValueError, match=r"a normalization in layer4\.0 would see one value a channel .* use a larger"):
        specs(layers, images(1, 32)[0])
    assert specs(layers, images(2, 32)[0])


def test_other_normalizations_are_not_called_batchnorm():
    for build, cure in (
        (lambda: nn.GroupNorm(4, 4), "a normalization in 0 would see one value a channel .* use a larger batch_size"),
        (
            lambda: nn.InstanceNorm2d(4),
            "a normalization in 0 would see one value a channel of an image .* larger images",
        ),
    ):
        with pytest.raises(ValueError, match=cure):
            specs(chain([build]).layers, torch.zeros(1, 4, 1, 1))


def test_the_smallest_microbatch_counts():
    """Five images in three microbatches are 2, 2 and 1."""
    model, (inputs, _) = resnet(depth=18, classes=10), images(5, 32)
    with pytest.raises(ValueError, match="one value a channel"):
        make_plan(settings_for("1f1b", 2, 3, 5), model, TensorSpec.of(inputs), CPU)


def test_a_layer_that_refuses_its_input_is_named():
    layers = chain([partial(nn.Linear, 4, 4), partial(nn.Linear, 5, 4)]).layers
    with pytest.raises(ValueError, match=r"layer 1 refuses its input float32\[2, 4\]: .+"):
        specs(layers, vectors(2)[0])
    with pytest.raises(ValueError, match=r"a sample has 8 tokens but the model's context is 4"):
        specs(gpt(layers=1, width=4, heads=1, context=4, vocabulary=32).layers, text(2)[0])


class Gives(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda x: None, "nothing"),
        (lambda x: (x, 3), "int"),
        (lambda x: {"x": x, "name": ["a", 2.0]}, "str, float"),
        (lambda x: {}, "nothing"),
    ],
)
def test_a_layer_must_return_tensors(make, what):
    with pytest.raises(ValueError, match=f"layer 1 returns {what}: let it return a tensor, or tensors in tuples"):
        specs(chain([nn.Identity, partial(Gives, make), nn.Identity]).layers, vectors(2)[0])


def test_a_stage_must_not_overwrite_what_it_received():
    overwriting = chain([partial(nn.Linear, 4, 4), partial(nn.ReLU, inplace=True), partial(nn.Linear, 4, 4)]).layers
    with pytest.raises(ValueError, match="layer 1 overwrites what its stage received and keeps"):
        specs(overwriting, vectors(2)[0], (1, 2))
    with pytest.raises(ValueError, match="layer 0 overwrites"):
        specs(chain([partial(nn.ReLU, inplace=True)]).layers, vectors(2)[0])
    assert specs(overwriting, vectors(2)[0], (2, 1)), "inside a stage it harms nobody"
    with pytest.raises(ValueError, match="layer 1 overwrites what"):
        specs(overwriting, vectors(2)[0], (2, 1), kept=[0, 1])


def test_a_later_layer_must_not_overwrite_what_the_stage_received_either():
    layers = chain([partial(nn.Linear, 4, 4), nn.Identity, partial(nn.ReLU, inplace=True)]).layers
    with pytest.raises(ValueError, match="layer 2 overwrites what its stage received"):
        specs(layers, vectors(2)[0], (1, 2))
    assert specs(layers, vectors(2)[0], (3,))


def test_a_spec_reads_like_a_tensor():
    assert str(TensorSpec((2, 3), torch.bfloat16)) == "bfloat16[2, 3]"


def test_bf16_crosses_ranks_and_is_computed_in_again():
    """Forward, recomputation and messages are under autocast, and parameters stay float32."""
    seen: list[torch.dtype] = []

    class Spy(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            if type(output) is torch.Tensor:
                seen.append(output.dtype)
            return output

    model, (inputs, targets) = chain([partial(Spy, 4, 4)] * 4), vectors(4)
    settings = settings_for("1f1b", 2, 2, 4, checkpoint="always", precision=BF16)
    plan = make_plan(settings, model, TensorSpec.of(inputs), CPU)
    assert {boundary.nest.dtype for boundary in plan.boundaries[2][1:]} == {torch.bfloat16}
    ranks = build_ranks(plan, model, dtype=torch.float32, autocast=autocast(BF16, "cpu"))
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    assert seen == [torch.bfloat16] * (4 * 2 * 2)
    assert results[-1].loss.dtype is torch.float32
    assert {p.grad.dtype for rank in ranks for p in rank.parameters.values()} == {torch.float32}
