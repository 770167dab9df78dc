"""precision=bf16_true: rounded weights with exact copies, and gradients added up in float32."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import pytest
import torch
from torch import nn

from models.resnet import resnet
from pipeline.engine.compilation import Compiler
from pipeline.engine.stage import Stage
from pipeline.training import masters as masters_module
from pipeline.training.masters import Masters
from pipeline.training.plan import microbatch_sizes
from pipeline.training.settings import OptimizerSettings, PrecisionSettings
from tests.engine.harness import build_ranks, microbatches_of, outcome, placement, plan_for, settings_for, step
from tests.engine.samples import chain, fill, small_gpt, text, vectors
from tests.training.harness import (
    BF16_TRUE,
    Numbers,
    SmallData,
    equal_states,
    image_data,
    prepare,
    settings_to_train,
    text_data,
    train,
)

BF16, MANY = torch.bfloat16, 64
WIDE = 512
"""A weight of this width gets its gradient added within the product."""


def wide():
    """Random layers as wide as that, and as narrow as the classes."""

    def scaled(name, tensor, generator):
        fill(name, tensor, generator)
        tensor.mul_(tensor.shape[-1] ** -0.5)

    large = partial(nn.Linear, WIDE, WIDE)
    model = chain([large, nn.GELU, large, partial(nn.Linear, WIDE, 4)])
    return dataclasses.replace(model, initialize=scaled)


CASES = {
    "gpt": (small_gpt, lambda: text(MANY)),
    "wide": (wide, lambda: (torch.randn(MANY, WIDE, generator=torch.Generator().manual_seed(4)), vectors(MANY)[1])),
}


@functools.cache
def by_hand(case: str) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of the same rounded weights in one process: the whole batch in float64, and microbatch by microbatch
    in bfloat16, added up in float32 and, as autograd does, in bfloat16."""
    model, (inputs, targets) = CASES[case][0](), CASES[case][1]()
    rounded, exact = (whole_stage(model, dtype) for dtype in (BF16, torch.float64))
    for ours, theirs in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        ours[1].data.copy_(theirs[1].data)
    weight = model.loss.weight(targets)
    if inputs.is_floating_point():
        inputs = inputs.bfloat16()
    forward(exact, inputs.double() if inputs.is_floating_point() else inputs, targets, weight).backward()
    parameters = dict(rounded.named_parameters())
    sums = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    naive = {name: torch.zeros(p.shape, dtype=BF16) for name, p in parameters.items()}
    sizes = list(microbatch_sizes(len(inputs), MANY))
    for piece, answer in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        forward(rounded, piece, answer, weight).backward()
        for name, parameter in parameters.items():
            sums[name] += parameter.grad
            naive[name] += parameter.grad
        for parameter in parameters.values():  # a tied one has two names
            parameter.grad = None
    return {"exact": {name: p.grad for name, p in exact.named_parameters()}, "loop": sums, "naive": naive}


def whole_stage(model, dtype):
    stage = Stage(0, model.layers, model, placement(dtype), last=True)
    for alias, owner in model.tied.items():
        stage.tie(alias, dict(stage.named_parameters())[owner])
    return stage


def forward(stage, inputs, targets, weight):
    return stage.forward(inputs, targets, weight=weight, step=0, microbatch=0)


def errors(case: str, gradients) -> dict[str, float]:
    exact = by_hand(case)["exact"]
    return {name: float((gradients[name].double() - g).norm() / g.norm()) for name, g in exact.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("schedule", "pp", "checkpoint", "compiled"),
    [
        ("1f1b", 2, "never", False),
        ("gpipe", 4, "always", False),
        ("zb_h1", 2, "never", False),
        ("zbv", 2, "selective", False),
        ("interleaved_1f1b", 2, "never", False),
        ("1f1b", 2, "never", True),
        ("zb_h1", 2, "never", True),
    ],
)
def test_many_microbatches_are_added_up_in_float32(case, schedule, pp, checkpoint, compiled):
    model, (inputs, targets) = CASES[case][0](), CASES[case][1]()
    plan = plan_for(settings_for(schedule, pp, MANY, MANY, checkpoint=checkpoint), model, inputs, BF16)
    compiler = Compiler("aot_eager") if compiled else None
    ranks = build_ranks(plan, model, dtype=BF16, masters=torch.float32, compiler=compiler)
    found = outcome(plan, ranks, step(ranks, microbatches_of(plan, model, inputs, targets))).gradients
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    loop, ours, naive = (errors(case, each) for each in (by_hand(case)["loop"], found, by_hand(case)["naive"]))
    assert all(ours[name] <= 1.5 * loop[name] for name in loop), [(n, ours[n] / loop[n]) for n in loop]
    assert any(naive[name] > 1.5 * loop[name] for name in loop), "else this proves nothing"


SGD = OptimizerSettings("sgd", learning_rate=1e-2, warmup_steps=0, decay="constant", weight_decay=0.0)


def rounded_weights(run):
    return {name: p.detach().clone() for rank in run.ranks for name, p in rank.parameters.items()}


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("zb_h1", 2), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_are_their_copies_rounded(schedule, pp, optimizer):
    settings = settings_to_train(schedule, pp, 3, 6, 4, precision=BF16_TRUE)
    settings.optimizer.name = optimizer
    run = train(settings, small_gpt(), text_data(6))
    exact, weights = run.state(), rounded_weights(run)
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    assert {tensor.dtype for tensor in weights.values()} == {BF16}
    assert all(torch.equal(weights[name], exact[name].to(BF16)) for name in weights)
    assert any(not torch.equal(exact[name], exact[name].to(BF16).float()) for name in weights)
    assert torch.equal(exact["embedding.tokens.weight"], exact["head.projection.weight"])


def test_a_run_trains_as_one_in_float32():
    losses = [
        train(settings_to_train("1f1b", 2, 3, 6, 20, precision=precision), small_gpt(), text_data(6)).losses
        for precision in (BF16_TRUE, PrecisionSettings())
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0] != losses[1]


def test_steps_that_are_small_beside_a_weight_add_up():
    """Each moves a weight of 1 by 1/1024: without a copy none would move it at all."""

    def ones(name, tensor, generator):
        tensor.fill_(1.0)

    @dataclasses.dataclass(frozen=True)
    class Sum:
        def __call__(self, outputs, targets):
            return outputs.float().sum()

        def weight(self, targets):
            return 4 * len(targets)

    model = dataclasses.replace(chain([nn.Identity, partial(Slope, 4)], loss=Sum()), initialize=ones)
    moved = {}
    for masters in (None, "float32"):
        optimizer = dataclasses.replace(SGD, learning_rate=4 / 1024, momentum=0.0)
        precision = PrecisionSettings("bf16_true", "bfloat16", masters=masters)
        settings = settings_to_train("1f1b", 2, 2, 4, 16, precision=precision, optimizer=optimizer, gradient_clip=None)
        run = prepare(settings, model, constant_data())
        run.trainer.train()
        moved[masters] = float(rounded_weights(run)["1.weight"][0] - 1)
    assert moved == {None: 0.0, "float32": -16 / 1024}


class Slope(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.weight


def constant_data():
    numbers = Numbers(lambda step: (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)))
    return SmallData(numbers, numbers, "vectors", 1)


def test_the_norm_and_its_clipping_are_those_of_float32_gradients():
    """Where all is exact in bfloat16: the same steps as without rounding."""
    optimizer = dataclasses.replace(SGD, learning_rate=1.0)
    states = []
    for precision in (PrecisionSettings(), BF16_TRUE):
        settings = settings_to_train("1f1b", 2, 2, 4, 1, precision=precision, optimizer=optimizer, gradient_clip=0.25)
        model = dataclasses.replace(chain([nn.Identity, partial(Slope, 4)]), initialize=lambda n, t, g: t.fill_(0.0))
        states.append(train(settings, model, constant_data()).state())
    assert torch.equal(states[0]["1.weight"], states[1]["1.weight"])


def test_batch_norm_keeps_its_averages_exact():
    settings = settings_to_train("zb_h1", 2, 3, 6, 2, precision=BF16_TRUE, batch_norm="deferred")
    run = train(settings, resnet(depth=18, classes=10), image_data(6))
    norms = {name: tensor.dtype for name, tensor in rounded_weights(run).items() if ".bn" in name or "norm" in name}
    assert set(norms.values()) == {torch.float32}
    assert {tensor.dtype for tensor in run.state().values()} == {torch.float32, torch.int64}


def test_a_skipped_step_leaves_copies_as_they_were():
    data = Numbers(lambda step: (vectors(4)[0] * (1e38 if step else 1) ** 2, vectors(4)[1]))
    settings = settings_to_train("1f1b", 2, 2, 4, 2, precision=BF16_TRUE, on_nonfinite="skip")
    model = chain([partial(nn.Linear, 4, 4)] * 2)
    run = train(settings, model, SmallData(data, data, "vectors", 1))
    settings.steps = 1
    first = train(settings, model, SmallData(data, data, "vectors", 1))
    assert run.finished.skipped_steps == 1
    assert equal_states(run.state(), first.state())


def test_gradients_are_let_go_after_a_step():
    run = train(settings_to_train("1f1b", 2, 2, 4, 1, precision=BF16_TRUE), small_gpt(), text_data(4))
    assert all(p.grad is None for rank in run.ranks for p in (*rank.parameters.values(), *rank.trained.values()))


def test_what_is_exact_already_or_not_trained_has_no_copy():
    exact, frozen, rounded = (nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, BF16, BF16))
    frozen.requires_grad_(False)
    masters = Masters([exact, frozen, rounded], torch.float32)
    assert masters.of(exact) is exact
    assert masters.of(frozen) is frozen
    assert masters.of(rounded).dtype is torch.float32
    assert Masters([rounded], None).of(rounded) is rounded


def test_a_torch_that_cannot_add_up_in_float32_is_refused(monkeypatch):
    monkeypatch.setattr(masters_module, "hasattr", lambda *_: False, raising=False)
    with pytest.raises(ValueError, match=r"precision.masters needs torch 2.10, .*: use precision=bf16, or"):
        Masters([nn.Parameter(torch.ones(2, dtype=BF16))], torch.float32)
